"""Dropout: the identity, until training makes random masks of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import GROUP, Array
from .op import STATE, random_words

STEPS = 2**24  # of the uniform numbers


class DropoutOp(Op, register=False):
    """Shared by both forms: x is f32, and a share p of it is dropped."""

    p: float

    def _checked(self, x: TensorType) -> TensorType:
        if x.dtype is not DType.F32 or not 0 <= self.p < 1:
            raise GraphError(f"{self.name}: expected f32 and 0 <= p < 1, got {x} and {self.p}")
        return x


@dataclass(frozen=True)
class Dropout(DropoutOp):
    """y = x; in a training step `activate_dropout` of the passes puts random_dropout in its place."""

    is_view: ClassVar[bool] = True
    tolerance: ClassVar[str] = "exact"
    p: float = 0.5

    def infer(self, x: TensorType) -> TensorType:
        return self._checked(x)

    def reference(self, x: Array) -> Array:
        return x

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (dy,)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        """Nothing to do."""

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(0.3), (TensorType((3, 5)),))]


@dataclass(frozen=True)
class RandomDropout(DropoutOp):
    """y = x * (u >= p) / (1 - p), u being random_uniform's numbers of a state whose counter is `first` further on.

    The gradient draws the same numbers from the same state, so that no mask is kept.
    """

    p: float = 0.5
    first: int = 0

    def infer(self, x: TensorType, state: TensorType) -> TensorType:
        if state != STATE or not 0 <= self.first <= 2**32 - self.blocks(x):
            raise GraphError(f"{self.name}: expected a state {STATE} and a place in it, got {state} and {self.first}")
        return self._checked(x)

    @staticmethod
    def blocks(x: TensorType) -> int:
        """Counter values that are used up."""
        return -(-x.size // 4)

    def reference(self, x: Array, state: Array) -> Array:
        uniform = (random_words(state, -(-x.size // 4), self.first) >> 8).reshape(-1)[: x.size] / STEPS
        factor = (uniform >= self.p).reshape(x.shape) / (1 - self.p)
        with np.errstate(invalid="ignore"):
            return np.asarray(x * factor)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, state: Any) -> tuple[Any, ...]:
        return (g.apply(self, dy, state), None)

    def lower(self, k: Lowering, x: Operand, state: Operand, *, out: Operand) -> None:
        least = math.ceil(self.p * STEPS)  # u >= p without rounding
        k.dispatch(
            "random",
            variant={"kind": "dropout", "vec": 4 if out.size % 4 == 0 else 1, "title": self.name},
            bind={"state": state, "x": x, "out": out},
            const={"N": out.size, "FIRST": self.first, "LEAST": least, "SCALE": 1 / (1 - self.p)},
            groups=math.ceil(self.blocks(x.type) / GROUP),
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        build: Callable[..., Any] = cls
        cases = [((7, 3), 0.5, 0), ((2, 1000), 0.1, 77), ((1,), 0.0, 1), ((0, 3), 0.5, 5), ((4099,), 0.9, 2**32 - 1025)]
        return [Sample(build(p, first), (TensorType(s), STATE), ("normal", "integer")) for s, p, first in cases]
