"""Reductions over any axes, softmax and log-softmax over any axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import Array
from .rows import Row, Team, fours_text, row_over, rows_of
from .softmax_gradient import LogSoftmaxGrad, SoftmaxGrad

LONG = 64  # positions a thread: rows that need more are reduced in two stages, so that they sum accurately
FILLED = 256  # workgroups: with fewer of them shorter rows are too, so that they fill the device

INTEGER_EXTREMES = {DType.I32: ("-2147483647i - 1i", "2147483647i"), DType.U32: ("0u", "4294967295u")}


class Reduction(Op, register=False):
    """y = f(x over `axes`): axes are ascending and not negative; keepdims keeps them with size 1."""

    axes: tuple[int, ...]
    keepdims: bool
    numpy: ClassVar[Callable[..., Any]]
    combine: ClassVar[str]
    empty_is_error: ClassVar[bool] = False
    float_only: ClassVar[bool] = False

    def infer(self, x: TensorType) -> TensorType:
        if list(self.axes) != sorted(set(self.axes)) or not all(0 <= axis < x.rank for axis in self.axes):
            raise GraphError(f"{self.name}: expected distinct axes of {x}, got {list(self.axes)}")
        if self.float_only and x.dtype.is_integer:
            raise GraphError(f"{self.name}: expected f32, got {x}")
        if self.empty_is_error and math.prod(x.shape[axis] for axis in self.axes) == 0:
            raise GraphError(f"{self.name}: nothing to reduce in {x} over axes {list(self.axes)}")
        kept = [1 if axis in self.axes else size for axis, size in enumerate(x.shape)]
        if not self.keepdims:
            kept = [size for axis, size in enumerate(x.shape) if axis not in self.axes]
        return TensorType(tuple(kept), x.dtype)

    def reference(self, x: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(type(self).numpy(x, self.axes, self.keepdims)).astype(x.dtype)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        fold = Fold(self.name, str(x.dtype), "sum" if self.combine == "mean" else self.combine)
        row = row_over(x.shape, self.axes)
        if self.combine == "mean":
            fold = replace(fold, finish="total / f32(DIVISOR)", const={"DIVISOR": row.count})
        reduce_rows(k, fold, {"x": x}, out, row)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(shape: tuple[int, ...], axes: tuple[int, ...], keep: bool = False, dtype: str = "f32") -> Sample:
            return Sample(_make(cls, axes, keep), (TensorType(shape, DType(dtype)),), draw[dtype])

        draw = {"f32": "normal", "i32": "integer", "u32": "integer"}
        cases = [
            sample((3, 257), (1,)),
            sample((257, 3), (0,), keep=True),
            sample((2, 3, 5, 7), (1, 3)),
            sample((2, 65, 4), (0, 1, 2)),
            sample((5, 1000), (0, 1), keep=True),
            sample((70000,), (0,)),
            sample((4, 6), ()),
        ]
        if not cls.float_only:
            cases += [sample((5, 33), (1,), dtype="i32"), sample((300, 3), (0,), dtype="u32")]
        return cases


def _make(cls: Callable[..., Any], axes: tuple[int, ...], keepdims: bool) -> Any:
    return cls(axes, keepdims)


def _sum(x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    return np.asarray(np.sum(x, axis=axes, keepdims=keepdims, dtype=x.dtype))


def _mean(x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    return np.asarray(_sum(x, axes, keepdims) / np.float64(math.prod(x.shape[axis] for axis in axes)))


@dataclass(frozen=True)
class Sum(Reduction):
    """y = the sum of x over `axes`; integers wrap; the sum of nothing is 0."""

    tolerance: ClassVar[str] = "sum"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(_sum)
    combine: ClassVar[str] = "sum"
    axes: tuple[int, ...] = ()
    keepdims: bool = False

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (g.expand_axes(dy, x.shape, self.axes),)


@dataclass(frozen=True)
class Mean(Reduction):
    """y = the mean of x over `axes`; the mean of nothing is NaN."""

    tolerance: ClassVar[str] = "sum"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(_mean)
    combine: ClassVar[str] = "mean"
    float_only: ClassVar[bool] = True
    axes: tuple[int, ...] = ()
    keepdims: bool = False

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        count = max(math.prod(x.shape[axis] for axis in self.axes), 1)
        return (g.expand_axes(dy * (1.0 / count), x.shape, self.axes),)


@dataclass(frozen=True)
class Max(Reduction):
    """y = the largest of x over `axes`; NaN wins; GraphError where there is nothing to reduce."""

    tolerance: ClassVar[str] = "exact"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(lambda x, axes, keep: np.max(x, axis=axes, keepdims=keep))
    combine: ClassVar[str] = "max"
    empty_is_error: ClassVar[bool] = True
    axes: tuple[int, ...] = ()
    keepdims: bool = False

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return share_evenly(g, dy, y, x, self.axes)


@dataclass(frozen=True)
class Min(Reduction):
    """y = the smallest of x over `axes`; NaN wins; GraphError where there is nothing to reduce."""

    tolerance: ClassVar[str] = "exact"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(lambda x, axes, keep: np.min(x, axis=axes, keepdims=keep))
    combine: ClassVar[str] = "min"
    empty_is_error: ClassVar[bool] = True
    axes: tuple[int, ...] = ()
    keepdims: bool = False

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return share_evenly(g, dy, y, x, self.axes)


def share_evenly(g: Any, dy: Any, y: Any, x: Any, axes: Sequence[int]) -> tuple[Any, ...]:
    """The gradient of the extreme y of x: equal ones share it; that of a row with a NaN is NaN, as in PyTorch."""
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    is_extreme = g.equal(x, g.reshape(y, kept))
    return (is_extreme * (g.reshape(dy, kept) / g.sum(is_extreme, axes, keepdims=True)),)


@dataclass(frozen=True)
class Fold:
    """What is reduced, and how: combine(term, term, ...), then `finish`.

    type: WGSL's type of a term. combine: "sum", "max" or "min".
    term: WGSL over a and b, the elements of the one or two inputs.
    finish: WGSL over `total` and the overrides `const`.
    """

    title: str
    type: str
    combine: str
    term: str = "a"
    finish: str = "total"
    const: Mapping[str, int] = field(default_factory=dict)


def reduce_rows(k: Lowering, fold: Fold, inputs: Mapping[str, Operand], out: Operand, row: Row) -> None:
    """One value an element of `out`: the fold of a row of the inputs; in stages where rows are long."""
    team = Team.of(row if fold.type.startswith("vec") else row.in_fours(), out.size)
    if team.steps > LONG or (team.is_long and team.groups < FILLED):
        team = team.cut()
    if team.chunks == 1:
        _dispatch(k, fold, inputs, out, team)
        return
    first = next(iter(inputs.values()))
    pair = (2,) if fold.type.startswith("vec") else ()
    partial = k.scratch(TensorType((out.size, team.chunks, *pair), first.dtype))
    _dispatch(k, replace(fold, finish="total", const={}), inputs, partial, team)
    reduce_rows(k, replace(fold, term="a"), {"x": partial}, out, rows_of(out.size, team.chunks))


def _dispatch(k: Lowering, fold: Fold, inputs: Mapping[str, Operand], out: Operand, team: Team) -> None:
    offsets, strides = team.row.offsets()
    fours = team.row.lanes == 4
    k.dispatch(
        "row_reduce",
        variant={
            **offsets,
            **team.variant(fold.type),
            "type": fold.type,
            "out_type": fold.type if fold.finish == "total" else str(out.dtype),
            "inputs": list(zip("ab", inputs, strict=False)),
            "term": fours_text(fold.term, fold.type) if fours else fold.term,
            "combined": combine_text(fold),
            "combined_fours": fours_text(combine_text(fold)),
            "sums": fold.combine == "sum",
            "finish": fold.finish,
            "finish_const": list(fold.const),
            "title": fold.title,
        },
        bind={**inputs, "out": out},
        const={**team.const(), **strides, **fold.const},
        groups=team.groups,
        label=fold.title,
    )


def combine_text(fold: Fold) -> str:
    """WGSL that combines `a` and `b`."""
    if fold.combine == "sum":
        return "a + b"
    return f"{fold.combine}imum_f32(a, b)" if fold.type == "f32" else f"{fold.combine}(a, b)"


class SoftmaxOp(Op, register=False):
    """Shared by softmax and log-softmax: rows along `axis`."""

    axis: int

    def infer(self, x: TensorType) -> TensorType:
        if x.dtype is not DType.F32 or not 0 <= self.axis < x.rank:
            raise GraphError(f"{self.name}: expected f32 and an axis of it, got {x} and axis {self.axis}")
        return x

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        if out.size == 0:
            return
        row = row_over(x.shape, (self.axis,)).in_fours()
        team = Team.keeping(row, x.size // x.shape[self.axis])
        if team.chunks == 1:
            dispatch_softmax(k, self.name, team, {"x": x, "out": out})
            return
        partial = softmax_statistics(k, team, x)
        dispatch_softmax(k, self.name, team, {"x": x, "partial": partial, "out": out})

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [((3, 257), 1), ((2, 3, 5), 1), ((65, 4), 0), ((257, 3), 0), ((5, 64), 1), ((2, 3, 100, 4), 2)]
        draws = ("normal", "small", "negative", "large")
        build: Callable[..., Any] = cls
        return [Sample(build(axis), (TensorType(shape),), draw) for draw in draws for shape, axis in cases]


def softmax_statistics(k: Lowering, team: Team, x: Operand) -> Operand:
    """The largest and the sum of exp(x - largest) of every chunk of every row, for rows in several chunks."""
    partial = k.scratch(TensorType((team.rows, team.chunks, 2)))
    dispatch_softmax(k, "statistics", team, {"x": x, "partial": partial})
    return partial


def dispatch_softmax(k: Lowering, stage: str, team: Team, bind: Mapping[str, Operand]) -> None:
    """stage: "softmax", "log_softmax", or the "statistics" of chunks."""
    offsets, strides = team.row.offsets()
    variant = {**offsets, **team.variant(), "stage": stage, "from_partial": team.chunks > 1 and stage != "statistics"}
    title = "softmax_statistics" if stage == "statistics" else stage
    const = team.const() | strides
    k.dispatch("softmax", variant={**variant, "title": title}, bind=bind, const=const, groups=team.groups, label=title)


@dataclass(frozen=True)
class Softmax(SoftmaxOp):
    """y = exp(x - max) / sum(exp(x - max)) along `axis`; a row of -inf alone gives 0, a NaN makes its row NaN."""

    tolerance: ClassVar[str] = "norm"
    axis: int = -1

    def reference(self, x: Array) -> Array:
        with np.errstate(all="ignore"):
            e = np.exp(x - np.maximum(np.max(x, axis=self.axis, keepdims=True, initial=-3.4e38), -3.4e38))
            total = np.sum(e, axis=self.axis, keepdims=True)
            return np.asarray(e / np.where(total == 0, 1, total))

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (g.apply(SoftmaxGrad(self.axis), dy, y),)


@dataclass(frozen=True)
class LogSoftmax(SoftmaxOp):
    """y = x - max - log(sum(exp(x - max))) along `axis`."""

    tolerance: ClassVar[str] = "norm"
    axis: int = -1

    def reference(self, x: Array) -> Array:
        with np.errstate(all="ignore"):
            shifted = x - np.max(x, axis=self.axis, keepdims=True, initial=-3.4e38)
            return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=self.axis, keepdims=True)))

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (g.apply(LogSoftmaxGrad(self.axis), dy, y),)
