"""The builder's operators over indices: gather and scatter, argmax and top_k."""

from __future__ import annotations

import math

from .builder_ops import Operators
from .errors import GraphError
from .op import Op
from .ops.gather import Embedding, Gather, GatherElements, OneHot, ScatterAdd
from .ops.sort import ArgMax, ArgMin, TopK
from .tensor import Number, Tensor


class GatherOperators(Operators):
    """Indices are u32 of any shape. One out of range reads as 0 and adds nothing."""

    def apply_many(self, op: Op, *inputs: Tensor | Number) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """The rows of table [V, H] that ids name: [..., H]; zeros for an id >= V"""
        return self.apply(Embedding(), ids, table)

    def gather(self, x: Tensor, ids: Tensor, axis: int = 0) -> Tensor:
        """ONNX Gather: x at ids along `axis`, which the axes of ids replace; 0 for an id out of range"""
        return self.apply(Gather(self._axis(x, axis)), x, ids)

    def gather_elements(self, x: Tensor, ids: Tensor, axis: int = 0) -> Tensor:
        """ONNX GatherElements, torch.gather: every element of ids picks one along `axis`; 0 for an id out of range"""
        return self.apply(GatherElements(self._axis(x, axis)), x, ids)

    def scatter_add(self, ids: Tensor, src: Tensor, rows: int) -> Tensor:
        """out[v] = the sum of src[s] over ids[s] = v, in ascending order of s: ids [...], src [..., H] to [rows, H]"""
        if src.rank != ids.rank + 1 or src.shape[:-1] != ids.shape:
            raise GraphError(f"scatter_add: expected ids [...] and src [..., H], got {ids.type} and {src.type}")
        count = math.prod(ids.shape)
        return self.apply(ScatterAdd(rows), self.reshape(ids, (count,)), self.reshape(src, (count, src.shape[-1])))

    def one_hot(self, ids: Tensor, depth: int) -> Tensor:
        """f32 [..., depth] with 1 at ids; zeros for an id >= depth"""
        return self.apply(OneHot(depth), ids)

    def argmax(self, x: Tensor, axis: int = -1, keepdims: bool = False) -> Tensor:
        """The index of the largest along `axis`, u32: the first of equal ones, the first NaN"""
        return self.apply(ArgMax(self._axis(x, axis), keepdims), x)

    def argmin(self, x: Tensor, axis: int = -1, keepdims: bool = False) -> Tensor:
        """The index of the smallest along `axis`, u32: the first of equal ones, the first NaN"""
        return self.apply(ArgMin(self._axis(x, axis), keepdims), x)

    def top_k(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Values and u32 indices of the k <= 64 largest along the last axis, descending, equal ones by index"""
        values, indices = self.apply_many(TopK(k), x)
        return values, indices
