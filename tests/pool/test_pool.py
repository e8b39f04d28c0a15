"""Pooling, padding and enlarging: what is outside of a tensor, and what is at its edges."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, Tensor, compile_graph
from meganeura_aot.ops.layout.resample import Pad, Upsample
from meganeura_aot.ops.pool.op import MaxPool
from tests import harness

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def result(build: Callable[[Graph, Tensor], Tensor], x: Array, target: str = "webgpu") -> Array:
    """Compile `build` of one input, check it against the reference, and return what it gives."""
    g = Graph()
    g.set_outputs({"y": build(g, g.input("x", x.shape, "f32" if x.dtype.kind == "f" else "i32"))})
    return harness.check(g, {"x": x}, target=target)["y"]


# ---- pooling


def test_padding_never_wins() -> None:
    for low in (-1e30, -np.inf):
        got = result(lambda g, x: g.max_pool(x, 3, stride=1, padding=1), np.full((1, 2, 4, 5), low, np.float32))
        np.testing.assert_array_equal(got, np.full((1, 2, 4, 5), low, np.float32))


def test_nan_wins_in_its_windows_alone() -> None:
    x = normal(1, 1, 5, 5)
    x[0, 0, 2, 2] = np.nan
    got = result(lambda g, x: g.max_pool(x, 2, stride=1), x)[0, 0]
    assert np.isnan(got[1:3, 1:3]).all()
    assert np.isfinite(got).sum() == 12
    assert np.isnan(result(lambda g, x: g.avg_pool(x, 2, stride=1), x)).sum() == 4


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "floor", "ceil"),
    [
        (5, 2, 2, 0, 2, 3),
        (6, 3, 2, 0, 2, 3),
        (6, 3, 2, 1, 3, 4),
        (3, 2, 3, 1, 2, 2),
        (4, 2, 2, 1, 3, 3),
        (7, 3, 3, 1, 3, 3),
    ],
)
def test_window_counts(size: int, kernel: int, stride: int, padding: int, floor: int, ceil: int) -> None:
    """A last window that would start in the padding behind is left out."""
    x = normal(1, 1, size)
    assert result(lambda g, x: g.max_pool(x, kernel, stride, padding), x).shape[2] == floor
    assert result(lambda g, x: g.max_pool(x, kernel, stride, padding, ceil_mode=True), x).shape[2] == ceil
    assert result(lambda g, x: g.avg_pool(x, kernel, stride, padding, ceil_mode=True), x).shape[2] == ceil


def test_divisors() -> None:
    """Corner 4, edge 6, centre 9 where only x counts; 9 everywhere where the padding counts too."""
    x = np.ones((1, 1, 3, 3), np.float32)
    np.testing.assert_array_equal(result(lambda g, x: g.avg_pool(x, 3, 1, 1), x), x)
    got = result(lambda g, x: g.avg_pool(x, 3, 1, 1, count_include_pad=True), x)[0, 0] * 9
    np.testing.assert_allclose(got, [[4, 6, 4], [6, 9, 6], [4, 6, 4]], rtol=1e-6)
    # the last window of ceil_mode has one element of x and nothing of the padding
    got = result(lambda g, x: g.avg_pool(x, 2, 2, ceil_mode=True, count_include_pad=True), x)
    np.testing.assert_array_equal(got, np.ones((1, 1, 2, 2)))


def test_same_padding_and_default_stride() -> None:
    x = normal(2, 3, 7, 8)
    assert result(lambda g, x: g.max_pool(x, 3, 2, "same"), x).shape == (2, 3, 4, 4)
    assert result(lambda g, x: g.avg_pool(x, (3, 2), 1, "same_lower"), x).shape == (2, 3, 7, 8)
    assert result(lambda g, x: g.max_pool(x, (3, 2)), x).shape == (2, 3, 2, 4)


@pytest.mark.parametrize("size", [1, 2, 31, 33, 63, 65, 255, 257])
def test_sizes(size: int) -> None:
    x = normal(2, 3, size, 2)
    result(lambda g, x: g.max_pool(x, (2, 3), 1, 1), x)
    result(lambda g, x: g.avg_pool(x, (3, 2), (2, 1), (1, 1)), x, "cpu")
    result(lambda g, x: g.upsample(x, (3, 2)), x)
    result(lambda g, x: g.pad(x, [(2, 300), (1, 1)], [2, 3], "edge"), x)


def test_global_pools() -> None:
    x = normal(2, 5, 7, 9)
    np.testing.assert_allclose(result(lambda g, x: g.global_avg_pool(x), x), x.mean((2, 3)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(
        result(lambda g, x: g.global_max_pool(x, keepdims=True), x), x.max((2, 3), keepdims=True)
    )
    np.testing.assert_array_equal(result(lambda g, x: g.global_max_pool(x), x[:, :, 0]), x[:, :, 0].max(2))


def test_many_outputs() -> None:
    """More than 65 535 workgroups."""
    g = Graph()
    x = g.input("x", (1, 1, 16_777_300))
    g.set_outputs(
        {"y": g.max_pool(x, 2, 1), "u": g.upsample(x[:, :, :8_400_000]), "p": g.pad(x, [(0, 0), (0, 0), (1, 0)])}
    )
    value = normal(1, 1, 16_777_300)
    got = harness.run(compile_graph(g), {"x": value})
    np.testing.assert_array_equal(got["y"], np.maximum(value[..., 1:], value[..., :-1]))
    np.testing.assert_array_equal(got["u"], np.repeat(value[..., :8_400_000], 2, 2))
    np.testing.assert_array_equal(got["p"][..., 1:], value)


# ---- gradients that are other operators


@pytest.mark.parametrize("op", [Upsample((1, 3, 2)), Pad((0, -1, 2), (1, -1, 3))])
def test_gradient_is_the_adjoint(op: Upsample | Pad) -> None:
    """<f(x), dy> = <x, f'(dy)> for what is linear in x."""
    x = normal(2, 5, 3).astype(float)
    y = op.reference(x, *[0.0] * isinstance(op, Pad))
    dy = normal(*y.shape, seed=1)
    g = Graph()
    upstream, x_value = g.input("dy", dy.shape), g.input("x", x.shape)
    dx, *rest = op.gradient(g, upstream, None, x_value)
    g.set_outputs({"dx": dx, **({"dvalue": rest[0]} if rest else {})})
    got = harness.run(compile_graph(g), {"dy": dy, "x": x.astype(np.float32)})
    np.testing.assert_allclose((got["dx"] * x).sum(), (y * dy).sum(), rtol=1e-5)
    if rest:
        padding = op.reference(np.zeros_like(x), 1.0)
        np.testing.assert_allclose(got["dvalue"], (padding * dy).sum(), rtol=1e-4)


