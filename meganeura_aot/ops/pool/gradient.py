"""The gradients of pooling: every element of the image visits the windows that cover it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import GROUP, Array
from .op import AvgPool, MaxPool


class PoolGrad(Op, register=False):
    """Shared by both kinds: the attributes are those of the pooling."""

    tolerance: ClassVar[str] = "sum"
    forward: ClassVar[Callable[..., Any]]

    def pool(self) -> Any:
        """The operator whose gradient this is."""
        kind = type(self).forward
        return kind(*(getattr(self, field.name) for field in fields(kind)))  # type: ignore[arg-type]

    def taps(self, x: tuple[int, ...], out: tuple[int, ...]) -> Iterator[tuple[Any, Any]]:
        """For every tap, in row-major order: the index of its elements of x, and of the windows that have them."""
        pool = self.pool()
        axes = range(len(pool.kernel))
        at = [pool.coordinates(axis, out[2 + axis]) for axis in axes]
        inside = [pool.inside(axis, x[2 + axis], out[2 + axis]) for axis in axes]
        every = (slice(None), slice(None))
        for tap in itertools.product(*map(range, pool.kernel)):
            windows = [np.flatnonzero(inside[axis][:, t]) for axis, t in enumerate(tap)]
            places = [at[axis][windows[axis], t] for axis, t in enumerate(tap)]
            yield (*every, *np.ix_(*places)), (*every, *np.ix_(*windows))

    def launch(self, k: Lowering, bind: dict[str, Operand], windows: Operand, out: Operand, divisor: str) -> None:
        k.dispatch(
            "pool_grad",
            variant={"divisor": divisor, "title": self.name},
            bind={**bind, "out": out},
            const=self.pool().overrides(out.shape, windows.shape, divisor) | {"SIZE": out.size},
            groups=-(-out.size // GROUP),
            label=self.name,
        )


@dataclass(frozen=True)
class MaxPoolGrad(PoolGrad):
    """dx = the sum of dy over the windows whose largest element is that of x, the first in row-major order; y: the
    pooled x. Of NaNs the first is the largest."""

    forward: ClassVar[Callable[..., Any]] = MaxPool
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1)
    ceil_mode: bool = False

    def infer(self, dy: TensorType, x: TensorType, y: TensorType) -> TensorType:
        if not dy == y == self.pool().infer(x):
            raise GraphError(f"max_pool_grad: expected dy and y like the pooled {x}, got {dy} and {y}")
        return x

    def reference(self, dy: Array, x: Array, y: Array) -> Array:
        dx, found = np.zeros_like(x), np.zeros(y.shape, bool)
        for place, window in self.taps(x.shape, y.shape):
            value, largest = x[place], y[window]
            first = ((value == largest) | (np.isnan(value) & np.isnan(largest))) & ~found[window]
            found[window] |= first
            dx[place] += np.where(first, dy[window], 0)  # the windows of one tap have different elements
        return dx

    def lower(self, k: Lowering, dy: Operand, x: Operand, y: Operand, *, out: Operand) -> None:
        self.launch(k, {"dy": dy, "x": x, "y": y}, y, out, divisor="")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Numbers of which many are equal, in windows too, and y is none of their largest alone."""
        found = []
        for sample in MaxPool.samples():
            (x,) = sample.inputs
            y = sample.op.inferred(x)[0]
            recipe = "special" if sample.draw == "special" else "below 3"
            found.append(Sample(cls(**vars(sample.op)), (y, x, y), ("normal", recipe, recipe)))
        return found


@dataclass(frozen=True)
class AvgPoolGrad(PoolGrad):
    """dx = the sum of dy / (the divisor of the window) over the windows that cover an element. shape: that of x."""

    forward: ClassVar[Callable[..., Any]] = AvgPool
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1)
    ceil_mode: bool = False
    count_include_pad: bool = False
    shape: tuple[int, ...] = ()

    def infer(self, dy: TensorType) -> TensorType:
        x = TensorType(self.shape)
        if dy != self.pool().infer(x):
            raise GraphError(f"avg_pool_grad: expected dy like the pooled {x}, got {dy}")
        return x

    def reference(self, dy: Array) -> Array:
        dx = np.zeros(self.shape, dy.dtype)
        shares = dy / self.pool().counts(self.shape)
        for place, window in self.taps(self.shape, dy.shape):
            dx[place] += shares[window]
        return dx

    def lower(self, k: Lowering, dy: Operand, *, out: Operand) -> None:
        self.launch(k, {"dy": dy}, dy, out, divisor="kernel" if self.count_include_pad else "taps")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        pairs = [(sample, sample.inputs[0]) for sample in AvgPool.samples()]
        return [Sample(cls(**vars(s.op), shape=x.shape), s.op.inferred(x), s.draw) for s, x in pairs]
