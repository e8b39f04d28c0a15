"""The builder's other operators: matrix products, reductions, layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .arguments import Axes
from .builder_pointwise import PointwiseOperators
from .errors import GraphError
from .indexing import slice_ranges
from .ops.layout.op import Concat, Expand, Permute, Reshape, Slice, StopGradient
from .ops.matmul.op import MatMul
from .ops.reduce.op import LogSoftmax, Max, Mean, Min, Softmax, Sum
from .tensor import Tensor


class Operators(PointwiseOperators):
    """Everything that a user calls on a Graph to compute."""

    # matrix products

    def matmul(self, a: Tensor, b: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        """a @ b as in NumPy, batches broadcast, vectors allowed; trans_*: the last two axes are swapped first"""
        if a.rank == 0 or b.rank == 0:
            raise GraphError(f"matmul: expected rank 1 or more, got {a.type} and {b.type}")
        row, column = a.rank == 1, b.rank == 1
        a = self.reshape(a, (1, *a.shape)) if row else a
        b = self.reshape(b, (1, *b.shape)) if column else b
        y = self.apply(MatMul(trans_a and not row, trans_b or column), a, b)
        if not (row or column):
            return y
        return self.reshape(y, y.shape[:-2] + (() if row else y.shape[-2:-1]) + (() if column else y.shape[-1:]))

    def matmul_at(self, a: Tensor, b: Tensor) -> Tensor:
        """a^T @ b: a is stored [..., K, M]"""
        return self.matmul(a, b, trans_a=True)

    def matmul_bt(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b^T: b is stored [..., N, K], as PyTorch's Linear weights are"""
        return self.matmul(a, b, trans_b=True)

    def bias_add(self, x: Tensor, bias: Tensor) -> Tensor:
        """x + bias, a vector over the last axis"""
        if x.rank == 0 or bias.shape not in ((x.shape[-1],), (1, x.shape[-1])):
            raise GraphError(f"bias_add: expected a bias of shape [{x.shape[-1] if x.rank else ''}], got {bias.type}")
        return self.add(x, bias)

    def swiglu_concat(self, x: Tensor) -> Tensor:
        """swiglu of the two halves of the last axis: gate first"""
        if x.rank == 0 or x.shape[-1] % 2:
            raise GraphError(f"swiglu_concat: expected a last axis of even size, got {x.type}")
        gate, up = self.split(x, [x.shape[-1] // 2] * 2, axis=-1)
        return self.swiglu(gate, up)

    # reductions

    def sum(self, x: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
        """The sum over `axes` (None: all); integers wrap; nothing sums to 0"""
        return self.apply(Sum(self._axes(x, axes), keepdims), x)

    def mean(self, x: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
        """The mean over `axes` (None: all); of nothing NaN"""
        return self.apply(Mean(self._axes(x, axes), keepdims), x)

    def max(self, x: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
        """The largest over `axes` (None: all); NaN wins"""
        return self.apply(Max(self._axes(x, axes), keepdims), x)

    def min(self, x: Tensor, axes: Axes = None, keepdims: bool = False) -> Tensor:
        """The smallest over `axes` (None: all); NaN wins"""
        return self.apply(Min(self._axes(x, axes), keepdims), x)

    def softmax(self, x: Tensor, axis: int = -1) -> Tensor:
        """exp(x) / sum(exp(x)) along `axis`, without overflow"""
        return self.apply(Softmax(self._axis(x, axis)), x)

    def log_softmax(self, x: Tensor, axis: int = -1) -> Tensor:
        """x - log(sum(exp(x))) along `axis`, without overflow"""
        return self.apply(LogSoftmax(self._axis(x, axis)), x)

    # layout

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The same elements under another shape; one size may be -1"""
        sizes = tuple(shape)
        known = math.prod(size for size in sizes if size != -1)
        if (
            sizes.count(-1) > 1
            or any(size < -1 for size in sizes)
            or (-1 in sizes and (not known or x.type.size % known))
        ):
            raise GraphError(f"reshape: {x.type} does not fit {list(sizes)}")
        sizes = tuple(x.type.size // known if size == -1 else size for size in sizes)
        return self.lift(x) if sizes == x.shape else self.apply(Reshape(sizes), x)

    def stop_gradient(self, x: Tensor) -> Tensor:
        """x, behind which no gradient flows"""
        return self.apply(StopGradient(), x)

    def transpose(self, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
        """Permute the axes as NumPy's transpose; None swaps the last two"""
        if axes is None:
            if x.rank < 2:
                raise GraphError(f"transpose: expected rank 2 or more, got {x.type}")
            axes = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
        return self.apply(Permute(tuple(self._axis(x, axis) for axis in axes)), x)

    def permute(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """out.shape[i] = x.shape[axes[i]]"""
        return self.transpose(x, axes)

    def expand(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Broadcast to `shape`"""
        return self.apply(Expand(tuple(shape)), x)

    def concat(self, tensors: Iterable[Tensor], axis: int = 0) -> Tensor:
        """The tensors one after the other along `axis`"""
        given = list(tensors)
        if not given:
            raise GraphError("concat: expected one tensor or more, got none")
        like = next((tensor for tensor in given if isinstance(tensor, Tensor)), None)
        parts = [self.lift(tensor, like=like) for tensor in given]
        return self.apply(Concat(self._axis(parts[0], axis)), *parts)

    def split(self, x: Tensor, sizes: int | Sequence[int], axis: int = 0) -> list[Tensor]:
        """Parts of the given sizes along `axis`; an int asks for parts of that size, the last one the rest"""
        axis = self._axis(x, axis)
        total = x.shape[axis]
        if isinstance(sizes, int):
            if sizes <= 0:
                raise GraphError(f"split: expected a size > 0, got {sizes}")
            sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
        if any(size < 0 for size in sizes) or sum(sizes) != total:
            raise GraphError(
                f"split: expected sizes that add up to {total} (axis {axis} of {x.type}), got {list(sizes)}"
            )
        parts, start = [], 0
        for size in sizes:
            index = (slice(None),) * axis + (slice(start, start + size),)
            parts.append(self.slice(x, index))
            start += size
        return parts

    def slice(self, x: Tensor, index: Any) -> Tensor:
        """x[index] as in NumPy: integers, slices with any step, None and ..."""
        ranges, squeezed, shape = slice_ranges(x.type, index)
        starts, counts, steps = (tuple(r[field] for r in ranges) for field in range(3))
        y = self.lift(x)
        if (starts, counts, steps) != ((0,) * x.rank, x.shape, (1,) * x.rank):
            y = self.apply(Slice(starts, counts, steps), y)
        return self.reshape(y, shape) if squeezed or shape != y.shape else y

    # what gradients use

    def sum_to(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Sum over the axes along which `shape` was broadcast to x"""
        lead = x.rank - len(shape)
        axes = [a for a in range(x.rank) if a < lead or (shape[a - lead] == 1 and x.shape[a] != 1)]
        return self.reshape(self.sum(x, axes), shape) if axes else x

    def expand_axes(self, x: Tensor, shape: Sequence[int], axes: Sequence[int]) -> Tensor:
        """Broadcast a reduction over `axes` back to `shape`"""
        kept = [1 if axis in axes else size for axis, size in enumerate(shape)]
        return self.expand(self.reshape(x, kept), shape)

    # axes

    def _axis(self, x: Tensor, axis: int) -> int:
        if not -x.rank <= axis < x.rank:
            raise GraphError(f"axis: expected one of {x.type} ({-x.rank} to {x.rank - 1}), got {axis!r}")
        return axis % x.rank

    def _axes(self, x: Tensor, axes: Axes) -> tuple[int, ...]:
        if axes is None:
            return tuple(range(x.rank))
        chosen = [self._axis(x, axis) for axis in ([axes] if isinstance(axes, int) else axes)]
        if len(set(chosen)) != len(chosen):
            raise GraphError(f"axes: expected distinct axes of {x.type}, got {axes}")
        return tuple(sorted(chosen))
