"""Gradients of norms over rows: of x, with the statistics of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.gradient import silu_slope
from ..pointwise.op import Array
from .schedule import (
    SLOPES,
    NormKernel,
    check_norm,
    lower_norm_grad,
    row_mean,
)


def check_upstream(name: str, dy: TensorType, x: TensorType) -> None:
    """Raise GraphError unless dy has the type of x, which is that of the output."""
    if dy != x:
        raise GraphError(f"{name}: expected dy {x}, got {dy}")


class NormGradX(Op, register=False):
    """The gradient of x with upstream dy, and the statistics of every row.

    With h = (x - mean) * scale and g = dy * w: dx = scale * (g - mean(g) - h * mean(g * h)), means over the row. Statistics
    are mean, rest and scale = 1 / sqrt(variance + eps) of each row; the mean is that of mean + rest, which kernels need
    to say it exactly enough. Where rows are not centered mean(g) is left out, and scale is the only statistic.
    """

    tolerance: ClassVar[str] = "norm"
    centered: ClassVar[bool] = True
    eps: float

    def rows(self, x: Array) -> Array:
        """x with the rows on the last axis."""
        return x

    def upstream(self, dy: Array, h: Array, *weights: Array) -> Array:
        """g, from the rows h in the shape of x."""
        return np.asarray(dy * weights[0] if weights else dy)

    def magnitude(self, dy: Array, x: Array, *weights: Array) -> tuple[Array, Array]:
        """The sum of the absolute values of what is added up: what rounding is relative to."""
        h, statistics = self._standardized(self.rows(x))
        g = np.abs(self.rows(self.upstream_size(dy, h.reshape(x.shape), *weights)))
        scale = statistics[..., -1:] if self.centered else statistics[..., None]
        dx = scale * (g + row_mean(g) * self.centered + np.abs(h) * row_mean(g * np.abs(h)))
        if self.centered:
            size = row_mean(np.abs(self.rows(x)))
            statistics = np.concatenate([size, size, scale], axis=-1)
        return dx.reshape(x.shape), statistics

    def upstream_size(self, dy: Array, h: Array, *weights: Array) -> Array:
        """What rounding of g is relative to."""
        return self.upstream(dy, h, *weights)

    def _standardized(self, x: Array) -> tuple[Array, Array]:
        mean = row_mean(x) if self.centered else np.zeros((*x.shape[:-1], 1))
        scale = 1 / np.sqrt(row_mean((x - mean) ** 2) + self.eps)
        rest = mean - mean  # as in the kernel, NaN where the mean is not finite; otherwise 0
        statistics = np.concatenate([mean, rest, scale], axis=-1) if self.centered else scale[..., 0]
        return (x - mean) * scale, statistics

    def reference(self, dy: Array, x: Array, *weights: Array) -> tuple[Array, Array]:
        with np.errstate(all="ignore"):
            h, statistics = self._standardized(self.rows(x))
            g = self.rows(self.upstream(dy, h.reshape(x.shape), *weights))
            scale = statistics[..., -1:] if self.centered else statistics[..., None]
            dx = scale * (g - (row_mean(g) if self.centered else 0) - h * row_mean(g * h))
            return dx.reshape(x.shape), statistics


@dataclass(frozen=True)
class RmsNormGradX(NormGradX):
    """dx = s * (g - h * mean(g * h)) with h = x * s, g = dy * w, over the last axis; and s = 1 / sqrt(mean(x^2) + eps)."""

    centered: ClassVar[bool] = False
    eps: float = 1e-5

    def infer(self, dy: TensorType, x: TensorType, w: TensorType | None = None) -> tuple[TensorType, ...]:
        check_norm(self.name, x, 1, x.shape[-1:], weight=w)
        check_upstream(self.name, dy, x)
        return x, TensorType(x.shape[:-1])

    def lower(
        self, k: Lowering, dy: Operand, x: Operand, w: Operand | None = None, *, out: tuple[Operand, ...]
    ) -> None:
        bind = {"x": x, "dy": dy} | ({"weight": w} if w else {})
        lower_norm_grad(k, NormKernel("rms_norm", self.eps, centered=False), bind, *out)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return row_samples(cls())


@dataclass(frozen=True)
class LayerNormGradX(NormGradX):
    """dx = s * (g - mean(g) - h * mean(g * h)) with h = (x - mean) * s, g = dy * w, over the last axis; and mean, rest, s."""

    eps: float = 1e-5

    def infer(self, dy: TensorType, x: TensorType, w: TensorType | None = None) -> tuple[TensorType, ...]:
        check_norm(self.name, x, 1, x.shape[-1:], weight=w)
        check_upstream(self.name, dy, x)
        return x, TensorType((*x.shape[:-1], 3))

    def lower(
        self, k: Lowering, dy: Operand, x: Operand, w: Operand | None = None, *, out: tuple[Operand, ...]
    ) -> None:
        bind = {"x": x, "dy": dy} | ({"weight": w} if w else {})
        lower_norm_grad(k, NormKernel("layer_norm", self.eps, centered=True), bind, *out)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        wide = [TensorType((2, 9000))] * 2
        return [*row_samples(cls()), Sample(cls(), (*wide, TensorType((9000,))), ("normal", "offset", "normal"))]


def row_samples(op: Op) -> list[Sample]:
    """Rows of every size about the edges of the kernels, with weights and without; in the last ones rows are chunks."""
    shapes = [
        (3, 257),
        (1, 1),
        (2, 255),
        (4, 256),
        (257, 3),
        (2, 1000),
        (17,),
        (2, 3, 130),
        (0, 4),
        (3, 8200),
        (2, 5001),
    ]
    samples = [Sample(op, (*(TensorType(shape),) * 2, TensorType(shape[-1:]))) for shape in shapes]
    samples += [Sample(op, (TensorType(shape),) * 2) for shape in ((5, 64), (3, 7), (2, 8200))]
    draws = ("small", "negative", "large")
    return samples + [Sample(op, (*(TensorType((3, 257)),) * 2, TensorType((257,))), draw) for draw in draws]


@dataclass(frozen=True)
class GroupNormGradX(NormGradX):
    """The gradient of x of group_norm, and mean, rest and s of every image and group, f32 [N, groups, 3].

    dx = s * (g - mean(g) - h * mean(g * h)) with h = (x - mean) * s and g = dy * w, where the activation is silu times its
    derivative at h * w + b.
    """

    num_groups: int = 1
    eps: float = 1e-5
    activation: str = ""

    def infer(
        self, dy: TensorType, x: TensorType, w: TensorType | None = None, b: TensorType | None = None
    ) -> tuple[TensorType, ...]:
        check_norm(self.name, x, 2, x.shape[1:2], weight=w, bias=b)
        check_upstream(self.name, dy, x)
        if self.num_groups < 1 or x.shape[1] % self.num_groups or self.activation not in SLOPES:
            raise GraphError(f"{self.name}: expected the attributes of a group_norm of {x}, got {self}")
        return x, TensorType((x.shape[0], self.num_groups, 3))

    def rows(self, x: Array) -> Array:
        return x.reshape(x.shape[0], self.num_groups, math.prod(x.shape[1:]) // self.num_groups)

    def upstream(self, dy: Array, h: Array, *weights: Array) -> Array:
        w, b = spread_weights(h.ndim, *weights)
        return np.asarray(dy * w * (silu_slope(h * w + b) if self.activation else 1))

    def upstream_size(self, dy: Array, h: Array, *weights: Array) -> Array:
        w, b = spread_weights(h.ndim, *weights)
        return np.asarray(dy * w * (slope_size(h, w, b) if self.activation else 1))

    def lower(
        self,
        k: Lowering,
        dy: Operand,
        x: Operand,
        w: Operand | None = None,
        b: Operand | None = None,
        *,
        out: tuple[Operand, ...],
    ) -> None:
        bind = {"x": x, "dy": dy} | ({"weight": w} if w else {}) | ({"bias": b} if b and self.activation else {})
        channels = x.shape[1] // self.num_groups
        kernel = NormKernel("group_norm", self.eps, True, self.activation, self.num_groups, channels)
        lower_norm_grad(k, kernel, bind, *out)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        build: Callable[..., Any] = cls
        return [
            Sample(
                build(groups, 1e-5, activation),
                (*(TensorType(shape),) * 2, *(TensorType(shape[1:2]),) * weights),
                ("normal", draw, *("normal",) * weights),
            )
            for shape, groups, activation, weights, draw in (
                ((2, 6, 5, 4), 3, "", 1, "normal"),
                ((2, 6, 5, 4), 3, "silu", 2, "offset"),
                ((1, 32, 16, 16), 4, "silu", 2, "normal"),
                ((2, 4, 7, 7), 2, "silu", 2, "normal"),
                ((2, 4, 7, 7), 2, "silu", 0, "normal"),
                ((3, 8), 4, "", 1, "normal"),
                ((3, 8, 5), 2, "", 0, "normal"),
                ((1, 2, 70, 70), 1, "silu", 2, "normal"),
                ((1, 2, 71, 73), 1, "", 1, "offset"),
                ((2, 3, 33), 3, "silu", 1, "normal"),
                ((0, 4, 2), 2, "", 1, "normal"),
            )
        ]


def spread_weights(rank: int, w: Array | float = 1.0, b: Array | float = 0.0) -> tuple[Array, Array]:
    """Weights of channels in the rank of x."""
    spread = (-1,) + (1,) * (rank - 2)
    return np.reshape(w, spread), np.reshape(b, spread)


def slope_size(h: Array, w: Array, b: Array) -> Array:
    """What rounding of silu's derivative at h * w + b is relative to: its terms are below 1.4, its own slope is below 0.5."""
    return np.asarray(1.4 + 0.5 * (np.abs(h * w) + np.abs(b)))
