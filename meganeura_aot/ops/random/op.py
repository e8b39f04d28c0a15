"""Random numbers from a counter: Philox4x32-10, whose key and counter are a state of four words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import GROUP, Array

STATE = TensorType((4,), DType.U32)  # key, counter: each two words, the low one first


class Random(Op, register=False):
    """Numbers of `shape` from a state u32[4]: element 4 b + j is word j of Philox4x32-10(key, counter + b)."""

    shape: tuple[int, ...]
    kind: ClassVar[str]

    def infer(self, state: TensorType) -> TensorType:
        if state != STATE:
            raise GraphError(f"{self.name}: expected a state {STATE}, got {state}")
        return TensorType(self.shape, DType.U32 if self.kind == "bits" else DType.F32)

    def gradient(self, g: Any, dy: Any, y: Any, state: Any) -> tuple[Any, ...]:
        return (None,)

    def blocks(self) -> int:
        """Counter values that are used up."""
        return -(-math.prod(self.shape) // 4)

    def words(self, state: Array) -> Array:
        """u32 [blocks, 4]"""
        return random_words(state, self.blocks())

    def shaped(self, values: Array) -> Array:
        return values.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def lower(self, k: Lowering, state: Operand, *, out: Operand) -> None:
        vec = 4 if out.size % 4 == 0 else 1
        k.dispatch(
            "random",
            variant={"kind": self.kind, "vec": vec, "title": self.name},
            bind={"state": state, "out": out},
            const={"N": out.size},
            groups=math.ceil(self.blocks() / GROUP),
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        build: Any = cls
        return [Sample(build(shape), (STATE,), "integer") for shape in ((7, 3), (2, 1000), (1,), (0, 3), (4099,))]


@dataclass(frozen=True)
class RandomBits(Random):
    """32 random bits an element, u32."""

    tolerance: ClassVar[str] = "exact"
    kind: ClassVar[str] = "bits"
    shape: tuple[int, ...] = ()

    def reference(self, state: Array) -> Array:
        return self.shaped(self.words(state))


@dataclass(frozen=True)
class RandomUniform(Random):
    """The upper 24 bits times 2^-24: uniform on [0, 1)."""

    tolerance: ClassVar[str] = "exact"
    kind: ClassVar[str] = "uniform"
    shape: tuple[int, ...] = ()

    def reference(self, state: Array) -> Array:
        return self.shaped((self.words(state) >> 8) * 2.0**-24)


@dataclass(frozen=True)
class RandomNormal(Random):
    """Box and Muller: of words a, b as uniform numbers, r = sqrt(-2 log(1 - a)); r cos(2 pi b), then r sin(2 pi b)."""

    kind: ClassVar[str] = "normal"
    shape: tuple[int, ...] = ()

    def reference(self, state: Array) -> Array:
        uniform = (self.words(state) >> 8) * 2.0**-24
        radius, angle = np.sqrt(-2 * np.log1p(-uniform[:, 0::2])), 2 * np.pi * uniform[:, 1::2]
        return self.shaped(np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1))


@dataclass(frozen=True)
class AdvanceCounter(Op):
    """The counter of a random state moves by `by`, modulo 2^64, in place."""

    writes: ClassVar[tuple[int, ...]] = (0,)
    tolerance: ClassVar[str] = "exact"
    by: int = 0

    def infer(self, state: TensorType) -> TensorType:
        return state

    def reference(self, state: Array) -> Array:
        counter = int(state[2]) + (int(state[3]) << 32) + self.by
        return np.array([state[0], state[1], counter % 2**32, (counter >> 32) % 2**32], np.uint32)

    def lower(self, k: Lowering, state: Operand, *, out: Operand) -> None:
        k.dispatch("random", variant={"kind": "advance"}, bind={"state": out}, const={"STEP": self.by}, groups=1)


def random_words(state: Array, blocks: int, first: int = 0) -> Array:
    """The words u32 [blocks, 4] of a state's key and counter, from `first` blocks further on."""
    start = int(state[2]) + (int(state[3]) << 32) + first
    counter = (start + np.arange(blocks, dtype=object)) % 2**64
    words = np.zeros((blocks, 4), np.uint32)
    words[:, 0], words[:, 1] = counter % 2**32, counter >> 32
    return philox_4x32(words, state[:2])


def philox_4x32(counter: Array, key: Array) -> Array:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).

    counter u32 [N, 4], key u32 [2] -> u32 [N, 4]
    """
    c = counter.astype(np.uint64).T
    k = [int(word) for word in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = np.stack([b >> 32 ^ c[1] ^ np.uint64(k[0]), b & low, a >> 32 ^ c[3] ^ np.uint64(k[1]), a & low])
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c.T.astype(np.uint32)
