"""What splits become backwards: a sum of parts that fill a tensor is their concatenation."""

from __future__ import annotations

from ..graph import GraphIR, Value
from ..op import OPS
from ..ops.layout.gradient import SliceGrad
from ..ops.layout.op import Concat
from ..target import Target
from .prune import prune
from .rebuild import Rebuild
from .single_use import single_uses


def join_slices(graph: GraphIR, target: Target) -> GraphIR:
    """slice_grad(a) + slice_grad(b) + ... -> concat(a, b, ...) where the slices lie side by side along one axis and leave
    no gap: every element is then written once, instead of zeros for every part and a sum of them."""
    single = single_uses(graph)
    parts: dict[Value, tuple[Value, ...]] = {}  # the slices that a value is the sum of
    rebuild = Rebuild(graph)
    for index, node in enumerate(graph.nodes):
        value = Value(index)
        if isinstance(node.op, SliceGrad) and set(node.op.steps) == {1}:
            parts[value] = (value,)
        elif isinstance(node.op, OPS["add"]) and all(v in parts and single.get(v) == index for v in node.inputs):
            parts[value] = tuple(slice_ for v in node.inputs for slice_ in parts[v])
            joined = side_by_side(graph, parts[value])
            if joined:
                rebuild.replace(value, *joined)
                continue
        rebuild.copy(value)
    return prune(rebuild.finish(), target)


def side_by_side(graph: GraphIR, slices: tuple[Value, ...]) -> tuple[Concat, tuple[Value, ...]] | None:
    """The concatenation that gradients of slices of one tensor add up to, or None where they overlap or leave a gap."""
    whole = graph.type_of(slices[0]).shape
    found: list[tuple[int, int, Value]] = []  # start, size, what was sliced
    axes = set()
    for value in slices:
        node = graph.nodes[value.node]
        source = graph.type_of(node.inputs[0]).shape
        cut = [axis for axis, size in enumerate(source) if size != whole[axis]]
        if len(cut) != 1 or not isinstance(node.op, SliceGrad):
            return None
        axes.add(cut[0])
        found.append((node.op.starts[cut[0]], source[cut[0]], node.inputs[0]))
    if len(axes) != 1:
        return None
    (axis,) = axes
    found.sort()
    end = 0
    for start, size, _ in found:
        if start != end:
            return None
        end += size
    return (Concat(axis), tuple(value for *_, value in found)) if end == whole[axis] else None
