"""Convolutions over one or two axes, and their transposes; what is fused into their store."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Operand, Sample, check_reach
from ..matmul.op import MatMul
from ..pointwise.epilogue import EpilogueOp
from ..pointwise.op import Array, Step, evaluate_steps
from .gradient import ConvGradWeight
from .schedule import TRIVIAL, Axis, Launch, dispatch_conv, forward_axis, grouped, met, transposed_axes


class ConvOp(EpilogueOp, register=False):
    """Shared by both directions. x: [N, Ci, (H,) W]; padding: before each axis, then after each axis."""

    tolerance: ClassVar[str] = "contraction"
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: ClassVar[bool]

    def product(self, x: Array, w: Array) -> Array:
        """The result before the epilogue."""
        raise NotImplementedError

    def reference(self, x: Array, w: Array, *extras: Array) -> Array:
        with np.errstate(all="ignore"):
            return evaluate_steps(self.epilogue, [self.product(x, w), *extras])

    def as_matrices(self, shape: tuple[int, ...], out: tuple[int, ...]) -> tuple[int, ...] | None:
        """[images, channels, positions]: an extra input has all positions or one."""
        images, channels, *places = (1,) * (len(out) - len(shape)) + shape
        if tuple(places) != out[2:] and math.prod(places) != 1:
            return None
        return (images, channels, math.prod(places))

    def describe(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> str:
        attributes = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        neutral = {"stride": 1, "padding": 0, "dilation": 1}
        parts = [f"{name} {_text(value)}" for name, value in attributes.items() if set(value) != {neutral[name]}]
        parts += [f"groups {self.groups}"] * (self.groups > 1)
        x, w = inputs[:2]
        details = f" ({', '.join(parts)})" if parts else ""
        return f"{self.name} {x}, {w}{details}{self.describe_epilogue(inputs)} -> {outputs[0]}"

    def check(self, x: TensorType, w: TensorType, channels: int) -> None:
        """Raise GraphError where the operands and attributes do not fit together; channels: those that w expects."""
        axes = x.rank - 2
        if axes not in (1, 2) or w.rank != x.rank or x.dtype is not DType.F32 or w.dtype is not DType.F32:
            raise GraphError(f"{self.name}: expected x f32[N, C, (H,) W] and weights of that rank, got {x} and {w}")
        for name, values, count, least in (
            ("stride", self.stride, axes, 1),
            ("dilation", self.dilation, axes, 1),
            ("padding", self.padding, 2 * axes, 0),
        ):
            if len(values) != count or min(values) < least:
                raise GraphError(f"{self.name}: expected {count} numbers >= {least} as {name}, got {list(values)}")
        if 0 in x.shape[2:]:
            raise GraphError(f"{self.name}: expected one position or more on every axis, got {x}")
        if self.groups < 1 or w.shape[0] % self.groups or 0 in w.shape[2:]:
            expected = f"weights that {self.groups} groups divide, and taps" if self.groups > 0 else "groups > 0"
            raise GraphError(f"{self.name}: expected {expected}, got {w} and groups={self.groups}")
        if channels != x.shape[1]:
            form = f"{x} and {w} with groups={self.groups}"
            raise GraphError(f"{self.name}: expected {channels} input channels, got {x.shape[1]} in {form}")

    def phases(self, x: tuple[int, ...], w: tuple[int, ...], out: tuple[int, ...]) -> list[tuple[Axis, ...]]:
        """The axes of every part of the output: a kernel computes one, or all."""
        raise NotImplementedError

    def lower(self, k: Lowering, x: Operand, w: Operand, *extras: Operand, out: Operand) -> None:
        if out.size == 0:
            return
        one_tap = all(n == 1 for n in (*w.shape[2:], *self.stride, self.groups)) and not any(self.padding)
        if one_tap and x.shape[2:] == out.shape[2:]:
            self._lower_to_product(k, x, w, extras, out)
            return
        channels, rows = x.shape[1] // self.groups, out.shape[1] // self.groups
        axes = self.phases(x.shape, w.shape, out.shape)
        phases = tuple((a[0] if len(a) == 2 else TRIVIAL, a[-1]) for a in axes)
        whole = Launch(x.shape[0], self.groups, channels, rows, phases, self.transposed)
        for launch in whole.divided(k.target.name):
            dispatch_conv(k, self, launch, x, w, extras, out)

    def _lower_to_product(self, k: Lowering, x: Operand, w: Operand, extras: Sequence[Operand], out: Operand) -> None:
        """One tap, and every position meets it: out[n] = w @ x[n] over matrices [channels, positions]."""

        def view(operand: Operand, shape: tuple[int, ...]) -> Operand:
            return replace(operand, type=TensorType(shape, operand.dtype))

        def matrices(operand: Operand) -> Operand:
            shape = self.as_matrices(operand.shape, out.shape)
            assert shape is not None, f"{self.name}: an input of shape {operand.shape} was fused into {out.shape}"
            return view(operand, shape)

        positions = math.prod(x.shape[2:])
        MatMul(trans_a=self.transposed, epilogue=self.epilogue).lower(
            k,
            view(w, w.shape[:2]),
            view(x, (*x.shape[:2], positions)),
            *map(matrices, extras),
            out=matrices(out),
        )


def _text(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


@dataclass(frozen=True)
class Conv(ConvOp):
    """y[n, o, p] = sum over c, t of x[n, c, p * stride + t * dilation - padding] * w[o, c, t]; 0 outside of x.

    w: [Co, Ci / groups, (kH,) kW]; group g of Co / groups output channels reads group g of the input channels.
    """

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    epilogue: tuple[Step, ...] = ()
    transposed: ClassVar[bool] = False

    def infer(self, x: TensorType, w: TensorType, *extras: TensorType) -> TensorType:
        self.check(x, w, w.shape[1] * self.groups if w.rank > 1 else 0)
        return self.check_epilogue(TensorType((x.shape[0], w.shape[0], *self.sizes(x.shape, w.shape))), extras)

    def sizes(self, x: tuple[int, ...], w: tuple[int, ...]) -> list[int]:
        """The output's sizes; raises GraphError where the window does not fit."""
        sizes = []
        for axis, (size, kernel) in enumerate(zip(x[2:], w[2:], strict=True)):
            padded = size + self.padding[axis] + self.padding[axis + len(x) - 2]
            check_reach(self.name, axis, padded)
            window = (kernel - 1) * self.dilation[axis] + 1
            if padded < window:
                expected = f"a padded size of {window} or more on axis {axis + 2} of {TensorType(x)}"
                raise GraphError(f"{self.name}: expected {expected}, got {padded}")
            sizes.append((padded - window) // self.stride[axis] + 1)
        return sizes

    def product(self, x: Array, w: Array) -> Array:
        axes = range(x.ndim - 2)
        sizes = self.sizes(x.shape, w.shape)
        around = [(self.padding[axis], self.padding[axis + len(axes)]) for axis in axes]
        padded = grouped(np.pad(x, [(0, 0), (0, 0), *around]), self.groups)
        weights = w.reshape(self.groups, w.shape[0] // self.groups, w.shape[1], math.prod(w.shape[2:]))
        total = np.zeros((x.shape[0], self.groups, weights.shape[1], math.prod(sizes)))
        for index, tap in enumerate(itertools.product(*map(range, w.shape[2:]))):
            values = padded[met(tap, sizes, self.dilation, self.stride)].reshape(*padded.shape[:3], math.prod(sizes))
            total += weights[..., index] @ values
        return total.reshape(x.shape[0], w.shape[0], *sizes)

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, w: Any) -> tuple[Any, ...]:
        """Of x: the transposed convolution, which gets back what the stride left over as its output_padding."""
        axes = len(self.stride)
        back = ConvTranspose(self.stride, self.padding, (0,) * axes, self.dilation, self.groups)
        reached = zip(x.shape[2:], self.padding, self.padding[axes:], back.full_sizes(y.shape, w.shape), strict=False)
        rest = tuple(size + before + after - full for size, before, after, full in reached)
        weight = ConvGradWeight(w.shape[2:], self.stride, self.padding[:axes], self.dilation, self.groups)
        return g.apply(replace(back, output_padding=rest), dy, w), g.apply(weight, dy, x)

    def phases(self, x: tuple[int, ...], w: tuple[int, ...], out: tuple[int, ...]) -> list[tuple[Axis, ...]]:
        sizes = zip(x[2:], out[2:], w[2:], self.stride, self.dilation, self.padding, strict=False)
        return [tuple(forward_axis(*numbers) for numbers in sizes)]

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(x: tuple[int, ...], w: tuple[int, ...], draw: str = "normal", **attributes: Any) -> Sample:
            return Sample(conv_of(cls, len(x) - 2, **attributes), (TensorType(x), TensorType(w)), draw)

        return [
            sample((2, 3, 7, 9), (33, 3, 3, 3), padding=1),
            sample((1, 1, 1, 1), (1, 1, 1, 1)),
            sample((2, 5, 9, 7), (12, 5, 3, 2), padding=(2, 0, 1, 3), stride=(2, 1), dilation=(1, 2)),
            sample((2, 4, 5, 55), (40, 4, 2, 3), stride=1),
            sample((3, 5, 4, 4), (7, 5, 1, 1)),
            sample((2, 6, 5, 7), (20, 6, 1, 1), stride=2),
            sample((2, 8, 9, 9), (64, 1, 3, 3), stride=2, padding=1, groups=8),
            sample((2, 9, 5, 5), (60, 3, 3, 3), groups=3),
            sample((1, 5, 8, 8), (10, 1, 3, 3), padding=1, groups=5, draw="small"),
            sample((2, 7, 33), (17, 7, 5), padding=(4, 2), stride=2),
            sample((1, 300, 3, 3), (9, 300, 3, 3), padding=1),
            sample((1, 30, 4, 4), (66, 30, 3, 3), padding=1),
            sample((2, 3, 4, 4), (3, 3, 4, 4)),
            sample((0, 3, 4, 4), (2, 3, 3, 3)),
            sample((2, 0, 4, 4), (2, 0, 3, 3)),
        ]


@dataclass(frozen=True)
class ConvTranspose(ConvOp):
    """y[n, o, i * stride + t * dilation - padding] += x[n, c, i] * w[c, o, t] over all c, i, t: a convolution's gradient.

    w: [Ci, Co / groups, (kH,) kW]. The output has (size - 1) * stride + (k - 1) * dilation + 1 + output_padding
    positions, less the padding.
    """

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    output_padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    epilogue: tuple[Step, ...] = ()
    transposed: ClassVar[bool] = True

    def infer(self, x: TensorType, w: TensorType, *extras: TensorType) -> TensorType:
        self.check(x, w, w.shape[0] if w.rank else 0)
        axes = x.rank - 2
        added, steps = self.output_padding, zip(self.stride, self.dilation, strict=True)
        if len(added) != axes or not all(0 <= n < max(step) for n, step in zip(added, steps, strict=True)):
            limits = [max(step) for step in zip(self.stride, self.dilation, strict=True)]
            raise GraphError(
                f"{self.name}: expected output_padding below the larger of stride and dilation {limits}, got {list(added)}"
            )
        sizes = self.full_sizes(x.shape, w.shape)
        for axis, size in enumerate(sizes):
            check_reach(self.name, axis, size)
        sizes = [n - self.padding[axis] - self.padding[axis + axes] for axis, n in enumerate(sizes)]
        if any(n < 1 for n in sizes):
            raise GraphError(f"{self.name}: expected an output of size 1 or more, got {sizes} of {x} and {w}")
        return self.check_epilogue(TensorType((x.shape[0], w.shape[1] * self.groups, *sizes)), extras)

    def full_sizes(self, x: tuple[int, ...], w: tuple[int, ...]) -> list[int]:
        """The output's sizes before the padding is taken away."""
        numbers = zip(x[2:], w[2:], self.stride, self.dilation, self.output_padding, strict=True)
        return [(n - 1) * stride + (k - 1) * dilation + 1 + added for n, k, stride, dilation, added in numbers]

    def product(self, x: Array, w: Array) -> Array:
        axes = range(x.ndim - 2)
        images, channels = x.shape[0], w.shape[1] * self.groups
        sizes = self.full_sizes(x.shape, w.shape)
        values = grouped(x, self.groups).reshape(images, self.groups, x.shape[1] // self.groups, math.prod(x.shape[2:]))
        weights = w.reshape(self.groups, w.shape[0] // self.groups, w.shape[1], math.prod(w.shape[2:])).swapaxes(1, 2)
        total = np.zeros((images, self.groups, w.shape[1], *sizes))
        for index, tap in enumerate(itertools.product(*map(range, w.shape[2:]))):
            part = weights[..., index] @ values
            total[met(tap, x.shape[2:], self.dilation, self.stride)] += part.reshape(
                images, self.groups, w.shape[1], *x.shape[2:]
            )
        kept: list[Any] = [slice(self.padding[axis], sizes[axis] - self.padding[axis + len(axes)]) for axis in axes]
        return np.asarray(total.reshape(images, channels, *sizes)[..., *kept])

    def gradient(self, g: Any, dy: Any, y: Any, x: Any, w: Any) -> tuple[Any, ...]:
        """Both are those of a convolution from y to x; an output_padding over the stride gives it too many positions."""
        dx = g.apply(Conv(self.stride, self.padding, self.dilation, self.groups), dy, w)
        before = self.padding[: len(self.stride)]
        weight = ConvGradWeight(w.shape[2:], self.stride, before, self.dilation, self.groups)
        return g.slice(dx, tuple(slice(size) for size in x.shape)), g.apply(weight, x, dy)

    def phases(self, x: tuple[int, ...], w: tuple[int, ...], out: tuple[int, ...]) -> list[tuple[Axis, ...]]:
        sizes = zip(x[2:], out[2:], w[2:], self.stride, self.dilation, self.padding, strict=False)
        return list(itertools.product(*(transposed_axes(*numbers) for numbers in sizes)))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(x: tuple[int, ...], w: tuple[int, ...], draw: str = "normal", **attributes: Any) -> Sample:
            return Sample(conv_of(cls, len(x) - 2, **attributes), (TensorType(x), TensorType(w)), draw)

        return [
            sample((2, 5, 4, 6), (5, 33, 3, 3), padding=1, stride=2, output_padding=1),
            sample((1, 1, 1, 1), (1, 1, 1, 1)),
            sample((2, 3, 5, 7), (3, 12, 3, 3), padding=(1, 0, 2, 1)),
            sample((2, 3, 5, 7), (3, 7, 1, 1)),
            sample((1, 6, 5, 4), (6, 4, 2, 2), stride=2),
            sample((2, 6, 5, 4), (6, 4, 4, 4), stride=2, padding=1, groups=2, draw="small"),
            sample((2, 4, 6, 5), (4, 20, 3, 2), stride=(2, 3), dilation=(4, 2), output_padding=(3, 0)),
            sample((1, 5, 4, 4), (5, 2, 3, 3), groups=5),
            sample((2, 7, 33), (7, 17, 8), padding=(2, 3), stride=4),
            sample((1, 5, 9), (5, 3, 1), stride=3, output_padding=2),
            sample((1, 130, 4, 4), (130, 34, 3, 3), padding=1),
            sample((0, 3, 4, 4), (3, 2, 3, 3)),
            sample((2, 0, 4, 4), (0, 2, 3, 3)),
        ]


def conv_of(cls: type[ConvOp], axes: int, **attributes: Any) -> Any:
    """An operator from attributes in which one number stands for every axis."""
    counts = {"stride": axes, "dilation": axes, "padding": 2 * axes, "output_padding": axes}
    if cls is Conv:
        del counts["output_padding"]
    defaults = {"stride": 1, "dilation": 1}
    values = {name: attributes.pop(name, defaults.get(name, 0)) for name in counts}
    spread = {name: (value,) * counts[name] if isinstance(value, int) else value for name, value in values.items()}
    return cls(**spread, **attributes)
