"""How RoPE's frequencies are stretched for contexts longer than a model was first trained on. Computed in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

Array = np.ndarray[Any, Any]


@runtime_checkable
class Scaling(Protocol):
    """frequencies: radians per position of every pair, dim / 2 of them; gain: what the rotated elements are multiplied
    by."""

    def frequencies(self, base: float, dim: int) -> Array: ...

    @property
    def gain(self) -> float: ...


@dataclass(frozen=True)
class Plain:
    """base^(-2i / dim) for pair i."""

    gain: float = 1.0

    def frequencies(self, base: float, dim: int) -> Array:
        return np.asarray(float(base) ** (-np.arange(0, dim, 2) / dim))


@dataclass(frozen=True)
class Linear:
    """Position interpolation: every frequency is divided by `factor`."""

    factor: float
    gain: float = 1.0

    def frequencies(self, base: float, dim: int) -> Array:
        return Plain().frequencies(base, dim) / self.factor


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: waves longer than original / low_freq_factor are divided by `factor`, those shorter than original /
    high_freq_factor stay, and between the two the frequencies blend."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    gain: float = 1.0

    def frequencies(self, base: float, dim: int) -> Array:
        plain = Plain().frequencies(base, dim)
        turns = plain * self.original_max_position / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return np.asarray(plain / self.factor + np.clip(blend, 0, 1) * (plain - plain / self.factor))


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng, Quesnelle, Fan, Shippole, 2023): pairs that turn less than beta_slow times in the original context
    are divided by `factor`, those that turn more than beta_fast times stay, with a ramp over the pairs between.

    gain: attention_factor where it is given, else 0.1 ln(factor) + 1; with mscale and mscale_all_dim the ratio of the
    two, each 0.1 mscale ln(factor) + 1. truncate: the ends of the ramp are whole pairs.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def gain(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        grown = 0.1 * math.log(self.factor) if self.factor > 1 else 0.0
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * grown + 1) / (self.mscale_all_dim * grown + 1)
        return grown + 1

    def frequencies(self, base: float, dim: int) -> Array:
        def pair_that_turns(times: float) -> float:
            return dim * math.log(self.original_max_position / (times * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        ramp = np.clip((np.arange(dim // 2) - first) / (last - first if last != first else 0.001), 0, 1)
        plain = Plain().frequencies(base, dim)
        return np.asarray(plain / self.factor * ramp + plain * (1 - ramp))
