"""Drop the operators that change nothing when a graph runs."""

from __future__ import annotations

from ..graph import GraphIR, Node, Value
from ..ops.layout.op import Expand, Reshape, StopGradient
from ..ops.random.dropout import Dropout
from ..target import Target
from .rebuild import Rebuild


def remove_identities(graph: GraphIR, target: Target) -> GraphIR:
    """Dropout and stop_gradient, which mean something to training only, and changes of shape that change none.

    Run it after differentiation, which asks for both.
    """
    rebuild = Rebuild(graph)
    for index, node in enumerate(graph.nodes):
        if is_identity(graph, node):
            rebuild.alias(Value(index), node.inputs[0])
        else:
            rebuild.copy(Value(index))
    return rebuild.finish()


def is_identity(graph: GraphIR, node: Node) -> bool:
    if isinstance(node.op, Reshape | Expand):
        return node.types[0] == graph.type_of(node.inputs[0])
    return isinstance(node.op, Dropout | StopGradient)
