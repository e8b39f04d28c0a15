"""The optimizer's numbers: what the user sets, checked, and what an update reads."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

FLOAT32_MAX = 3.4028234663852886e38


def sgd_numbers(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Any:
    """What an update by SGD reads."""
    return np.array([lr, momentum, weight_decay], dtype=np.float32)


def adam_numbers(
    lr: float, step: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Any:
    """What an update by Adam or AdamW reads at the 1-based step; 1 - beta would lose digits on the GPU."""
    (b1, b2), t = betas, step
    return np.array([lr, b1, 1 - b1, b2, 1 - b2, eps, weight_decay, 1 - b1**t, 1 - b2**t], dtype=np.float32)


def check_number(name: str, value: Any, below: float | None = None) -> float:
    """As a float, or ValueError: at least 0, and less than `below` or at most what f32 holds."""
    known = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    exact = float(value) if known and not isinstance(value, int) else value  # a half has no such maximum
    if not (known and 0 <= exact <= FLOAT32_MAX and (below is None or exact < below)):
        what = "a finite f32 number of at least 0" if below is None else f"a number from 0 to less than {below:g}"
        raise ValueError(f"{name}: expected {what}, got {value!r}")
    return float(value)


class OptimizerNumbers(Mapping[str, Any]):
    """The optimizer's numbers by name. What is set counts from the next update on; a refused value changes nothing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, values: Mapping[str, Any]) -> None:
        self._values |= self.check(values)

    def check(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values as they would be kept, or ValueError."""
        return {name: self._check(name, value) for name, value in values.items()}

    def _check(self, name: str, value: Any) -> Any:
        if name not in self._values:
            raise ValueError(f"optimizer number {name!r}: expected one of {', '.join(self)}")
        if name == "betas":
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ValueError(f"betas: expected two numbers, got {value!r}")
            return tuple(check_number(f"betas[{i}]", beta, below=1) for i, beta in enumerate(value))
        number = check_number(name, value)
        if name == "clip_norm" and number == 0:
            raise ValueError(f"clip_norm: expected a number above 0, got {value!r}")
        if name == "momentum" and (number > 0) != (self._values[name] > 0):
            kind, expected = ("with", "a number above 0") if self._values[name] > 0 else ("without", "0")
            why = f"the update was compiled {kind} a velocity, as --opt momentum said"
            raise ValueError(f"momentum: expected {expected}, got {value!r}: {why}")
        return number
