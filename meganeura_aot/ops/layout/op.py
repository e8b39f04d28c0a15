"""Operators that move elements and compute nothing: reshape, permute, slice, concat, expand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample, make
from ..pointwise.op import Array, broadcast_shapes, dispatch_copy, elementwise_groups

SHORTEST_TILED = 16  # a shorter side leaves most of a 32 x 32 tile empty


@dataclass(frozen=True)
class Reshape(Op):
    """The same elements in the same order under another shape: no dispatch, the memory is shared."""

    is_view: ClassVar[bool] = True
    tolerance: ClassVar[str] = "exact"
    shape: tuple[int, ...] = ()

    def infer(self, x: TensorType) -> TensorType:
        if math.prod(self.shape) != x.size:
            raise GraphError(f"reshape: expected {x.size} elements as in {x}, got shape {list(self.shape)}")
        return TensorType(self.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        return x.reshape(self.shape)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (g.reshape(dy, x.shape),)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        """Nothing to do."""

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls((6, 4)), (TensorType((2, 3, 4)),)), Sample(cls(()), (TensorType((1, 1)),))]


@dataclass(frozen=True)
class StopGradient(Op):
    """The same tensor, behind which no gradient flows."""

    is_view: ClassVar[bool] = True
    is_flat: ClassVar[bool] = True
    tolerance: ClassVar[str] = "exact"

    def infer(self, x: TensorType) -> TensorType:
        return x

    def reference(self, x: Array) -> Array:
        return x

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        """Nothing to do."""

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(), (TensorType((2, 3)),))]


@dataclass(frozen=True)
class Permute(Op):
    """out.shape[i] = x.shape[axes[i]]: NumPy's transpose(x, axes)."""

    tolerance: ClassVar[str] = "exact"
    axes: tuple[int, ...] = ()

    def infer(self, x: TensorType) -> TensorType:
        if sorted(self.axes) != list(range(x.rank)):
            raise GraphError(f"permute: expected a permutation of the axes of {x}, got {list(self.axes)}")
        return TensorType(tuple(x.shape[axis] for axis in self.axes), x.dtype)

    def reference(self, x: Array) -> Array:
        return x.transpose(self.axes)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (g.transpose(dy, [self.axes.index(axis) for axis in range(len(self.axes))]),)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        """Through tiles where the last axis and the axis along which x is contiguous are both long, else as a copy,
        which is the faster one on software adapters."""
        strides = row_major_strides(x.shape)
        read = [strides[axis] for axis in self.axes]
        kept = [axis for axis, size in enumerate(out.shape) if size != 1]
        sizes, joined = join_axes([out.shape[axis] for axis in kept], {"X": [read[axis] for axis in kept]})
        swapped = len(sizes) >= 2 and joined["X"][-2] == 1 and min(sizes[-2:]) >= SHORTEST_TILED
        if swapped and k.target.name != "cpu":
            dispatch_transpose(k, x, out, sizes, joined["X"])
        else:
            dispatch_strided(k, x, out, out.shape, read=read)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [((1, 0), (33, 65)), ((0, 2, 1), (2, 3, 5)), ((2, 0, 1), (7, 1, 32)), ((3, 1, 2, 0), (2, 3, 4, 5))]
        cases += [((0, 2, 1), (3, 64, 16)), ((0, 3, 1, 2), (2, 17, 3, 31)), ((2, 1, 4, 3, 0), (32, 3, 2, 16, 2))]
        cases += [((1, 0, 3, 2), (2, 3, 33, 32)), ((1, 2, 0, 4, 3), (2, 3, 2, 16, 40))]
        return [Sample(cls(axes), (TensorType(shape),)) for axes, shape in cases] + [
            Sample(cls((1, 0)), (TensorType((5, 9), DType.I32),), "integer"),
            Sample(cls((1, 0)), (TensorType((40, 20), DType.U32),), "integer"),
            Sample(cls((1, 0)), (TensorType((0, 3)),)),
        ]


