"""Attention with grouped heads and any mask, over tensors or over a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import GROUP, Array
from .schedule import AttentionKernel, Sizes, choose_attention

LOG2_E = math.log2(math.e)
HIDDEN = -1e9  # an additive mask up to here hides a key altogether
FARTHEST = 2**30  # a place among the keys: sums of two fit an i32
LARGEST_FACTOR = 1e18  # of scores: products of two fit an f32
LEAST = -3.4e38  # stands for -inf, as the maximum and the logarithm of a sum over nothing


@dataclass(frozen=True)
class Full:
    """Every query sees every key."""


@dataclass(frozen=True)
class Causal:
    """Query i sees keys 0 .. offset + i. An offset of T - S aligns the last query with the last key."""

    offset: int = 0


@dataclass(frozen=True)
class Window:
    """Query i sees the last `size` keys up to offset + i, that one included."""

    size: int
    offset: int = 0


Mask = Full | Causal | Window


@dataclass(frozen=True)
class Attention(Op):
    """out[b, i, h] = sum_t p[b, h, i, t] v[b, t, h // (H / G)], p = softmax over the keys t that query i sees.

    Inputs: q [B, S, H * hd], k and v [B, T, G * hd], all f32, or without the B; then, each if wanted,
    an additive mask f32 that broadcasts to [B, H, S, T], and the position u32, () or [B], of the first query.
    score = soft_cap * tanh(scale * q.k / soft_cap) + mask; scale None: 1 / sqrt(hd); soft_cap None: scale * q.k + mask.
    A mask value <= -1e9 hides the key. What is hidden has no influence, whatever it holds; a query that sees nothing
    gives 0. A NaN that is seen gives NaN.
    With a position the mask's offset grows by it: k and v are a cache of which queries see the part up to themselves.
    ring: the cache holds position p in row p % T.
    with_lse: port 1 is log(sum_t exp(score)), [B, H, S], -3.4e38 where a query sees nothing.
    """

    tolerance: ClassVar[str] = "contraction"
    heads: int = 1
    kv_heads: int = 1
    mask: Mask = Full()
    scale: float | None = None
    soft_cap: float | None = None
    ring: bool = False
    with_lse: bool = False

    # types

    def sizes(self, q: TensorType | Array, k: TensorType | Array) -> Sizes:
        batch, queries, width = (1, *q.shape)[-3:]
        keys = k.shape[-2]
        return Sizes(batch, queries, keys, self.heads, self.kv_heads, width // self.heads)

    def infer(self, q: TensorType, k: TensorType, v: TensorType, *extras: TensorType) -> Any:
        self._check_attributes()
        ranks = (q.rank, k.rank, v.rank)
        if ranks not in ((2, 2, 2), (3, 3, 3)) or {q.dtype, k.dtype, v.dtype} != {DType.F32}:
            raise GraphError(
                f"attention: expected f32 q, k and v, all of rank 2 or all of rank 3, got {q}, {k} and {v}"
            )
        size = self.sizes(q, k)
        hd = size.head_dim
        if hd * self.heads != q.shape[-1] or not 1 <= hd <= 256:
            raise GraphError(f"attention: expected q of {self.heads} heads of 1 to 256, got {q}")
        if k != v or k.shape != (*q.shape[:-2], size.keys, self.kv_heads * hd):
            wanted = TensorType((*q.shape[:-2], size.keys, self.kv_heads * hd))
            raise GraphError(
                f"attention: expected {wanted} as k and v ({self.kv_heads} heads of {hd}), got {k} and {v}"
            )
        self._check_extras(size, extras)
        return (q, TensorType((*q.shape[:-2], self.heads, size.queries))) if self.with_lse else q

    def _check_attributes(self) -> None:
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise GraphError(
                f"attention: expected heads as a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        if isinstance(self.mask, Window) and not 1 <= self.mask.size <= FARTHEST:
            raise GraphError(f"attention: expected a window of 1 to {FARTHEST}, got {self.mask.size}")
        if not isinstance(self.mask, Full) and abs(self.mask.offset) > FARTHEST:
            raise GraphError(f"attention: expected an offset of at most {FARTHEST}, got {self.mask.offset}")
        if self.scale is not None and not abs(self.scale) <= LARGEST_FACTOR:
            raise GraphError(f"attention: expected a finite scale, got {self.scale}")
        if self.soft_cap is not None and not 1 / LARGEST_FACTOR <= self.soft_cap <= LARGEST_FACTOR:
            raise GraphError(f"attention: expected a finite soft cap > 0, got {self.soft_cap}")

    def _check_extras(self, size: Sizes, extras: Sequence[TensorType]) -> None:
        if [t.dtype for t in extras] not in ([], [DType.F32], [DType.U32], [DType.F32, DType.U32]):
            raise GraphError(
                f"attention: expected a mask (f32) and a position (u32), got {' and '.join(map(str, extras))}"
            )
        bias, position = self.split(extras)
        full = (size.batch, size.heads, size.queries, size.keys)
        if bias is not None and not _broadcasts(bias.shape, full):
            raise GraphError(f"attention: expected a mask that broadcasts to {list(full)}, got {bias}")
        if position is not None and position.shape not in ((), (1,), (size.batch,)):
            raise GraphError(f"attention: expected a position u32[] or u32[{size.batch}], got {position}")
        if position is not None and isinstance(self.mask, Full):
            raise GraphError("attention: expected a causal mask or a window where there is a position, got none")
        if self.ring:
            needed = self.mask.size + size.queries - 1 if isinstance(self.mask, Window) else None
            if position is None or needed is None or size.keys < needed:
                raise GraphError(
                    f"attention: expected a position, and a ring of rows for a window and the queries before its last "
                    f"one ({needed}), got {size.keys} rows"
                )

    @staticmethod
    def split(extras: Sequence[Any]) -> tuple[Any, Any]:
        """The additive mask and the position, each None where it is not given."""
        position = extras[-1] if extras and _is_integer(extras[-1]) else None
        return (extras[0] if len(extras) > (position is not None) else None), position

    # meaning

    def reference(self, q: Array, k: Array, v: Array, *extras: Array) -> Any:
        size = self.sizes(q, k)
        scores, seen = self.scores(q, k, *extras)
        with np.errstate(all="ignore"):
            top = np.max(scores, axis=-1, keepdims=True, initial=LEAST, where=seen)
            e = np.where(seen, np.exp(scores - top), 0)
            total = e.sum(-1, keepdims=True)
            p = np.where(seen, e / np.where(total == 0, 1, total), 0)
            out = weighted(p, seen, self.per_head(v, size.kv_heads, size))
            out = out.transpose(0, 2, 1, 3).reshape(q.shape)
            lse = np.where(total == 0, LEAST, top + np.log(total)).reshape(*q.shape[:-2], size.heads, size.queries)
        return (out, lse) if self.with_lse else out

    def fuller(self) -> Attention | None:
        return None if self.with_lse else replace(self, with_lse=True)

    def gradient(self, g: Any, dy: Any, y: Any, *inputs: Any) -> tuple[Any, ...]:
        """The log-sum-exp that it needs is that of a twin, which becomes one node with this one (passes/share_twins)."""
        from .gradient import attention_gradient

        if self.split(inputs[3:])[1] is not None:
            raise NotImplementedError("keys and values in a cache, seen up to a position")
        if not self.with_lse:
            dy, y = (dy, None), (y, g.apply_many(replace(self, with_lse=True), *inputs)[1])
        return attention_gradient(replace(self, with_lse=False), g, dy, y, *inputs)

    @staticmethod
    def per_head(x: Array, heads: int, size: Sizes) -> Array:
        """[B, N, heads * hd] to [B, H, N, hd]: each head of k and v serves H / heads of q."""
        split = x.reshape(size.batch, x.shape[-2], heads, size.head_dim).transpose(0, 2, 1, 3)
        return np.repeat(split, size.heads // heads, axis=1)

    def scores(self, q: Array, k: Array, *extras: Array) -> tuple[Array, Array]:
        """Scores and what is seen, [B, H, S, T]."""
        size = self.sizes(q, k)
        bias, position = self.split(extras)
        seen = np.broadcast_to(self.visible(size, position), (size.batch, size.heads, size.queries, size.keys))
        with np.errstate(all="ignore"):
            keys = self.per_head(k, size.kv_heads, size).swapaxes(-1, -2)
            scores = self.factor(size) * (self.per_head(q, size.heads, size) @ keys)
            if self.soft_cap is not None:
                scores = self.soft_cap * np.tanh(scores / self.soft_cap)
            if bias is not None:
                scores, seen = scores + bias, seen & ~(bias <= HIDDEN)
        return scores, seen

    def visible(self, size: Sizes, position: Array | None) -> Array:
        """Which keys the queries see by their places: [B or 1, 1, S, T]."""
        rows = np.arange(size.keys)
        if isinstance(self.mask, Full):
            return np.ones((1, 1, size.queries, size.keys), bool)
        start = np.zeros(1, np.int64) if position is None else np.asarray(position).astype(np.int64).reshape(-1)
        last = self.mask.offset + start[:, None, None] + np.arange(size.queries)[:, None]
        final = last[:, -1:]
        keys = final - (final - rows) % max(size.keys, 1) if self.ring else rows  # the latest position in each row
        seen = (keys >= 0) & (keys <= last)
        if isinstance(self.mask, Window):
            seen &= keys > last - self.mask.size
        return np.asarray(seen)[:, None]

    def factor(self, size: Sizes) -> float:
        return 1 / math.sqrt(size.head_dim) if self.scale is None else self.scale

    def describe(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> str:
        size = self.sizes(inputs[0], inputs[1])
        bias, position = self.split(inputs[3:])
        parts = [] if isinstance(self.mask, Full) else [str(self.mask)]
        parts.append(f"{size.heads} heads of {size.head_dim}")
        parts += [f"{size.kv_heads} of k and v"] if size.kv_heads < size.heads else []
        parts += [f"mask {bias}"] if bias else []
        parts += ["keys up to a position, in a ring" if self.ring else "keys up to a position"] if position else []
        return f"{inputs[0]} on {inputs[1]}, {', '.join(parts)} -> {', '.join(map(str, outputs))}"

    # kernels

    def lower(self, k: Lowering, q: Operand, key: Operand, value: Operand, *extras: Operand, out: Any) -> None:
        result, lse = out if self.with_lse else (out, None)
        if result.size == 0:
            return
        size = self.sizes(q.type, key.type)
        choice = choose_attention(size, k.target.name)
        element = "f32" if size.head_dim % 4 else "vec4<f32>"
        rows = size.batch * size.queries * size.heads
        writes = {"out": result} | ({"lse": lse} if lse is not None else {})
        parts: dict[str, Operand] = {}
        if choice.splits > 1:
            sums = k.scratch(TensorType((choice.splits, rows, size.head_dim)), "attention_sums")
            stat = k.scratch(TensorType((choice.splits, rows, 2)), "attention_stat")
            writes, parts = {"out": sums, "stat": stat}, {"sums": sums, "stat": stat}
        if choice.splits:
            self._dispatch(k, choice, size, {"q": q, "k": key, "v": value}, extras, writes)
        if choice.splits == 1:
            return
        width = size.head_dim // 4 if element != "f32" else size.head_dim
        k.dispatch(
            "attention_combine",
            variant={"splits": choice.splits, "element": element, "width": width, "lse": lse is not None},
            bind=parts | {"out": result} | ({"lse": lse} if lse is not None else {}),
            const={"ROWS": rows} | ({"S": size.queries, "H": size.heads} if lse is not None else {}),
            groups=math.ceil(rows * width / GROUP),
            label="attention_combine",
        )

    def _dispatch(
        self,
        k: Lowering,
        choice: AttentionKernel,
        size: Sizes,
        inputs: dict[str, Operand],
        extras: Sequence[Operand],
        writes: dict[str, Operand],
    ) -> None:
        bias, position = self.split(extras)
        element = "f32" if size.head_dim % 4 else "vec4<f32>"
        kinds = {"mask": "f32", "position": "u32", "lse": "f32", "stat": "vec2<f32>"}
        kinds |= {"out": "f32"} if choice.template == "attention_decode" else {}
        reads = inputs | ({"mask": bias} if bias else {}) | ({"position": position} if position else {})
        variant, const = self.structure(size, bias)
        if choice.splits > 1:
            const["SPLITS"] = choice.splits
        k.dispatch(
            choice.template,
            variant={
                **choice.variant,
                **variant,
                "reads": [(name, kinds.get(name, element)) for name in reads],
                "writes": [(name, kinds.get(name, element)) for name in writes],
                "position": "" if position is None else "row" if position.size == size.batch > 1 else "one",
                "split": choice.splits > 1,
                "lse": "lse" in writes,
            },
            bind=reads | writes,
            const={"GROUPS": choice.groups, **const},
            groups=choice.groups,
            label=f"{choice.template}_{size.head_dim}",
        )

    def structure(self, size: Sizes, bias: Operand | None) -> tuple[dict[str, Any], dict[str, int | float]]:
        """What all kernels of attention are rendered with, and their numbers: sizes, scores and masks."""
        factor, cap = self.factor(size), self.soft_cap
        const: dict[str, int | float] = {"BATCH": size.batch, "S": size.queries, "T": size.keys}
        const |= {"H": size.heads, "G": size.kv_heads}
        const |= {"SCALE": factor * LOG2_E} if cap is None else {"SCALE": factor / cap, "CAP": cap * LOG2_E}
        if not isinstance(self.mask, Full):
            const["OFFSET"] = self.mask.offset
        if isinstance(self.mask, Window):
            const["WINDOW"] = self.mask.size
        if bias is not None:
            const |= _broadcast_strides(bias.shape)
        variant = {
            "hd": size.head_dim,
            "causal": not isinstance(self.mask, Full),
            "window": isinstance(self.mask, Window),
            "mask": bias is not None,
            "ring": self.ring,
            "soft_cap": cap is not None,
        }
        return variant, const

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(s: int, t: int, heads: tuple[int, int], hd: int, mask: Mask, *more: Any, **options: Any) -> Sample:
            """more: (shape, recipe) of each extra input; batch and draw as options, the rest are attributes."""
            lead = (options.pop("batch"),) if "batch" in options else ()
            recipe = options.pop("draw", "normal")
            q, kv = TensorType((*lead, s, heads[0] * hd)), TensorType((*lead, t, heads[1] * hd))
            extras = [TensorType(shape, DType.U32 if "below" in how else DType.F32) for shape, how in more]
            return Sample(
                cls(*heads, mask, **options), (q, kv, kv, *extras), (*[recipe] * 3, *(how for _, how in more))
            )

        cases = [sample(33, 33, (6, 2), 16, Causal(), batch=2, with_lse=True)]
        lengths, masks = (1, 33, 7, 128, 8, 31, 9, 129, 32), (Causal(), Window(5), Full(), Window(200))
        for n, hd in enumerate((4, 8, 16, 32, 40, 48, 64, 72, 80, 96, 128, 160, 256)):
            heads, length = ((9, 3), (15, 5), (5, 1), (7, 7))[n % 4], lengths[n % 9]
            cases.append(sample(length, length, heads, hd, masks[n % 4]))
            cases.append(sample(lengths[(n + 4) % 9], lengths[(n + 1) % 9], heads, hd, Full(), with_lse=n % 2 == 0))
        return cases + [
            # large tiles, split keys
            sample(1000, 1000, (9, 3), 8, Causal()),
            sample(129, 1000, (5, 1), 64, Full(), with_lse=True),
            sample(70, 70, (64, 64), 64, Window(40)),
            sample(1, 4097, (4, 2), 64, Full(), with_lse=True),
            sample(3, 1000, (8, 2), 20, Causal(997)),
            # heads that are no multiple of 4, heads of 1
            sample(33, 40, (3, 1), 7, Causal(7)),
            sample(2, 600, (3, 1), 7, Full()),
            sample(5, 12, (4, 4), 1, Causal(-2)),
            # windows, chunks, rows that see nothing
            sample(33, 33, (2, 2), 4, Window(1)),
            sample(20, 64, (4, 2), 12, Window(9, offset=44)),
            sample(20, 33, (4, 2), 12, Causal(-7), with_lse=True),
            # masks that are tensors
            sample(17, 40, (4, 2), 8, Full(), ((2, 4, 17, 40), "mask"), batch=2),
            sample(17, 40, (4, 2), 8, Full(), ((17, 40), "mask"), with_lse=True),
            sample(17, 17, (4, 2), 8, Causal(), ((2, 1, 1, 17), "mask"), batch=2),
            sample(3, 40, (4, 2), 8, Full(), ((4, 1, 40), "mask with nan")),
            sample(12, 40, (4, 2), 8, Causal(28), ((1, 1, 12, 1), "mask")),
            # numbers
            sample(40, 40, (2, 1), 16, Causal(), draw="one nan"),
            sample(4, 40, (2, 1), 16, Causal(36), draw="one nan"),
            sample(33, 33, (2, 1), 16, Causal(), draw="large"),
            sample(33, 33, (2, 1), 16, Causal(), draw="small", scale=-3.0),
            sample(33, 33, (2, 1), 16, Window(8), soft_cap=1.5, with_lse=True),
            sample(2, 33, (2, 1), 16, Full(), ((2, 33), "mask"), soft_cap=1.5, scale=0.7),
            # caches: a position for all, one a batch item, past the end, in a ring
            sample(1, 65, (6, 2), 16, Causal(), ((), "below 65")),
            sample(1, 65, (6, 2), 16, Window(7), ((3,), "below 65"), batch=3),
            sample(40, 70, (6, 2), 16, Causal(), ((3,), "below 31"), batch=3),
            sample(4, 16, (6, 2), 16, Causal(), ((2,), "below 90"), batch=2),
            sample(1, 7, (6, 2), 16, Window(7), ((3,), "below 50"), batch=3, ring=True),
            sample(12, 40, (6, 2), 16, Window(7), ((3,), "below 90"), batch=3, ring=True),
            # nothing
            sample(3, 0, (2, 1), 8, Full(), with_lse=True),
            sample(0, 3, (2, 1), 8, Causal()),
        ]


def weighted(weights: Array, seen: Array, values: Array) -> Array:
    """weights @ values, without any influence of values that are not seen, be they NaN or infinite."""
    finite = np.isfinite(values)
    out = np.asarray(weights @ np.where(finite, values, 0))
    for t in np.flatnonzero(~finite.all(axis=(0, 1, 3))):
        bad = np.where(finite[:, :, t], 0, values[:, :, t])[:, :, None]
        out += np.where(seen[..., t, None], weights[..., t, None] * bad, 0)
    return out


def _is_integer(x: Any) -> bool:
    """Of a type, an operand or an array."""
    return x.dtype.is_integer if isinstance(x.dtype, DType) else x.dtype.kind in "iu"


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, full) == full
    except ValueError:
        return False


def _broadcast_strides(shape: tuple[int, ...]) -> dict[str, int]:
    """Strides of an additive mask over [B, H, S, T]: 0 where it is broadcast."""
    padded = (1,) * (4 - len(shape)) + shape
    strides = [math.prod(padded[axis + 1 :]) if padded[axis] > 1 else 0 for axis in range(4)]
    return dict(zip(("MASK_B", "MASK_H", "MASK_S", "MASK_T"), strides, strict=True))
