"""The builder's operators over indices and positions: gather and scatter, argmax and top_k, random numbers, RoPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .arguments import Indices, Word
from .builder_ops import Operators
from .errors import GraphError
from .graph import TensorType, Value
from .op import Op
from .ops.attention.rope import Rope, turns_per_position
from .ops.index.gather import Embedding, Gather, GatherElements, OneHot, ScatterAdd
from .ops.random.dropout import Dropout
from .ops.random.op import AdvanceCounter, Random, RandomBits, RandomNormal, RandomUniform
from .ops.reduce.sort import ArgMax, ArgMin, TopK
from .rope_scaling import Plain, Scaling
from .tensor import Number, StateHandle, Tensor


class GatherOperators(Operators):
    """Indices are u32 of any shape, or arrays of integers. One out of range reads as 0 and adds nothing."""

    def apply_many(self, op: Op, *inputs: Tensor | Number) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def constant(self, array: Any, dtype: str | None = None) -> Tensor:
        raise NotImplementedError

    def _type(self, subject: str, shape: Sequence[int], dtype: str) -> TensorType:
        raise NotImplementedError

    def _assignable(self, action: str, state: Tensor) -> Value:
        raise NotImplementedError

    def _handle(self, leaf: Value) -> StateHandle:
        raise NotImplementedError

    def _write(self, leaf: Value, op: Op, operands: list[Tensor]) -> Tensor:
        raise NotImplementedError

    # gather and scatter

    def embedding(self, ids: Indices, table: Tensor) -> Tensor:
        """The rows of table [V, H] that ids name: [..., H]; zeros for an id >= V"""
        return self.apply(Embedding(), ids, table)

    def gather(self, x: Tensor, ids: Indices, axis: int = 0) -> Tensor:
        """ONNX Gather: x at ids along `axis`, which the axes of ids replace; 0 for an id out of range"""
        return self.apply(Gather(self._axis(x, axis)), x, ids)

    def gather_elements(self, x: Tensor, ids: Indices, axis: int = 0) -> Tensor:
        """ONNX GatherElements, torch.gather: every element of ids picks one along `axis`; 0 for an id out of range"""
        return self.apply(GatherElements(self._axis(x, axis)), x, ids)

    def scatter_add(self, ids: Indices, src: Tensor, rows: int) -> Tensor:
        """out[v] = the sum of src[s] over ids[s] = v, in ascending order of s: ids [...], src [..., H] to [rows, H]"""
        if src.rank != ids.rank + 1 or src.shape[:-1] != ids.shape:
            raise GraphError(f"scatter_add: expected ids [...] and src [..., H], got {ids.type} and {src.type}")
        count = math.prod(ids.shape)
        return self.apply(ScatterAdd(rows), self.reshape(ids, (count,)), self.reshape(src, (count, src.shape[-1])))

    def one_hot(self, ids: Indices, depth: int) -> Tensor:
        """f32 [..., depth] with 1 at ids; zeros for an id >= depth"""
        return self.apply(OneHot(depth), ids)

    # order

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

    # random numbers

    def random_bits(self, shape: Sequence[int], state: Tensor) -> Tensor:
        """32 random bits an element, u32. state: a state u32[4] of key (the seed) and counter, low words first; its
        counter moves on, so that every later use and every call draws new numbers"""
        return self._random(RandomBits, shape, state)

    def random_uniform(self, shape: Sequence[int], state: Tensor) -> Tensor:
        """Uniform on [0, 1) in steps of 2^-24; see random_bits for the state"""
        return self._random(RandomUniform, shape, state)

    def random_normal(self, shape: Sequence[int], state: Tensor) -> Tensor:
        """Normal of mean 0 and deviation 1; see random_bits for the state"""
        return self._random(RandomNormal, shape, state)

    def _random(self, kind: Callable[[tuple[int, ...]], Random], shape: Sequence[int], state: Tensor) -> Tensor:
        op = kind(self._type("random numbers", shape, "f32").shape)
        leaf = self._assignable(op.name, state)
        values = self.apply(op, self._handle(leaf))
        if op.blocks():
            self._write(leaf, AdvanceCounter(op.blocks()), [])
        return values

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """x; in a training step each element is 0 with probability p, else x / (1 - p), anew at every step"""
        return self.apply(Dropout(p), x) if p else self.lift(x)

    # positions

    def rope(
        self,
        x: Tensor,
        *,
        head_dim: int,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        offset: Word | Indices = 0,
        scaling: Scaling | None = None,
    ) -> Tensor:
        """Rotary position embedding of x [B, S, heads * head_dim] or [S, heads * head_dim], from position `offset` on

        Pair i of a head turns by position * base^(-2i / rotary_dim): elements i and i + rotary_dim / 2, as in
        Hugging Face's files, or interleaved 2i and 2i + 1. rotary_dim: the first elements of a head, which turn; the
        rest is copied. offset: a number, or u32 [] or [B]. scaling: see rope_scaling
        """
        dim = head_dim if rotary_dim is None else rotary_dim
        if not (2 <= dim <= head_dim) or dim % 2 or base <= 0:
            raise GraphError(f"rope: expected an even rotary_dim in 2..{head_dim} and base > 0, got {dim} and {base}")
        stretched = Plain() if scaling is None else scaling
        if not isinstance(stretched, Scaling):
            expected = "one of rope_scaling (Linear, Llama3, Yarn, ...), or an object with `frequencies` and `gain`,"
            raise GraphError(f"rope: expected {expected} as scaling, got {scaling!r}")
        frequencies = np.asarray(stretched.frequencies(base, dim), np.float64)
        if frequencies.shape != (dim // 2,) or not np.isfinite(frequencies).all():
            raise GraphError(f"rope: expected {dim // 2} finite frequencies, got {frequencies}")
        turns = turns_per_position(frequencies)
        key = turns.tobytes()
        if key not in self._rope_tables:
            self._rope_tables[key] = self.constant(turns)
        start, more = (0, [offset]) if isinstance(offset, Tensor) else (offset, [])
        return self.apply(Rope(head_dim, interleaved, start, stretched.gain), x, self._rope_tables[key], *more)

    @cached_property
    def _rope_tables(self) -> dict[bytes, Tensor]:
        """The tables of this graph by their numbers: layers share them."""
        return {}
