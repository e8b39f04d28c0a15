"""Writes of states: in place, in the order of the graph."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import GraphError
from ...graph import TensorType
from ...op import Lowering, Op, Operand
from ..pointwise.op import GROUP, Array, dispatch_copy


@dataclass(frozen=True)
class Assign(Op):
    """The state takes a new value; the output is the state after the write."""

    writes: ClassVar[tuple[int, ...]] = (0,)
    tolerance: ClassVar[str] = "exact"

    def infer(self, state: TensorType, value: TensorType) -> TensorType:
        if state != value:
            raise GraphError(f"assign: expected {state} as the state, got {value}")
        return state

    def reference(self, state: Array, value: Array) -> Array:
        return value

    def gradient(self, g: Any, dy: Any, y: Any, state: Any, value: Any) -> tuple[Any, ...]:
        return (None, dy)

    def lower(self, k: Lowering, state: Operand, value: Operand, *, out: Operand) -> None:
        dispatch_copy(k, value, out)


@dataclass(frozen=True)
class AdvancePosition(Op):
    """Every element of a u32 position state moves by `by` (or by the second input, a scalar), modulo 2^32."""

    writes: ClassVar[tuple[int, ...]] = (0,)
    tolerance: ClassVar[str] = "exact"
    name: ClassVar[str] = "advance"
    by: int | None = None

    def infer(self, state: TensorType, step: TensorType | None = None) -> TensorType:
        return state

    def reference(self, state: Array, step: Array | None = None) -> Array:
        moved = state.astype("uint64") + (self.by if step is None else step)
        return moved.astype("uint32")

    def lower(self, k: Lowering, state: Operand, step: Operand | None = None, *, out: Operand) -> None:
        bind = {"state": out} if step is None else {"step": step, "state": out}
        const = {"N": out.size} | ({"STEP": self.by or 0} if step is None else {})
        groups = math.ceil(out.size / GROUP)
        k.dispatch("state", variant={"from_input": step is not None}, bind=bind, const=const, groups=groups)
