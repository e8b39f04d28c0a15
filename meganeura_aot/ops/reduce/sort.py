"""The first entries of rows in order: argmax, argmin, top_k, and the sorting kernel that they share with scatter_add."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample, make
from ..pointwise.op import GROUP, Array
from .rows import Row, power_of_two, row_over, rows_of

SHORT = 64  # rows up to this length are one thread's work
TILE = 2048  # entries that a workgroup sorts: their keys and places fill its 16 KiB
SMALL_TILES = 512  # entries that a workgroup takes in several short rows
LARGEST_K = 64

# u32 keys of `v`, the smaller the earlier; NaN comes first in both directions
DESCENDING = {DType.F32: "descending_key_f32(v)", DType.I32: "0x7fffffffu - bitcast<u32>(v)", DType.U32: "~v"}
ASCENDING = {DType.F32: "ascending_key_f32(v)", DType.I32: "bitcast<u32>(v) ^ 0x80000000u", DType.U32: "v"}


class ArgExtreme(Op, register=False):
    """The index along `axis` of the first of the best elements, u32; the first NaN where there is one."""

    axis: int
    keepdims: bool
    keys: ClassVar[Mapping[DType, str]]
    numpy: ClassVar[Callable[..., Any]]

    def infer(self, x: TensorType) -> TensorType:
        if not 0 <= self.axis < x.rank or x.shape[self.axis] == 0:
            raise GraphError(f"{self.name}: expected a tensor with elements along axis {self.axis}, got {x}")
        kept = (1,) if self.keepdims else ()
        return TensorType((*x.shape[: self.axis], *kept, *x.shape[self.axis + 1 :]), DType.U32)

    def reference(self, x: Array) -> Array:
        return np.asarray(type(self).numpy(x, axis=self.axis, keepdims=self.keepdims)).astype(np.uint32)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        """One thread a row where rows are short, or strided with their neighbours side by side; else sorting."""
        if out.size == 0:
            return
        row = row_over(x.shape, [self.axis])
        side_by_side = row.is_apart and row.count <= 1024 and out.size >= GROUP
        if row.count > SHORT and not side_by_side:
            Sorting(x, row, out.size, 1, self.keys[x.dtype], self.name).into(k, {"indices": out})
            return
        variant, const = row.offsets()
        variant |= {"dtype": x.dtype, "key": self.keys[x.dtype], "source": "x", "result": "places"}
        k.dispatch(
            "sort",
            variant={**variant, "short": True, "title": self.name},
            bind={"x": x, "indices": out},
            const=const | {"N": out.size, "COUNT": row.count},
            groups=math.ceil(out.size / GROUP),
            label=f"{self.name}_rows",
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        build: Callable[..., Any] = cls
        cases = [((3, 257), 1), ((5, 33), 1), ((65, 7), 0), ((2, 100, 3), 1), ((2, 70, 200), 1), ((7,), 0)]
        cases += [((2, 5000), 1), ((300, 65), 1), ((1, 1), 0), ((3, 2049), 1), ((0, 3), 1), ((0, 5000), 1)]
        samples = [Sample(build(axis), (TensorType(shape),)) for shape, axis in cases]
        samples += [Sample(build(1, True), (TensorType((4, 300)),), draw) for draw in ("special", "small", "negative")]
        samples += [Sample(build(0, True), (TensorType((70, 2)),), "special")]
        types = [TensorType((2, 300), dtype) for dtype in (DType.I32, DType.U32)]
        return samples + [Sample(build(1), (type_,), draw) for type_ in types for draw in ("integer", "below 3")]


@dataclass(frozen=True)
class ArgMax(ArgExtreme):
    """y = the first index of the largest element along `axis`; the first NaN where there is one."""

    name: ClassVar[str] = "argmax"
    keys: ClassVar[Mapping[DType, str]] = DESCENDING
    numpy: ClassVar[Callable[..., Any]] = staticmethod(np.argmax)
    axis: int = -1
    keepdims: bool = False


@dataclass(frozen=True)
class ArgMin(ArgExtreme):
    """y = the first index of the smallest element along `axis`; the first NaN where there is one."""

    name: ClassVar[str] = "argmin"
    keys: ClassVar[Mapping[DType, str]] = ASCENDING
    numpy: ClassVar[Callable[..., Any]] = staticmethod(np.argmin)
    axis: int = -1
    keepdims: bool = False


@dataclass(frozen=True)
class TopK(Op):
    """(values, indices u32), the k largest of every row in descending order; equal ones by index; NaN is largest."""

    tolerance: ClassVar[str] = "exact"
    k: int = 1

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType]:
        if x.rank == 0 or not 1 <= self.k <= min(LARGEST_K, x.shape[-1]):
            limit = f"k in 1..{LARGEST_K} and no more than the last axis has"
            raise GraphError(f"top_k: expected {limit}, got {self.k} of {x}")
        shape = (*x.shape[:-1], self.k)
        return TensorType(shape, x.dtype), TensorType(shape, DType.U32)

    def reference(self, x: Array) -> tuple[Array, Array]:
        nan = np.isnan(x)
        wide = x if x.dtype.kind == "f" else x.astype(np.int64)
        order = np.lexsort((-np.where(nan, 0, wide), ~nan), axis=-1)[..., : self.k]
        return np.take_along_axis(x, order, -1), order.astype(np.uint32)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        """Each value's gradient goes where the value came from."""
        return (g.apply(make("scatter_elements", x.rank - 1, x.shape[-1]), y[1], dy[0]),)

    def lower(self, k: Lowering, x: Operand, *, out: tuple[Operand, Operand]) -> None:
        if x.size == 0:
            return
        count = x.shape[-1]
        row = rows_of(x.size // count, count)
        sorting = Sorting(x, row, x.size // count, self.k, DESCENDING[x.dtype], "top_k")
        sorting.into(k, {"values": out[0], "indices": out[1]})

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [((3, 257), 5), ((2, 2, 64), 64), ((70, 8), 2), ((5000,), 64), ((2, 2049), 1), ((33, 3), 3), ((1,), 1)]
        cases += [((2, 2048), 7), ((2, 140000), 50), ((0, 3), 2), ((0, 5000), 2), ((130, 5), 4)]
        samples = [Sample(cls(k), (TensorType(shape),)) for shape, k in cases]
        samples += [Sample(cls(40), (TensorType((3, 300)),), draw) for draw in ("special", "small", "negative")]
        types = [TensorType((2, 300), dtype) for dtype in (DType.I32, DType.U32)]
        return samples + [Sample(cls(33), (type_,), draw) for type_ in types for draw in ("integer", "below 3")]


@dataclass(frozen=True)
class Sorting:
    """The `first` entries of each of `rows` rows, which `row` walks in x, in the order of `key`, WGSL over `v`; equal
    keys by place. An entry is a key and its place in the row."""

    x: Operand
    row: Row
    rows: int
    first: int
    key: str
    label: str

    def into(self, k: Lowering, results: Mapping[str, Operand]) -> None:
        """Chunk by chunk until a row fits a workgroup, then into `indices`, and `values` where they are asked for."""
        source: tuple[Operand, ...] = (self.x,)
        count = self.row.count
        while count > TILE:
            source = self.chunks(k, source, count)
            count = source[0].size // self.rows
        self.dispatch(k, source, count, results)

    def chunks(self, k: Lowering, source: tuple[Operand, ...], count: int) -> tuple[Operand, Operand]:
        """The first entries of every chunk of rows of `count`; a chunk with fewer is filled up with 0xffffffff."""
        chunks = max(1, -(-count // TILE))
        type_ = TensorType((self.rows, chunks * self.first), DType.U32)
        entries = k.scratch(type_, f"{self.label}_keys"), k.scratch(type_, f"{self.label}_places")
        self.dispatch(k, source, count, {"out_keys": entries[0], "out_places": entries[1]})
        return entries

    def dispatch(self, k: Lowering, source: tuple[Operand, ...], count: int, results: Mapping[str, Operand]) -> None:
        """source: (x,), or the keys and places of [rows, count] entries."""
        run = power_of_two(self.first)
        tile = max(run, min(TILE, power_of_two(count)))
        teams = max(1, min(SMALL_TILES // tile, power_of_two(self.rows)))
        chunks = max(1, -(-count // tile))
        kind = "entries" if "out_keys" in results else "values" if "values" in results else "places"
        from_x = len(source) == 1
        bind = {} if from_x else dict(zip(("keys", "places"), source, strict=True))
        variant, const = self.row.offsets() if from_x or kind == "values" else ({}, {})
        if from_x or kind == "values":
            bind["x"] = self.x
        variant |= {"dtype": self.x.dtype, "key": self.key, "source": "x" if from_x else "entries", "result": kind}
        k.dispatch(
            "sort",
            variant={**variant, "short": False, "tile": tile, "teams": teams, "run": run, "title": self.label},
            bind={**bind, **results},
            const=const | {"N": self.rows * chunks, "COUNT": count, "CHUNKS": chunks, "FIRST": self.first},
            groups=-(-self.rows * chunks // teams),
            label=self.label,
        )


def sorted_runs(k: Lowering, x: Operand, label: str) -> tuple[Operand, Operand]:
    """A vector of u32 as sorted runs of TILE, or as one shorter run: keys and places, filled up with 0xffffffff."""
    row = rows_of(1, x.size)
    return Sorting(x, row, 1, min(TILE, power_of_two(x.size)), "v", label).chunks(k, (x,), x.size)
