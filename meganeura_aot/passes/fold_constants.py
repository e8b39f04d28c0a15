"""Compute now what is known now."""

from __future__ import annotations

import numpy as np

from ..graph import DType, GraphIR, Node, Value
from ..ops.layout.op import Expand, Reshape
from ..ops.pointwise.op import Pointwise
from ..ops.state.leaf import Constant
from ..target import Target
from .prune import prune
from .rebuild import Rebuild


def fold_constants(graph: GraphIR, target: Target) -> GraphIR:
    """Pointwise operators over constants of one element become such a constant, and x * 1 becomes x.

    A result that is not finite is left to the device, so that it looks like any other one computed there.
    """
    rebuild = Rebuild(graph)
    for index, node in enumerate(graph.nodes):
        value = Value(index)
        known = [number(rebuild, v) for v in node.inputs]
        folded = fold(node, [constant for constant in known if constant]) if all(known) else None
        if folded:
            rebuild.moved[value] = rebuild.insert(folded, (), node.location)
        elif (place := factor_of_one(node, known)) is not None and graph.type_of(node.inputs[place]) == node.types[0]:
            rebuild.alias(value, node.inputs[place])
        else:
            rebuild.copy(value)
    return prune(rebuild.finish(), target)


def number(rebuild: Rebuild, value: Value) -> Constant | None:
    """The constant of one element that an old value has become."""
    op = rebuild.nodes[rebuild.moved[value].node].op
    return op if isinstance(op, Constant) and op.infer().size == 1 else None


def fold(node: Node, constants: list[Constant]) -> Constant | None:
    """What an operator makes of constants of one element, where it is a finite number of that kind."""
    type_ = node.types[0]
    if not constants or type_.size != 1 or not isinstance(node.op, Pointwise | Reshape | Expand):
        return None
    result = node.op.reference(*(constant.reference() for constant in constants))
    with np.errstate(over="ignore"):
        rounded = np.asarray(result).astype(type_.dtype.numpy).reshape(type_.shape)
    if type_.dtype is DType.F32 and not np.isfinite(rounded).all():
        return None
    return Constant.of(rounded, type_.dtype)


def factor_of_one(node: Node, known: list[Constant | None]) -> int | None:
    """The place of x in a product of x and 1."""
    if node.op.name != "mul":
        return None
    places = [1 - place for place, constant in enumerate(known) if constant and constant.array().item() == 1]
    return places[0] if places else None
