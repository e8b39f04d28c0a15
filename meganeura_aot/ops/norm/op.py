"""Normalisation: rows are brought to one scale, then scaled and shifted by weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import Array
from .gradient import GroupNormGradX, LayerNormGradX, RmsNormGradX
from .schedule import ACTIVATIONS, NormKernel, check_norm, lower_norm, row_mean, standardize
from .weight_gradient import GroupNormGradWB, LayerNormGradWB, RmsNormGradW


@dataclass(frozen=True)
class RmsNorm(Op):
    """y[..., c] = x[..., c] / sqrt(mean over c of x^2 + eps) * w[c]; x f32 of rank 1 or more, w f32 [C] or none."""

    tolerance: ClassVar[str] = "norm"
    eps: float = 1e-5

    def infer(self, x: TensorType, w: TensorType | None = None) -> TensorType:
        check_norm(self.name, x, 1, x.shape[-1:], weight=w)
        return x

    def reference(self, x: Array, w: Array | float = 1.0) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(x / np.sqrt(row_mean(x * x) + self.eps) * w)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, *w: Any) -> tuple[Any, ...]:
        dx, statistics = g.apply_many(RmsNormGradX(self.eps), dy, x, *w)
        return (dx, g.apply(RmsNormGradW(), dy, x, statistics)) if w else (dx,)

    def lower(self, k: Lowering, x: Operand, w: Operand | None = None, *, out: Operand) -> None:
        bind = {"x": x} | ({"weight": w} if w else {})
        lower_norm(k, NormKernel(self.name, self.eps, centered=False), bind, out, math.prod(x.shape[:-1]))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        # with a small eps the gradient of a row of one number is a difference of two that hardly differ
        return [
            Sample(cls(0.5 if types[0].size == 1 else 1e-5), types, draw) for types, draw in _samples(bias=False)
        ] + [
            Sample(cls(0.5), (TensorType((3, 7)),)),
            Sample(cls(0.0), (TensorType((2, 33)), TensorType((33,))), "positive"),
        ]


@dataclass(frozen=True)
class LayerNorm(Op):
    """y = (x - mean) / sqrt(variance + eps) * w + b over the last axis; the variance is biased; w, b f32 [C] or none."""

    tolerance: ClassVar[str] = "norm"
    eps: float = 1e-5

    def infer(self, x: TensorType, w: TensorType | None = None, b: TensorType | None = None) -> TensorType:
        check_norm(self.name, x, 1, x.shape[-1:], weight=w, bias=b)
        return x

    def reference(self, x: Array, w: Array | float = 1.0, b: Array | float = 0.0) -> Array:
        return np.asarray(standardize(x, self.eps) * w + b)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, *weights: Any) -> tuple[Any, ...]:
        dx, statistics = g.apply_many(LayerNormGradX(self.eps), dy, x, *weights[:1])
        of_weights = g.apply_many(LayerNormGradWB(), dy, x, statistics) if weights else ()
        return (dx, *of_weights[: len(weights)])

    def lower(
        self, k: Lowering, x: Operand, w: Operand | None = None, b: Operand | None = None, *, out: Operand
    ) -> None:
        bind = {"x": x} | ({"weight": w} if w else {}) | ({"bias": b} if b else {})
        lower_norm(k, NormKernel(self.name, self.eps, centered=True), bind, out, math.prod(x.shape[:-1]))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(), types, draw) for types, draw in _samples(bias=True)] + [
            Sample(cls(0.5), (TensorType((3, 7)),)),
            Sample(cls(), (TensorType((3, 1, 40)), TensorType((40,)))),
            Sample(
                cls(), (TensorType((5, 260)), TensorType((260,)), TensorType((260,))), ("offset", "normal", "normal")
            ),
            Sample(
                cls(), (TensorType((2, 9000)), TensorType((9000,)), TensorType((9000,))), ("offset", "normal", "normal")
            ),
        ]


@dataclass(frozen=True)
class GroupNorm(Op):
    """Layer norm of every image and group of channels: x f32 [N, C, ...], C divisible by num_groups; w, b f32 [C].

    activation: "" or "silu", of the result.
    """

    tolerance: ClassVar[str] = "norm"
    num_groups: int = 1
    eps: float = 1e-5
    activation: str = ""

    def infer(self, x: TensorType, w: TensorType | None = None, b: TensorType | None = None) -> TensorType:
        check_norm(self.name, x, 2, x.shape[1:2], weight=w, bias=b)
        if self.num_groups < 1 or x.shape[1] % self.num_groups:
            raise GraphError(f"{self.name}: expected groups that divide {x.shape[1]} channels, got {self.num_groups}")
        if self.activation not in ACTIVATIONS:
            raise GraphError(f'{self.name}: expected activation "" or "silu", got {self.activation!r}')
        return x

    def reference(self, x: Array, w: Array | float = 1.0, b: Array | float = 0.0) -> Array:
        spread = (-1,) + (1,) * (x.ndim - 2)
        size = math.prod(x.shape[1:]) // self.num_groups
        y = standardize(x.reshape(x.shape[0], self.num_groups, size), self.eps).reshape(x.shape)
        y = y * np.reshape(w, spread) + np.reshape(b, spread)
        with np.errstate(over="ignore"):
            return np.asarray(y / (1 + np.exp(-y)) if self.activation else y)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, *weights: Any) -> tuple[Any, ...]:
        op = GroupNormGradX(self.num_groups, self.eps, self.activation)
        dx, statistics = g.apply_many(op, dy, x, *(weights if self.activation else weights[:1]))
        inside = weights if self.activation else ()  # what the derivative of the activation depends on
        of_weights = g.apply_many(GroupNormGradWB(self.activation), dy, x, statistics, *inside) if weights else ()
        return (dx, *of_weights[: len(weights)])

    def lower(
        self, k: Lowering, x: Operand, w: Operand | None = None, b: Operand | None = None, *, out: Operand
    ) -> None:
        bind = {"x": x} | ({"weight": w} if w else {}) | ({"bias": b} if b else {})
        kernel = NormKernel(self.name, self.eps, True, self.activation, self.num_groups, x.shape[1] // self.num_groups)
        lower_norm(k, kernel, bind, out, x.shape[0] * self.num_groups)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [
            ((2, 6, 5, 4), 3, ""),
            ((2, 6, 5, 4), 3, "silu"),
            ((1, 32, 16, 16), 4, "silu"),
            ((2, 4, 7, 7), 2, ""),
            ((3, 8), 4, ""),
            ((3, 8, 5), 2, ""),
            ((1, 2, 70, 70), 1, "silu"),
            ((2, 3, 33), 3, "silu"),
            ((2, 4, 0), 2, ""),
        ]
        build: Callable[..., Any] = cls
        samples = [
            Sample(
                build(groups, 1e-5, activation),
                (TensorType(shape), *(TensorType(shape[1:2]),) * 2),
                (draw, "normal", "normal"),
            )
            for shape, groups, activation in cases
            for draw in (("normal", "offset") if len(shape) == 4 else ("normal",))
        ]
        return [*samples, Sample(build(2, 0.1), (TensorType((2, 4, 3)),))]


def _samples(bias: bool) -> list[tuple[tuple[TensorType, ...], str]]:
    """Rows of every size about the edges of the kernels, and rows of only small and only large numbers."""
    shapes = [(3, 257), (1, 1), (2, 255), (4, 256), (257, 3), (2, 1000), (5, 64), (17,), (2, 3, 130), (0, 4), (3, 0)]
    cases = [(shape, "normal") for shape in shapes]
    cases += [(shape, draw) for draw in ("small", "negative", "large") for shape in ((3, 257), (4, 256))]
    cases += [((3, 8200), "normal"), ((2, 5001), "normal")]
    return [((TensorType(shape), *(TensorType(shape[-1:]),) * (1 + bias)), draw) for shape, draw in cases]
