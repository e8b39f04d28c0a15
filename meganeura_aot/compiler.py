"""The line: graph -> rewritten graph -> plan -> placed plan -> text. Read this file first."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .builder import Graph, is_name
from .emit import Header, emit
from .errors import GraphError
from .graph import GraphIR
from .kernel import data_folder
from .lowering import lower
from .memory import share_buffers, verify_sharing
from .ops.state.leaf import Parameter, State
from .passes import CLEANUP, PASSES, run_passes
from .plan import ExecutionPlan
from .report import Report, make_report
from .target import find_target
from .training import Training, freeze, training_graphs

# Attributes of the emitted Runner, which an entry point must not hide.
RUNNER_ATTRIBUTES = """
accumulate advance allocate apply bind bind_groups buffer buffers call checked close closed constant create_module
create_pipeline declare describe device entries features fit get_state gradient gradients has init_weights input
inputs limits load_checkpoint load_weights moment name numbers on_nan optimizer optimizer_defaults optimizer_kind
optional_features output outputs parameter parameters pipeline pipelines reset save_checkpoint save_weights set_state
state states step target train_step upload weights wgpu
"""
RUNNER_NAMES = frozenset(RUNNER_ATTRIBUTES.split())


@dataclass(frozen=True)
class Program:
    """A compiled program. sources: the graphs as given; differentiated: what training adds to them; graphs: all of
    them as rewritten; text: the emitted file."""

    name: str
    command: str
    sources: Mapping[str, GraphIR]
    differentiated: Mapping[str, GraphIR]
    graphs: Mapping[str, GraphIR]
    unshared: ExecutionPlan
    plan: ExecutionPlan

    @property
    def whole(self) -> Mapping[str, GraphIR]:
        """Every graph before rewrites."""
        return {**self.sources, **self.differentiated}

    @functools.cached_property
    def report(self) -> Report:
        return make_report(self.whole, self.unshared, self.plan)

    @functools.cached_property
    def text(self) -> str:
        return emit(self.plan, Header(self.name, self.command, digest(self.whole)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the runner, atomically: a failure leaves what was there. Raises OSError."""
        write_atomically(Path(path), self.text)

    def load(self, **arguments: Any) -> Any:
        """A Runner made from the emitted text; `arguments` go to its constructor (device, adapter, checked)."""
        namespace: dict[str, Any] = {"__name__": self.name}
        exec(compile(self.text, f"<{self.name}.py>", "exec"), namespace)
        return namespace["Runner"](**arguments)


def compile_graph(
    graphs: Graph | GraphIR | Mapping[str, Graph | GraphIR],
    *,
    name: str = "model",
    target: str = "webgpu",
    train: Training | None = None,
    optimize: bool = True,
    command: str | None = None,
) -> Program:
    """Compile one graph (entry point `run`) or several that share parameters and states.

    name: of the model, in the header. command: the one that rebuilds the file, in the header.
    train: also emit the training step of the entry `train`, or of the only one; its loss is the output `loss`, else the
    first. Raises GraphError for a graph without meaning, GradientError for an operator without a gradient, LoweringError
    for one without a kernel.
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise GraphError(f"name of the model: expected printable text, got {name!r}")
    sources = entry_points(graphs)
    if train is not None and not isinstance(train, Training):
        raise GraphError(f"train: expected a Training, such as Training('adam'), got {train!r}")
    if train:
        sources = freeze(sources, train.freeze)
    aim = find_target(target)
    passes = CLEANUP + PASSES if optimize else CLEANUP
    differentiated, training = training_graphs(sources, train) if train else ({}, None)
    rewritten = {entry: run_passes(graph, aim, passes) for entry, graph in (sources | differentiated).items()}
    unshared = lower(rewritten, aim, training)
    plan = share_buffers(unshared).verify()
    verify_sharing(unshared, plan)
    return Program(name, command or f"meganeura-aot {name}.py", sources, differentiated, rewritten, unshared, plan)


def entry_points(graphs: Graph | GraphIR | Mapping[str, Graph | GraphIR]) -> dict[str, GraphIR]:
    """Entry name -> verified graph. A plain graph is the entry `run`."""
    table = graphs if isinstance(graphs, Mapping) else {"run": graphs}
    if not table:
        raise GraphError("entry points: expected one graph or more, got none")
    result: dict[str, GraphIR] = {}
    for entry, graph in table.items():
        if not is_name(entry):
            raise GraphError(f"entry point {entry!r}: expected a Python identifier as its name")
        if entry in RUNNER_NAMES or entry.startswith(("_", "b_", "p_", "g_", "encode_")):
            raise GraphError(f"entry point {entry!r}: expected a name that is no attribute of a Runner")
        if not isinstance(graph, Graph | GraphIR):
            raise GraphError(f"entry point {entry!r}: expected a Graph, got {type(graph).__name__}")
        result[entry] = graph.build() if isinstance(graph, Graph) else graph.verify()
    refuse_different_leaves(result)
    refuse_assigned_positions(result)
    return result


def refuse_different_leaves(graphs: Mapping[str, GraphIR]) -> None:
    """Entries share parameters and states by name, so every entry must declare them in the same way."""
    first: dict[str, tuple[str, Mapping[str, object]]] = {}  # label: where it was declared first, and how
    for entry, graph in graphs.items():
        for node in graph.nodes:
            op = node.op
            if not isinstance(op, Parameter | State):
                continue
            leaf = f"{op.name} {op.label!r} of entry {entry!r} (built at {node.location})"
            got = declaration_of(op)
            other, expected = first.setdefault(op.label, (leaf, got))
            different = [key for key in expected if got.get(key) != expected[key]]
            if different:
                wanted = ", ".join(f"{key} {expected[key]}" for key in different)
                found = ", ".join(f"{key} {got.get(key)}" for key in different)
                raise GraphError(
                    f"{leaf}: expected {wanted} as {other} has, got {found}; "
                    "declare both in the same way, or rename one of them"
                )


def declaration_of(op: Parameter | State) -> dict[str, object]:
    """The arguments of `Graph.parameter` or `Graph.state` that made the leaf."""
    declaration: dict[str, object] = {
        "kind": op.name,
        "shape": list(op.type.shape),
        "dtype": op.storage or str(op.type.dtype),
        "init": op.init,
    }
    if isinstance(op, Parameter):
        declaration["trainable"] = op.trainable
    return declaration


def refuse_assigned_positions(graphs: Mapping[str, GraphIR]) -> None:
    """The runner mirrors positions on the host: no entry may write a state that another one advances."""
    advanced = {advance.state: entry for entry, graph in graphs.items() for advance in graph.advances}
    for entry, graph in graphs.items():
        for state in graph.written():
            if state in advanced and all(advance.state != state for advance in graph.advances):
                raise GraphError(f"entry point {entry!r}: writes state {state!r}, which {advanced[state]!r} advances")


def digest(graphs: Mapping[str, GraphIR]) -> str:
    """16 hex digits that change when the graphs do."""
    whole = "".join(f"{entry}\n{graph.text()}" for entry, graph in graphs.items())
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` in one step, as runners replace their files; its folder is made when missing."""
    content = text.encode()
    Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
    with files_of_runners().replacing(path) as file:
        file.write(content)


@functools.cache
def files_of_runners() -> ModuleType:
    """The module runtime_stub/files.py, loaded from its path.

    runtime_stub is data of this package, not one of its modules: runners carry its text. Loading it from there keeps one
    writer of files for both.
    """
    spec = importlib.util.spec_from_file_location("files", data_folder("runtime_stub") / "files.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