# ---- padding


@pytest.mark.parametrize("value", [0, 1.5, -0.0, np.inf, -np.inf, np.nan, 1e-45])
def test_pad_values(value: float) -> None:
    got = result(lambda g, x: g.pad(x, [(1, 2), (0, 1)], value=value), normal(2, 3))
    assert got.shape == (5, 4)
    np.testing.assert_array_equal(got[0].view(np.uint32), np.full(4, value, np.float32).view(np.uint32))


def test_pad_by_a_tensor() -> None:
    g = Graph()
    x, v = g.input("x", (3, 4)), g.input("v", ())
    g.set_outputs({"y": g.pad(x, [(1, 1)], -1, value=v)})
    got = harness.check(g, {"x": normal(3, 4), "v": np.float32(7)})["y"]
    assert (got[:, [0, 5]] == 7).all()


def test_pad_modes() -> None:
    x = np.arange(4, dtype=np.int32)
    assert list(result(lambda g, x: g.pad(x, [(3, 2)], mode="reflect"), x)) == [3, 2, 1, 0, 1, 2, 3, 2, 1]
    assert list(result(lambda g, x: g.pad(x, [(2, 1)], mode="edge"), x)) == [0, 0, 0, 1, 2, 3, 3]
    assert list(result(lambda g, x: g.pad(x, [(-1, 2)], value=9), x)) == [1, 2, 3, 9, 9]
    assert list(result(lambda g, x: g.pad(x, [(-1, -3)]), x)) == []