@dataclass(frozen=True)
class Slice(Op):
    """x[start : stop : step] on every axis, with bounds already inside the axis; a step may be negative.

    counts: the elements kept on every axis.
    """

    tolerance: ClassVar[str] = "exact"
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()

    def infer(self, x: TensorType) -> TensorType:
        if not len(self.starts) == len(self.counts) == len(self.steps) == x.rank:
            raise GraphError(f"slice: expected one range an axis of {x}, got {len(self.starts)}")
        for axis, (start, count, step) in enumerate(zip(self.starts, self.counts, self.steps, strict=True)):
            last = start + (count - 1) * step
            if count and not (0 <= start < x.shape[axis] and 0 <= last < x.shape[axis]):
                raise GraphError(f"slice: axis {axis} of {x}: start {start}, count {count}, step {step} leave it")
        return TensorType(self.counts, x.dtype)

    def reference(self, x: Array) -> Array:
        grids = [s + np.arange(n) * d for s, n, d in zip(self.starts, self.counts, self.steps, strict=True)]
        return x[np.ix_(*grids)] if grids else x

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (g.apply(make("slice_grad", x.shape, self.starts, self.steps), dy),)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        strides = row_major_strides(x.shape)
        offset = sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        read = [step * stride for step, stride in zip(self.steps, strides, strict=True)]
        dispatch_strided(k, x, out, out.shape, read=read, read_offset=offset)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [
            Sample(cls((1,), (3,), (2,)), (TensorType((9,)),)),
            Sample(cls((4, 0), (5, 33), (-1, 1)), (TensorType((5, 64)),)),
            Sample(cls((0, 1, 2), (2, 1, 0), (1, 1, 1)), (TensorType((2, 3, 4)),)),
            Sample(cls((1, 1), (2, 2), (1, 1)), (TensorType((4, 4), DType.U32),), "integer"),
        ]


@dataclass(frozen=True)
class Concat(Op):
    """The inputs one after the other along `axis`."""

    tolerance: ClassVar[str] = "exact"
    axis: int = 0

    def infer(self, *types: TensorType) -> TensorType:
        first = types[0]
        for t in types:
            rest = [(a, b) for axis, (a, b) in enumerate(zip(first.shape, t.shape, strict=False)) if axis != self.axis]
            if t.rank != first.rank or t.dtype != first.dtype or any(a != b for a, b in rest):
                raise GraphError(f"concat: expected shapes equal but for axis {self.axis}, got {first} and {t}")
        if not 0 <= self.axis < first.rank:
            raise GraphError(f"concat: expected an axis of {first}, got {self.axis}")
        total = sum(t.shape[self.axis] for t in types)
        return TensorType((*first.shape[: self.axis], total, *first.shape[self.axis + 1 :]), first.dtype)

    def reference(self, *arrays: Array) -> Array:
        return np.concatenate(arrays, axis=self.axis)

    def gradient(self, g: Any, dy: Any, y: Any, *inputs: Any) -> tuple[Any, ...]:
        return tuple(g.split(dy, [x.shape[self.axis] for x in inputs], self.axis))

    def lower(self, k: Lowering, *inputs: Operand, out: Operand) -> None:
        """One dispatch an input, each writing its own part, so that any number of inputs fits the binding limit."""
        strides = row_major_strides(out.shape)
        start = 0
        for x in inputs:
            dispatch_strided(k, x, out, x.shape, write=strides, write_offset=start * strides[self.axis])
            start += x.shape[self.axis]

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def types(*shapes: tuple[int, ...]) -> tuple[TensorType, ...]:
            return tuple(TensorType(shape) for shape in shapes)

        return [
            Sample(cls(0), types((2, 3), (1, 3))),
            Sample(cls(1), types((2, 3), (2, 64), (2, 1))),
            Sample(cls(1), types((2, 3, 5), (2, 0, 5), (2, 4, 5))),
            Sample(cls(0), types(*[(3,)] * 16)),
        ]


