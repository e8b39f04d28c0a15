"""What `train=` adds to a program: the entries `accumulate` (forward and backward) and `apply` (the update)."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .autodiff import differentiate
from .builder import Graph
from .errors import GraphError
from .graph import GraphIR, Node, Value
from .op import LARGEST_F32
from .ops.optimizer.op import AdamUpdate, AdamWUpdate, ClipScale, SgdUpdate, Update
from .ops.state.leaf import Gradient, Input, Moment, Parameter, gradient_label
from .passes import activate_dropout, advance_dropout
from .program import ACCUMULATE, APPLY, TrainingSpec
from .tensor import Tensor

DEFAULTS: Mapping[str, Mapping[str, Any]] = {  # PyTorch's
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
}
CHECKPOINT_PREFIXES = ("optimizer.", "state.")  # of moments and states there, as the stub writes them
MULTIPLIERS = ("lr_mult.", "wd_mult.")


class Training:
    """How a program is trained: `Training("adamw", freeze=["embed.*"], lr=3e-4, clip_norm=1.0)`.

    kind: "sgd", "adam" or "adamw". freeze: patterns (`*`, `?`, `[...]`) of parameters that stay as they are.
    Numbers: lr, weight_decay, clip_norm (of all gradients together; off where it is not given); for sgd momentum and
    nesterov; for adam and adamw betas and eps; "lr_mult.PREFIX" and "wd_mult.PREFIX" for parameters whose name starts
    so, of which the longest counts. Raises GraphError.
    """

    def __init__(self, kind: str, freeze: Sequence[str] = (), **numbers: Any) -> None:
        if not isinstance(kind, str) or kind not in DEFAULTS:
            raise GraphError(f"training: expected one of {', '.join(DEFAULTS)}, got {kind!r}")
        if not isinstance(freeze, list | tuple) or not all(isinstance(pattern, str) for pattern in freeze):
            raise GraphError(f"training: expected a list of patterns as freeze, got {freeze!r}")
        self.kind, self.freeze = kind, tuple(freeze)
        self.nesterov = numbers.pop("nesterov", False)
        self.numbers: dict[str, Any] = dict(DEFAULTS[kind])
        for name, value in numbers.items():
            self.numbers[name] = self._checked(name, value)
        moving = self.numbers.get("momentum", 0) > 0
        if not isinstance(self.nesterov, bool) or (self.nesterov and not moving):
            got = f"{self.nesterov!r} for {kind} and momentum {self.numbers.get('momentum', 0)}"
            raise GraphError(f"training: expected nesterov only with sgd and a momentum > 0, got {got}")

    def _checked(self, name: str, value: Any) -> Any:
        known = [*DEFAULTS[self.kind], "clip_norm", *(["nesterov"] if self.kind == "sgd" else [])]
        multiplier = name.startswith(MULTIPLIERS) and name not in MULTIPLIERS
        if name not in known and not multiplier:
            names = ", ".join([*known, *(f"{prefix}PREFIX" for prefix in MULTIPLIERS)])
            raise GraphError(f"training: {self.kind} takes {names}, got {name!r}")
        if name == "betas":
            value = tuple(value) if isinstance(value, Sequence | np.ndarray) else value
            two = isinstance(value, tuple) and len(value) == 2 and all(is_number(b) and b < 1 for b in value)
            if not two:
                raise GraphError(f"training: expected two betas from 0 up to 1, got {value!r}")
            return (float(value[0]), float(value[1]))
        if not is_number(value) or (name == "clip_norm" and value == 0):
            least = "> 0" if name == "clip_norm" else ">= 0"
            raise GraphError(f"training: expected a finite number {least} as {name}, got {value!r}")
        return float(value)

    def update(self) -> Update:
        """The operator that updates one parameter."""
        scaled = "clip_norm" in self.numbers
        if self.kind == "sgd":
            return SgdUpdate(self.numbers["momentum"] > 0, self.nesterov, scaled)
        return (AdamWUpdate if self.kind == "adamw" else AdamUpdate)(scaled)

    def prefixes(self, parameter: str) -> tuple[str, str]:
        """The longest prefixes with a multiplier of the learning rate and of the weight decay; "" for none."""
        lr, wd = (
            max((key[len(kind) :] for key in self.numbers if self._applies(kind, key, parameter)), key=len, default="")
            for kind in MULTIPLIERS
        )
        return lr, wd

    @staticmethod
    def _applies(kind: str, key: str, parameter: str) -> bool:
        return key.startswith(kind) and parameter.startswith(key[len(kind) :])


def is_number(value: Any) -> bool:
    """At least 0, and what f32 holds."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and bool(0 <= value <= LARGEST_F32)


