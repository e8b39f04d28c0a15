"""Fuse pointwise operators into the store of the matrix product or convolution that feeds them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..graph import DType, GraphIR, Node, Value
from ..ops.pointwise.epilogue import EpilogueOp
from ..ops.pointwise.op import Pointwise, Step
from ..ops.state.leaf import Constant
from ..target import Target
from .prune import prune
from .rebuild import Rebuild
from .single_use import single_uses


def fuse_epilogue(graph: GraphIR, target: Target) -> GraphIR:
    """matmul or conv -> bias, residual, activation, ... becomes one operator, step by step.

    The product must have one use, its user must not broadcast it, give f32, and read extra inputs that the kernel
    can index, within the limit of storage buffers.
    """
    single = single_uses(graph)
    limit = target.limits["max-storage-buffers-per-shader-stage"]
    fused: dict[Value, tuple[EpilogueOp, tuple[Value, ...]]] = {}
    rebuild = Rebuild(graph)
    for index, node in enumerate(graph.nodes):
        value = Value(index)
        if isinstance(node.op, EpilogueOp):
            fused[value] = (node.op, node.inputs)
        elif isinstance(node.op, Pointwise):
            product = next(
                (v for v in sorted(node.inputs, reverse=True) if v in fused and single.get(v) == index), None
            )
            merged = product and merge(graph, node, product, *fused[product])
            if merged and bindings(graph, *merged) <= limit:
                fused[value] = merged
                rebuild.replace(value, *merged)
                continue
        rebuild.copy(value)
    return prune(rebuild.finish(), target)


def merge(
    graph: GraphIR, node: Node, product: Value, op: EpilogueOp, inputs: tuple[Value, ...]
) -> tuple[EpilogueOp, tuple[Value, ...]] | None:
    """The product with `node` as one more step of its epilogue, or None where it does not fit."""
    out = graph.type_of(product)
    if node.types[0] != out:
        return None
    shapes = [graph.type_of(v).shape for v in node.inputs if v != product]
    if any(op.as_matrices(shape, out.shape) is None for shape in shapes):
        return None
    if not isinstance(node.op, Pointwise) or node.types[0].dtype is not DType.F32:
        return None
    own, extras = inputs[: op.operands], [*inputs[op.operands :]]
    added = [v for v in dict.fromkeys(node.inputs) if v != product and v not in extras]
    # Operand 0 is the product, then the extra inputs, then the steps: new extra inputs shift the steps.
    shift = len(added)
    known = 1 + len(extras)
    steps = tuple(
        replace(step, operands=tuple(i if i < known else i + shift for i in step.operands)) for step in op.epilogue
    )
    extras += added
    latest = len(extras) + len(steps) if steps else 0
    operands = tuple(latest if v == product else 1 + extras.index(v) for v in node.inputs)
    changed: dict[str, Any] = {"epilogue": (*steps, Step(node.op, operands))}
    return replace(op, **changed), (*own, *extras)


def bindings(graph: GraphIR, op: EpilogueOp, inputs: tuple[Value, ...]) -> int:
    """Storage buffers of a fused product: its inputs that are not numbers in the text, and the output."""
    extras = inputs[op.operands :]
    sources = [graph.nodes[v.node].op for v in extras]
    literals = [source for source in sources if isinstance(source, Constant) and source.literal() is not None]
    return len(inputs) + 1 - len(literals)
