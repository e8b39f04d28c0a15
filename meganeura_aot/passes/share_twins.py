"""Compute once what a fuller operator computes too: attention, which its gradient asks for the log-sum-exp as well."""

from __future__ import annotations

from ..graph import GraphIR, Value
from ..op import Op
from ..target import Target
from .rebuild import Rebuild


def share_twins(graph: GraphIR, target: Target) -> GraphIR:
    """An operator whose `Op.fuller` stands on the same inputs, before or after it, is one node with that one."""
    wanted = {(fuller, node.inputs) for node in graph.nodes if (fuller := node.op.fuller()) is not None}
    shared = wanted & {(node.op, node.inputs) for node in graph.nodes} if wanted else wanted
    rebuild = Rebuild(graph)
    first: dict[tuple[Op, tuple[Value, ...]], Value] = {}
    for index, node in enumerate(graph.nodes):
        value = Value(index)
        key = (node.op.fuller() or node.op, node.inputs)
        if key not in shared:
            rebuild.copy(value)
        elif key in first:
            for port in range(len(node.types)):
                rebuild.alias(Value(index, port), Value(first[key].node, port))
        else:
            first[key] = value
            rebuild.replace(value, *key)
    return rebuild.finish()
