"""Gradients of pooling, lookups, layout and extremes: which windows, which kernels, how many dispatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor, compile_graph
from meganeura_aot.errors import GradientError
from tests import harness
from tests.gradients import gradients_of

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def loss_of(build: Callable[[Graph, Tensor], Tensor], x: Array) -> Any:
    """The gradient for x of the sum of weights w times what `build` makes of it, as a graph."""
    g = Graph()
    y = build(g, g.parameter("x", x.shape))
    g.set_outputs({"loss": g.sum(y * g.input("w", y.shape))})
    return gradients_of(g.build())


def gradient(build: Callable[[Graph, Tensor], Tensor], x: Array, w: Array, **feeds: Array) -> Array:
    graph = loss_of(build, x)
    return harness.run(harness.compile_graph(graph), {"x": x, "w": w, **feeds})["grad.x"]


def labels(build: Callable[[Graph, Tensor], Tensor], x: Array) -> list[str]:
    """What the gradient dispatches."""
    return [dispatch.label for dispatch in compile_graph(loss_of(build, x)).plan.dispatches()]


# ---- pooling


def test_the_first_of_equal_ones() -> None:
    """In row-major order, also where the windows overlap, and where -0 equals 0."""
    x = np.array([[[[1, 1, 0], [1, 1, 0], [0, -0.0, 0]]]], np.float32)
    got = gradient(lambda g, x: g.max_pool(x, 2, stride=1), x, np.array([[[[1, 10], [100, 1000]]]], np.float32))
    np.testing.assert_array_equal(got[0, 0], [[1, 10, 0], [100, 1000, 0], [0, 0, 0]])
    zeros = np.array([[[-0.0, 0.0]]], np.float32)
    got = gradient(lambda g, x: g.max_pool(x, 2), zeros, np.ones((1, 1, 1), np.float32))
    np.testing.assert_array_equal(got, [[[1, 0]]])


def test_the_first_nan_and_windows_of_minus_infinity() -> None:
    x = np.array([[[[-np.inf, -np.inf, 1], [-np.inf, np.nan, np.nan]]]], np.float32)
    got = gradient(lambda g, x: g.max_pool(x, 2, stride=1), x, np.array([[[[1, 10]]]], np.float32))
    np.testing.assert_array_equal(got[0, 0], [[0, 0, 0], [0, 11, 0]])
    low = np.full((1, 1, 3), -np.inf, np.float32)
    got = gradient(lambda g, x: g.max_pool(x, 2, stride=2, padding=1), low, np.array([[[1, 10]]], np.float32))
    np.testing.assert_array_equal(got, [[[1, 10, 0]]])


def test_infinite_upstream_gradients_stay_in_their_windows() -> None:
    w = np.array([[[np.inf, 1]]], np.float32)
    got = gradient(lambda g, x: g.max_pool(x, 2), np.array([[[1, 2, 4, 3]]], np.float32), w)
    np.testing.assert_array_equal(got, [[[0, np.inf, 1, 0]]])


# ---- lookups


def test_equal_ids_and_ids_out_of_range() -> None:
    ids = np.array([[1, 1, 7, 0, 1]], np.uint32)

    def build(g: Graph, x: Tensor) -> Tensor:
        return g.gather_elements(x, g.parameter("ids", ids.shape, "u32", trainable=False), 1)

    got = gradient(build, normal(1, 3), np.array([[1, 2, 4, 8, 16]], np.float32), ids=ids)
    np.testing.assert_array_equal(got, [[8, 19, 0]])


@pytest.mark.parametrize("count", [1, 70])
def test_ids_out_of_range_touch_nothing(count: int) -> None:
    """Numbers so large that they show next to what lies behind the buffer, which a wrong kernel would add them to."""
    ids, w = np.full((2, count), 4, np.uint32), np.full((2, count), 1e36, np.float32)

    def build(g: Graph, x: Tensor) -> Tensor:
        return g.gather_elements(x, g.parameter("ids", ids.shape, "u32", trainable=False), 1)

    np.testing.assert_array_equal(gradient(build, normal(2, 4), w, ids=ids), np.zeros((2, 4)))


@pytest.mark.parametrize("count", [64, 65, 700])
def test_equal_ids_are_added_in_ascending_order(count: int) -> None:
    """Of numbers whose sum depends on it: in f32, one after the other."""
    ids = np.random.default_rng(1).integers(0, 3, (5, count)).astype(np.uint32)
    w = normal(5, count, seed=2) * np.float32(10) ** np.random.default_rng(3).integers(-3, 4, (5, count)).astype(
        np.float32
    )
    expected = np.zeros((5, 4), np.float32)
    for row in range(5):
        for place, id_ in enumerate(ids[row]):
            expected[row, id_] += w[row, place]

    def build(g: Graph, x: Tensor) -> Tensor:
        return g.gather_elements(x, g.parameter("ids", ids.shape, "u32", trainable=False), 1)

    np.testing.assert_array_equal(gradient(build, normal(5, 4), w, ids=ids), expected)


def test_tied_embedding_is_deterministic() -> None:
    """The table is looked up and multiplied with; many equal ids."""
    ids, x = np.random.default_rng(0).integers(0, 40, 128).astype(np.uint32), normal(5000, 8)
    g = Graph()
    table = g.parameter("x", x.shape)
    y = g.matmul(g.embedding(g.input("ids", ids.shape, "u32"), table), table, trans_b=True)
    g.set_outputs({"loss": g.mean(y * y)})
    program = harness.compile_graph(gradients_of(g.build()))
    runner = harness.load(program)
    inputs = harness.feeds_of(runner, {"x": x, "ids": ids})
    first = runner.run(**inputs)
    for _ in range(19):
        harness.assert_same(first, runner.run(**inputs), "in a replay")


# ---- extremes


def test_equal_extremes_share() -> None:
    """As in PyTorch's amax and amin; a row with a NaN has no gradient to speak of."""
    x, w = np.array([[1, 2, 2], [3, 3, 3], [0, np.nan, 1]], np.float32), np.array([4, 9, 1], np.float32)
    got = gradient(lambda g, x: g.max(x, 1), x, w)
    np.testing.assert_array_equal(got, [[0, 2, 2], [3, 3, 3], [np.nan] * 3])
    got = gradient(lambda g, x: g.min(x, 1, keepdims=True), -x, w[:, None])
    np.testing.assert_array_equal(got, [[0, 2, 2], [3, 3, 3], [np.nan] * 3])


