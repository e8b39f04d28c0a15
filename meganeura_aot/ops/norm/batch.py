"""Batch norm: with given statistics, and with those of the batch, for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import Array, Pointwise
from ..reduce.rows import Team, rows_of
from .gradient import check_upstream
from .schedule import WeightSums, bindings, channel_rows, check_norm, lower_weight_sums
from .weight_gradient import NormGradW


@dataclass(frozen=True)
class BatchNorm(Pointwise):
    """y = (x - mean) / sqrt(variance + eps) * w + b with given statistics: inputs x, mean, variance, w, b, broadcast."""

    arity: ClassVar[int] = 5
    rule: ClassVar[str] = "float"
    wgsl: ClassVar[str | Mapping[DType, str]] = "({0} - {1}) * inverseSqrt({2} + {eps}) * {3} + {4}"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(
        lambda x, mean, variance, w, b, eps: (x - mean) / np.sqrt(variance + eps) * w + b
    )
    eps: float = 1e-5

    def gradient(self, g: Any, dy: Any, y: Any, *inputs: Any) -> tuple[Any, ...]:
        x, mean, variance, w, b = inputs
        each = mean.shape
        if x.shape != y.shape or variance.shape != each or each != (y.shape[1], *(1,) * (y.rank - 2)):
            raise NotImplementedError(f"statistics {mean.type} that are not those of the channels of {x.type}")
        scale = g.rsqrt(variance + self.eps)
        of_weights = g.apply_many(
            BatchNormGradWB(self.eps), dy, x, g.reshape(mean, each[:1]), g.reshape(variance, each[:1])
        )
        dw, db = (g.reshape(t, each) for t in of_weights)
        slope = w * scale
        return (
            dy * slope,
            -db * slope,
            dw * slope * scale * -0.5,
            g.sum_to(dw, w.shape),
            g.sum_to(db, b.shape),
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        channels = [((2, 3, 5, 7), (3, 1, 1)), ((3, 33), (33,)), ((1, 16, 9), (16, 1)), ((0, 4, 2), (4, 1))]
        draws = ("normal", "normal", "positive", "normal", "normal")
        return [Sample(cls(), (TensorType(shape), *(TensorType(each),) * 4), draws) for shape, each in channels]


@dataclass(frozen=True)
class BatchNormTraining(Op):
    """y = (x - mean) / sqrt(variance + eps) * w + b for every channel of x [N, C, ...] over all other axes.

    Inputs x, w [C] or none, b [C] or none; outputs y, mean [C] and the biased variance [C].
    """

    tolerance: ClassVar[str] = "norm"
    eps: float = 1e-5

    def infer(self, x: TensorType, w: TensorType | None = None, b: TensorType | None = None) -> tuple[TensorType, ...]:
        check_norm(self.name, x, 2, x.shape[1:2], weight=w, bias=b)
        if x.size // max(1, x.shape[1]) < 2:
            raise GraphError(f"{self.name}: expected two numbers or more a channel, got {x}")
        return x, *(TensorType(x.shape[1:2]),) * 2

    def reference(self, x: Array, w: Array | float = 1.0, b: Array | float = 0.0) -> tuple[Array, Array, Array]:
        axes, spread = (0, *range(2, x.ndim)), (-1,) + (1,) * (x.ndim - 2)
        with np.errstate(all="ignore"):
            mean, variance = np.mean(x, axis=axes), np.var(x, axis=axes)
            h = (x - mean.reshape(spread)) / np.sqrt(variance.reshape(spread) + self.eps)
            return h * np.reshape(w, spread) + np.reshape(b, spread), mean, variance

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, *weights: Any) -> tuple[Any, ...]:
        (upstream, dmean, dvariance), (_, mean, variance) = dy, y
        spread, share = (x.shape[1], *(1,) * (x.rank - 2)), x.shape[1] / x.type.size
        parts, of_weights = [], ()
        if upstream is not None:
            of_weights = g.apply_many(BatchNormGradWB(self.eps), upstream, x, mean, variance)
            w = g.reshape(weights[0], spread) if weights else 1.0
            each = [g.reshape(t, spread) for t in (mean, variance, *of_weights)]
            op = BatchNormGradX(self.eps, share)
            parts.append(g.apply(op, upstream, x, each[0], each[1], w, each[2], each[3]))
        if dmean is not None:
            parts.append(g.expand(g.reshape(dmean * share, spread), x.shape))
        if dvariance is not None:
            parts.append((x - g.reshape(mean, spread)) * g.reshape(dvariance * (2 * share), spread))
        dx = parts[0]
        for part in parts[1:]:
            dx = dx + part
        return (dx, *of_weights[: len(weights)]) if of_weights else (dx, *(None for _ in weights))

    def lower(
        self,
        k: Lowering,
        x: Operand,
        w: Operand | None = None,
        b: Operand | None = None,
        *,
        out: tuple[Operand, ...],
    ) -> None:
        y, mean, variance = out
        lower_statistics(k, x, mean, variance)
        spread = TensorType((x.shape[1], *(1,) * (len(x.shape) - 2)))
        each = [replace(t, type=spread) for t in (mean, variance)]
        scale, shift = (
            replace(t, type=spread) if t else Operand(TensorType(()), "", literal)
            for t, literal in ((w, "1.0f"), (b, "0.0f"))
        )
        BatchNorm(self.eps).lower(k, x, *each, scale, shift, out=y)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        shapes = [(4, 3, 5, 7), (33, 5), (2, 16, 9), (3, 2, 64, 64), (5000, 40), (2, 3, 71, 73), (2, 70)]
        samples = [Sample(cls(), (TensorType(s), *(TensorType(s[1:2]),) * 2)) for s in shapes]
        large = Sample(cls(0.1), (TensorType((4, 3, 40, 16)),), "large")
        return [*samples, large, Sample(cls(), (TensorType((3, 4, 8)), TensorType((4,))))]


def lower_statistics(k: Lowering, x: Operand, mean: Operand, variance: Operand) -> None:
    """Mean and variance of every channel; where rows are long, of chunks, then those of all chunks of a row."""
    if x.size == 0:
        return
    team = Team.keeping(channel_rows(x.shape), mean.size)
    outs = {"mean_out": mean, "variance_out": variance}
    if team.chunks == 1:
        _dispatch_statistics(k, team, {"x": x}, outs)
        return
    partial = k.scratch(TensorType((team.rows, team.chunks, 4)))
    _dispatch_statistics(k, team, {"x": x}, {"partial": partial})
    chunks = Team.of(rows_of(team.rows, team.chunks), team.rows)
    _dispatch_statistics(k, chunks, {"partial": partial}, outs, {"CHUNKS": team.chunks, "SIZE": team.members})


def _dispatch_statistics(
    k: Lowering, team: Team, bind: Mapping[str, Operand], outs: Mapping[str, Operand], more: Mapping[str, int] = {}
) -> None:
    offsets, strides = team.row.offsets()
    title = "batch_statistics" + ("_sum" if more else "")
    every = {**bind, **outs}
    types = {"partial": "vec4<f32>", "mean_out": "f32", "variance_out": "f32"}
    variant = {
        **offsets,
        **team.variant(),
        "bindings": bindings(team, every, len(outs), types),
        "centered": True,
        "from_partial": bool(more),
        "title": title,
    }
    if more:  # the row's own elements are not read
        variant["steps"], strides = 0, {}
    const = {**team.const(), **strides, **more}
    k.dispatch("batch_statistics", variant=variant, bind=every, const=const, groups=team.groups, label=title)


@dataclass(frozen=True)
class BatchNormGradWB(NormGradW):
    """dw[c] and db[c] = the sums over a channel of dy * (x - mean) / sqrt(variance + eps) and of dy; statistics f32 [C]."""

    eps: float = 1e-5

    def infer(self, dy: TensorType, x: TensorType, mean: TensorType, variance: TensorType) -> tuple[TensorType, ...]:
        check_norm(self.name, x, 2, x.shape[1:2], mean=mean, variance=variance)
        check_upstream(self.name, dy, x)
        return (TensorType(x.shape[1:2]),) * 2

    def over(self, x: Array) -> tuple[int, ...]:
        return (0, *range(2, x.ndim))

    def terms(self, dy: Array, x: Array, *more: Array) -> tuple[Array, Array]:
        mean, variance = (t.reshape(-1, *(1,) * (x.ndim - 2)) for t in more)
        return dy, (x - mean) / np.sqrt(variance + self.eps)

    def sizes(self, dy: Array, x: Array, *more: Array) -> tuple[Array, Array]:
        return self.terms(dy, np.abs(x), -np.abs(more[0]), more[1])

    def lower(
        self, k: Lowering, dy: Operand, x: Operand, mean: Operand, variance: Operand, *, out: tuple[Operand, ...]
    ) -> None:
        sums = WeightSums(self.name, "given", eps=self.eps)
        bind = {"dy": dy, "x": x, "mean": mean, "variance": variance}
        lower_weight_sums(k, sums, bind, dict(zip(("dw", "db"), out, strict=True)), channel_rows(x.shape))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        shapes = [(2, 3, 5, 7), (33, 5), (3, 2, 64, 64), (5000, 40), (2, 3, 71, 73), (0, 4, 2)]
        draws = ("normal", "normal", "normal", "positive")
        return [Sample(cls(), (*(TensorType(s),) * 2, *(TensorType(s[1:2]),) * 2), draws) for s in shapes]


@dataclass(frozen=True)
class BatchNormGradX(Pointwise):
    """The gradient of x of batch_norm_training, whose statistics depend on x: inputs dy, x, mean, variance, w, dw, db.

    dx = w * s * (dy - (db + (x - mean) * s * dw) * share) with s = 1 / sqrt(variance + eps); share is 1 / numbers of a channel.
    """

    arity: ClassVar[int] = 7
    rule: ClassVar[str] = "float"
    wgsl: ClassVar[str | Mapping[DType, str]] = (
        "{4} * inverseSqrt({3} + {eps}) * ({0} - ({6} + ({1} - {2}) * inverseSqrt({3} + {eps}) * {5}) * {share})"
    )
    numpy: ClassVar[Callable[..., Any]] = staticmethod(
        lambda dy, x, mean, variance, w, dw, db, eps, share: (
            w / np.sqrt(variance + eps) * (dy - (db + (x - mean) / np.sqrt(variance + eps) * dw) * share)
        )
    )
    derivative: ClassVar[Callable[..., Any] | None] = None
    eps: float = 1e-5
    share: float = 1.0

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        draws = ("normal", "normal", "normal", "positive", "normal", "normal", "normal")
        cases = [((2, 3, 5, 7), (3, 1, 1)), ((3, 33), (33,)), ((1, 16, 9), (16, 1)), ((4, 2, 400, 400), (2, 1, 1))]
        return [Sample(cls(share=0.1), (*(TensorType(s),) * 2, *(TensorType(each),) * 5), draws) for s, each in cases]


@dataclass(frozen=True)
class RunningAverage(Pointwise):
    """y = keep * running + add * batch"""

    arity: ClassVar[int] = 2
    rule: ClassVar[str] = "float"
    wgsl: ClassVar[str | Mapping[DType, str]] = "{keep} * {0} + {add} * {1}"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(lambda running, batch, keep, add: keep * running + add * batch)
    derivative: ClassVar[Callable[..., Any] | None] = staticmethod(
        lambda g, dy, y, running, batch, keep, add: (dy * keep, dy * add)
    )
    keep: float = 0.9
    add: float = 0.1

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(0.75, 0.5), (TensorType(shape),) * 2, "positive") for shape in ((7,), (300,))]
