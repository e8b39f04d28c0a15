"""Convolutions: awkward channels, groups, tiles and geometry, and what is fused into their store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, Tensor, compile_graph
from meganeura_aot.op import Sample
from meganeura_aot.ops.conv.op import Conv, ConvTranspose
from meganeura_aot.ops.conv.schedule import ENOUGH_GROUPS, choose_kernel
from meganeura_aot.passes import fuse_epilogue
from meganeura_aot.target import find_target
from tests import harness
from tests.test_operators import feeds_of, graph_of
from tests.tolerance import assert_within, conv_bound, pointwise_bound

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

TARGETS = ["webgpu", "cpu"]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def convolve(x: Shape, w: Shape, target: str = "webgpu", twins: bool = True, **attributes: Any) -> dict[str, Array]:
    """Check one convolution of normal numbers."""
    g = Graph()
    g.set_outputs({"y": g.conv(g.input("x", x), g.parameter("w", w), **attributes)})
    return harness.check(g, {"x": normal(*x), "w": normal(*w, seed=1)}, target=target, twins=twins)


def title(graph: Graph, target: str = "webgpu") -> str:
    """The first line of the first kernel."""
    return next(compile_graph(graph, target=target).plan.dispatches()).kernel.text.split("\n")[0]


# ---- channels, groups, sizes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 6, 9, 12])
def test_first_layers(channels: int, target: str) -> None:
    convolve((2, channels, 9, 11), (32, channels, 3, 3), target, padding=1)


@pytest.mark.parametrize("target", TARGETS)
def test_grouped(target: str) -> None:
    convolve((2, 8, 9, 9), (64, 1, 3, 3), target, stride=2, padding=1, groups=8)
    convolve((2, 9, 7, 7), (9, 3, 3, 3), target, padding=1, groups=3)
    convolve((2, 9, 7, 7), (90, 3, 2, 2), target, groups=3)
    convolve((3, 6, 5, 5), (30, 2, 1, 1), target, groups=3)


@pytest.mark.parametrize("multiplier", [1, 2, 3, 10])
@pytest.mark.parametrize("channels", [1, 3, 5, 7, 32])
def test_depthwise(channels: int, multiplier: int) -> None:
    for target, stride in (("webgpu", 1), ("cpu", 2)):
        w = (channels * multiplier, 1, 3, 3)
        convolve((2, channels, 8, 7), w, target, twins=multiplier == 2, stride=stride, padding=1, groups=channels)


def test_ones() -> None:
    g = Graph()
    x, w = g.input("x", (1, 1, 3, 3)), g.constant(np.ones((1, 1, 3, 3)))
    g.set_outputs({"y": g.conv(x, w, padding=1), "z": g.conv(g.input("big", (1, 1, 4, 4)), w)})
    got = harness.check(g, {"x": np.ones((1, 1, 3, 3), np.float32), "big": np.ones((1, 1, 4, 4), np.float32)})
    np.testing.assert_array_equal(got["y"][0, 0], [[4, 6, 4], [6, 9, 6], [4, 6, 4]])
    np.testing.assert_array_equal(got["z"], np.full((1, 1, 2, 2), 9))


@pytest.mark.parametrize("target", TARGETS)
def test_items_of_a_batch_are_alone(target: str) -> None:
    """Columns of several images share a tile: each image must come out as it does alone."""
    x, w = normal(5, 4, 5, 7), normal(33, 4, 3, 3, seed=1)

    def run(images: Array) -> Array:
        g = Graph()
        g.set_outputs({"y": g.conv(g.input("x", images.shape), g.parameter("w", w.shape), padding=1)})
        result: Array = harness.run(compile_graph(g, target=target), {"x": images, "w": w})["y"]
        return result

    together = run(x)
    for index in range(5):
        np.testing.assert_allclose(together[index], run(x[index : index + 1])[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160, 191, 193, 255, 256])
def test_channels_around_tiles(rows: int) -> None:
    convolve((2, 3, 5, 13), (rows, 3, 3, 3), padding=1, twins=rows in (33, 128))


@pytest.mark.parametrize("width", [1, 2, 3, 31, 32, 33, 55, 63, 64, 65, 127, 129, 257])
def test_positions_around_tiles(width: int) -> None:
    for images, rows, target in ((1, 17, "webgpu"), (3, 2, "webgpu"), (2, 5, "cpu")):
        convolve((images, 2, 2, width), (rows, 2, 2, 3), target, twins=width in (1, 55), padding=(0, 1))


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        (129, (127, 130), "128 channels x 128 positions"),
        (64, (200, 170), "64 channels x 128 positions"),
        (65, (91, 91), "64 channels x 64 positions"),
        (20, (200, 171), "32 channels x 128 positions"),
        (32, (129, 128), "32 channels x 64 positions"),
        (5, (256, 257), "sums 5 channels x 4 positions"),
    ],
)
def test_large_tiles(rows: int, size: tuple[int, int], expected: str) -> None:
    g = Graph()
    g.set_outputs({"y": g.conv(g.input("x", (1, 2, *size)), g.parameter("w", (rows, 2, 3, 3)), padding=1)})
    assert expected in title(g)
    harness.check(g, {"x": normal(1, 2, *size), "w": normal(rows, 2, 3, 3)}, twins=False)


def test_sums_in_parts() -> None:
    """Few positions and many terms: parts of the sums are added by a second dispatch, which has the epilogue."""
    for channels, rows, size in ((300, 65, 3), (40, 65, 3), (64, 20, 4), (301, 7, 2)):
        g = Graph()
        x, w = g.input("x", (2, channels, size, size)), g.parameter("w", (rows, channels, 3, 3))
        y = g.conv(x, w, padding=1)
        skip = g.input("skip", y.shape)
        g.set_outputs({"y": g.relu(y + skip)})
        feeds = {"x": normal(*x.shape), "w": normal(*w.shape, seed=1), "skip": normal(*y.shape, seed=2)}
        program = compile_graph(g)
        assert [d.label.split("_")[:2] for d in program.plan.dispatches()] == [["conv", "parts"], ["sum", "parts"]]
        op = Conv(padding=(1, 1, 1, 1))
        harness.check(g, feeds, slack={"y": 2 * conv_bound(op, feeds["x"].astype(float), feeds["w"].astype(float))})


def test_large_indices() -> None:
    """Past 2^24 elements, where a float would miss neighbours."""
    x, w = normal(1, 1, 16_800_001), normal(1, 1, 3, seed=1)
    g = Graph()
    g.set_outputs({"y": g.conv(g.input("x", x.shape), g.parameter("w", w.shape), stride=2)})
    for target in TARGETS:
        got = harness.run(compile_graph(g, target=target), {"x": x, "w": w})["y"][0, 0]
        expected = sum(x[0, 0, t : t + 2 * len(got) - 1 : 2] * w[0, 0, t] for t in range(3))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_more_than_65535_workgroups() -> None:
    """One for each group of channels, in both kernels."""
    for rows in (1, 9):
        x, w = normal(1, 66_000, 2), normal(66_000 * rows, 1, 2, seed=1)
        g = Graph()
        y = g.conv(g.input("x", x.shape), g.parameter("w", w.shape), groups=66_000)
        g.set_outputs({"y": y})
        program = compile_graph(g)
        assert next(program.plan.dispatches()).grid[1] == 2
        got = harness.run(program, {"x": x, "w": w})["y"].reshape(66_000, rows)
        expected = np.einsum("gt,grt->gr", x[0].astype(float), w.reshape(66_000, rows, 2).astype(float))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_one_column_image_has_no_empty_workgroups() -> None:
    """Positions are counted over the whole image, not by rows of it."""
    g = Graph()
    g.set_outputs({"y": g.conv(g.input("x", (1, 80, 3000, 1)), g.parameter("w", (384, 80, 3, 1)), padding=(1, 0))})
    grid = next(compile_graph(g).plan.dispatches()).grid
    assert grid[0] * grid[1] == 6 * 47


@pytest.mark.parametrize("target", TARGETS)
def test_numbers_stay_in_their_windows(target: str) -> None:
    """A NaN spreads to the windows that meet it; what padding and clamped loads stand for spreads nowhere."""
    x, w = np.ones((2, 2, 6, 7), np.float32), np.ones((33, 2, 3, 3), np.float32)
    x[0, 0, 0, 0], x[1, 1, 5, 6] = np.nan, np.inf
    g = Graph()
    g.set_outputs({"y": g.conv(g.input("x", x.shape), g.parameter("w", w.shape), padding=1)})
    got = harness.run(compile_graph(g, target=target), {"x": x, "w": w})["y"]
    assert np.isnan(got[0, :, :2, :2]).all()
    assert (got[1, :, 4:, 5:] == np.inf).all()
    assert np.isfinite(got).sum() == got.size - 33 * (4 + 4)


# ---- the product that a convolution with one tap is


@pytest.mark.parametrize("target", TARGETS)
def test_one_tap_is_a_product(target: str) -> None:
    for images, channels, rows, size in ((3, 5, 7, (4, 5)), (2, 33, 65, (1, 9)), (1, 4, 3, (1, 1))):
        g = Graph()
        x, w = g.input("x", (images, channels, *size)), g.parameter("w", (rows, channels, 1, 1))
        g.set_outputs({"y": g.conv(x, w)})
        assert "C = A B" in title(g, target)
        harness.check(g, {"x": normal(*x.shape), "w": normal(*w.shape, seed=1)}, target=target)


def test_strided_single_tap_is_a_convolution() -> None:
    convolve((2, 5, 7, 9), (20, 5, 1, 1), stride=2)
    convolve((2, 5, 7, 9), (20, 5, 1, 1), padding=1)


@pytest.mark.parametrize("sample", [*Conv.samples(), *ConvTranspose.samples()])
def test_samples_on_software(sample: Sample, request: pytest.FixtureRequest) -> None:
    harness.check(graph_of(sample), feeds_of(sample, request), target="cpu")


# ---- epilogues


def check_epilogue(
    build: Callable[[Graph, Tensor], Tensor], taps: int = 3, dispatches: int = 1, target: str = "webgpu", rows: int = 33
) -> None:
    """conv, then `build`; its slope in the result is below 1.2."""
    g = Graph()
    x, w = g.input("x", (2, 5, 6, 7)), g.parameter("w", (rows, 5, taps, taps))
    g.set_outputs({"y": build(g, g.conv(x, w, padding=taps // 2))})
    ir = g.build()
    feeds = {
        node.op.label: normal(*node.types[0].shape, seed=i)
        for i, node in enumerate(ir.nodes)
        if hasattr(node.op, "label")
    }
    bound = conv_bound(Conv(padding=(taps // 2,) * 4), feeds["x"].astype(float), feeds["w"].astype(float))
    slack = {"y": 1.2 * bound + 2 * pointwise_bound(harness.evaluate(ir, feeds)["y"])}
    rewritten = harness.evaluate(fuse_epilogue(ir, find_target(target)), feeds)["y"]
    np.testing.assert_allclose(rewritten, harness.evaluate(ir, feeds)["y"], rtol=1e-12)
    fused = harness.check(ir, feeds, slack=slack, target=target)
    plain = harness.check(ir, feeds, slack=slack, target=target, optimize=False, twins=False)
    assert_within(fused["y"], plain["y"].astype(float), 2 * slack["y"])
    assert len(compile_graph(ir, target=target).plan.entries[0].dispatches) == dispatches


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("taps", "rows"), [(3, 33), (3, 3), (1, 33), (1, 2)])
def test_epilogue_of_every_kernel(taps: int, rows: int, target: str) -> None:
    """Bias by channel, a residual, a factor by image, a map by position, an activation."""

    def build(g: Graph, y: Tensor) -> Tensor:
        y = y + g.reshape(g.parameter("bias", (rows,)), (rows, 1, 1)) + g.input("skip", y.shape)
        y = g.tanh(y * g.sigmoid(g.input("gate", (2, 1, 1, 1)))) + g.input("map", (6, 7))
        return g.relu(y) + g.input("scale", (2, rows, 1, 1))

    check_epilogue(build, taps, dispatches=2, target=target, rows=rows)  # the gate has a dispatch of its own


@pytest.mark.parametrize("shape", [(), (1,), (7,), (6, 7), (33, 1, 1), (33, 6, 7), (2, 1, 1, 1), (2, 1, 6, 7)])
def test_epilogue_shapes(shape: Shape) -> None:
    check_epilogue(lambda g, y: y + g.input("d", shape), dispatches=2 if shape == (7,) else 1)


def test_epilogue_without_an_index_is_not_fused() -> None:
    check_epilogue(lambda g, y: y + g.input("d", (6, 1)), dispatches=2)


def test_bias_is_fused() -> None:
    g = Graph()
    x, w, b = g.input("x", (2, 3, 5, 5)), g.parameter("w", (4, 3, 3, 3)), g.parameter("b", (4,))
    g.set_outputs({"y": g.relu(g.conv(x, w, b, padding=1))})
    assert [d.label for d in compile_graph(g).plan.dispatches()] == ["conv_add_relu"]


def test_epilogue_stops_at_eight_buffers() -> None:
    def build(g: Graph, y: Tensor) -> Tensor:
        for index in range(6):
            y = y + g.input(f"d{index}", y.shape)
        return y

    check_epilogue(build, dispatches=2)


def test_one_tensor_as_image_and_kernel() -> None:
    g = Graph()
    x = g.input("x", (3, 3, 3, 3))
    g.set_outputs({"y": g.conv(x, x, padding=1) + x})
    value = normal(3, 3, 3, 3)
    bound = conv_bound(Conv(padding=(1,) * 4), value.astype(float), value.astype(float))
    harness.check(g, {"x": value}, slack={"y": bound * 2})


# ---- geometry


@pytest.mark.parametrize("size", [5, 6, 7, 8])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (2, 1, 1), (3, 2, 1), (1, 3, 1), (4, 3, 2)])
def test_same_padding(size: int, kernel: int, stride: int, dilation: int) -> None:
    """ceil(size / stride) outputs; the odd one is behind for "same" and "same_upper", in front for "same_lower"."""
    g = Graph()
    x, w = g.input("x", (1, 1, size)), g.parameter("w", (1, 1, kernel))
    count = -(-size // stride)
    total = max((count - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    sides = {"same": (total // 2, total - total // 2), "same_lower": (total - total // 2, total // 2)}
    sides["same_upper"] = sides["same"]
    for mode, around in sides.items():
        y = g.conv(x, w, None, stride, mode, dilation)
        assert y.shape == (1, 1, count)
        node = g._nodes[y.value.node].op
        assert isinstance(node, Conv)
        assert node.padding == around


def test_choice_is_by_shape() -> None:
    assert choose_kernel(64, 3136, 576, 1, "cpu").template == "conv_direct"
    assert choose_kernel(4, 100_000, 576, 1, "webgpu").template == "conv_direct"
    assert choose_kernel(4, 64, 576, 1, "webgpu").parts == 4
    assert choose_kernel(4, 64, 36, 32, "webgpu").template == "conv_direct"
    assert choose_kernel(64, 25088, 576, 1, "native").variant["tile_m"] == 64
    resnet = choose_kernel(512, 49, 4608, 1, "webgpu")
    assert resnet.groups >= ENOUGH_GROUPS > resnet.groups // resnet.parts
    assert resnet.constants["PART_TERMS"] * (resnet.parts - 1) < 4608 <= resnet.constants["PART_TERMS"] * resnet.parts
    assert choose_kernel(512, 49, 4608, 1, "webgpu", whole=False).parts == 1
    assert choose_kernel(64, 49, 0, 1, "webgpu").template == "conv_direct"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g, x, w: g.conv(x, w), "padded size of 3 or more on axis 2 of f32.1, 4, 2, 5., got 2"),
        (lambda g, x, w: g.conv(x, w, padding=1, dilation=2), "padded size of 5 or more on axis 2"),
        (lambda g, x, w: g.conv(x, w, padding=1, groups=2), "expected 8 input channels, got 4"),
        (lambda g, x, w: g.conv(x, w, padding=1, groups=4), "4 groups divide"),
        (lambda g, x, w: g.conv(x, w, padding=1, groups=0), "groups > 0"),
        (lambda g, x, w: g.conv(x, w, padding=1, stride=0), "2 numbers >= 1 as stride, got .0, 0."),
        (lambda g, x, w: g.conv(x, w, padding=-1), "4 numbers >= 0 as padding"),
        (lambda g, x, w: g.conv(x, w, padding=(1, 2, 3)), "padding: expected one integer or 2"),
        (lambda g, x, w: g.conv(x, w, stride=1.5), "stride"),
        (lambda g, x, w: g.conv(x, w, padding="full"), "expected padding valid, same"),
        (lambda g, x, w: g.conv(x, w, w, padding=1), r"bias: expected shape \[6\]"),
        (lambda g, x, w: g.conv(x[0], w), "weights of the same rank"),
        (lambda g, x, w: g.conv(x[0, 0], w[0, 0]), "weights of the same rank"),
        (lambda g, x, w: g.conv(x[:, :, :0], w, padding=2), "one position or more"),
        (lambda g, x, w: g.conv(x, w[:, :, :0], padding=2), "taps"),
        (lambda g, x, w: g.conv(g.cast(x, "i32"), w, padding=1), "f32"),
        (lambda g, x, w: g.conv_transpose(x, w), "expected 6 input channels, got 4"),
        (lambda g, x, w: g.conv_transpose(x, w[:4], output_padding=1), "output_padding below"),
        (lambda g, x, w: g.conv_transpose(x, w[:4], padding=3), "output of size 1 or more, got .-2, 1."),
        (
            lambda g, x, w: g.conv_transpose(x, w[:4], padding="same"),
            "expected an integer or a sequence of integers as padding",
        ),
    ],
)
def test_impossible_geometry(build: Callable[..., Tensor], message: str) -> None:
    g = Graph()
    x, w = g.input("x", (1, 4, 2, 5)), g.parameter("w", (6, 4, 3, 3))
    with pytest.raises(GraphError, match=message):
        build(g, x, w)