def test_neighbours_that_stay_are_one_axis() -> None:
    g = Graph()
    g.set_outputs({"y": g.pad(g.input("x", (2, 3, 4, 5)), [(1, 1)], 1)})
    (dispatch,) = compile_graph(g).plan.dispatches()
    assert dict(dispatch.constants) == {"SIZE": 200, "OUT_1": 5, "IN_1": 3, "NUMBER_1": 1, "OUT_2": 20, "IN_2": 20}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g, x: g.max_pool(x, 3), "padded size of 3 or more on axis 2, got 2"),
        (lambda g, x: g.max_pool(x, 2, padding=2), "every window to meet axis 2"),
        (lambda g, x: g.max_pool(x, (2, 2), dilation=(3, 1), padding=(1, 0)), "every window to meet axis 2"),
        (lambda g, x: g.avg_pool(x, 2, stride=0), "stride"),
        (lambda g, x: g.avg_pool(x, 0), "kernel"),
        (lambda g, x: g.avg_pool(x, 2, padding=-1), "padding"),
        (lambda g, x: g.avg_pool(x, 2, padding="full"), "expected padding valid"),
        (lambda g, x: g.avg_pool(x, (1, 2, 3)), "expected one integer or 2"),
        (lambda g, x: g.max_pool(x[0, 0], 1), "expected x"),
        (lambda g, x: g.max_pool(x[:, :, :0], 1), "with positions"),
        (lambda g, x: g.max_pool(g.cast(x, "i32"), 1), "f32"),
        (lambda g, x: g.global_max_pool(x[:, :, :0]), "nothing to reduce"),
        (lambda g, x: g.upsample(x, 0), "a factor >= 1"),
        (lambda g, x: g.upsample(x[0, 0]), "expected .N, C"),
        (lambda g, x: g.pad(x, [(1, 1)]), "two widths for each of the axes"),
        (lambda g, x: g.pad(x, [(1, 1), (2, 2)], [0, 0]), "two widths for each of the axes"),
        (lambda g, x: g.pad(x, [(2, 0)], 2, "reflect"), "axis 2 of .* expected widths from 0 to 1 for mode reflect"),
        (lambda g, x: g.pad(x, [(-1, 0)], 2, "edge"), "axis 2"),
        (lambda g, x: g.pad(x, [(-1, -2)], 2), "axis 2"),
        (lambda g, x: g.pad(x, [(1, 0)], 2, "wrap"), "expected a mode among"),
        (lambda g, x: g.pad(x, [(1, 0)], 2, value=x), "expected a scalar f32"),
    ],
)
def test_impossible_geometry(build: Callable[..., Tensor], message: str) -> None:
    g = Graph()
    x = g.input("x", (1, 4, 2, 5))
    with pytest.raises(GraphError, match=message):
        build(g, x)


def test_whether_all_windows_meet_the_input() -> None:
    """Told without a table of windows and taps, which would fill the memory where numbers are large."""
    for kernel, stride, step, before, after, size in itertools.product(
        (1, 2, 3), (1, 2, 3), (1, 2, 5), *[range(5)] * 2, (1, 2, 4)
    ):
        pool = MaxPool((kernel,), (stride,), (before, after), (step,))
        if before + size + after > (kernel - 1) * step:
            count = pool.windows(0, size)
            assert pool.all_meet(0, size, count) == pool.inside(0, size, count).any(axis=1).all(), pool
