"""Add rows up where their sum goes: the gradient of an embedding that is the head too needs no second table."""

from __future__ import annotations

from ..graph import GraphIR, Node, Value
from ..op import OPS
from ..ops.index.gather import ScatterAdd, ScatterAddOnto
from ..target import Target
from .prune import prune
from .rebuild import Rebuild
from .single_use import single_uses


def fuse_scatter(graph: GraphIR, target: Target) -> GraphIR:
    """x + scatter_add(ids, src) is written over x, where x is computed and nothing else reads it."""
    single = single_uses(graph)
    rebuild = Rebuild(graph)
    for index, node in enumerate(graph.nodes):
        operands = onto(graph, node) if all(single.get(v) == index for v in node.inputs) else None
        if operands:
            rebuild.replace(Value(index), ScatterAddOnto(), operands)
        else:
            rebuild.copy(Value(index))
    return prune(rebuild.finish(), target)


def onto(graph: GraphIR, node: Node) -> tuple[Value, ...] | None:
    """base, ids and src, or None where the node is no such sum."""
    if not isinstance(node.op, OPS["add"]):
        return None
    for base, sums in (node.inputs, node.inputs[::-1]):
        op, other = graph.nodes[base.node].op, graph.nodes[sums.node].op
        computed = not (op.is_leaf or op.is_view or op.writes)
        if isinstance(other, ScatterAdd) and computed and graph.type_of(base) == graph.type_of(sums):
            return (base, *graph.nodes[sums.node].inputs)
    return None
