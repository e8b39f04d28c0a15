"""Gradients of the weights of norms: sums over rows, from the statistics that the gradients of x give."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.gradient import silu_slope
from ..pointwise.op import Array
from ..reduce.rows import row_over
from .gradient import check_upstream, slope_size, spread_weights
from .schedule import WeightSums, channel_rows, check_norm, lower_weight_sums


class NormGradW(Op, register=False):
    """Gradients of weights from what an operator of the gradient of x says about the rows: sums over all rows."""

    tolerance: ClassVar[str] = "sum"
    centered: ClassVar[bool] = True

    def terms(self, dy: Array, x: Array, *more: Array) -> tuple[Array, Array]:
        """e and h: dw is the sum of e * h, db that of e."""
        raise NotImplementedError

    def sizes(self, dy: Array, x: Array, *more: Array) -> tuple[Array, Array]:
        """What the rounding of e and h is relative to."""
        raise NotImplementedError

    def over(self, x: Array) -> tuple[int, ...]:
        """The axes over which is summed."""
        return tuple(range(x.ndim - 1))

    def _sums(self, e: Array, h: Array) -> Array | tuple[Array, Array]:
        dw = np.asarray(np.sum(e * h, axis=self.over(h)))
        return (dw, np.asarray(np.sum(e, axis=self.over(h)))) if self.centered else dw

    def reference(self, dy: Array, x: Array, *more: Array) -> Any:
        with np.errstate(all="ignore"):
            return self._sums(*self.terms(dy, x, *more))

    def magnitude(self, dy: Array, x: Array, *more: Array) -> Any:
        """The sums of absolute values, times the square root of how many there are."""
        e, h = self.sizes(dy, x, *more)
        length = math.sqrt(max(1, math.prod(x.shape[axis] for axis in self.over(x))))
        return self._sums(np.abs(e) * length, np.abs(h))


@dataclass(frozen=True)
class RmsNormGradW(NormGradW):
    """dw[c] = the sum over rows of dy * x * s, with s of every row from rms_norm_grad_x."""

    centered: ClassVar[bool] = False

    def infer(self, dy: TensorType, x: TensorType, statistics: TensorType) -> TensorType:
        check_norm(self.name, x, 1, x.shape[:-1], statistics=statistics)
        check_upstream(self.name, dy, x)
        return TensorType(x.shape[-1:])

    def terms(self, dy: Array, x: Array, *more: Array) -> tuple[Array, Array]:
        return dy, x * more[0][..., None]

    sizes = terms

    def lower(self, k: Lowering, dy: Operand, x: Operand, statistics: Operand, *, out: Operand) -> None:
        sums = WeightSums(self.name, "rms", x.shape[-1])
        lower_row_sums(k, sums, {"dy": dy, "x": x, "statistics": statistics}, {"dw": out})

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(), (*(TensorType(s),) * 2, TensorType(s[:-1]))) for s in SUM_SHAPES]


@dataclass(frozen=True)
class LayerNormGradWB(NormGradW):
    """dw[c] and db[c] = the sums over rows of dy * (x - mean) * s and of dy; mean, rest and s from layer_norm_grad_x."""

    def infer(self, dy: TensorType, x: TensorType, statistics: TensorType) -> tuple[TensorType, ...]:
        check_norm(self.name, x, 1, (*x.shape[:-1], 3), statistics=statistics)
        check_upstream(self.name, dy, x)
        return (TensorType(x.shape[-1:]),) * 2

    def terms(self, dy: Array, x: Array, *more: Array) -> tuple[Array, Array]:
        mean, rest, scale = np.split(more[0], 3, axis=-1)
        return dy, (x - mean - rest) * scale

    def sizes(self, dy: Array, x: Array, *more: Array) -> tuple[Array, Array]:
        mean, rest, scale = np.abs(np.split(more[0], 3, axis=-1))
        return dy, (np.abs(x) + mean + rest) * scale

    def lower(self, k: Lowering, dy: Operand, x: Operand, statistics: Operand, *, out: tuple[Operand, ...]) -> None:
        sums = WeightSums(self.name, "centered", x.shape[-1])
        outs = dict(zip(("dw", "db"), out, strict=True))
        lower_row_sums(k, sums, {"dy": dy, "x": x, "statistics": statistics}, outs)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(), (*(TensorType(s),) * 2, TensorType((*s[:-1], 3)))) for s in SUM_SHAPES]


SUM_SHAPES = (
    (3, 257),
    (1, 1),
    (1000, 5),
    (300, 64),
    (4, 256),
    (257, 3),
    (17,),
    (2, 3, 130),
    (0, 4),
    (5, 0),
    (2500, 33),
)


def lower_row_sums(k: Lowering, sums: WeightSums, bind: Mapping[str, Operand], outs: Mapping[str, Operand]) -> None:
    """Sums over all but the last axis."""
    x, columns = bind["x"], outs["dw"].size
    lower_weight_sums(k, sums, bind, outs, row_over((x.size // max(1, columns), columns), (0,)))


@dataclass(frozen=True)
class GroupNormGradWB(NormGradW):
    """dw and db = the sums over images and space of e * (x - mean) * s and of e; mean, rest and s from group_norm_grad_x.

    e = dy, where the activation is silu times its derivative at h * w + b, for which w and b are inputs.
    """

    activation: str = ""

    def infer(
        self,
        dy: TensorType,
        x: TensorType,
        statistics: TensorType,
        w: TensorType | None = None,
        b: TensorType | None = None,
    ) -> tuple[TensorType, ...]:
        check_norm(self.name, x, 2, x.shape[1:2], weight=w, bias=b)
        check_upstream(self.name, dy, x)
        groups = statistics.shape[1] if statistics.rank == 3 else 0
        if statistics.shape != (x.shape[0], groups, 3) or groups == 0 or x.shape[1] % groups:
            raise GraphError(f"{self.name}: expected statistics of the groups of {x}, got {statistics}")
        return (TensorType(x.shape[1:2]),) * 2

    def over(self, x: Array) -> tuple[int, ...]:
        return (0, *range(2, x.ndim))

    def _parts(self, x: Array, statistics: Array) -> list[Array]:
        """mean, rest and scale of the group of every channel, in the rank of x."""
        channels = np.repeat(statistics, x.shape[1] // statistics.shape[1], axis=1)
        return [channels[..., i].reshape(*x.shape[:2], *(1,) * (x.ndim - 2)) for i in range(3)]

    def terms(self, dy: Array, x: Array, *more: Array) -> tuple[Array, Array]:
        mean, rest, scale = self._parts(x, more[0])
        h = (x - mean - rest) * scale
        w, b = spread_weights(x.ndim, *more[1:])
        return np.asarray(dy * silu_slope(h * w + b) if self.activation else dy), h

    def sizes(self, dy: Array, x: Array, *more: Array) -> tuple[Array, Array]:
        mean, rest, scale = map(np.abs, self._parts(x, more[0]))
        h = (np.abs(x) + mean + rest) * scale
        w, b = spread_weights(x.ndim, *more[1:])
        return np.asarray(dy * slope_size(h, w, b) if self.activation else dy), h

    def lower(
        self,
        k: Lowering,
        dy: Operand,
        x: Operand,
        statistics: Operand,
        w: Operand | None = None,
        b: Operand | None = None,
        *,
        out: tuple[Operand, ...],
    ) -> None:
        bind = {"dy": dy, "x": x, "statistics": statistics}
        if self.activation:
            bind |= ({"weight": w} if w else {}) | ({"bias": b} if b else {})
        per = math.prod(x.shape[1:]) // statistics.shape[1]
        sums = WeightSums(self.name, "centered", per, activation=self.activation)
        outs = dict(zip(("dw", "db"), out, strict=True))
        lower_weight_sums(k, sums, bind, outs, channel_rows(x.shape))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        build: Callable[..., Any] = cls
        return [
            Sample(
                build(activation),
                (*(TensorType(s),) * 2, TensorType((s[0], groups, 3)), *(TensorType(s[1:2]),) * weights),
            )
            for s, groups, activation, weights in (
                ((2, 6, 5, 4), 3, "", 0),
                ((2, 6, 5, 4), 3, "silu", 2),
                ((3, 4, 7, 7), 2, "silu", 2),
                ((3, 4, 7, 7), 1, "silu", 0),
                ((70, 8), 4, "silu", 1),
                ((400, 6), 2, "", 0),
                ((5, 2, 64, 64), 1, "silu", 2),
                ((2, 3, 71, 73), 3, "", 0),
                ((4, 1, 3), 1, "", 0),
                ((0, 4, 2), 2, "", 0),
            )
        ]
