"""Convolution, pooling, padding and enlarging give PyTorch's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from tests import harness

pytestmark = pytest.mark.parity

Array = np.ndarray[Any, Any]

# x, w, attributes in PyTorch's names
CONV: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9, 11), (8, 3, 3, 3), {"padding": 1}),
    ((2, 8, 9, 9), (64, 1, 3, 3), {"padding": 1, "stride": 2, "groups": 8}),
    ((1, 9, 7, 55), (9, 3, 5, 2), {"padding": (2, 1), "dilation": (2, 3), "groups": 3}),
    ((3, 5, 4, 6), (7, 5, 1, 1), {}),
    ((3, 6, 4, 6), (8, 3, 1, 1), {"stride": 2, "groups": 2}),
    ((1, 3, 16, 15), (20, 3, 7, 7), {"padding": 3, "stride": 2}),
    ((2, 4, 6, 7), (5, 4, 2, 4), {"padding": "same"}),
    ((2, 4, 6, 7), (5, 4, 2, 3), {"padding": "same", "dilation": (1, 2)}),
    ((2, 4, 6, 7), (5, 4, 2, 3), {"padding": "valid"}),
    ((2, 7, 33), (17, 7, 5), {"padding": 2, "stride": 2}),
    ((1, 80, 30), (40, 80, 3), {"padding": 1}),
    ((2, 6, 20), (6, 1, 4), {"groups": 6, "dilation": 3, "padding": "same"}),
]
TRANSPOSED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 5, 4, 6), (5, 8, 3, 3), {"padding": 1, "stride": 2, "output_padding": 1}),
    ((1, 6, 5, 4), (6, 4, 2, 2), {"stride": 2}),
    ((2, 6, 5, 4), (6, 4, 4, 4), {"stride": 2, "padding": 1, "groups": 2}),
    ((2, 3, 5, 7), (3, 12, 3, 5), {"padding": (1, 2)}),
    ((2, 4, 6, 5), (4, 10, 3, 2), {"stride": (2, 3), "dilation": (4, 2), "output_padding": (3, 0)}),
    ((2, 3, 5, 7), (3, 7, 1, 1), {}),
    ((2, 7, 33), (7, 17, 8), {"stride": 4, "padding": 2}),
    ((1, 5, 9), (5, 3, 3), {"stride": 3, "output_padding": 2, "dilation": 2}),
    ((2, 4, 9), (4, 1, 3), {"groups": 4}),
]
IMAGES = [(2, 3, 9, 7), (1, 2, 8, 8), (3, 1, 13, 6)]

POOLS: dict[str, tuple[Callable[[Graph, Tensor], Tensor], Callable[[Any, Any], Any]]] = {
    "max": (lambda g, x: g.max_pool(x, 3, 2, 1), lambda f, x: f.max_pool2d(x, 3, 2, 1)),
    "max_uneven": (lambda g, x: g.max_pool(x, (2, 3)), lambda f, x: f.max_pool2d(x, (2, 3))),
    "max_dilated": (
        lambda g, x: g.max_pool(x, (3, 2), 1, (1, 0), (2, 3)),
        lambda f, x: f.max_pool2d(x, (3, 2), 1, (1, 0), (2, 3)),
    ),
    "max_ceil": (
        lambda g, x: g.max_pool(x, 3, 2, 1, ceil_mode=True),
        lambda f, x: f.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    ),
    "max_ceil_far": (
        lambda g, x: g.max_pool(x, 2, 4, 1, ceil_mode=True),
        lambda f, x: f.max_pool2d(x, 2, 4, 1, ceil_mode=True),
    ),
    "avg": (
        lambda g, x: g.avg_pool(x, 3, 2, 1, count_include_pad=True),
        lambda f, x: f.avg_pool2d(x, 3, 2, 1),
    ),
    "avg_exclude": (
        lambda g, x: g.avg_pool(x, (3, 2), (2, 1), 1),
        lambda f, x: f.avg_pool2d(x, (3, 2), (2, 1), 1, count_include_pad=False),
    ),
    "avg_ceil": (
        lambda g, x: g.avg_pool(x, 3, 2, 1, ceil_mode=True, count_include_pad=True),
        lambda f, x: f.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    ),
    "avg_ceil_exclude": (
        lambda g, x: g.avg_pool(x, 4, 3, 2, ceil_mode=True),
        lambda f, x: f.avg_pool2d(x, 4, 3, 2, ceil_mode=True, count_include_pad=False),
    ),
    "max_1d": (lambda g, x: g.max_pool(x[:, :, 0], 2, 1, 1), lambda f, x: f.max_pool1d(x[:, :, 0], 2, 1, 1)),
    "avg_1d": (lambda g, x: g.avg_pool(x[:, :, 0], 3), lambda f, x: f.avg_pool1d(x[:, :, 0], 3)),
    "global_avg": (lambda g, x: g.global_avg_pool(x, True), lambda f, x: f.adaptive_avg_pool2d(x, 1)),
    "global_max": (lambda g, x: g.global_max_pool(x, True), lambda f, x: f.adaptive_max_pool2d(x, 1)),
    "upsample": (lambda g, x: g.upsample_2x(x), lambda f, x: f.interpolate(x, scale_factor=2, mode="nearest")),
    "upsample_uneven": (
        lambda g, x: g.upsample(x, (3, 4)),
        lambda f, x: f.interpolate(x, scale_factor=(3, 4), mode="nearest"),
    ),
    "pad": (lambda g, x: g.pad(x, [(1, 2), (3, 0)], [2, 3], value=0.5), lambda f, x: f.pad(x, (3, 0, 1, 2), value=0.5)),
    "pad_cut": (lambda g, x: g.pad(x, [(-1, 2), (3, -2)], [2, 3]), lambda f, x: f.pad(x, (3, -2, -1, 2))),
    "pad_reflect": (
        lambda g, x: g.pad(x, [(2, 5), (3, 1)], [2, 3], "reflect"),
        lambda f, x: f.pad(x, (3, 1, 2, 5), mode="reflect"),
    ),
    "pad_edge": (
        lambda g, x: g.pad(x, [(2, 20), (3, 1)], [2, 3], "edge"),
        lambda f, x: f.pad(x, (3, 1, 2, 20), mode="replicate"),
    ),
}


def compare(got: Array, expected: Any) -> None:
    assert got.shape == tuple(expected.shape)
    reference = expected.numpy()
    np.testing.assert_allclose(got, reference, rtol=2e-5, atol=2e-6 * max(1, np.abs(reference).max()))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", range(max(len(CONV), len(TRANSPOSED))))
def test_convolution(case: int, transposed: bool) -> None:
    torch = pytest.importorskip("torch")
    cases = TRANSPOSED if transposed else CONV
    x_shape, w_shape, attributes = cases[case % len(cases)]
    rng = np.random.default_rng(case)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in (x_shape, w_shape))
    bias = rng.normal(size=w_shape[1] * attributes.get("groups", 1) if transposed else w_shape[0]).astype(np.float32)
    g = Graph()
    ours = g.conv_transpose if transposed else g.conv
    operands = (g.input("x", x_shape), g.parameter("w", w_shape), g.parameter("b", bias.shape))
    g.set_outputs({"y": g.relu(ours(*operands, **attributes))})
    axes = len(x_shape) - 2
    name = f"conv_transpose{axes}d" if transposed else f"conv{axes}d"
    tensors = [torch.from_numpy(array).double() for array in (x, w, bias)]
    expected = torch.relu(getattr(torch.nn.functional, name)(*tensors, **attributes))
    compare(harness.run(harness.compile_graph(g), {"x": x, "w": w, "b": bias})["y"], expected)


@pytest.mark.parametrize("shape", IMAGES, ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_pool(name: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = POOLS[name]
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    g = Graph()
    g.set_outputs({"y": ours(g, g.input("x", shape))})
    got = harness.run(harness.compile_graph(g), {"x": x})["y"]
    compare(got, theirs(torch.nn.functional, torch.from_numpy(x).double()))
