"""Losses: f32 scalars of shape (), reduced on the GPU, so that they can be used inside a graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import Array
from ..reduce.op import Fold, reduce_rows, softmax_statistics
from ..reduce.rows import Team, rows_of
from .gradient import BceGrad, BceTargetGrad, CrossEntropyGrad, log_of


class PairLoss(Op, register=False):
    """The mean over all elements of a function of prediction and target, both f32 of one shape; NaN for no elements."""

    tolerance: ClassVar[str] = "norm"
    term: ClassVar[str]  # WGSL of a prediction a and a target b
    numpy: ClassVar[Callable[[Array, Array], Array]]
    draws: ClassVar[tuple[str, str]] = ("normal", "large")

    def infer(self, pred: TensorType, target: TensorType) -> TensorType:
        if pred.dtype is not DType.F32 or target != pred:
            raise GraphError(f"{self.name}: expected two f32 tensors of one shape, got {pred} and {target}")
        return TensorType(())

    def reference(self, pred: Array, target: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(np.sum(type(self).numpy(pred, target)) / np.float64(pred.size))

    def lower(self, k: Lowering, pred: Operand, target: Operand, *, out: Operand) -> None:
        fold = mean_fold(self.name, pred.size, type(self).term)
        reduce_rows(k, fold, {"x": pred, "expected": target}, out, rows_of(1, pred.size))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        shapes: list[tuple[int, ...]] = [(3, 257), (), (1,), (4, 256), (1000,), (2, 3, 70), (70000,), (9001, 8), (0, 3)]
        return [Sample(cls(), (TensorType(shape),) * 2, cls.draws) for shape in shapes]


def mean_fold(title: str, count: int, term: str = "a") -> Fold:
    """The sum of `term` over `count`; NaN where that is 0."""
    return Fold(title, "f32", "sum", term, "total / f32(DIVISOR)", {"DIVISOR": count})


@dataclass(frozen=True)
class MseLoss(PairLoss):
    """mean((pred - target)^2)"""

    term: ClassVar[str] = "(a - b) * (a - b)"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(lambda p, t: (p - t) ** 2)

    def gradient(self, g: Any, dy: Any, y: Any, pred: Any, target: Any) -> tuple[Any, ...]:
        slope = (pred - target) * (dy * (2 / max(pred.type.size, 1)))
        return (slope, -slope)


@dataclass(frozen=True)
class L1Loss(PairLoss):
    """mean(|pred - target|)"""

    term: ClassVar[str] = "abs(a - b)"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(lambda p, t: np.abs(p - t))

    def gradient(self, g: Any, dy: Any, y: Any, pred: Any, target: Any) -> tuple[Any, ...]:
        slope = g.sign(pred - target) * (dy * (1 / max(pred.type.size, 1)))
        return (slope, -slope)


def _bce(p: Array, t: Array) -> Array:
    of_one, of_zero = log_of(p)
    return np.asarray(-(t * of_one + (1 - t) * of_zero))


@dataclass(frozen=True)
class BceLoss(PairLoss):
    """mean(-(t log p + (1 - t) log(1 - p))) of probabilities p, clipped to [0, 1]; t is any number, logarithms >= -100."""

    term: ClassVar[str] = "bce_f32(a, b)"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(_bce)
    draws: ClassVar[tuple[str, str]] = ("probability", "probability")

    def gradient(self, g: Any, dy: Any, y: Any, pred: Any, target: Any) -> tuple[Any, ...]:
        share = dy * (1 / max(pred.type.size, 1))
        return (g.apply(BceGrad(), share, pred, target), g.apply(BceTargetGrad(), share, pred))


@dataclass(frozen=True)
class CrossEntropyLoss(Op):
    """The mean over rows of -sum over classes of weight * log_softmax(logits); classes are the last axis.

    Labels are f32 weights of the shape of the logits, which need not add up to 1, or u32 class ids of shape
    logits.shape[:-1]. Rows whose id is ignore_index do not count; if none does the loss is NaN, and so it is with any
    other id that is no class. With label_smoothing s the weights are (1 - s) * weight + s / classes.
    """

    tolerance: ClassVar[str] = "loss"
    ignore_index: int | None = None
    label_smoothing: float = 0.0

    def infer(self, logits: TensorType, labels: TensorType) -> TensorType:
        if logits.dtype is not DType.F32 or logits.rank == 0 or logits.shape[-1] == 0:
            raise GraphError(f"{self.name}: expected f32 logits of one class or more on the last axis, got {logits}")
        ids = TensorType(logits.shape[:-1], DType.U32)
        if labels not in (ids, logits):
            raise GraphError(f"{self.name}: expected labels {ids} (class ids) or {logits} (weights), got {labels}")
        if not 0 <= self.label_smoothing <= 1:
            raise GraphError(f"{self.name}: expected label_smoothing from 0 to 1, got {self.label_smoothing}")
        if self.ignore_index is not None and not 0 <= self.ignore_index < 2**32:
            raise GraphError(f"{self.name}: expected a u32 as ignore_index, got {self.ignore_index}")
        return TensorType(())

    def reference(self, logits: Array, labels: Array) -> Array:
        return self._mean(logits, labels, lambda weights, losses: weights * losses)

    def magnitude(self, logits: Array, labels: Array) -> Array:
        """The mean of the absolute values of what is added up: what rounding is relative to."""
        return self._mean(logits, labels, lambda weights, losses: np.abs(weights * losses))

    def _mean(self, logits: Array, labels: Array, product: Callable[[Array, Array], Array]) -> Array:
        s, classes = self.label_smoothing, logits.shape[-1]
        with np.errstate(all="ignore"):
            shifted = logits - np.max(logits, axis=-1, keepdims=True, initial=-3.4e38)
            losses = np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True)) - shifted
            if labels.dtype.kind == "f":
                rows = np.sum(product(labels * (1 - s) + s / classes, losses), axis=-1)
                return np.asarray(np.sum(rows) / np.float64(rows.size))
            known = np.minimum(labels, classes - 1).astype(np.int64)[..., None]
            rows = np.take_along_axis(losses, known, axis=-1)[..., 0] * (1 - s)
            if s:
                rows = rows + s * np.mean(losses, axis=-1)
            counted = np.ones(labels.shape) if self.ignore_index is None else labels != self.ignore_index
            rows = np.where(counted, np.where(labels < classes, rows, np.nan), 0)
            return np.asarray(np.sum(rows) / np.float64(np.sum(counted)))

    def gradient(self, g: Any, dy: Any, y: Any, logits: Any, labels: Any) -> tuple[Any, ...]:
        dlogits = g.apply(CrossEntropyGrad(self.ignore_index, self.label_smoothing), dy, logits, labels)
        if labels.dtype is DType.U32:
            return (dlogits, None)
        rows = max(logits.type.size // logits.shape[-1], 1)
        return (dlogits, g.log_softmax(logits) * (dy * ((self.label_smoothing - 1) / rows)))

    def lower(self, k: Lowering, logits: Operand, labels: Operand, *, out: Operand) -> None:
        classes = logits.shape[-1]
        rows = logits.size // classes
        if rows == 0:
            reduce_rows(k, mean_fold(self.name, 0), {"x": logits}, out, rows_of(1, 0))
            return
        team = Team.keeping(rows_of(rows, classes).in_fours(), rows)
        losses = self._row_losses(k, logits, labels, team)
        fold = mean_fold(self.name, rows)
        if labels.dtype is DType.U32:
            finish = "select(total.x / total.y, nan_f32(), total.y == 0.0)"
            fold = Fold(self.name, "vec2<f32>", "sum", finish=finish)
        reduce_rows(k, fold, {"x": losses}, out, rows_of(1, math.prod(losses.shape[:2])))

    def _row_losses(self, k: Lowering, logits: Operand, labels: Operand, team: Team) -> Operand:
        """The loss of every row, or chunk of one; for class ids, pairs of it and of how many rows it counts for."""
        ids, smoothing = labels.dtype is DType.U32, self.label_smoothing
        every = not ids or smoothing > 0  # whether every class adds to the loss, or only the row's own
        const: dict[str, int | float] = {**team.const()}
        bind = {"x": logits, "labels": labels}
        from_partial = team.chunks > 1
        if from_partial:
            bind["partial"] = softmax_statistics(k, team, logits)
        if from_partial and not every:  # nothing is left to read but one logit a row and the chunks' statistics
            const["COUNT"] = team.members
            team = Team.of(rows_of(team.rows, team.chunks), team.rows)
        bind["out"] = k.scratch(TensorType((team.rows, team.chunks, 2) if ids else (team.rows, team.chunks)))
        types = {"labels": "u32", "out": "vec2<f32>"} if ids else {"out": "f32"}
        ignored = self.ignore_index if ids else None
        const |= {} if ignored is None else {"IGNORE": ignored}
        const |= {"KEEP": 1 - smoothing, "SPREAD": smoothing / logits.shape[-1]} if smoothing else {}
        variant = {
            **team.variant(),
            "bindings": team.bindings(bind, partial="vec2<f32>", **types),
            "from_partial": from_partial,
            "every": every,
            "ids": ids,
            "ignores": ignored is not None,
            "smooth": smoothing > 0,
            "title": "cross_entropy_rows",
        }
        k.dispatch(
            "cross_entropy", variant=variant, bind=bind, const=const, groups=team.groups, label="cross_entropy_rows"
        )
        return bind["out"]

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        build: Callable[..., Any] = cls

        def ids(shape: tuple[int, ...], draw: str, ignore: int | None = None, smoothing: float = 0.0) -> Sample:
            types = (TensorType(shape), TensorType(shape[:-1], DType.U32))
            return Sample(build(ignore, smoothing), types, ("large" if len(shape) > 2 else "normal", draw))

        def weights(shape: tuple[int, ...], smoothing: float = 0.0, draw: str = "normal") -> Sample:
            return Sample(build(None, smoothing), (TensorType(shape),) * 2, (draw, "normal"))

        return [
            ids((5, 7), "below 7"),
            ids((70, 64), "below 64", ignore=3),
            ids((3, 2, 257), "below 257"),
            ids((4, 6), "outside 6"),  # ids that are no class
            ids((4, 6), "zero", ignore=0),  # nothing counts
            ids((1, 1), "below 1"),
            ids((9,), "below 9"),
            ids((5, 33), "below 33", ignore=1, smoothing=0.1),
            ids((2, 2, 100), "below 100", smoothing=0.3),
            ids((3, 9000), "below 9000", ignore=4),
            ids((3, 5001), "below 5001"),
            ids((2, 9000), "below 9000", ignore=2**32 - 100, smoothing=0.1),
            ids((0, 4), "below 4"),
            weights((5, 7)),
            weights((3, 2, 256)),
            weights((3, 257), draw="large"),
            weights((4, 9000)),
            weights((4, 100), smoothing=0.2),
            weights((1, 3), draw="negative"),
            weights((0, 4)),
        ]
