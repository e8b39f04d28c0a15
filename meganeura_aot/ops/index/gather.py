"""Operators that look elements up by u32 indices, and the one that adds rows up by them. An index out of range gives 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample, make
from ..layout.op import join_axes, row_major_strides
from ..pointwise.op import GROUP, Array, elementwise_groups
from ..reduce.rows import Row, Walk
from ..reduce.sort import TILE, sorted_runs


@dataclass(frozen=True)
class Embedding(Op):
    """out[..., h] = table[ids[...], h]: ids u32 of any shape, table f32[V, H]; a row of zeros for an id >= V."""

    tolerance: ClassVar[str] = "exact"

    def infer(self, ids: TensorType, table: TensorType) -> TensorType:
        if ids.dtype is not DType.U32 or table.rank != 2 or table.dtype is not DType.F32:
            raise GraphError(f"embedding: expected u32 ids and an f32 table [V, H], got {ids} and {table}")
        return TensorType((*ids.shape, table.shape[1]))

    def index_limits(self, *types: TensorType) -> Mapping[int, int]:
        return {0: types[1].shape[0]}

    def reference(self, ids: Array, table: Array) -> Array:
        return take(table, ids, 0)

    def gradient(self, g: Any, dy: Any, y: Any, ids: Any, table: Any) -> tuple[Any, ...]:
        return (None, g.scatter_add(ids, dy, table.shape[0]))

    def lower(self, k: Lowering, ids: Operand, table: Operand, *, out: Operand) -> None:
        dispatch_gather(k, table, ids, out, 0, "embedding")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(ids: tuple[int, ...], table: tuple[int, int], recipe: str) -> Sample:
            return Sample(cls(), (TensorType(ids, DType.U32), TensorType(table)), (recipe, "normal"))

        return [
            sample((7,), (11, 64), "below 14"),
            sample((2, 33), (5, 17), "below 6"),
            sample((), (3, 4), "below 3"),
            sample((65,), (100, 1), "integer"),
            sample((0,), (3, 4), "below 3"),
            sample((3,), (0, 4), "below 3"),
            sample((3,), (4, 0), "below 4"),
        ]


@dataclass(frozen=True)
class Gather(Op):
    """ONNX Gather: out[a.., i.., b..] = x[a.., ids[i..], b..], ids u32 at `axis` of x; 0 for an id out of range."""

    tolerance: ClassVar[str] = "exact"
    axis: int = 0

    def infer(self, x: TensorType, ids: TensorType) -> TensorType:
        if ids.dtype is not DType.U32 or not 0 <= self.axis < x.rank:
            raise GraphError(f"gather: expected u32 ids and an axis of {x}, got {ids} and axis {self.axis}")
        return TensorType((*x.shape[: self.axis], *ids.shape, *x.shape[self.axis + 1 :]), x.dtype)

    def index_limits(self, *types: TensorType) -> Mapping[int, int]:
        return {1: types[0].shape[self.axis]}

    def reference(self, x: Array, ids: Array) -> Array:
        return take(x, ids, self.axis)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, ids: Any) -> tuple[Any, ...]:
        """The axes of ids move to the front, the rows are added up, and the axis moves back."""
        count, rest = x.shape[self.axis], [a for a in range(x.rank) if a != self.axis]
        moved = [*range(self.axis, self.axis + ids.rank), *(a if a < self.axis else a + ids.rank - 1 for a in rest)]
        ahead = dy if self.axis == 0 else g.transpose(dy, moved)
        rows = g.reshape(ahead, (*ids.shape, math.prod(x.shape[a] for a in rest)))
        sums = g.reshape(g.scatter_add(ids, rows, count), (count, *(x.shape[a] for a in rest)))
        back = [*range(1, self.axis + 1), 0, *range(self.axis + 1, x.rank)]
        return (sums if self.axis == 0 else g.transpose(sums, back), None)

    def lower(self, k: Lowering, x: Operand, ids: Operand, *, out: Operand) -> None:
        dispatch_gather(k, x, ids, out, self.axis, "gather")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(axis: int, x: tuple[int, ...], ids: tuple[int, ...], recipe: str, dtype: str = "f32") -> Sample:
            types = (TensorType(x, DType(dtype)), TensorType(ids, DType.U32))
            return Sample(cls(axis), types, ("normal", recipe))

        return [
            sample(1, (2, 9, 8), (3, 5), "below 11"),
            sample(0, (9, 3), (2, 33), "below 9"),
            sample(2, (2, 3, 5), (7,), "below 6"),
            sample(1, (3, 4), (), "below 4"),
            sample(0, (70,), (65,), "below 70", "i32"),
            sample(1, (2, 3, 4), (5,), "below 3", "u32"),
            sample(1, (2, 0, 3), (2,), "below 3"),
            sample(0, (3, 2), (0, 2), "below 3"),
        ]


@dataclass(frozen=True)
class GatherElements(Op):
    """ONNX GatherElements: out[c] = x[c with c[axis] = ids[c]], ids u32 of the rank of x, no larger than x but along
    `axis`; 0 for an id out of range."""

    tolerance: ClassVar[str] = "exact"
    axis: int = 0

    def infer(self, x: TensorType, ids: TensorType) -> TensorType:
        if ids.dtype is not DType.U32 or not 0 <= self.axis < x.rank:
            raise GraphError(f"gather_elements: expected u32 ids and an axis of {x}, got {ids} and axis {self.axis}")
        others = [axis for axis in range(x.rank) if axis != self.axis]
        if ids.rank != x.rank or any(ids.shape[axis] > x.shape[axis] for axis in others):
            raise GraphError(f"gather_elements: expected ids no larger than {x} but along axis {self.axis}, got {ids}")
        return TensorType(ids.shape, x.dtype)

    def index_limits(self, *types: TensorType) -> Mapping[int, int]:
        return {1: types[0].shape[self.axis]}

    def reference(self, x: Array, ids: Array) -> Array:
        size = x.shape[self.axis]
        if size == 0:
            return np.zeros(ids.shape, x.dtype)
        near = x[tuple(slice(None) if a == self.axis else slice(n) for a, n in enumerate(ids.shape))]
        return np.where(ids < size, np.take_along_axis(near, np.minimum(ids, size - 1).astype(int), self.axis), 0)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, ids: Any) -> tuple[Any, ...]:
        """Where ids is smaller than x along other axes, what is behind it gets nothing."""
        dx = g.apply(make("scatter_elements", self.axis, x.shape[self.axis]), ids, dy)
        return (
            dx if dx.shape == x.shape else g.pad(dx, [(0, n - m) for n, m in zip(x.shape, dx.shape, strict=True)]),
            None,
        )

    def lower(self, k: Lowering, x: Operand, ids: Operand, *, out: Operand) -> None:
        strides = row_major_strides(x.shape)
        sizes, joined = join_axes(list(ids.shape), {"": [s * (a != self.axis) for a, s in enumerate(strides)]})
        places = Row(Walk(tuple(sizes), tuple(joined[""])), Walk((1,), (strides[self.axis],)), x.shape[self.axis])
        dispatch_lookup(k, x, ids, out, places, "i", "gather_elements")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(axis: int, x: tuple[int, ...], ids: tuple[int, ...], recipe: str, dtype: str = "f32") -> Sample:
            types = (TensorType(x, DType(dtype)), TensorType(ids, DType.U32))
            return Sample(cls(axis), types, ("normal", recipe))

        return [
            sample(1, (3, 9, 5), (3, 4, 5), "below 11"),
            sample(0, (9, 33), (20, 33), "below 9"),
            sample(2, (2, 3, 5), (2, 2, 65), "below 5"),
            sample(0, (7,), (300,), "below 7", "u32"),
            sample(1, (4, 5, 6), (3, 7, 2), "below 6", "i32"),
            sample(1, (2, 0), (2, 3), "below 3"),
            sample(0, (3, 2), (0, 2), "below 3"),
        ]


@dataclass(frozen=True)
class ScatterAdd(Op):
    """out[v] = sum of src[s] over the s with ids[s] = v, added in ascending order of s: ids u32[S], src f32[S, H],
    out [rows, H]. Rows that no id names are 0; an id >= rows is left out."""

    tolerance: ClassVar[str] = "sum"
    rows: int = 0

    def infer(self, ids: TensorType, src: TensorType) -> TensorType:
        fits = ids.rank == 1 and src.rank == 2 and ids.shape[0] == src.shape[0]
        if not fits or ids.dtype is not DType.U32 or src.dtype is not DType.F32 or self.rows < 0:
            raise GraphError(f"scatter_add: expected u32[S], f32[S, H] and rows >= 0, got {ids}, {src} and {self.rows}")
        return TensorType((self.rows, src.shape[1]))

    def index_limits(self, *types: TensorType) -> Mapping[int, int]:
        return {0: self.rows}

    def reference(self, ids: Array, src: Array) -> Array:
        sums = np.zeros((self.rows, src.shape[1]), src.dtype)
        np.add.at(sums, ids[ids < self.rows], src[ids < self.rows])
        return sums

    def gradient(self, g: Any, dy: Any, y: Any, ids: Any, src: Any) -> tuple[Any, ...]:
        return (None, g.embedding(ids, dy))

    def lower(self, k: Lowering, ids: Operand, src: Operand, *, out: Operand) -> None:
        dispatch_scatter_add(k, ids, src, out)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(count: int, width: int, rows: int, recipe: str) -> Sample:
            types = (TensorType((count,), DType.U32), TensorType((count, width)))
            return Sample(cls(rows), types, (recipe, "normal"))

        return [
            sample(100, 17, 9, "below 11"),
            sample(7, 64, 1300, "below 1300"),
            sample(2048, 1, 3, "below 2"),
            sample(5000, 8, 1025, "below 1100"),
            sample(33, 4, 5, "integer"),
            sample(1, 3, 1, "below 1"),
            sample(0, 3, 4, "below 4"),
            sample(5, 0, 4, "below 4"),
            sample(5, 3, 0, "below 4"),
        ]


@dataclass(frozen=True)
class ScatterAddOnto(Op):
    """base[v] += sum of src[s] over the s with ids[s] = v, in place: base f32[rows, H], the rest as of ScatterAdd."""

    writes: ClassVar[tuple[int, ...]] = (0,)
    tolerance: ClassVar[str] = "sum"

    def infer(self, base: TensorType, ids: TensorType, src: TensorType) -> TensorType:
        if base.rank != 2 or ScatterAdd(base.shape[0]).infer(ids, src) != base:
            raise GraphError(f"{self.name}: expected a base f32[rows, H] of {ids} and {src}, got {base}")
        return base

    def index_limits(self, *types: TensorType) -> Mapping[int, int]:
        return {1: types[0].shape[0]}

    def reference(self, base: Array, ids: Array, src: Array) -> Array:
        return base + ScatterAdd(base.shape[0]).reference(ids, src)

    def lower(self, k: Lowering, base: Operand, ids: Operand, src: Operand, *, out: Operand) -> None:
        dispatch_scatter_add(k, ids, src, out, onto=True)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = ScatterAdd.samples()
        return [
            Sample(cls(), (*case.op.inferred(*case.inputs), *case.inputs), ("normal", *case.draws())) for case in cases
        ]


def dispatch_scatter_add(k: Lowering, ids: Operand, src: Operand, out: Operand, onto: bool = False) -> None:
    """Sort (id, s) in runs, merge the runs, then every output row adds up its own part of the list: the order of the
    sums is that of s whatever the device does, and the work is O(S log^2 S + (S + rows) H).

    onto: `out` holds what they are added to, and rows that no id names are left alone.
    """
    rows, width = out.shape
    if out.size == 0:
        return
    keys, order = sorted_runs(k, ids, "sort_ids")
    if keys.size > TILE:
        merged = k.scratch(keys.type, "merged_keys"), k.scratch(order.type, "merged_places")
        k.dispatch(
            "scatter_add",
            variant={"merge": True},
            bind={"keys": keys, "order": order, "keys_out": merged[0], "order_out": merged[1]},
            const={"COUNT": keys.size, "RUN": TILE},
            groups=math.ceil(keys.size / GROUP),
            label="merge_runs",
        )
        keys, order = merged
    vec = 4 if width % 4 == 0 else 1
    own = next(own for own in (32, 16, 8, 4, 2, 1) if rows >= 512 * own or own == 1)
    k.dispatch(
        "scatter_add",
        variant={"merge": False, "vec": vec, "onto": onto},
        bind={"keys": keys, "order": order, "src": src, "out": out},
        const={"COUNT": keys.size, "ROWS": rows, "WIDTH": width // vec, "OWN": own},
        groups=math.ceil(rows / own),
        label="scatter_add_onto" if onto else "scatter_add",
    )


@dataclass(frozen=True)
class OneHot(Op):
    """out[..., d] = 1 where ids[...] = d, else 0, f32[..., depth]: a row of zeros for an id >= depth."""

    tolerance: ClassVar[str] = "exact"
    depth: int = 0

    def infer(self, ids: TensorType) -> TensorType:
        if ids.dtype is not DType.U32 or self.depth < 0:
            raise GraphError(f"one_hot: expected u32 ids and a depth >= 0, got {ids} and {self.depth}")
        return TensorType((*ids.shape, self.depth))

    def reference(self, ids: Array) -> Array:
        return np.asarray(ids[..., None] == np.arange(self.depth), dtype=np.float64)

    def gradient(self, g: Any, dy: Any, y: Any, ids: Any) -> tuple[Any, ...]:
        return (None,)

    def lower(self, k: Lowering, ids: Operand, *, out: Operand) -> None:
        wide, groups = elementwise_groups(out.size)
        k.dispatch(
            "pointwise",
            variant={
                "inputs": [("ids", ids.dtype)],
                "out_dtype": out.dtype,
                "dims": ["DEPTH"],
                "lines": [],
                "result": "select(0.0, 1.0, ids[i / DEPTH] == i % DEPTH)",
                "title": "one_hot",
                "wide": wide,
            },
            bind={"ids": ids, "out": out},
            const={"N": out.size, "DEPTH": self.depth},
            groups=groups,
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [((5,), 7, "below 9"), ((2, 3), 130, "below 130"), ((), 1, "below 2"), ((70,), 3, "integer")]
        cases += [((3,), 0, "below 3"), ((0, 2), 4, "below 3")]
        return [Sample(cls(depth), (TensorType(shape, DType.U32),), recipe) for shape, depth, recipe in cases]


def take(x: Array, ids: Array, axis: int) -> Array:
    """numpy.take with 0 for an id out of range."""
    size = x.shape[axis]
    padded = np.concatenate([x, np.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)], axis)
    return np.asarray(np.take(padded, np.minimum(ids, size).astype(int), axis))


def dispatch_gather(k: Lowering, x: Operand, ids: Operand, out: Operand, axis: int, label: str) -> None:
    """out[a, i, b] = x[a, ids[i], b]; four neighbours a thread where b allows it."""
    before, size, width = math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
    vec = 4 if width % 4 == 0 else 1
    width //= vec
    sizes, strides = (before, ids.size, width), (size * width, 0, 1)
    kept = [axis for axis, count in enumerate(sizes) if count != 1]
    outer = Walk(tuple(sizes[axis] for axis in kept), tuple(strides[axis] for axis in kept))
    place = "i" + (" / WIDTH" if width != 1 else "") + (" % COUNT" if before != 1 else "")
    counts = {name: count for name, count in (("WIDTH", width), ("COUNT", ids.size)) if name in place}
    dispatch_lookup(k, x, ids, out, Row(outer, Walk((size,), (width,)), size), place, label, vec, counts)


def dispatch_lookup(
    k: Lowering,
    x: Operand,
    ids: Operand,
    out: Operand,
    places: Row,
    place: str,
    label: str,
    vec: int = 1,
    counts: dict[str, int] | None = None,
) -> None:
    """out[i] = x at row_start(i) + in_row(ids[place]), the two as `places` says; place: WGSL over i and `counts`."""
    variant, const = places.offsets()
    counts = counts or {}
    k.dispatch(
        "gather",
        variant={**variant, "dtype": x.dtype, "vec": vec, "place": place, "counts": list(counts), "title": label},
        bind={"x": x, "ids": ids, "out": out},
        const={"N": out.size // vec, "SIZE": places.count} | counts | const,
        groups=math.ceil(out.size // vec / GROUP),
        label=label,
    )
