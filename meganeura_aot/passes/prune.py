"""Drop what no output and no state write needs. Declared leaves stay: they are the runner's interface."""

from __future__ import annotations

from ..graph import GraphIR, Value
from ..ops.state.leaf import Leaf
from ..target import Target
from .rebuild import Rebuild


def prune(graph: GraphIR, target: Target) -> GraphIR:
    """Keep the leaves and everything that a root reaches."""
    needed: set[int] = set()
    pending = list(graph.roots())
    while pending:
        index = pending.pop().node
        if index not in needed:
            needed.add(index)
            pending += graph.nodes[index].inputs
    rebuild = Rebuild(graph)
    for index, node in enumerate(graph.nodes):
        if index in needed or isinstance(node.op, Leaf):
            rebuild.copy(Value(index))
    return rebuild.finish()
