"""Normalisation: rows are brought to one scale, then scaled and shifted by weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import GraphError
from ..graph import DType, TensorType
from ..op import Lowering, Op, Operand, Sample
from .pointwise import Array, Pointwise
from .rows import Team, fours_text, rows_of

# WGSL of `a`: norms have no infinities, so silu needs neither its guards nor their cost
ACTIVATIONS = {"": "", "silu": "a * sigmoid_f32(a)"}


@dataclass(frozen=True)
class RmsNorm(Op):
    """y[..., c] = x[..., c] / sqrt(mean over c of x^2 + eps) * w[c]; x f32 of rank 1 or more, w f32 [C] or none."""

    tolerance: ClassVar[str] = "norm"
    eps: float = 1e-5

    def infer(self, x: TensorType, w: TensorType | None = None) -> TensorType:
        _check(self.name, x, 1, x.shape[-1:], weight=w)
        return x

    def reference(self, x: Array, w: Array | float = 1.0) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(x / np.sqrt(_mean(x * x) + self.eps) * w)

    def lower(self, k: Lowering, x: Operand, w: Operand | None = None, *, out: Operand) -> None:
        bind = {"x": x} | ({"weight": w} if w else {})
        lower_norm(k, NormKernel(self.name, self.eps, centered=False), bind, out, math.prod(x.shape[:-1]))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(), types, draw) for types, draw in _samples(bias=False)] + [
            Sample(cls(0.5), (TensorType((3, 7)),)),
            Sample(cls(0.0), (TensorType((2, 33)), TensorType((33,))), "positive"),
        ]


@dataclass(frozen=True)
class LayerNorm(Op):
    """y = (x - mean) / sqrt(variance + eps) * w + b over the last axis; the variance is biased; w, b f32 [C] or none."""

    tolerance: ClassVar[str] = "norm"
    eps: float = 1e-5

    def infer(self, x: TensorType, w: TensorType | None = None, b: TensorType | None = None) -> TensorType:
        _check(self.name, x, 1, x.shape[-1:], weight=w, bias=b)
        return x

    def reference(self, x: Array, w: Array | float = 1.0, b: Array | float = 0.0) -> Array:
        return np.asarray(_standardize(x, self.eps) * w + b)

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
        _check(self.name, x, 2, x.shape[1:2], weight=w, bias=b)
        if self.num_groups < 1 or x.shape[1] % self.num_groups:
            raise GraphError(f"{self.name}: expected groups that divide {x.shape[1]} channels, got {self.num_groups}")
        if self.activation not in ACTIVATIONS:
            raise GraphError(f'{self.name}: expected activation "" or "silu", got {self.activation!r}')
        return x

    def reference(self, x: Array, w: Array | float = 1.0, b: Array | float = 0.0) -> Array:
        spread = (-1,) + (1,) * (x.ndim - 2)
        size = math.prod(x.shape[1:]) // self.num_groups
        y = _standardize(x.reshape(x.shape[0], self.num_groups, size), self.eps).reshape(x.shape)
        y = y * np.reshape(w, spread) + np.reshape(b, spread)
        with np.errstate(over="ignore"):
            return np.asarray(y / (1 + np.exp(-y)) if self.activation else y)

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


@dataclass(frozen=True)
class BatchNorm(Pointwise):
    """y = (x - mean) / sqrt(variance + eps) * w + b with given statistics: inputs x, mean, variance, w, b, broadcast."""

    arity: ClassVar[int] = 5
    rule: ClassVar[str] = "float"
    wgsl: ClassVar[str | Mapping[DType, str]] = "({0} - {1}) * inverseSqrt({2} + {eps}) * {3} + {4}"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(
        lambda x, mean, variance, w, b, eps: (x - mean) / np.sqrt(variance + eps) * w + b
    )
    derivative: ClassVar[Callable[..., Any] | None] = None
    eps: float = 1e-5

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        channels = [((2, 3, 5, 7), (3, 1, 1)), ((3, 33), (33,)), ((1, 16, 9), (16, 1)), ((0, 4, 2), (4, 1))]
        draws = ("normal", "normal", "positive", "normal", "normal")
        return [Sample(cls(), (TensorType(shape), *(TensorType(each),) * 4), draws) for shape, each in channels]


def _check(name: str, x: TensorType, rank: int, each: tuple[int, ...], **weights: TensorType | None) -> None:
    """Raise GraphError unless x is f32 of this rank or more, and the weights are f32 of shape `each`."""
    if x.dtype is not DType.F32 or x.rank < rank:
        raise GraphError(f"{name}: expected f32 of rank {rank} or more, got {x}")
    for role, type_ in weights.items():
        if type_ is not None and type_ != TensorType(each):
            raise GraphError(f"{name}: expected {role} {TensorType(each)}, got {type_}")


def _mean(x: Array) -> Array:
    return np.asarray(np.mean(x, axis=-1, keepdims=True) if x.shape[-1] else np.zeros((*x.shape[:-1], 1)))


def _standardize(x: Array, eps: float) -> Array:
    with np.errstate(all="ignore"):
        centered = x - _mean(x)
        return np.asarray(centered / np.sqrt(_mean(centered * centered) + eps))


def _samples(bias: bool) -> list[tuple[tuple[TensorType, ...], str]]:
    """Rows of every size about the edges of the kernels, and rows of only small and only large numbers."""
    shapes = [(3, 257), (1, 1), (2, 255), (4, 256), (257, 3), (2, 1000), (5, 64), (17,), (2, 3, 130), (0, 4), (3, 0)]
    cases = [(shape, "normal") for shape in shapes]
    cases += [(shape, draw) for draw in ("small", "negative", "large") for shape in ((3, 257), (4, 256))]
    cases += [((3, 8200), "normal"), ((2, 5001), "normal")]
    return [((TensorType(shape), *(TensorType(shape[-1:]),) * (1 + bias)), draw) for shape, draw in cases]


@dataclass(frozen=True)
class NormKernel:
    """What a norm does with a row. groups, channels: of an image and of a group, where weights are of channels."""

    title: str
    eps: float
    centered: bool
    activation: str = ""
    groups: int = 0
    channels: int = 0


def lower_norm(k: Lowering, kernel: NormKernel, bind: Mapping[str, Operand], out: Operand, rows: int) -> None:
    """One dispatch where threads can keep a row in registers; else one for statistics of chunks before it."""
    if out.size == 0:
        return
    count = out.size // rows
    row = rows_of(rows, count)
    if not kernel.groups or count // kernel.channels % 4 == 0:
        row = row.in_fours()
    team = Team.keeping(row, rows)
    if team.chunks == 1:
        _dispatch(k, kernel, team, {**bind, "out": out})
        return
    partial = k.scratch(TensorType((rows, team.chunks, 4 if kernel.centered else 1)))
    _dispatch(k, kernel, team, {"x": bind["x"], "partial": partial}, statistics=True)
    _dispatch(k, kernel, team, {**bind, "partial": partial, "out": out})


def _dispatch(
    k: Lowering, kernel: NormKernel, team: Team, bind: Mapping[str, Operand], statistics: bool = False
) -> None:
    grouped = kernel.groups > 0 and "weight" in bind
    types = {"partial": "vec4<f32>" if kernel.centered else "f32"} | (
        {"weight": "f32", "bias": "f32"} if grouped else {}
    )
    const: dict[str, int | float] = {**team.const()}
    if not statistics:
        const["EPS"] = kernel.eps
    if grouped:
        const |= {"GROUPS": kernel.groups, "CHANNELS": kernel.channels, "SPATIAL": team.row.count // kernel.channels}
    activation = "" if statistics else ACTIVATIONS[kernel.activation]
    title = f"{kernel.title}_statistics" if statistics else kernel.title
    variant = {
        **team.variant(),
        "bindings": team.bindings(bind, **types),
        "stage": "statistics" if statistics else "norm",
        "from_partial": team.chunks > 1 and not statistics,
        "centered": kernel.centered,
        "grouped": grouped,
        "weight": "weight" in bind,
        "bias": "bias" in bind,
        "activation": fours_text(activation) if team.row.lanes == 4 else activation,
        "title": title,
    }
    k.dispatch("norm", variant=variant, bind=bind, const=const, groups=team.groups, label=title)
