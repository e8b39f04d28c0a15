"""Reductions over any axes, softmax and log-softmax over any axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import GraphError
from ..graph import DType, TensorType
from ..op import Lowering, Op, Operand, Sample
from .layout import join_axes, row_major_strides
from .pointwise import GROUP, Array

SHORT = 64  # rows up to this length are one thread's work
SPLIT = 65536  # longer rows are reduced in two stages, so that they fill the device and sum accurately
CHUNK = 4096  # elements a workgroup in the first of two stages

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
        kept = [axis for axis in range(len(x.shape)) if axis not in self.axes and x.shape[axis] != 1]
        reduced = [axis for axis in self.axes if x.shape[axis] != 1]
        count = math.prod(x.shape[axis] for axis in self.axes)
        row = Row(walk(x.shape, kept), walk(x.shape, reduced), count)
        if count <= SPLIT or not row.inner.is_contiguous:
            dispatch_reduce(k, self, x, out, row, count)
            return
        chunks = -(-count // CHUNK)
        partial = k.scratch(TensorType((out.size, chunks), x.dtype))
        dispatch_reduce(k, self, x, partial, row, 1, chunks)
        second = Row(Walk((out.size,), (chunks,)), Walk((chunks,), (1,)), chunks)
        dispatch_reduce(k, self, partial, out, second, count)

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
        count = math.prod(x.shape[axis] for axis in self.axes)
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


@dataclass(frozen=True)
class Min(Reduction):
    """y = the smallest of x over `axes`; NaN wins; GraphError where there is nothing to reduce."""

    tolerance: ClassVar[str] = "exact"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(lambda x, axes, keep: np.min(x, axis=axes, keepdims=keep))
    combine: ClassVar[str] = "min"
    empty_is_error: ClassVar[bool] = True
    axes: tuple[int, ...] = ()
    keepdims: bool = False


@dataclass(frozen=True)
class Walk:
    """How an index over some axes of a row-major tensor becomes an offset: sizes and strides, outermost first."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        return self.strides in ((), (1,))


@dataclass(frozen=True)
class Row:
    """outer: from an output's index to the start of its row; inner: from a position in the row; count: its length."""

    outer: Walk
    inner: Walk
    count: int


def walk(shape: Sequence[int], axes: Sequence[int]) -> Walk:
    """The walk over `axes` of a row-major tensor, with neighbouring axes joined."""
    strides = row_major_strides(shape)
    sizes, joined = join_axes([shape[axis] for axis in axes], {"": [strides[axis] for axis in axes]})
    return Walk(tuple(sizes), tuple(joined[""]))


def row_variant(row: Row) -> tuple[dict[str, Any], dict[str, int]]:
    """Template variables and overrides for the offsets of a row."""
    variant: dict[str, Any] = {}
    const: dict[str, int] = {}
    for name, steps in (("outer", row.outer), ("inner", row.inner)):
        variant[name] = len(steps.sizes)
        prefix = name.upper()
        const |= {f"{prefix}_{axis}": stride for axis, stride in enumerate(steps.strides) if stride != 1}
        const |= {f"{prefix}_SIZE_{axis}": size for axis, size in enumerate(steps.sizes) if axis}
        variant[f"{name}_unit"] = [axis for axis, stride in enumerate(steps.strides) if stride == 1]
    return variant, const


def dispatch_reduce(
    k: Lowering, op: Reduction, x: Operand, out: Operand, row: Row, divisor: int, chunks: int = 1
) -> None:
    """One value an output element; with chunks > 1, one a chunk of each row."""
    variant, const = row_variant(row)
    short = row.count <= SHORT
    const |= {"N": out.size, "COUNT": row.count} | ({"CHUNKS": chunks, "CHUNK": CHUNK} if chunks > 1 else {})
    mean = op.combine == "mean" and divisor != 1
    k.dispatch(
        "row_reduce",
        variant={
            **variant,
            "dtype": x.dtype,
            "combine": "sum" if op.combine == "mean" else op.combine,
            "function": combine_text(op.combine, x.dtype),
            "divide": mean,
            "chunked": chunks > 1,
            "short": short,
            "title": op.name,
        },
        bind={"x": x, "out": out},
        const=const | ({"DIVISOR": divisor} if mean else {}),
        groups=math.ceil(out.size / GROUP) if short else out.size,
        label=f"{op.name}_rows" if short else f"{op.name}_row",
    )


def combine_text(combine: str, dtype: DType) -> str:
    """WGSL that combines `a` and `b`."""
    if combine in ("sum", "mean"):
        return "a + b"
    if dtype.is_integer:
        return f"{combine}(a, b)"
    return "maximum_f32(a, b)" if combine == "max" else "minimum_f32(a, b)"


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
        kept = [axis for axis in range(len(x.shape)) if axis != self.axis and x.shape[axis] != 1]
        count = x.shape[self.axis]
        row = Row(walk(x.shape, kept), walk(x.shape, [self.axis]), count)
        rows = x.size // count
        variant, const = row_variant(row)
        short = count <= SHORT
        k.dispatch(
            "softmax",
            variant={**variant, "log": self.name == "log_softmax", "short": short, "title": self.name},
            bind={"x": x, "out": out},
            const=const | {"N": rows, "COUNT": count},
            groups=math.ceil(rows / GROUP) if short else rows,
            label=f"{self.name}_rows" if short else f"{self.name}_row",
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [((3, 257), 1), ((2, 3, 5), 1), ((65, 4), 0), ((257, 3), 0), ((5, 64), 1), ((2, 3, 100, 4), 2)]
        draws = ("normal", "small", "negative", "large")
        build: Callable[..., Any] = cls
        return [Sample(build(axis), (TensorType(shape),), draw) for draw in draws for shape, axis in cases]


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
        return (y * (dy - g.sum(dy * y, axes=[self.axis], keepdims=True)),)


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
        return (dy - g.exp(y) * g.sum(dy, axes=[self.axis], keepdims=True),)
