"""The builder's attention and key-value caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .arguments import Indices, Scores
from .builder_ops import Operators
from .errors import GraphError
from .graph import DType, Node, Value
from .op import Op
from .ops.attention.cache import CacheWrite
from .ops.attention.op import Attention, Causal, Full, Mask, Window
from .ops.pointwise.op import Pointwise
from .ops.state.leaf import Constant
from .tensor import Tensor

FULL = Full()
ALL, FIRST, CHOICES = slice(None), slice(0, 1), slice(1, None)
MOVES = ("reshape", "permute", "slice", "concat", "expand", "pad", "stop_gradient", "cast")
COMBINES = ("mul", "sub", "minimum", "maximum", "min", "max", "bitwise_and", "bitwise_or", "bitwise_xor")
# operators that make a condition of conditions, and those of their inputs that must be some
KEEPS_CONDITIONS: Mapping[str, slice] = {
    **dict.fromkeys(MOVES + COMBINES, ALL),
    "gather": FIRST,
    "gather_elements": FIRST,
    "where": CHOICES,
}


class AttentionOperators(Operators):
    """q is [B, S, heads * head_dim], k and v are [B, T, kv_heads * head_dim]; all of rank 2 means B = 1.

    kv_heads None: as many as heads; otherwise each serves heads / kv_heads of q. head_dim is read off q, and checked
    where it is given. Options of all: attn_mask is added to the scores; it broadcasts to [B, heads, S, T], and -1e9 or
    less, -inf included, hides a key. Of a condition that is true for the keys that a query sees, where(condition, 0, -inf)
    makes such a mask. scale None: 1 / sqrt(head_dim). soft_cap c: scores become c * tanh(score / c), before attn_mask.
    A query that sees no key gives 0; a hidden key has no influence, even when it is NaN.
    """

    _nodes: list[Node]

    def _state_leaf(self, action: str, tensor: Tensor) -> Value:
        raise NotImplementedError

    def _write(self, leaf: Value, op: Op, operands: list[Tensor]) -> Tensor:
        raise NotImplementedError

    def _storage(self, leaf: Value) -> str:
        raise NotImplementedError

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        mask: Mask = FULL,
        *,
        attn_mask: Scores | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """softmax(scale * q @ k^T + attn_mask) @ v over the keys that `mask` shows: Full(), Causal() or Window(n)"""
        op = Attention(heads, heads if kv_heads is None else kv_heads, mask, scale, soft_cap)
        return self._attend(op, head_dim, q, k, v, attn_mask)

    def attention_with_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        mask: Mask = FULL,
        *,
        attn_mask: Scores | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`attention`, and log(sum(exp(scores))) as [B, heads, S], -3.4e38 where a query sees no key"""
        op = Attention(heads, heads if kv_heads is None else kv_heads, mask, scale, soft_cap, with_lse=True)
        out = self._attend(op, head_dim, q, k, v, attn_mask)
        return out, Tensor(out.graph, Value(out.value.node, 1), op.inferred(q.type, k.type, v.type)[1])

    def full_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Every query sees every key"""
        return self.attention(q, k, v, heads, kv_heads, head_dim, **options)

    def cross_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Every query sees every key, of which there may be more or fewer than queries"""
        return self.attention(q, k, v, heads, kv_heads, head_dim, **options)

    def multi_head_attn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        is_cross: bool = False,
        **options: Any,
    ) -> Tensor:
        """Every query sees every key; is_cross says whether k and v come from elsewhere, and changes nothing"""
        return self.attention(q, k, v, heads, kv_heads, head_dim, **options)

    def causal_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        offset: int = 0,
        **options: Any,
    ) -> Tensor:
        """Query i sees keys 0 .. offset + i: offset 0 aligns the starts, as in PyTorch and ONNX, T - S the ends"""
        return self.attention(q, k, v, heads, kv_heads, head_dim, Causal(offset), **options)

    def sliding_window_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int = 0,
        offset: int = 0,
        **options: Any,
    ) -> Tensor:
        """Query i sees the last `window` keys up to offset + i, that one included"""
        return self.attention(q, k, v, heads, kv_heads, head_dim, Window(window, offset), **options)

    # caches: write, attend, then advance the position

    def cache_write(self, cache: Tensor, rows: Tensor, position: Indices, ring: bool = False) -> Tensor:
        """Write rows [B, n, D] into the state `cache` [B, size, D] from row `position` on; u32, one or one a batch item.

        Every later use of the cache's handle sees them. Rows past the end are dropped, so let
        `advance(position, n, limit=size)` raise first: write, attend, then advance, all in one entry point.
        ring: position p is row p % size, for attention over a window.
        """
        leaf = self._state_leaf("cache_write", cache)
        op = CacheWrite(ring, self._storage(leaf) == "f16")
        return self._write(leaf, op, [rows, position])

    def cached_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        position: Indices,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        ring: bool = False,
        *,
        attn_mask: Scores | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Query i sees rows 0 .. position + i of the caches, or the last `window` of them.

        position: where `cache_write` put the row of the first query, before `advance`. ring: as in `cache_write`; the
        caches need window + S - 1 rows or more.
        """
        if position.dtype is not DType.U32:
            raise GraphError(f"cached_attention: expected a position of dtype u32, got {position.type}")
        mask = Causal() if window is None else Window(window)
        op = Attention(heads, heads if kv_heads is None else kv_heads, mask, scale, soft_cap, ring)
        return self._attend(op, head_dim, q, k_cache, v_cache, attn_mask, position)

    def _attend(
        self,
        op: Attention,
        head_dim: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None,
        position: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(op.mask, Full | Causal | Window):
            raise GraphError(f"attention: expected Full(), Causal() or Window(n) as the mask, got {op.mask!r}")
        if attn_mask is not None and (attn_mask.dtype is not DType.F32 or self._is_condition(attn_mask.value)):
            got = f"{attn_mask.type} of {self._nodes[attn_mask.value.node].op.name}"
            raise GraphError(
                f"attention: expected attn_mask as f32 numbers that are added to the scores, got {got}; if it is true for "
                "the keys that a query sees, give where(attn_mask, 0, -inf)"
            )
        if head_dim is not None and q.type.size and q.shape[-1] != op.heads * head_dim:
            raise GraphError(f"attention: expected {op.heads} heads of {head_dim} in the last axis of q, got {q.type}")
        return self.apply(op, q, k, v, *(x for x in (attn_mask, position) if x is not None))

    def _is_condition(self, value: Value) -> bool:
        """Whether the graph shows that every element is 0 or 1: all its sources are comparisons, or such numbers beside one."""
        pending, known, decides = [value], {value}, False
        while pending:
            node = self._nodes[pending.pop().node]
            rule = node.op.rule if isinstance(node.op, Pointwise) else ""
            decides |= rule in ("compare", "select")  # numbers alone, as zeros that hide nothing, are no condition
            if rule == "compare" or (isinstance(node.op, Constant) and np.isin(node.op.array(), (0, 1)).all()):
                continue
            if node.op.name not in KEEPS_CONDITIONS:
                return False
            inputs = node.inputs[KEEPS_CONDITIONS[node.op.name]]
            pending += set(inputs) - known
            known.update(inputs)
        return decides
