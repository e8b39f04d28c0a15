"""Let pointwise operators broadcast what would be expanded in memory for them."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import GraphIR, Node, Value
from ..ops.layout.op import Expand, Reshape
from ..ops.pointwise.op import Pointwise, broadcast_shapes
from ..target import Target
from .prune import prune
from .rebuild import Rebuild


def fuse_expand(graph: GraphIR, target: Target) -> GraphIR:
    """f(x, expand(v)) becomes f(x, v) where the shape of the result stays what it is."""
    rebuild = Rebuild(graph)
    for index, node in enumerate(graph.nodes):
        inputs = unexpanded(graph, node) if isinstance(node.op, Pointwise) else node.inputs
        rebuild.replace(Value(index), node.op, inputs)
    return prune(rebuild.finish(), target)


def unexpanded(graph: GraphIR, node: Node) -> Sequence[Value]:
    """The inputs of a pointwise operator, each as far before its expansion as the shape of the result allows."""
    inputs = [*node.inputs]
    for place, value in enumerate(node.inputs):
        for source in sources(graph, value):
            changed = [*inputs[:place], source, *inputs[place + 1 :]]
            if broadcast_shapes(node.op.name, [graph.type_of(v).shape for v in changed]) == node.types[0].shape:
                inputs = changed
                break
    return inputs


def sources(graph: GraphIR, value: Value) -> list[Value]:
    """What broadcasts to the same tensor as `value`, the first that was computed first.

    A reshape in between is allowed for where a single element is spread: it then changes nothing.
    """
    found, only_expanded = [], True
    while isinstance(op := graph.nodes[value.node].op, Expand | Reshape):
        only_expanded = only_expanded and isinstance(op, Expand)
        value = graph.nodes[value.node].inputs[0]
        if only_expanded or graph.type_of(value).size == 1:
            found.append(value)
    return found[::-1]
