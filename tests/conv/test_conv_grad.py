"""Gradients of convolutions: sizes that come back exactly, groups, tiles around their edges, and sums in parts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from meganeura_aot.graph import TensorType
from meganeura_aot.op import Sample
from meganeura_aot.ops.conv.gradient import ENOUGH_THREADS, TILES, ConvGradWeight, choose_kernel
from meganeura_aot.ops.conv.op import Conv, ConvOp, ConvTranspose, conv_of
from tests import harness
from tests.gradients import assert_finite_differences, assert_kernels, gradients_of, loss_graph, weights_for
from tests.test_operators import graph_of

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

TARGETS = ["webgpu", "cpu"]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def case(cls: type[ConvOp], x: Shape, w: Shape, **attributes: Any) -> tuple[Sample, dict[str, Array]]:
    """A convolution in the middle of a graph, and numbers for it."""
    sample = Sample(conv_of(cls, len(x) - 2, **attributes), (TensorType(x), TensorType(w)))
    return sample, {"x0": normal(*x), "x1": normal(*w, seed=1)} | weights_for(sample, np.random.default_rng(2))


def check_both(sample: Sample, feeds: dict[str, Array], target: str = "webgpu") -> None:
    assert_finite_differences(loss_graph(sample), feeds)
    assert_kernels(loss_graph(sample), feeds, target=target)


def grad_weight(dy: Shape, x: Shape, target: str = "webgpu", twins: bool = True, **attributes: Any) -> str:
    """Check one gradient of weights of normal numbers; the first line of its kernel."""
    op = ConvGradWeight(**attributes)
    graph = graph_of(Sample(op, (TensorType(dy), TensorType(x))))
    harness.check(graph, {"x0": normal(*dy), "x1": normal(*x, seed=1)}, target=target, twins=twins)
    return next(compile_graph(graph, target=target).plan.dispatches()).kernel.text.split("\n")[0]


# ---- geometry


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (5, 1), (5, 2)])
def test_kernel_and_padding(kernel: int, padding: int, stride: int) -> None:
    """Also where twice the padding is not the kernel less one."""
    width = 54 * stride + kernel - 2 * padding + (stride - 1)  # oW is 55, and something is left over
    sample, feeds = case(Conv, (2, 3, 7, width), (4, 3, kernel, kernel), stride=stride, padding=padding)
    assert sample.op.inferred(*sample.inputs)[0].shape[-1] == 55
    check_both(sample, feeds, "cpu" if kernel == 2 else "webgpu")


def test_depthwise_of_stride_2() -> None:
    """A group a channel, 4 x 4 images, 3 taps, padding 1: every target."""
    sample, feeds = case(Conv, (2, 4, 4, 4), (4, 1, 3, 3), stride=2, padding=1, groups=4)
    for target in TARGETS:
        check_both(sample, feeds, target)


@pytest.mark.parametrize("target", TARGETS)
def test_one_tap_of_many_positions_and_images(target: str) -> None:
    for images, size, groups in ((3, (4, 5), 1), (2, (7, 3), 2)):
        sample, feeds = case(Conv, (images, 6, *size), (10, 6 // groups, 1, 1), groups=groups)
        check_both(sample, feeds, target)


def test_sizes_come_back_exactly() -> None:
    """Also where the padding is wider than the window, the stride than the kernel, or positions are left over."""
    for size, kernel, stride, dilation, before, after in itertools.product(
        (1, 4, 7), (1, 3), (1, 2, 4), (1, 3), (0, 1, 5), (0, 2)
    ):
        if size + before + after < (kernel - 1) * dilation + 1:
            continue
        attributes = {"stride": stride, "dilation": dilation, "padding": (before, after)}
        sample, feeds = case(Conv, (1, 2, size), (3, 2, kernel), **attributes)
        assert_finite_differences(loss_graph(sample), feeds)


def test_sizes_of_transposes_come_back_exactly() -> None:
    """Also where the output_padding is over the stride, as the dilation allows."""
    for size, kernel, stride, dilation, padding in itertools.product((1, 5), (1, 3), (1, 2, 3), (1, 5), (0, 1)):
        for added in range(max(stride, dilation)):
            if (size - 1) * stride + (kernel - 1) * dilation + 1 + added - padding < 1:
                continue
            attributes = {"stride": stride, "dilation": dilation, "padding": (padding, 0), "output_padding": added}
            sample, feeds = case(ConvTranspose, (1, 3, size), (3, 2, kernel), **attributes)
            assert_finite_differences(loss_graph(sample), feeds)


@pytest.mark.parametrize("target", TARGETS)
def test_wide_padding_and_output_padding(target: str) -> None:
    cases: list[tuple[type[ConvOp], Shape, Shape, dict[str, Any]]] = [
        (Conv, (2, 3, 4, 5), (5, 3, 1, 2), {"padding": (3, 2, 0, 4), "stride": (2, 3)}),
        (Conv, (2, 4, 9), (6, 2, 3), {"padding": (5, 1), "dilation": 3, "groups": 2}),
        (ConvTranspose, (2, 3, 4, 5), (3, 5, 3, 2), {"dilation": (4, 3), "stride": (2, 1), "output_padding": (3, 2)}),
        (ConvTranspose, (2, 4, 6), (4, 3, 4), {"stride": 2, "padding": (1, 2), "groups": 2}),
    ]
    for cls, x, w, attributes in cases:
        check_both(*case(cls, x, w, **attributes), target)


# ---- the kernels of weights


@pytest.mark.parametrize("groups", [1, 3, 32])
@pytest.mark.parametrize("multiplier", [1, 2, 5])
def test_depthwise(groups: int, multiplier: int) -> None:
    for target, stride, size in (("webgpu", 1, 7), ("cpu", 2, 4), ("webgpu", 2, 4)):
        dy, x = (2, groups * multiplier, size, size), (2, groups, 7, 7)
        grad_weight(dy, x, target, kernel=(3, 3), stride=(stride, stride), before=(1, 1), groups=groups)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 8, 9, 12, 13])
@pytest.mark.parametrize("target", TARGETS)
def test_few_rows_or_columns(channels: int, target: str) -> None:
    grad_weight((2, channels, 7, 5), (2, 7, 7, 5), target, kernel=(3, 3), before=(1, 1))
    grad_weight((2, 21, 7, 5), (2, channels, 7, 5), target, twins=False, kernel=(1, 1))
    one_axis = {"kernel": (5,), "stride": (1,), "before": (2,), "dilation": (1,), "groups": 2}
    grad_weight((2, channels * 2, 15), (2, channels * 2, 15), target, twins=False, **one_axis)


@pytest.mark.parametrize(
    ("rows", "channels", "expected"),
    [
        (128, 128, "128 channels x 128"),
        (255, 14, "128 channels x 128"),
        (64, 14, "64 channels x 128"),
        (57, 28, "64 channels x 128"),
        (64, 7, "64 channels x 64"),
        (50, 7, "64 channels x 64"),
        (32, 7, "32 channels x 64"),
        (31, 14, "32 channels x 64"),
        (96, 1, "32 channels x 32"),
        (17, 3, "32 channels x 32"),
    ],
)
@pytest.mark.parametrize("size", [(4, 8), (5, 7)])
def test_tiles(rows: int, channels: int, size: tuple[int, int], expected: str) -> None:
    """Every tile, with and without edges of each kind."""
    x = (2, channels, *size) if channels > 1 else (2, 32, *size)
    kernel, before = ((3, 3), (1, 1)) if channels > 1 else ((1, 1), (0, 0))
    assert expected in grad_weight((2, rows, *size), x, kernel=kernel, before=before)


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("size", [(16, 16), (15, 19), (37, 41)])
@pytest.mark.parametrize("rows", [4, 40])
def test_sums_in_parts(rows: int, size: tuple[int, int], images: int) -> None:
    """Few sums and many terms, the last part shorter: added in a fixed order by a second dispatch."""
    for target in TARGETS:
        dy, x = (images, rows, *size), (images, 5, *size)
        title = grad_weight(dy, x, target, kernel=(3, 3), before=(1, 1), twins=target == "webgpu")
        assert target == "cpu" or ("threads divide" in title) == (rows == 4)
    two_groups = (images, 2 * rows, *size), (images, 10, *size)
    grad_weight(*two_groups, twins=False, kernel=(3, 3), before=(1, 1), groups=2)
    op = ConvGradWeight((3, 3), before=(1, 1))
    program = compile_graph(graph_of(Sample(op, (TensorType(dy), TensorType(x)))))
    assert [d.label for d in program.plan.dispatches()][:2] == ["conv_grad_weight_parts", "sum_parts"]
    runner = harness.load(program)
    feeds = harness.feeds_of(runner, {"x0": normal(*dy), "x1": normal(*x)})
    first = runner.run(**feeds)
    for _ in range(19):
        harness.assert_same(first, runner.run(**feeds), "in a replay")


def test_large_blocks_of_a_software_adapter() -> None:
    title = grad_weight((2, 30, 60, 60), (2, 12, 60, 60), "cpu", kernel=(3, 3), before=(1, 1))
    assert "16 channels x 9" in title


def test_nan_stays_visible() -> None:
    """In the channel of dy, or of x, that has it; not in others."""
    dy, x = normal(2, 40, 6, 6), normal(2, 8, 6, 6, seed=1)
    graph = graph_of(Sample(ConvGradWeight((3, 3), before=(1, 1)), (TensorType(dy.shape), TensorType(x.shape))))
    dy[1, 33, 5, 5], x[0, 2, 3, 3] = np.nan, np.nan
    for target in TARGETS:
        got = harness.run(compile_graph(graph, target=target), {"x0": dy, "x1": x})["y0"]
        expected = np.zeros(got.shape, bool)
        expected[33] = expected[:, 2] = True
        np.testing.assert_array_equal(np.isnan(got), expected)


def test_what_nothing_needs_is_not_computed() -> None:
    """The input of a first layer gets no gradient, and weights that are frozen get none."""
    g = Graph()
    x, frozen = g.input("x", (1, 3, 8, 8)), g.parameter("frozen", (4, 4, 3, 3), trainable=False)
    y = g.conv(g.relu(g.conv(x, g.parameter("w", (4, 3, 3, 3)), g.parameter("b", (4,)))), frozen)
    g.set_outputs({"loss": g.sum(y)})
    graph = gradients_of(g.build())
    assert [name for name, _ in graph.outputs] == ["grad.w", "grad.b"]
    labels = [d.label for d in compile_graph(graph).plan.dispatches()]
    assert sum("conv_transpose" in label for label in labels) == 1
    assert sum("conv_grad_weight" in label for label in labels) == 1


# ---- the choice


@pytest.mark.parametrize("target", TARGETS)
def test_parts_have_every_term_once(target: str) -> None:
    for rows, columns, terms, groups in itertools.product(
        (1, 5, 64, 512), (1, 9, 576), (1, 127, 1000, 401408), (1, 32)
    ):
        choice = choose_kernel(rows, columns, terms, groups, target)
        length = choice.constants.get("PART_TERMS", terms)
        assert (choice.parts - 1) * length < terms <= choice.parts * length
        assert choice.groups % choice.parts == 0
        step = choice.variant.get("tile_k", choice.variant.get("lanes", 1))
        assert choice.parts == 1 or length % step == 0


def test_memory_and_threads_of_a_workgroup() -> None:
    for tile in TILES:
        assert tile.threads <= 256
        assert tile.threads % tile.k == 0
        assert tile.k * (tile.m + tile.n + 8) * 4 <= 16384
        assert tile.k * tile.m % (4 * tile.threads) == 0
        assert tile.k * tile.n % (4 * tile.threads) == 0
    for rows, columns, terms, target in itertools.product(range(1, 20), range(1, 80), (1000, 1000000), TARGETS):
        variant = choose_kernel(rows, columns, terms, 1, target).variant
        if "lanes" in variant:
            assert variant["lanes"] * variant["rows"] * variant["cols"] * 4 <= 16384
            assert variant["rows"] <= rows
            assert variant["cols"] <= columns


@pytest.mark.parametrize(
    ("channels", "kernel", "images", "size", "groups", "expected"),
    [
        ((64, 3), 7, 32, 112, 1, "conv_grad_weight"),  # the layers of a ResNet
        ((64, 64), 3, 32, 56, 1, "conv_grad_weight"),
        ((512, 512), 3, 32, 7, 1, "conv_grad_weight"),
        ((256, 64), 1, 32, 56, 1, "conv_grad_weight"),
        ((32, 32), 3, 32, 112, 32, "conv_grad_weight_dot"),  # depthwise
        ((960, 960), 3, 32, 7, 960, "conv_grad_weight_dot"),
    ],
)
def test_layers_fill_a_gpu(
    channels: tuple[int, int], kernel: int, images: int, size: int, groups: int, expected: str
) -> None:
    rows, columns = channels[0] // groups, channels[1] // groups * kernel**2
    choice = choose_kernel(rows, columns, images * size * size, groups, "webgpu")
    assert choice.template == expected
    threads = choice.variant.get("threads", choice.variant.get("lanes", 0)) * choice.groups
    assert threads >= ENOUGH_THREADS // 2
    assert choice.parts * rows * columns * groups * 4 <= 64 << 20  # bytes of the parts