# ---- how much work there is


def test_dispatches() -> None:
    x = normal(4, 64, 24)
    for name in ("relu", "sigmoid", "tanh", "gelu", "silu", "elu", "leaky_relu", "hard_swish", "hard_sigmoid", "erf"):
        shown = labels(lambda g, x, name=name: getattr(g, name)(x), x)
        assert shown[-1] == f"{name}_grad"
        assert len(shown) <= 4
    assert labels(lambda g, x: x[::2, 3::-1], x)[-1] == "slice_grad"
    assert "one_hot" not in labels(lambda g, x: g.top_k(x, 5)[0], x)
    assert labels(lambda g, x: g.upsample(x, 2), x)[-1] == "sum"


def test_parts_of_a_split_are_joined() -> None:
    """A gradient of a split, with all parts used, zeroes nothing and adds nothing."""

    def build(g: Graph, x: Tensor) -> Tensor:
        a, b, c = g.split(x, [5, 9, 10], 2)
        return g.concat([g.tanh(c), g.exp(a), g.sin(b)], 2)

    x, w = normal(4, 6, 24), normal(4, 6, 24, seed=1)
    shown = labels(build, x)
    assert "slice_grad" not in shown
    assert "add" not in shown
    plain = harness.run(compile_graph(loss_of(build, x), optimize=False), {"x": x, "w": w})["grad.x"]
    np.testing.assert_array_equal(gradient(build, x, w), plain)


def test_the_mean_of_nothing() -> None:
    got = gradient(lambda g, x: g.mean(x, 0), np.zeros((0, 3), np.float32), np.ones(3, np.float32))
    assert got.shape == (0, 3)


def test_a_gradient_has_no_gradient() -> None:
    g = Graph()
    x = g.parameter("x", (3,))
    g.set_outputs({"loss": g.sum(g.silu_grad(x, x))})
    with pytest.raises(GradientError, match="silu_grad has no gradient: its row of the table has none"):
        gradients_of(g.build())
