"""The builder's operators over images and sequences [N, C, (H,) W]: convolution, pooling, enlarging; padding of any."""

from __future__ import annotations

from collections.abc import Sequence

from .arguments import Axes, Sizes
from .builder_ops import Operators
from .errors import GraphError
from .ops.conv.op import Conv, ConvTranspose
from .ops.layout.resample import Pad, Upsample
from .ops.pool.op import AvgPool, MaxPool
from .tensor import Number, Tensor


class ImageOperators(Operators):
    """Sizes are one number for all spatial axes, or one an axis.

    A padding may also have two numbers an axis, all those in front first ((top, left, bottom, right) of an image), or be
    a name: "valid" is none, "same" gives ceil(size / stride) outputs. "same_upper", which "same" stands for as in
    TensorFlow and PyTorch, puts an odd one behind the axis, "same_lower" in front of it.
    """

    def conv(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        """x [N, Ci, (H,) W] with w [Co, Ci / groups, (kH,) kW], which is not flipped, and bias [Co]"""
        axes = spatial_axes("conv", x, w)
        strides, steps = sizes_of("conv stride", stride, axes), sizes_of("conv dilation", dilation, axes)
        around = padding_of("conv", padding, x.shape[2:], w.shape[2:], strides, steps)
        return self._biased(self.apply(Conv(strides, around, steps, groups), x, w), bias)

    def conv_transpose(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        """The gradient of conv: x [N, Ci, (H,) W] with w [Ci, Co / groups, (kH,) kW] and bias [Co]"""
        axes = spatial_axes("conv_transpose", x, w)
        strides = sizes_of("conv_transpose stride", stride, axes)
        steps = sizes_of("conv_transpose dilation", dilation, axes)
        added = sizes_of("conv_transpose output_padding", output_padding, axes)
        around = padding_of("conv_transpose", padding, x.shape[2:], w.shape[2:], strides, steps)
        return self._biased(self.apply(ConvTranspose(strides, around, added, steps, groups), x, w), bias)

    conv1d = conv2d = conv
    conv_transpose1d = conv_transpose2d = conv_transpose

    def max_pool(
        self,
        x: Tensor,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> Tensor:
        """The largest of every window of x [N, C, (H,) W]; stride None: the kernel. NaN wins, padding never"""
        windows, strides, around, steps = pooling("max_pool", x, kernel, stride, padding, dilation)
        return self.apply(MaxPool(windows, strides, around, steps, ceil_mode), x)

    def avg_pool(
        self,
        x: Tensor,
        kernel: Sizes,
        stride: Sizes | None = None,
        padding: Sizes | str = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = False,
    ) -> Tensor:
        """The mean of every window of x [N, C, (H,) W]; stride None: the kernel. Zeros of the padding count if asked"""
        windows, strides, around, steps = pooling("avg_pool", x, kernel, stride, padding, 1)
        return self.apply(AvgPool(windows, strides, around, steps, ceil_mode, count_include_pad), x)

    def global_avg_pool(self, x: Tensor, keepdims: bool = False) -> Tensor:
        """The mean of every channel of x [N, C, ...]: [N, C], or [N, C, 1, ...] with keepdims"""
        return self.mean(x, self._spatial("global_avg_pool", x), keepdims)

    def global_max_pool(self, x: Tensor, keepdims: bool = False) -> Tensor:
        """The largest of every channel of x [N, C, ...]: [N, C], or [N, C, 1, ...] with keepdims"""
        return self.max(x, self._spatial("global_max_pool", x), keepdims)

    def upsample(self, x: Tensor, factor: Sizes = 2) -> Tensor:
        """Every element of x [N, C, ...] repeated along the spatial axes: nearest neighbour"""
        if x.rank < 3:
            raise GraphError(f"upsample: expected [N, C, ...], got {x.type}")
        return self.apply(Upsample((1, 1, *sizes_of("upsample factor", factor, x.rank - 2))), x)

    def upsample_2x(self, x: Tensor) -> Tensor:
        """upsample by 2"""
        return self.upsample(x, 2)

    def pad(
        self,
        x: Tensor,
        widths: Sequence[tuple[int, int]],
        axes: Axes = None,
        mode: str = "constant",
        value: Number | Tensor = 0,
    ) -> Tensor:
        """(in front, behind) for each of `axes` (None: all); mode "constant" (of `value`), "reflect" or "edge".

        Negative widths cut off, with "constant".
        """
        chosen = list(range(x.rank))
        if axes is not None:
            chosen = [self._axis(x, axis) for axis in ([axes] if isinstance(axes, int) else axes)]
        if mode != "constant" and (isinstance(value, Tensor) or value != 0):
            raise GraphError(f"pad: expected a value with mode constant alone, got {value} and mode {mode!r}")
        table = dict(zip(chosen, widths, strict=False))
        if not len(widths) == len(chosen) == len(table):
            raise GraphError(f"pad: expected two widths for each of the axes {chosen}, got {list(widths)}")
        front, behind = (tuple(table.get(axis, (0, 0))[side] for axis in range(x.rank)) for side in (0, 1))
        operands = [self.lift(value, like=x)] if mode == "constant" else []
        return self.apply(Pad(front, behind, mode), x, *operands)

    def _spatial(self, name: str, x: Tensor) -> Sequence[int]:
        if x.rank < 3:
            raise GraphError(f"{name}: expected [N, C, ...], got {x.type}")
        return range(2, x.rank)

    def _biased(self, y: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return y
        if bias.shape != (y.shape[1],):
            raise GraphError(f"bias: expected shape [{y.shape[1]}], got {bias.type}")
        return self.add(y, self.reshape(bias, (y.shape[1], *[1] * (y.rank - 2))))


def spatial_axes(name: str, x: Tensor, w: Tensor) -> int:
    """How many there are; raises GraphError where x and w have no spatial axes in common."""
    if x.rank not in (3, 4) or w.rank != x.rank:
        raise GraphError(f"{name}: expected x [N, C, (H,) W] and weights of the same rank, got {x.type} and {w.type}")
    return x.rank - 2


def sizes_of(subject: str, value: Sizes, count: int) -> tuple[int, ...]:
    """One number an axis."""
    values = (value,) * count if isinstance(value, int) else tuple(value)
    if len(values) != count:
        raise GraphError(f"{subject}: expected one integer or {count}, got {value!r}")
    return values


def pooling(
    name: str, x: Tensor, kernel: Sizes, stride: Sizes | None, padding: Sizes | str, dilation: Sizes
) -> tuple[tuple[int, ...], ...]:
    """kernel, stride, padding and dilation, one number (padding: two) an axis."""
    if x.rank not in (3, 4):
        raise GraphError(f"{name}: expected x [N, C, (H,) W], got {x.type}")
    windows = sizes_of(f"{name} kernel", kernel, x.rank - 2)
    strides = windows if stride is None else sizes_of(f"{name} stride", stride, x.rank - 2)
    steps = sizes_of(f"{name} dilation", dilation, x.rank - 2)
    return windows, strides, padding_of(name, padding, x.shape[2:], windows, strides, steps), steps


def padding_of(
    name: str,
    padding: Sizes | str,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """The padding in front of every axis, then that behind every axis."""
    if not isinstance(padding, str):
        two = isinstance(padding, Sequence) and len(padding) == 2 * len(sizes)
        values = sizes_of(f"{name} padding", padding, (1 + two) * len(sizes))
        return values if two else values * 2
    if padding == "valid":
        return (0,) * (2 * len(sizes))
    if padding not in ("same", "same_upper", "same_lower"):
        raise GraphError(f"{name}: expected padding valid, same, same_upper, same_lower or numbers, got {padding!r}")
    if min(stride) < 1:
        raise GraphError(f"{name}: expected a stride of 1 or more, got {list(stride)}")
    numbers = zip(sizes, kernel, stride, dilation, strict=True)
    totals = [max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, k, s, d in numbers]
    less, more = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return more + less if padding == "same_lower" else less + more
