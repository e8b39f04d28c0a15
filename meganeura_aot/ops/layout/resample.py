"""Padding along any axes, and enlarging by repetition: an output is an element of x, or the number of the padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import LARGEST_INT, Lowering, Op, Operand, Sample, make
from ..pointwise.op import GROUP, Array

MODES = ("constant", "reflect", "edge")


@dataclass(frozen=True)
class Pad(Op):
    """x with before[axis] elements added in front of every axis and after[axis] behind it.

    constant: the second input, a scalar of x's dtype; widths may be negative and cut off. reflect: x mirrored at its
    first and last element, which are not repeated. edge: the first and the last element.
    """

    tolerance: ClassVar[str] = "exact"
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    mode: str = "constant"

    def infer(self, x: TensorType, *value: TensorType) -> TensorType:
        if self.mode not in MODES:
            raise GraphError(f"pad: expected a mode among {', '.join(MODES)}, got {self.mode!r}")
        if value != ((TensorType((), x.dtype),) if self.mode == "constant" else ()):
            raise GraphError(
                f"pad: expected a scalar {x.dtype} for the mode constant alone, got {list(map(str, value))}"
            )
        if not len(self.before) == len(self.after) == x.rank:
            raise GraphError(f"pad: expected two widths an axis of {x}, got {len(self.before)} and {len(self.after)}")
        for axis, (size, widths) in enumerate(zip(x.shape, zip(self.before, self.after, strict=True), strict=True)):
            self._check_widths(f"axis {axis} of {x}", size, widths)
        return TensorType(tuple(map(sum, zip(self.before, x.shape, self.after, strict=True))), x.dtype)

    def _check_widths(self, axis: str, size: int, widths: tuple[int, int]) -> None:
        if self.mode == "constant":
            if sum(min(width, 0) for width in widths) < -size:
                raise GraphError(f"pad: {axis}: expected widths that cut off at most {size} elements, got {widths}")
            return
        largest = LARGEST_INT
        if size == 0:  # no element to repeat
            largest = 0
        elif self.mode == "reflect":
            largest = size - 1
        if not 0 <= min(widths) <= max(widths) <= largest:
            raise GraphError(f"pad: {axis}: expected widths from 0 to {largest} for mode {self.mode}, got {widths}")

    def reference(self, x: Array, *value: Array) -> Array:
        widths = [(max(b, 0), max(a, 0)) for b, a in zip(self.before, self.after, strict=True)]
        if not widths:
            return x
        if self.mode != "constant":
            return np.pad(x, widths, mode=self.mode)  # type: ignore[call-overload, no-any-return]
        sides = zip(self.before, x.shape, self.after, strict=True)
        kept: list[Any] = [slice(max(-b, 0), n - max(-a, 0)) for b, n, a in sides]
        return np.pad(x[*kept], widths, constant_values=value[0])

    def gradient(self, g: Any, dy: Any, y: Any, *inputs: Any) -> tuple[Any, ...]:
        """One axis after the other; the constant is where padding, and not x, put dy."""
        widths = list(zip(self.before, self.after, strict=True))
        if self.mode == "constant":
            dx = g.pad(dy, [(-before, -after) for before, after in widths])
            return (dx, g.sum(dy - g.pad(dx, widths)))
        for axis, (before, after) in enumerate(widths):
            dy = g.apply(make("pad_grad", axis, before, after, self.mode), dy) if before or after else dy
        return (dy,)

    def lower(self, k: Lowering, x: Operand, *value: Operand, out: Operand) -> None:
        kinds = [
            self.mode if before or after else "same" for before, after in zip(self.before, self.after, strict=True)
        ]
        dispatch_remap(k, x, out, kinds, list(self.before), value[0] if value else None, f"pad_{self.mode}")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(
            shape: tuple[int, ...],
            before: tuple[int, ...],
            after: tuple[int, ...],
            mode: str,
            dtype: str = "f32",
            draw: str = "special",
        ) -> Sample:
            types = (TensorType(shape, DType(dtype)), TensorType((), DType(dtype)))
            return Sample(cls(before, after, mode), types[: 1 + (mode == "constant")], draw)

        return [
            sample((2, 3, 5, 7), (0, 0, 1, 2), (0, 0, 0, 3), "constant"),
            sample((2, 3, 5, 7), (0, 0, 4, 2), (0, 0, 1, 6), "reflect"),
            sample((2, 3, 5, 7), (0, 0, 9, 2), (0, 0, 0, 300), "edge"),
            sample((5,), (-2,), (70,), "constant"),
            sample((3, 6, 33), (0, -2, -1), (0, -3, -2), "constant", "i32"),
            sample((3, 4, 2, 5), (1, 0, 0, 0), (0, 2, 0, 0), "constant", "u32"),
            sample((1, 2, 1), (0, 1, 0), (0, 1, 0), "reflect", "u32"),
            sample((2, 2), (0, 0), (0, 0), "edge"),
            sample((0, 3), (1, 1), (1, 0), "constant"),
            sample((0, 3), (0, 1), (0, 2), "reflect"),
            sample((), (), (), "constant"),
            sample((3, 5), (1, -2), (2, 4), "constant", draw="normal"),
            sample((2, 4, 5), (0, 3, 1), (0, 2, 0), "reflect", draw="normal"),
            sample((2, 4, 5), (2, 0, 1), (0, 3, 0), "edge", draw="normal"),
        ]


@dataclass(frozen=True)
class Upsample(Op):
    """y[c] = x[c // factors] on every axis: each element repeated."""

    tolerance: ClassVar[str] = "exact"
    factors: tuple[int, ...] = ()

    def infer(self, x: TensorType) -> TensorType:
        if len(self.factors) != x.rank or not all(factor >= 1 for factor in self.factors):
            raise GraphError(f"upsample: expected a factor >= 1 for every axis of {x}, got {list(self.factors)}")
        return TensorType(tuple(n * factor for n, factor in zip(x.shape, self.factors, strict=True)), x.dtype)

    def reference(self, x: Array) -> Array:
        for axis, factor in enumerate(self.factors):
            x = np.repeat(x, factor, axis)
        return x

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        blocks = [size for pair in zip(x.shape, self.factors, strict=True) for size in pair]
        return (g.sum(g.reshape(dy, blocks), axes=range(1, len(blocks), 2)),)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        kinds = ["same" if factor == 1 else "repeat" for factor in self.factors]
        dispatch_remap(k, x, out, kinds, list(self.factors), None, "upsample")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        cases = [((2, 3, 5, 7), (1, 1, 2, 2)), ((3, 33), (1, 3)), ((2, 5, 1, 4), (3, 1, 7, 1)), ((0, 3), (2, 2))]
        return [Sample(cls(factors), (TensorType(shape),)) for shape, factors in cases] + [
            Sample(cls((2, 1)), (TensorType((3, 65), DType.I32),), "integer"),
        ]


def dispatch_remap(
    k: Lowering,
    x: Operand,
    out: Operand,
    kinds: list[str],
    numbers: list[int],
    value: Operand | None,
    label: str,
    steps: list[int] | None = None,
) -> None:
    """out[c] = x[source of c]; kinds: how the source of each axis is found; numbers: the width before it, or its factor.

    value: what is stored where there is no source. steps: of an axis of kind "spread", whose sources are `step` apart
    from its number on.
    """
    axes: list[tuple[str, int, int, int, int]] = []  # kind, size in x, size in out, number, step; what stays is joined
    for kind, size, out_size, number, step in zip(kinds, x.shape, out.shape, numbers, steps or numbers, strict=True):
        if kind == "same" and axes and axes[-1][0] == "same":
            joined = axes.pop()
            size, out_size = size * joined[1], out_size * joined[2]
        axes.append((kind, size, out_size, number, step))
    const = {"SIZE": out.size}
    for axis, (kind, size, out_size, number, step) in enumerate(axes):
        const |= {f"OUT_{axis}": out_size} if axis else {}
        const |= {f"IN_{axis}": size} if axis or kind in (*MODES, "spread") else {}
        const |= {f"NUMBER_{axis}": number} if kind != "same" else {}
        const |= {f"STEP_{axis}": step} if kind == "spread" else {}
    literal = value.literal if value else None
    k.dispatch(
        "remap",
        variant={
            "dtype": x.dtype,
            "kinds": [kind for kind, *_ in axes],
            "value": literal or "value[0]",
            "bind_value": value is not None and literal is None,
            "title": label,
        },
        bind={"x": x, **({"value": value} if value and literal is None else {}), "out": out},
        const=const,
        groups=-(-out.size // GROUP),
        label=label,
    )
