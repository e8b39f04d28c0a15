"""Leaves: tensors that exist before the first dispatch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ...graph import DType, TensorType
from ...op import Op
from ...program import Init


@dataclass(frozen=True)
class Leaf(Op, register=False):
    """A named tensor of a declared type."""

    is_leaf: ClassVar[bool] = True
    label: str = ""
    type: TensorType = field(default=TensorType(()), repr=False)

    def infer(self) -> TensorType:
        return self.type


@dataclass(frozen=True)
class Input(Leaf):
    """Given by the caller at every call. minimum, maximum: the inclusive bounds of an integer input, where declared."""

    minimum: int | None = None
    maximum: int | None = None

    def bounds(self) -> tuple[int, int]:
        """The least and the largest number of an integer input: those declared, otherwise those of its dtype."""
        limits = np.iinfo(self.type.dtype.numpy)
        low = int(limits.min) if self.minimum is None else self.minimum
        high = int(limits.max) if self.maximum is None else self.maximum
        return low, high


@dataclass(frozen=True)
class Parameter(Leaf):
    """A weight. init is None, "zeros", "ones", ("uniform", a) or ("normal", s).

    storage: "" for the dtype itself; "f16" for f32 numbers that are rounded to f16 and kept as such.
    """

    init: Init = None
    trainable: bool = True
    storage: str = ""


@dataclass(frozen=True)
class State(Leaf):
    """Lives on the GPU across calls. storage: as of a parameter; only `cache_write` writes halves. init: the number that
    every element starts with."""

    storage: str = ""
    init: float = 0.0


@dataclass(frozen=True)
class Moment(Leaf):
    """What an optimizer keeps of a parameter from step to step; zero at start."""


@dataclass(frozen=True)
class Gradient(Leaf):
    """The gradient of a parameter, which another entry computes; the label is `gradient_label` of the parameter's."""


def gradient_label(parameter: str) -> str:
    """The name of a parameter's gradient among the values of a graph and the buffers of a plan."""
    return f"grad.{parameter}"


@dataclass(frozen=True)
class Constant(Op):
    """Numbers known at compile time. `data` is the little-endian bytes; the text form shows a digest."""

    is_leaf: ClassVar[bool] = True
    shape: tuple[int, ...] = field(default=(), repr=False)
    dtype: DType = field(default=DType.F32, repr=False)
    data: bytes = field(default=b"", repr=False)
    digest: str = ""

    @staticmethod
    def of(array: np.ndarray[Any, Any], dtype: DType) -> Constant:
        """A constant with the bits of `array`, which must already be of `dtype`."""
        data = np.ascontiguousarray(array, dtype=dtype.numpy).tobytes()
        shown = str(array.item()) if array.size == 1 else hashlib.sha256(data).hexdigest()[:8]
        return Constant(tuple(array.shape), dtype, data, shown)

    def infer(self) -> TensorType:
        return TensorType(self.shape, self.dtype)

    def array(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.data, dtype=self.dtype.numpy).reshape(self.shape)

    def literal(self) -> str | None:
        """A single number as WGSL text. None for several numbers, and for bits that WGSL text does not keep: infinities,
        NaN, -0.0, subnormals."""
        if self.infer().size != 1:
            return None
        value = self.array().reshape(())[()]
        if self.dtype is DType.U32:
            return f"{value}u"
        if self.dtype is DType.I32:
            return f"{value}i" if value != np.iinfo(np.int32).min else None
        if not np.isfinite(value) or (value == 0 and np.signbit(value)) or 0 < abs(value) < np.finfo(np.float32).tiny:
            return None
        return f"{value!s}f"

    def reference(self) -> np.ndarray[Any, Any]:
        array = self.array()
        return array.astype(np.float64) if self.dtype is DType.F32 else array