def training_graphs(graphs: Mapping[str, GraphIR], training: Training) -> tuple[dict[str, GraphIR], TrainingSpec]:
    """The entries that training adds, and what the runner must know. Raises GraphError, GradientError."""
    accumulate = accumulate_graph(graphs[trained_entry(graphs)])
    apply, spec = apply_graph(accumulate, training)
    return {ACCUMULATE: accumulate, APPLY: apply}, spec


def trained_entry(graphs: Mapping[str, object]) -> str:
    """The entry `train`, else the only one."""
    if "train" in graphs or len(graphs) == 1:
        return "train" if "train" in graphs else next(iter(graphs))
    raise GraphError(f"training: expected an entry point `train` or one alone, got {', '.join(graphs)}")


def freeze(graphs: Mapping[str, GraphIR], patterns: Sequence[str]) -> dict[str, GraphIR]:
    """The graphs with the parameters that a pattern matches not trainable; raises GraphError where it matches none."""
    names = [n.op.label for graph in graphs.values() for n in graph.nodes if isinstance(n.op, Parameter)]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise GraphError(
                f"freeze {pattern!r}: expected a pattern of {', '.join(dict.fromkeys(names)) or 'nothing'}"
            )

    def frozen(node: Node) -> Node:
        op = node.op
        if isinstance(op, Parameter) and any(fnmatch.fnmatchcase(op.label, pattern) for pattern in patterns):
            return replace(node, op=replace(op, trainable=False))
        return node

    return {entry: replace(graph, nodes=tuple(map(frozen, graph.nodes))) for entry, graph in graphs.items()}


def accumulate_graph(graph: GraphIR) -> GraphIR:
    """Forward and backward: the loss as the only output, and the gradients. The loss is `loss`, else the first output."""
    if not graph.outputs:
        raise GraphError("training: expected an output of the trained entry, its loss, got none")
    outputs = dict(graph.outputs)
    name = "loss" if "loss" in outputs else graph.outputs[0][0]
    for node in graph.nodes:
        if isinstance(node.op, Parameter) and node.op.trainable and node.op.storage:
            raise GraphError(
                f"parameter {node.op.label!r} (built at {node.location}): expected trainable=False, or to be frozen, "
                f"where it is stored as {node.op.storage}"
            )
    active = activate_dropout(replace(graph, outputs=(("loss", outputs[name]),)))
    return advance_dropout(differentiate(active, "loss")).verify()


def apply_graph(differentiated: GraphIR, training: Training) -> tuple[GraphIR, TrainingSpec]:
    """The update of every parameter that has a gradient, in place, and what the runner must know of it."""
    g, update = Graph(), training.update()
    parameters = {node.op.label: node.op for node in differentiated.nodes if isinstance(node.op, Parameter)}
    for label in parameters:
        if label.startswith(CHECKPOINT_PREFIXES):
            raise GraphError(
                f"parameter {label!r}: expected a name that checkpoints do not use, which begin with "
                f"{' and '.join(CHECKPOINT_PREFIXES)}"
            )
    trained = [op for label, op in parameters.items() if label in dict(differentiated.gradients)]
    for key in training.numbers:
        if key.startswith(MULTIPLIERS) and not any(op.label.startswith(key.split(".", 1)[1]) for op in trained):
            names = ", ".join(op.label for op in trained)
            raise GraphError(f"training: expected {key!r} to be the start of a trained parameter of {names}")
    gradients = {op.label: g.apply(Gradient(gradient_label(op.label), op.type)) for op in trained}
    scale = []
    if update.scaled:
        scale.append(g.apply(ClipScale(), g.input("clip_norm", ()), *gradients.values()))
    inputs: dict[tuple[str, str], Tensor] = {}
    for op in trained:
        prefixes = training.prefixes(op.label)
        if prefixes not in inputs:
            inputs[prefixes] = g.input(f"numbers_{len(inputs)}" if inputs else "numbers", (len(update.names),))
        moments = [g.apply(Moment(f"{moment}.{op.label}", op.type)) for moment in update.moments]
        g.apply(update, g.apply(op), gradients[op.label], inputs[prefixes], *moments, *scale)
    graph = g.finish()
    groups = {input_name(graph, tensor.value): prefixes for prefixes, tensor in inputs.items()}
    return graph, TrainingSpec(training.kind, dict(training.numbers), groups, len(trained), len(parameters))


def input_name(graph: GraphIR, value: Value) -> str:
    op = graph.nodes[value.node].op
    assert isinstance(op, Input)
    return op.label
