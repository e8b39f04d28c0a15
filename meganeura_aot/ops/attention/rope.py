"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import GROUP, Array


@dataclass(frozen=True)
class Rope(Op):
    """Rotates pairs of every head: y[a] = gain (x[a] cos t - x[b] sin t), y[b] = gain (x[b] cos t + x[a] sin t).

    x: f32 [B, S, heads * head_dim], or [S, ...] as one batch. frequencies: u32 [2, pairs], see `turns_per_position`.
    offset: as a third input u32 [] or [B], else the attribute. t = (offset + s) * frequencies[i] at row s for pair i:
    elements a = i and b = i + pairs of a head, interleaved a = 2i and b = 2i + 1. Elements past 2 pairs are copied.
    inverse: t is negated, which is the transpose.
    """

    head_dim: int = 2
    interleaved: bool = False
    offset: int = 0
    gain: float = 1.0
    inverse: bool = False

    def infer(self, x: TensorType, frequencies: TensorType, offset: TensorType | None = None) -> TensorType:
        if x.rank not in (2, 3) or x.dtype is not DType.F32 or self.head_dim < 1 or x.shape[-1] % self.head_dim:
            raise GraphError(f"rope: expected f32 [B, S, heads * {self.head_dim}] or [S, ...], got {x}")
        pairs = frequencies.shape[-1] if frequencies.rank else 0
        if frequencies != TensorType((2, pairs), DType.U32) or not 0 < 2 * pairs <= self.head_dim:
            raise GraphError(f"rope: expected u32 [2, pairs], pairs in 1..{self.head_dim // 2}, got {frequencies}")
        batch = x.shape[0] if x.rank == 3 else 1
        if offset is not None and (offset.dtype is not DType.U32 or offset.shape not in ((), (batch,))):
            raise GraphError(f"rope: expected an offset u32[] or u32[{batch}], got {offset}")
        if not 0 <= self.offset < 2**32:
            raise GraphError(f"rope: expected an offset in 0..2^32 - 1, got {self.offset}")
        return x

    def reference(self, x: Array, frequencies: Array, offset: Array | None = None) -> Array:
        pairs = frequencies.shape[1]
        table = frequencies.astype(np.uint64)
        start = np.reshape(self.offset if offset is None else offset, (-1, 1)).astype(np.uint64)
        position = (start + np.arange(x.shape[-2], dtype=np.uint64)) % np.uint64(2**32)
        turns = position[..., None] * (table[0] << np.uint64(32) | table[1])  # modulo 2^64: whole turns wrap away
        angle = turns[..., None, :] / 2.0**64 * (2 * np.pi)
        cosine, sine = self.gain * np.cos(angle), self.gain * np.sin(angle) * (-1 if self.inverse else 1)
        heads = np.array(x).reshape(math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1] // self.head_dim, self.head_dim)
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
        if self.interleaved:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        a, b = heads[..., first].copy(), heads[..., second].copy()
        heads[..., first], heads[..., second] = a * cosine - b * sine, b * cosine + a * sine
        return heads.reshape(x.shape)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, *others: Any) -> tuple[Any, ...]:
        return (g.apply(replace(self, inverse=not self.inverse), dy, *others), *(None for _ in others))

    def lower(
        self, k: Lowering, x: Operand, frequencies: Operand, offset: Operand | None = None, *, out: Operand
    ) -> None:
        pairs, heads = frequencies.shape[1], x.shape[-1] // self.head_dim
        rows = math.prod(x.shape[:-1])
        count = rows * -(-heads // 4) * (self.head_dim - pairs)
        kind = "fixed" if offset is None else "one" if offset.size == 1 else "each"
        const: dict[str, int | float] = {"N": count, "SEQUENCE": x.shape[-2], "HEADS": heads}
        const |= {"HEAD_DIM": self.head_dim, "PAIRS": pairs}
        const |= ({"OFFSET": self.offset} if offset is None else {}) | ({"GAIN": self.gain} if self.gain != 1 else {})
        k.dispatch(
            "rope",
            variant={
                "interleaved": self.interleaved,
                "partial": 2 * pairs < self.head_dim,
                "offset": kind,
                "gain": self.gain != 1,
                "inverse": self.inverse,
            },
            bind={"x": x, "frequencies": frequencies, "out": out} | ({} if offset is None else {"offset": offset}),
            const=const,
            groups=math.ceil(count / GROUP),
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(op: Rope, shape: tuple[int, ...], pairs: int, offset: tuple[int, ...] | None = None) -> Sample:
            types = [TensorType(shape), TensorType((2, pairs), DType.U32)]
            more = [] if offset is None else [TensorType(offset, DType.U32)]
            return Sample(op, (*types, *more), ("normal", "integer", *("below 1000000" for _ in more)))

        return [
            sample(cls(64), (2, 7, 3 * 64), 32),
            sample(cls(8, offset=999_999), (3, 16), 4),
            sample(cls(6, True), (2, 33, 5 * 6), 3, ()),
            sample(cls(10, True, gain=1.25), (2, 3, 20), 2, (2,)),
            sample(cls(256, offset=5), (5, 256), 32),
            sample(cls(4, gain=0.5, inverse=True), (1, 129, 36), 2, (1,)),
            sample(cls(3), (4, 3), 1, ()),
            sample(cls(4), (2, 0, 4), 2),
        ]


def turns_per_position(frequencies: Array) -> Array:
    """Radians per position as u32 [2, pairs]: the fraction of a turn times 2^64, high words, then low words.

    A product of a position with them that wraps past 2^64 has lost whole turns alone: angles stay exact at any
    position, where a product in f32 is off by 6e-3 at position 100 000.
    """
    words = [int(math.ldexp(turns % 1.0, 64)) for turns in (frequencies / (2 * math.pi)).tolist()]
    return np.array([[word >> 32 for word in words], [word % 2**32 for word in words]], np.uint32)
