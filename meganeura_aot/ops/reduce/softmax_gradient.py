"""Gradients of softmax and log-softmax: one kernel a row, two where rows are long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import Array
from .rows import Team, row_over


class SoftmaxGradOp(Op, register=False):
    """Shared by the gradients of softmax and log-softmax: dy and y to dx, all of one type, rows along `axis`."""

    axis: int
    draw: ClassVar[str]

    def infer(self, dy: TensorType, y: TensorType) -> TensorType:
        if y.dtype is not DType.F32 or dy != y or not 0 <= self.axis < y.rank:
            raise GraphError(f"{self.name}: expected two f32 of one shape, got {dy} and {y} and axis {self.axis}")
        return y

    def lower(self, k: Lowering, dy: Operand, y: Operand, *, out: Operand) -> None:
        if out.size == 0:
            return
        team = Team.keeping(row_over(y.shape, (self.axis,)).in_fours(), y.size // y.shape[self.axis])
        bind = {"dy": dy, "y": y}
        if team.chunks > 1:
            bind["partial"] = k.scratch(TensorType((team.rows, team.chunks)))
            read = ("dy", "partial") if isinstance(self, LogSoftmaxGrad) else ("dy", "y", "partial")
            self._dispatch(k, f"{self.name}_sums", team, {name: bind[name] for name in read})
        self._dispatch(k, self.name, team, {**bind, "out": out})

    def _dispatch(self, k: Lowering, title: str, team: Team, bind: Mapping[str, Operand]) -> None:
        offsets, strides = team.row.offsets()
        sums = "out" not in bind
        variant = {
            **offsets,
            **team.variant(),
            "bindings": team.bindings(bind, partial="f32"),
            "log": isinstance(self, LogSoftmaxGrad),
            "sums": sums,
            "from_partial": "partial" in bind and not sums,
            "title": title,
        }
        const = team.const() | strides
        k.dispatch("softmax_grad", variant=variant, bind=bind, const=const, groups=team.groups, label=title)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [((3, 257), 1), ((2, 3, 5), 1), ((65, 4), 0), ((257, 3), 0), ((5, 64), 1), ((2, 3, 100, 4), 2)]
        cases += [((2, 9000), 1), ((1, 5001), 1), ((9000, 3), 0), ((7,), 0), ((3, 1), 1), ((0, 3), 1)]
        build: Callable[..., Any] = cls
        return [Sample(build(axis), (TensorType(shape),) * 2, ("normal", cls.draw)) for shape, axis in cases]


@dataclass(frozen=True)
class SoftmaxGrad(SoftmaxGradOp):
    """dx = y * (dy - sum(dy * y)) along `axis`, of y = softmax(x)."""

    tolerance: ClassVar[str] = "sum"
    draw: ClassVar[str] = "normal"
    axis: int = -1

    def reference(self, dy: Array, y: Array) -> Array:
        return np.asarray(y * (dy - np.sum(dy * y, axis=self.axis, keepdims=True)))

    def magnitude(self, dy: Array, y: Array) -> Array:
        """The absolute values of what is added up: what rounding is relative to."""
        return np.asarray(np.abs(y) * (np.abs(dy) + np.sum(np.abs(dy * y), axis=self.axis, keepdims=True)))


@dataclass(frozen=True)
class LogSoftmaxGrad(SoftmaxGradOp):
    """dx = dy - exp(y) * sum(dy) along `axis`, of y = log_softmax(x)."""

    tolerance: ClassVar[str] = "sum"
    draw: ClassVar[str] = "negative"
    axis: int = -1

    def reference(self, dy: Array, y: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(dy - np.exp(y) * np.sum(dy, axis=self.axis, keepdims=True))

    def magnitude(self, dy: Array, y: Array) -> Array:
        """The absolute values of what is added up: what rounding is relative to."""
        return np.asarray(np.abs(dy) + np.exp(y) * np.sum(np.abs(dy), axis=self.axis, keepdims=True))
