"""Pooling: the largest or the mean of every window of an image or a sequence."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample, check_reach, make
from ..pointwise.op import GROUP, Array


class Pool(Op, register=False):
    """Shared by both kinds: windows over the last axes of x [N, C, (H,) W]; what is outside of x is in no window.

    padding: before each axis, then after each axis. ceil_mode: the last window may leave the padded input, if it
    starts inside of the input or of the padding before it.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    def infer(self, x: TensorType) -> TensorType:
        axes = x.rank - 2
        if axes not in (1, 2) or x.dtype is not DType.F32 or 0 in x.shape[2:]:
            raise GraphError(f"{self.name}: expected x f32[N, C, (H,) W] with positions, got {x}")
        for name, values, count, least in (
            ("kernel", self.kernel, axes, 1),
            ("stride", self.stride, axes, 1),
            ("dilation", self.dilation, axes, 1),
            ("padding", self.padding, 2 * axes, 0),
        ):
            if len(values) != count or min(values) < least:
                raise GraphError(f"{self.name}: expected {count} numbers >= {least} as {name}, got {list(values)}")
        sizes = tuple(self.windows(axis, size) for axis, size in enumerate(x.shape[2:]))
        for axis, (size, count) in enumerate(zip(x.shape[2:], sizes, strict=True)):
            if not self.all_meet(axis, size, count):
                got = f"kernel {list(self.kernel)}, padding {list(self.padding)}, dilation {list(self.dilation)}"
                raise GraphError(f"{self.name}: expected every window to meet axis {axis + 2} of {x}, got {got}")
        return TensorType((*x.shape[:2], *sizes))

    def all_meet(self, axis: int, size: int, count: int) -> bool:
        """Whether each of `count` windows along a spatial axis has a tap inside the input."""
        kernel, stride, step, before = self.kernel[axis], self.stride[axis], self.dilation[axis], self.padding[axis]
        last_start = (count - 1) * stride - before
        last_tap_of_first = (kernel - 1) * step - before
        if last_start >= size or last_tap_of_first < 0:
            return False
        if step <= size:  # no window can step over the whole input
            return True
        # Left are windows that start before the input. The first tap behind its beginning is at start % step, which takes
        # all its values within step / gcd(stride, step) windows.
        repeats = min(count, step // math.gcd(stride, step))
        starts = range(-before, min(0, repeats * stride - before), stride)
        return all(start % step < size for start in starts)

    def windows(self, axis: int, size: int) -> int:
        """How many windows there are along a spatial axis; raises GraphError where not one fits."""
        before, after = self.padding[axis], self.padding[axis + len(self.kernel)]
        check_reach(self.name, axis, before + size + after)
        room = before + size + after - (self.kernel[axis] - 1) * self.dilation[axis] - 1
        if room < (1 - self.stride[axis] if self.ceil_mode else 0):
            expected = f"a padded size of {before + size + after - room} or more on axis {axis + 2}"
            raise GraphError(f"{self.name}: expected {expected}, got {before + size + after}")
        stride = self.stride[axis]
        count = (-(-room // stride) if self.ceil_mode else room // stride) + 1
        return count - 1 if (count - 1) * stride >= size + before else count

    def coordinates(self, axis: int, count: int) -> Array:
        """[window, tap]: the input's coordinate."""
        starts = np.arange(count) * self.stride[axis] - self.padding[axis]
        return starts[:, None] + np.arange(self.kernel[axis]) * self.dilation[axis]

    def inside(self, axis: int, size: int, count: int) -> Array:
        """[window, tap]: whether it is in the input."""
        at = self.coordinates(axis, count)
        return np.asarray((at >= 0) & (at < size))

    def taps(self, x: Array, fill: float) -> list[Array]:
        """What every window has at each tap; `fill` outside of x."""
        grids = [self.coordinates(axis, self.windows(axis, size)) for axis, size in enumerate(x.shape[2:])]
        found = []
        for tap in itertools.product(*map(range, self.kernel)):
            inside: list[Any] = []
            nearest: list[Any] = []
            for size, grid, t in zip(x.shape[2:], grids, tap, strict=True):
                places = grid[:, t]
                inside.append((places >= 0) & (places < size))
                nearest.append(np.clip(places, 0, size - 1))
            values = x[(slice(None), slice(None), *np.ix_(*nearest))]
            found.append(np.where(functools.reduce(np.logical_and.outer, inside), values, fill))
        return found

    def overrides(self, x: tuple[int, ...], out: tuple[int, ...], divisor: str) -> dict[str, int]:
        """What the kernels of pooling and of its gradient are told about the windows."""
        absent = 2 - len(self.kernel)  # a sequence is an image of one row
        ones, zeros = (1,) * absent, (0,) * absent
        half = len(self.kernel)
        columns = {
            "IN": (*ones, *x[2:]),
            "OUT": (*ones, *out[2:]),
            "KERNEL": (*ones, *self.kernel),
            "STRIDE": (*ones, *self.stride),
            "STEP": (*ones, *self.dilation),
            "BEFORE": (*zeros, *self.padding[:half]),
            **({"AFTER": (*zeros, *self.padding[half:])} if divisor == "kernel" else {}),
        }
        return {f"{name}_{axis}": n for name, pair in columns.items() for axis, n in zip("YX", pair, strict=True)}

    def dispatch(self, k: Lowering, x: Operand, out: Operand, divisor: str) -> None:
        """divisor: "" for the largest, "taps" for the mean of what is in x, "kernel" where the padding counts too."""
        k.dispatch(
            "pool",
            variant={"divisor": divisor, "title": self.name},
            bind={"x": x, "out": out},
            const=self.overrides(x.shape, out.shape, divisor) | {"SIZE": out.size},
            groups=-(-out.size // GROUP),
            label=self.name,
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return cls.cases()

    @classmethod
    def cases(cls, **shared: Any) -> list[Sample]:
        def sample(x: tuple[int, ...], kernel: tuple[int, ...], draw: str = "normal", **attributes: Any) -> Sample:
            axes = len(kernel)
            values = {"stride": 1, "padding": 0, "dilation": 1} | attributes | shared
            counts = {"stride": axes, "padding": 2 * axes, "dilation": axes}
            spread = {n: (v,) * counts[n] if isinstance(v, int) and n in counts else v for n, v in values.items()}
            build: Any = cls
            return Sample(build(kernel, **spread), (TensorType(x),), draw)

        return [
            sample((2, 3, 9, 7), (3, 3), stride=2, padding=1),
            sample((1, 1, 1, 1), (1, 1)),
            sample((2, 3, 8, 9), (2, 3), stride=(2, 3), draw="negative"),
            sample((2, 5, 33), (4,), stride=3, padding=(3, 1)),
            sample((1, 2, 10, 7), (3, 2), dilation=(2, 3), padding=(2, 0, 1, 2), draw="negative"),
            sample((1, 3, 6, 6), (3, 3), stride=2, padding=1, ceil_mode=True, draw="small"),
            sample((1, 2, 5, 5), (2, 2), stride=2, ceil_mode=True),
            sample((1, 1, 3, 4), (2, 2), stride=3, padding=1, ceil_mode=True),
            sample((2, 2, 7, 7), (3, 3), stride=2, draw="special"),
            sample((65, 33, 4), (2,), stride=2),
            sample((0, 3, 4, 4), (2, 2)),
            sample((2, 0, 4, 4), (2, 2)),
        ]


@dataclass(frozen=True)
class MaxPool(Pool):
    """y = the largest of every window; NaN wins, padding never does."""

    tolerance: ClassVar[str] = "exact"
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1)
    ceil_mode: bool = False

    def reference(self, x: Array) -> Array:
        return np.asarray(np.maximum.reduce(self.taps(x, -np.inf)))

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (g.apply(make("max_pool_grad", **vars(self)), dy, x, y),)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        self.dispatch(k, x, out, divisor="")


@dataclass(frozen=True)
class AvgPool(Pool):
    """y = the sum of every window, 0 outside of x, divided by how many of its taps are in x.

    count_include_pad: those in the padding count too.
    """

    tolerance: ClassVar[str] = "sum"
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1)
    ceil_mode: bool = False
    count_include_pad: bool = False

    def counts(self, x: tuple[int, ...]) -> Array:
        """The divisor of every window."""
        total = np.ones((1,) * len(self.kernel))
        for axis, size in enumerate(x[2:]):
            at = self.coordinates(axis, self.windows(axis, size))
            low, high = (-self.padding[axis], size + self.padding[axis + len(self.kernel)])
            inside = (at >= low) & (at < high) if self.count_include_pad else (at >= 0) & (at < size)
            shape = [-1 if axis == other else 1 for other in range(len(self.kernel))]
            total = total * inside.sum(axis=1).reshape(shape)
        return total

    def reference(self, x: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(np.add.reduce(self.taps(x, 0)) / self.counts(x.shape))

    def gradient(self, g: Any, dy: Any, y: Any, x: Any) -> tuple[Any, ...]:
        return (g.apply(make("avg_pool_grad", **vars(self), shape=x.shape), dy),)

    def lower(self, k: Lowering, x: Operand, *, out: Operand) -> None:
        self.dispatch(k, x, out, divisor="kernel" if self.count_include_pad else "taps")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [*cls.cases(), *cls.cases(count_include_pad=True)]
