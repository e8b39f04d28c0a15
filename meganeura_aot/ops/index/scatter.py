"""Adding up single elements by u32 indices along an axis: what gather_elements and top_k need backwards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import GROUP, Array

FEW = 64  # indices a row: up to here every element of the output looks at all of them


@dataclass(frozen=True)
class ScatterElements(Op):
    """out[c with c[axis] = ids[c]] += src[c], added in ascending order of c[axis]: ids u32 and src f32 of one shape, out
    with `count` elements along `axis`. What no index names is 0; an index >= count is left out."""

    tolerance: ClassVar[str] = "sum"
    axis: int = 0
    count: int = 0

    def infer(self, ids: TensorType, src: TensorType) -> TensorType:
        fits = ids.shape == src.shape and 0 <= self.axis < ids.rank and self.count >= 0
        if not fits or ids.dtype is not DType.U32 or src.dtype is not DType.F32:
            got = f"{ids}, {src}, axis {self.axis} and {self.count}"
            raise GraphError(f"scatter_elements: expected u32 and f32 of one shape, an axis and a count, got {got}")
        return TensorType((*ids.shape[: self.axis], self.count, *ids.shape[self.axis + 1 :]))

    def index_limits(self, *types: TensorType) -> Mapping[int, int]:
        return {0: self.count}

    def reference(self, ids: Array, src: Array) -> Array:
        places = np.moveaxis(ids, self.axis, 0)
        out = np.zeros((self.count, *places.shape[1:]), src.dtype)
        inside = places < self.count
        others = np.indices(places.shape)[1:]
        np.add.at(out, (places[inside], *(grid[inside] for grid in others)), np.moveaxis(src, self.axis, 0)[inside])
        return np.moveaxis(out, 0, self.axis)

    def gradient(self, g: Any, dy: Any, y: Any, ids: Any, src: Any) -> tuple[Any, ...]:
        return (None, g.gather_elements(dy, ids, self.axis))

    def lower(self, k: Lowering, ids: Operand, src: Operand, *, out: Operand) -> None:
        """Few indices a row: a thread an element, or four neighbours, of the output adds up those that name it. Many: a
        workgroup a row, 256 indices at a time, of which the first that names an element adds for all that do."""
        picks, inner = ids.shape[self.axis], math.prod(ids.shape[self.axis + 1 :])
        few = picks <= FEW
        vec = 4 if few and inner == 1 and self.count % 4 == 0 else 1
        rows = out.size // max(self.count, 1)
        const = {"N": out.size // vec if few else rows, "COUNT": self.count // vec, "PICKS": picks, "INNER": inner}
        k.dispatch(
            "scatter_elements",
            variant={"few": few, "vec": vec},
            bind={"ids": ids, "src": src, "out": out},
            const=const,
            groups=math.ceil(const["N"] / GROUP) if few else rows,
            label="scatter_elements",
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(axis: int, count: int, ids: tuple[int, ...], recipe: str) -> Sample:
            return Sample(cls(axis, count), (TensorType(ids, DType.U32), TensorType(ids)), (recipe, "normal"))

        return [
            sample(1, 9, (3, 4, 5), "below 11"),
            sample(1, 260, (5, 3), "below 260"),
            sample(1, 301, (4, 2), "integer"),
            sample(0, 7, (300,), "below 8"),
            sample(1, 700, (3, 513), "below 5"),
            sample(0, 70, (257, 33), "below 72"),
            sample(2, 4, (2, 3, 65), "below 4"),
            sample(1, 5, (2, 0), "below 4"),
            sample(0, 0, (3, 2), "below 4"),
            sample(0, 4, (3, 0), "below 4"),
            sample(0, 0, (70,), "below 4"),
        ]
