"""What an operator is: one frozen dataclass per operator, registered on definition."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import numpy as np

from .errors import GraphError
from .graph import DType, TensorType
from .target import Target

OPS: dict[str, type[Op]] = {}
LARGEST_F32 = float(np.finfo(np.float32).max)
LARGEST_INT = 2**31 - 1


@dataclass(frozen=True)
class Operand:
    """A tensor as a kernel sees it: its type, the buffer that holds it, and its WGSL literal if it is one number.

    storage: "f16" where the buffer holds halves; kernels are written for f32 and read them through a function.
    """

    type: TensorType
    buffer: str
    literal: str | None = None
    storage: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def size(self) -> int:
        return self.type.size


class Lowering(Protocol):
    """What `Op.lower` receives as k."""

    target: Target

    def dispatch(
        self,
        template: str,
        *,
        variant: Mapping[str, Any],
        bind: Mapping[str, Operand],
        const: Mapping[str, int | float],
        groups: int,
        label: str = "",
    ) -> None:
        """Append a launch of `groups` workgroups of a template; nothing where groups is 0."""

    def scratch(self, type_: TensorType, name: str = "partial") -> Operand:
        """A new buffer for values between two dispatches of one operator."""


@dataclass(frozen=True)
class Sample:
    """One case of the generated tests: an operator, the types of its inputs, and how the inputs are drawn.

    draw names recipes of tests/draws.py ("normal", "small", "below 7", ...): one for all inputs, or one for each.
    """

    op: Op
    inputs: tuple[TensorType, ...]
    draw: str | tuple[str, ...] = "normal"

    def draws(self) -> tuple[str, ...]:
        return (self.draw,) * len(self.inputs) if isinstance(self.draw, str) else self.draw


def plain(value: Any) -> Any:
    """The value with NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    return tuple(map(plain, value)) if type(value) is tuple else value


@dataclass(frozen=True)
class Op:
    """Base of all operators. The fields of a subclass are its attributes.

    infer(self, *types) -> TensorType, or a tuple for several outputs; raises GraphError
    reference(self, *arrays) -> array, or a tuple: the meaning, in float64 (integers in their own dtype)
    gradient(self, g, dy, y, *inputs) -> one Tensor or None per input: the upstream gradient dy (of several outputs a
        tuple, None where nothing uses a port) through the operator, built with the builder g from dy, y and the inputs.
        An operator without it is not differentiable
    lower(self, k, *inputs, out) -> None: dispatches that compute `out`
    """

    name: ClassVar[str] = "op"
    is_leaf: ClassVar[bool] = False  # has no inputs and no dispatch
    is_view: ClassVar[bool] = False  # the output is the input's memory under another shape
    is_flat: ClassVar[bool] = False  # the gradient is zero everywhere: what is behind it does not influence the loss
    writes: ClassVar[tuple[int, ...]] = ()  # places of the inputs that are written: output 0, 1, ... is their memory
    tolerance: ClassVar[str] = "pointwise"  # the line of the tolerance rule that its kernels are held to
    infer: ClassVar[Callable[..., TensorType | tuple[TensorType, ...]]]
    reference: ClassVar[Callable[..., Any]]
    gradient: ClassVar[Callable[..., Any]]
    lower: ClassVar[Callable[..., None]]

    def __init_subclass__(cls, register: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not register:
            return
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        if cls.name in OPS:
            raise TypeError(f"operator {cls.name} is defined twice")
        OPS[cls.name] = cls

    def __post_init__(self) -> None:
        """Convert numbers of NumPy to Python's. Raises GraphError for an attribute that is not of its declared type, or
        that 32 bits do not hold."""
        for field in fields(self):
            value = plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            expected = str(field.type).split(" | ")
            if "int" in expected and not (type(value) is int or (value is None and "None" in expected)):
                raise GraphError(f"{self.name}: expected an integer as {field.name}, got {value!r}")
            if "float" in expected and isinstance(value, int | float) and not abs(value) <= LARGEST_F32:  # true of NaN
                raise GraphError(f"{self.name}: expected a finite {field.name} that f32 holds, got {value}")
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, int) and not -(2**31) <= item < 2**32:
                    raise GraphError(f"{self.name}: expected an integer of 32 bits as {field.name}, got {item}")

    def inferred(self, *types: TensorType) -> tuple[TensorType, ...]:
        """The output types, always as a tuple."""
        result = self.infer(*types)
        return result if isinstance(result, tuple) else (result,)

    def index_limits(self, *types: TensorType) -> Mapping[int, int]:
        """For inputs that hold indices, by position: the limit that every index must stay below."""
        return {}

    def rows_written(self, *types: TensorType) -> Mapping[int, int]:
        """For inputs that are positions in a state, by position: the number of rows that are written from there on."""
        return {}

    def fuller(self) -> Op | None:
        """An operator whose outputs begin with those of this one on the same inputs; None where there is none."""
        return None

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Shapes and attributes that every generated test runs."""
        return ()


def check_reach(name: str, axis: int, size: int) -> None:
    """Raise GraphError where the padded size of a spatial axis is too large for coordinates of i32."""
    if size > LARGEST_INT:
        raise GraphError(f"{name}: expected at most {LARGEST_INT} positions on axis {axis + 2}, padded, got {size}")


def make(name: str, *attributes: Any, **named: Any) -> Op:
    """The operator of this name: gradients are operators that are defined after those that need them."""
    build: Callable[..., Op] = OPS[name]
    return build(*attributes, **named)