@dataclass(frozen=True)
class Expand(Op):
    """Broadcast to `shape` by NumPy's rule."""

    tolerance: ClassVar[str] = "exact"
    shape: tuple[int, ...] = ()

    def infer(self, x: TensorType) -> TensorType:
        if min(self.shape, default=0) < 0 or broadcast_shapes("expand", [x.shape, self.shape]) != self.shape:
            raise GraphError(f"expand: {x} does not broadcast to {list(self.shape)}")
        return TensorType(self.shape, x.dtype)

    def reference(self, x: Array) -> Array:
        return np.broadcast_to(x, self.shape)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (g.sum_to(dy, x.shape),)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        dispatch_copy(k, x, out)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls((4, 3, 5)), (TensorType((3, 1)),)), Sample(cls((257,)), (TensorType(()),))]


def row_major_strides(shape: Sequence[int]) -> list[int]:
    """Elements between neighbours on every axis."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def dispatch_strided(
    k: Lowering,
    x: Operand,
    out: Operand,
    shape: Sequence[int],
    *,
    read: Sequence[int] | None = None,
    read_offset: int = 0,
    write: Sequence[int] | None = None,
    write_offset: int = 0,
) -> None:
    """out[write(c)] = x[read(c)] for every coordinate c of `shape`; strides left out are row-major (index i)."""
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    sizes = [shape[axis] for axis in axes]
    moves = {name: strides for name, strides in (("X", read), ("OUT", write)) if strides is not None}
    pairs = {name: [strides[axis] for axis in axes] for name, strides in moves.items()}
    sizes, pairs = join_axes(sizes, pairs)
    offsets = {"X": read_offset, "OUT": write_offset}
    const = {f"D{axis}": size for axis, size in enumerate(sizes) if axis} | {"N": math.prod(shape)}
    for name, strides in pairs.items():
        const |= {f"{name}_OFFSET": offsets[name]} | {f"{name}_{axis}": s for axis, s in enumerate(strides)}
    wide, groups = elementwise_groups(math.prod(shape))
    k.dispatch(
        "layout",
        variant={"dtype": x.dtype, "rank": len(sizes), "moves": list(pairs), "wide": wide},
        bind={"x": x, "out": out},
        const=const,
        groups=groups,
        label="strided_copy",
    )


def dispatch_transpose(k: Lowering, x: Operand, out: Operand, sizes: Sequence[int], strides: Sequence[int]) -> None:
    """out[..., r, c] = x[... + r + c * strides[-1]]: sizes are those of the output, strides those of x, [-2] is 1."""
    *batch, rows, columns = sizes
    const = {"BATCH": math.prod(batch), "ROWS": rows, "COLUMNS": columns, "STRIDE": strides[-1]}
    const |= {f"D{axis}": size for axis, size in enumerate(batch) if axis}
    const |= {f"X_{axis}": stride for axis, stride in enumerate(strides[:-2])}
    k.dispatch(
        "transpose",
        variant={"dtype": x.dtype, "rank": len(batch)},
        bind={"x": x, "out": out},
        const=const,
        groups=math.prod(batch) * -(-rows // 32) * -(-columns // 32),
        label="transpose_tiles",
    )


def join_axes(sizes: list[int], strides: dict[str, list[int]]) -> tuple[list[int], dict[str, list[int]]]:
    """Join neighbouring axes that every set of strides walks as one."""
    joined: list[int] = []
    kept: dict[str, list[int]] = {name: [] for name in strides}
    for axis, size in enumerate(sizes):
        if joined and all(kept[name][-1] == strides[name][axis] * size for name in strides):
            joined[-1] *= size
            for name in strides:
                kept[name][-1] = strides[name][axis]
            continue
        joined.append(size)
        for name in strides:
            kept[name].append(strides[name][axis])
    return joined, kept
