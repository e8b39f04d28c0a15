"""Caches of keys and values: states that grow by rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand
from ..pointwise.op import GROUP, Array


@dataclass(frozen=True)
class CacheWrite(Op):
    """cache[b, position[b] + j] = rows[b, j], in place; the output is the cache after the write.

    Inputs: cache f32 [B, size, D] or [size, D]; rows [B, n, D], for one batch item also [n, D] or [D]; position u32,
    () or [B]. A row past the end is dropped: `advance` with a limit raises on the host before that can happen.
    ring: position p is row p % size, and of more rows than the cache has only the last ones stay.
    half: the cache is stored as f16; the rows are rounded.
    """

    writes: ClassVar[tuple[int, ...]] = (0,)
    tolerance: ClassVar[str] = "exact"
    ring: bool = False
    half: bool = False

    def infer(self, cache: TensorType, rows: TensorType, position: TensorType) -> TensorType:
        if cache.rank not in (2, 3) or cache.dtype is not DType.F32 or rows.dtype is not DType.F32:
            raise GraphError(f"cache_write: expected f32 as cache [B, size, D] and rows, got {cache} and {rows}")
        batch, width = (1, *cache.shape)[-3], cache.shape[-1]
        fits = rows.shape[-1:] == (width,) and 1 <= rows.rank <= 3
        if not fits or (1, 1, *rows.shape)[-3] != batch or (rows.rank < 3 and batch > 1):
            raise GraphError(f"cache_write: expected rows [{batch}, n, {width}] for {cache}, got {rows}")
        if position.dtype is not DType.U32 or position.shape not in ((), (1,), (batch,)):
            raise GraphError(f"cache_write: expected a position u32[] or u32[{batch}], got {position}")
        if self.half and width % 2:
            raise GraphError(f"cache_write: expected an even width of a cache stored as f16, got {cache}")
        return cache

    def rows_written(self, *types: TensorType) -> Mapping[int, int]:
        _, rows, _ = types
        return {2: 1 if rows.rank == 1 else rows.shape[-2]}

    def reference(self, cache: Array, rows: Array, position: Array) -> Array:
        size, width = cache.shape[-2:]
        after = cache.reshape(-1, size, width).copy()
        new = rows.reshape(len(after), -1, width)
        with np.errstate(over="ignore"):
            new = new.astype(np.float16).astype(np.float64) if self.half else new
        starts = np.broadcast_to(np.asarray(position, np.int64).reshape(-1), len(after))
        for item, start in enumerate(starts):
            for j in range(new.shape[1]):
                if self.ring or start + j < size:
                    after[item, (start + j) % size] = new[item, j]
        return after.reshape(cache.shape)

    def lower(self, k: Lowering, cache: Operand, rows: Operand, position: Operand, *, out: Operand) -> None:
        size, width = cache.shape[-2:]
        batch = (1, *cache.shape)[-3]
        vec = 4 if width % 4 == 0 else 2 if self.half else 1
        count = rows.size // vec
        if cache.size == 0:
            return
        k.dispatch(
            "cache_write",
            variant={
                "vec": vec,
                "half": self.half,
                "per_row": position.size == batch > 1,
                "ring": self.ring,
            },
            bind={"rows": rows, "position": position, "cache": out},
            const={"N": count, "ROWS": rows.size // (batch * width), "SIZE": size, "WIDTH": width // vec},
            groups=math.ceil(count / GROUP),
        )
