"""Reverse mode: from the graph of a loss to the graph that also computes its gradients.

Operators say what their gradient is (`Op.gradient`), or that it is zero everywhere (`Op.is_flat`); integers have none.
"""

from __future__ import annotations

from collections import deque
from typing import TypeGuard

import numpy as np

from .builder import Graph
from .errors import GradientError
from .graph import DType, GraphIR, TensorType, Value
from .op import Op
from .ops.state.leaf import Leaf, Parameter
from .tensor import Tensor


def differentiate(graph: GraphIR, loss: str) -> GraphIR:
    """The graph with the gradient of output `loss`, f32 of one element, for every trainable parameter behind it.

    Only what lies between such a parameter and the loss gets a gradient; a parameter without a path to it has none.
    Raises GradientError where an operator between them has no gradient, or where there is nothing to train.
    """
    target = dict(graph.outputs)[loss]
    type_ = graph.type_of(target)
    where = f"loss {loss!r} (built at {graph.nodes[target.node].location})"
    if type_.dtype is not DType.F32 or type_.size != 1:
        raise GradientError(f"{where}: expected f32 of one element, got {type_}")
    between = trained_values(graph)
    if target not in between:
        raise GradientError(f"{where}: expected a parameter that is trained behind it, found none, or all frozen")
    g = Graph.from_ir(graph)
    gradients = {target: g.constant(np.ones(type_.shape))}
    for index in reversed(range(target.node + 1)):
        node = graph.nodes[index]
        ports = [Value(index, port) for port in range(len(node.types))]
        if isinstance(node.op, Leaf) or not any(port in gradients for port in ports):
            continue
        if not hasattr(node.op, "gradient"):
            raise GradientError(f"{path_text(graph, index, target)}: {node.op.name} has no gradient")
        with g.at(node.location):
            try:
                parts = input_gradients(g, graph, index, [gradients.get(port) for port in ports])
            except NotImplementedError as error:
                raise GradientError(
                    f"{path_text(graph, index, target)}: {node.op.name} has no gradient: {error}"
                ) from error
            for value, part in zip(node.inputs, parts, strict=True):
                if part is None or value not in between:
                    continue
                expected: TensorType = graph.type_of(value)
                assert part.type == expected, f"{node.op.name}: a gradient {part.type} of an input {expected}"
                gradients[value] = g.add(gradients[value], part) if value in gradients else part
    named = {
        node.op.label: gradients[Value(index)]
        for index, node in enumerate(graph.nodes)
        if is_trained(node.op) and Value(index) in gradients
    }
    if not named:
        raise GradientError(f"{where}: expected a parameter that is trained behind it, found none")
    return g.finish(named)


def input_gradients(g: Graph, graph: GraphIR, index: int, upstream: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What the operator of a node says: one gradient per input, or None."""
    node = graph.nodes[index]
    outputs = [Tensor(g, Value(index, port), type_) for port, type_ in enumerate(node.types)]
    inputs = [Tensor(g, value, graph.type_of(value)) for value in node.inputs]
    several = len(outputs) > 1
    dy, y = (tuple(upstream), tuple(outputs)) if several else (upstream[0], outputs[0])
    return tuple(node.op.gradient(g, dy, y, *inputs))


def is_trained(op: Op) -> TypeGuard[Parameter]:
    """Whether it is a parameter that training changes."""
    return isinstance(op, Parameter) and op.trainable and op.type.dtype is DType.F32


def trained_values(graph: GraphIR) -> set[Value]:
    """The f32 values that a trainable parameter influences smoothly."""
    found: set[Value] = set()
    for index, node in enumerate(graph.nodes):
        if is_trained(node.op) or (not node.op.is_flat and any(value in found for value in node.inputs)):
            found |= {Value(index, port) for port, type_ in enumerate(node.types) if type_.dtype is DType.F32}
    return found


def path_text(graph: GraphIR, index: int, target: Value) -> str:
    """From a node to the loss, as the shortest chain of operators with the lines that built them."""
    users: dict[int, set[int]] = {}
    for user, node in enumerate(graph.nodes):
        for value in node.inputs:
            users.setdefault(value.node, set()).add(user)
    came: dict[int, int] = {index: index}
    pending = deque([index])
    while pending and target.node not in came:
        here = pending.popleft()
        for user in sorted(users.get(here, ())):
            if user not in came:
                came[user] = here
                pending.append(user)
    chain = [target.node]
    while chain[-1] != index:
        chain.append(came[chain[-1]])
    steps = [f"%{i} {graph.nodes[i].op.name} (built at {graph.nodes[i].location})" for i in reversed(chain)]
    shown = steps if len(steps) <= 6 else [*steps[:3], f"{len(steps) - 5} more", *steps[-2:]]
    return f"cannot differentiate {' -> '.join(shown)} -> loss"
