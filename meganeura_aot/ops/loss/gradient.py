"""Gradients of the losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import Array, Pointwise
from ..reduce.op import Fold, reduce_rows, softmax_statistics
from ..reduce.rows import Team, rows_of

LEAST_LOG = -100.0  # the least logarithm in the binary cross-entropy, as in PyTorch: no loss is infinite
LEAST_VARIANCE = 1e-12  # the least p (1 - p) by which the gradient divides, as in PyTorch


@dataclass(frozen=True)
class CrossEntropyGrad(Op):
    """Of the scalar dy, logits and labels of a cross-entropy, dlogits = dy * (softmax(logits) * sum(w) - w) / rows.

    w are the weights of the classes of a row after smoothing, and rows those that count. A row that does not count is
    0, one whose id is no class NaN.
    """

    tolerance: ClassVar[str] = "loss"
    ignore_index: int | None = None
    label_smoothing: float = 0.0

    def infer(self, dy: TensorType, logits: TensorType, labels: TensorType) -> TensorType:
        if dy != TensorType(()) or labels not in (logits, TensorType(logits.shape[:-1], DType.U32)):
            raise GraphError(f"{self.name}: expected a scalar, logits and labels, got {dy}, {logits} and {labels}")
        return logits

    def reference(self, dy: Array, logits: Array, labels: Array) -> Array:
        return self._combined(dy, logits, labels, np.subtract)

    def magnitude(self, dy: Array, logits: Array, labels: Array) -> Array:
        """The absolute values of what is subtracted: what rounding is relative to."""
        return self._combined(np.abs(dy), logits, np.abs(labels), np.add)

    def _combined(self, dy: Array, logits: Array, labels: Array, combine: Callable[[Array, Array], Array]) -> Array:
        s, classes = self.label_smoothing, logits.shape[-1]
        dense = labels.dtype.kind == "f"
        hits = labels if dense else labels[..., None] == np.arange(classes)
        weights = hits * (1 - s) + s / classes
        with np.errstate(all="ignore"):
            e = np.exp(logits - np.max(logits, axis=-1, keepdims=True, initial=-3.4e38))
            softmax = e / np.sum(e, axis=-1, keepdims=True)
            if dense:
                total = np.sum(weights, axis=-1, keepdims=True)
                return np.asarray(dy * combine(softmax * total, weights) / max(logits.size // classes, 1))
            counted = np.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index
            known = np.where((labels < classes)[..., None], combine(softmax, weights), np.nan)
            return np.where(counted[..., None], dy * known / np.float64(np.sum(counted)), 0)

    def lower(self, k: Lowering, dy: Operand, logits: Operand, labels: Operand, *, out: Operand) -> None:
        if out.size == 0:
            return
        classes = logits.shape[-1]
        rows = logits.size // classes
        ids, smoothing = labels.dtype is DType.U32, self.label_smoothing
        team = Team.keeping(rows_of(rows, classes).in_fours(), rows)
        bind = {"x": logits, "labels": labels, "dy": dy}
        from_partial = team.chunks > 1
        if from_partial:
            bind["partial"] = softmax_statistics(k, team, logits)
            if not ids:
                bind["label_sums"] = k.scratch(TensorType((rows,)), "label_sums")
                reduce_rows(k, Fold("sum", "f32", "sum"), {"x": labels}, bind["label_sums"], rows_of(rows, classes))
        ignores = ids and self.ignore_index is not None
        if ignores:
            bind["counted"] = k.scratch(TensorType((1,)), "counted")
            counts = Fold("counted", "u32", "sum", f"select(1u, 0u, a == {self.ignore_index}u)", "f32(total)")
            reduce_rows(k, counts, {"x": labels}, bind["counted"], rows_of(1, rows))
        types = {"labels": "u32"} if ids else {}
        bind["out"] = out
        variant = {
            **team.variant(),
            "bindings": team.bindings(bind, dy="f32", partial="vec2<f32>", label_sums="f32", counted="f32", **types),
            "from_partial": from_partial,
            "ids": ids,
            "ignores": ignores,
            "smooth": smoothing > 0,
        }
        const: dict[str, int | float] = {**team.const()}
        const |= {"IGNORE": self.ignore_index} if ignores and self.ignore_index is not None else {}
        const |= {"KEEP": 1 - smoothing, "SPREAD": smoothing / classes} if smoothing else {}
        k.dispatch("cross_entropy_grad", variant=variant, bind=bind, const=const, groups=team.groups)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        build: Callable[..., Any] = cls

        def ids(shape: tuple[int, ...], draw: str, ignore: int | None = None, smoothing: float = 0.0) -> Sample:
            types = (TensorType(()), TensorType(shape), TensorType(shape[:-1], DType.U32))
            draws = ("normal", "large" if len(shape) > 2 else "normal", draw)
            return Sample(build(ignore, smoothing), types, draws)

        def weights(shape: tuple[int, ...], smoothing: float = 0.0, draw: str = "normal") -> Sample:
            types = (TensorType(()), TensorType(shape), TensorType(shape))
            return Sample(build(None, smoothing), types, ("normal", draw, "normal"))

        return [
            ids((5, 7), "below 7"),
            ids((70, 64), "below 64", ignore=3),
            ids((3, 2, 257), "below 257"),
            ids((9, 6), "outside 6", ignore=2),
            ids((4, 6), "zero", ignore=0),  # nothing counts
            ids((1, 1), "below 1"),
            ids((9,), "below 9"),
            ids((5, 33), "below 33", ignore=1, smoothing=0.1),
            ids((2, 2, 100), "below 100", smoothing=0.3),
            ids((3, 9000), "below 9000", ignore=4),
            ids((3, 5001), "below 5001"),
            ids((2, 9000), "below 9000", ignore=2**32 - 100, smoothing=0.1),
            ids((9001, 3), "below 3", ignore=2),  # counted in two stages
            ids((0, 4), "below 4", ignore=1),
            weights((5, 7)),
            weights((3, 2, 256)),
            weights((3, 257), draw="large"),
            weights((4, 9000)),
            weights((2, 5001), smoothing=0.1),
            weights((4, 100), smoothing=0.2),
            weights((1, 3), draw="negative"),
            weights((0, 4)),
        ]


class BceSlope(Pointwise, register=False):
    """Shared by the gradients of the binary cross-entropy: f32 to f32."""

    rule: ClassVar[str] = "float"
    derivative: ClassVar[None] = None

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        shapes = [((), (3, 65), (3, 65)), ((), (7,), (7,)), ((257,), (257,), (257,)), ((), (2, 1, 5), (3, 1))]
        draws = ("normal", "probability", "probability")[: cls.arity]
        return [Sample(cls(), tuple(map(TensorType, shape[: cls.arity])), draws) for shape in shapes]


def log_of(p: Array) -> tuple[Array, Array]:
    """log p and log(1 - p) of probabilities p, clipped to [0, 1]. Each logarithm is at least LEAST_LOG."""
    with np.errstate(all="ignore"):
        p = np.clip(p, 0, 1)
        return np.maximum(np.log(p), LEAST_LOG), np.maximum(np.log1p(-p), LEAST_LOG)


def _bce_slope(dy: Array, p: Array, t: Array) -> Array:
    p = np.clip(p, 0, 1)
    return np.asarray(dy * ((p - t) / np.maximum(p * (1 - p), LEAST_VARIANCE)))


def _bce_target_slope(dy: Array, p: Array) -> Array:
    of_one, of_zero = log_of(p)
    return np.asarray(dy * (of_zero - of_one))


@dataclass(frozen=True)
class BceGrad(BceSlope):
    """dy * (p - t) / max(p * (1 - p), 1e-12) of probabilities p, clipped to [0, 1]: PyTorch's."""

    arity: ClassVar[int] = 3
    wgsl: ClassVar[str] = "{0} * bce_slope_f32({1}, {2})"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(_bce_slope)


@dataclass(frozen=True)
class BceTargetGrad(BceSlope):
    """dy * (log(1 - p) - log(p)) of probabilities p, clipped to [0, 1]; the logarithms are -100 or more."""

    arity: ClassVar[int] = 2
    wgsl: ClassVar[str] = "{0} * (bce_f32({1}, 1.0) - bce_f32({1}, 0.0))"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(_bce_target_slope)
