"""The gradients of slices, and of padding by mirrored or repeated elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import GROUP, Array
from .resample import dispatch_remap


@dataclass(frozen=True)
class SliceGrad(Op):
    """dx of this shape: dy at start + step * c on every axis, 0 elsewhere."""

    tolerance: ClassVar[str] = "exact"
    shape: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def infer(self, dy: TensorType) -> TensorType:
        if not len(self.shape) == len(self.starts) == len(self.steps) == dy.rank or 0 in self.steps:
            raise GraphError(f"slice_grad: expected a size, a start and a step an axis of {dy}, got {list(self.shape)}")
        for axis, (size, start, step) in enumerate(zip(self.shape, self.starts, self.steps, strict=True)):
            last = start + (dy.shape[axis] - 1) * step
            if dy.shape[axis] and not (0 <= start < size and 0 <= last < size):
                raise GraphError(f"slice_grad: axis {axis} of {dy}: start {start} and step {step} leave {size}")
        return TensorType(self.shape, dy.dtype)

    def reference(self, dy: Array) -> Array:
        dx = np.zeros(self.shape, dy.dtype)
        grids = [s + np.arange(n) * d for s, n, d in zip(self.starts, dy.shape, self.steps, strict=True)]
        dx[np.ix_(*grids) if grids else ...] = dy
        return dx

    def lower(self, k: Lowering, dy: Operand, *, out: Operand) -> None:
        kinds, numbers = [], []
        for size, n, start, step in zip(self.shape, dy.shape, self.starts, self.steps, strict=True):
            kinds.append("same" if size == n and step == 1 else "constant" if step == 1 else "spread")
            numbers.append(start)
        zero = Operand(TensorType((), dy.dtype), "", "0.0")
        dispatch_remap(k, dy, out, kinds, numbers, zero, "slice_grad", list(self.steps))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [
            ((9,), (1,), (2,), (3,)),
            ((5, 64), (4, 0), (-1, 1), (5, 33)),
            ((2, 5, 7), (0, 4, 6), (1, -2, -3), (2, 3, 2)),
        ]
        cases += [
            ((2, 3, 300), (0, 1, 7), (1, 1, 1), (2, 2, 290)),
            ((3, 4), (2, 0), (1, 3), (1, 2)),
            ((3, 4), (0, 0), (1, 1), (3, 4)),
        ]
        cases += [((3, 4), (0, 0), (1, 1), (0, 4)), ((0, 4), (0, 1), (1, 2), (0, 2)), ((), (), (), ())]
        return [Sample(cls(x, starts, steps), (TensorType(dy),), "special") for x, starts, steps, dy in cases]


@dataclass(frozen=True)
class PadGrad(Op):
    """dx along one axis: every element adds up dy wherever padding of mode reflect or edge put it, in ascending order."""

    tolerance: ClassVar[str] = "sum"
    axis: int = 0
    before: int = 0
    after: int = 0
    mode: str = "reflect"

    def infer(self, dy: TensorType) -> TensorType:
        if not 0 <= self.axis < dy.rank or self.mode not in ("reflect", "edge"):
            raise GraphError(f"pad_grad: expected mode reflect or edge and an axis of {dy}, got {self}")
        size = dy.shape[self.axis] - self.before - self.after
        if (
            not 0
            <= min(self.before, self.after)
            <= max(self.before, self.after)
            < (size if self.mode == "reflect" else 2**31)
        ):
            raise GraphError(f"pad_grad: expected other widths of axis {self.axis} of {dy}, got {self}")
        return TensorType((*dy.shape[: self.axis], size, *dy.shape[self.axis + 1 :]), dy.dtype)

    def reference(self, dy: Array) -> Array:
        size = dy.shape[self.axis] - self.before - self.after
        sources = np.pad(np.arange(size), (self.before, self.after), mode=self.mode)  # type: ignore[call-overload]
        dx = np.zeros((size, *np.delete(dy.shape, self.axis)), dy.dtype)
        np.add.at(dx, sources, np.moveaxis(dy, self.axis, 0))
        return np.moveaxis(dx, 0, self.axis)

    def lower(self, k: Lowering, dy: Operand, *, out: Operand) -> None:
        inner = int(np.prod(out.shape[self.axis + 1 :]))
        const = {
            "SIZE": out.size,
            "COUNT": out.shape[self.axis],
            "INNER": inner,
            "BEFORE": self.before,
            "AFTER": self.after,
        }
        k.dispatch(
            "pad_grad",
            variant={"mode": self.mode},
            bind={"dy": dy, "out": out},
            const=const,
            groups=-(-out.size // GROUP),
            label=f"pad_{self.mode}_grad",
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(shape: tuple[int, ...], axis: int, before: int, after: int, mode: str) -> Sample:
            dy = tuple(n + (before + after) * (a == axis) for a, n in enumerate(shape))
            return Sample(cls(axis, before, after, mode), (TensorType(dy),))

        cases = [((2, 3, 5), 1, 2, 1), ((7,), 0, 6, 6), ((3, 65), 1, 0, 3), ((2, 2, 33), 1, 1, 0), ((4, 1), 1, 0, 0)]
        samples = [sample(*case, mode) for case in cases for mode in ("reflect", "edge")]
        return [
            *samples,
            sample((3, 4), 1, 9, 300, "edge"),
            sample((5, 1, 2), 1, 2, 3, "edge"),
            sample((0, 4), 1, 1, 1, "edge"),
        ]
