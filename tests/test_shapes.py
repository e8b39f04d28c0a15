"""Shapes that break kernels: awkward sizes, huge grids, nothing at all, one tensor in several places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from meganeura_aot.reference import evaluate
from tests import harness

SIZES = [1, 2, 3, 5, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1000]
HUGE = [4_194_240, 4_194_241, 16_777_217]  # around 65 535 workgroups of 64, and past 65 535 of 256


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_every_size(size: int) -> None:
    """Row operators over the last axis and over the first one."""
    g = Graph()
    x, y = g.input("x", (3, size)), g.input("y", (size, 3))
    g.set_outputs(
        {
            "softmax": g.softmax(x),
            "log": g.log_softmax(y, 0),
            "sum": g.sum(x, 1),
            "sum0": g.sum(y, 0),
            "mean": g.mean(y, 0, keepdims=True),
            "max": g.max(x, 1),
            "min0": g.min(y, 0),
            "all": g.sum(x),
            "transposed": g.transpose(x),
        }
    )
    harness.check(g, {"x": normal(3, size), "y": normal(size, 3)}, twins=size in (1, 65, 257))


@pytest.mark.parametrize("size", SIZES)
def test_pointwise_broadcasts_of_every_size(size: int) -> None:
    g = Graph()
    a, b, c = g.input("a", (2, size, 3)), g.input("b", (size, 1)), g.input("c", (2, 1, 1))
    g.set_outputs({"ab": a * b, "ac": a + c, "bc": b - c, "abc": g.where(c, a, b)})
    harness.check(g, {"a": normal(2, size, 3), "b": normal(size, 1), "c": normal(2, 1, 1)}, twins=size == 33)


def test_broadcasts_that_alternate() -> None:
    g = Graph()
    a, b, c = g.input("a", (2, 1, 3, 1, 4)), g.input("b", (5, 1, 6, 1)), g.input("c", (2, 5, 1, 6, 1))
    g.set_outputs({"ab": a + b, "ac": c - a, "abc": g.where(b, a, c)})
    harness.check(g, {"a": normal(2, 1, 3, 1, 4), "b": normal(5, 1, 6, 1, seed=1), "c": normal(2, 5, 1, 6, 1, seed=2)})


@pytest.mark.parametrize("size", HUGE)
def test_more_than_65535_workgroups(size: int) -> None:
    g = Graph()
    x = g.input("x", (size,))
    g.set_outputs({"relu": g.relu(x), "sum": g.sum(x), "reversed": x[::-1]})
    x_value = normal(size)
    got = harness.run(compile_graph(g), {"x": x_value})
    np.testing.assert_array_equal(got["relu"], np.maximum(x_value, 0))
    np.testing.assert_array_equal(got["reversed"], x_value[::-1])
    np.testing.assert_allclose(got["sum"], x_value.astype(np.float64).sum(), atol=2e-6 * size**0.5 * 0.8 * size)


def test_more_than_65535_rows() -> None:
    for width in (3, 100):
        g = Graph()
        x = g.input("x", (70_000, width))
        g.set_outputs({"softmax": g.softmax(x), "sum": g.sum(x, 1), "max": g.max(x, 1)})
        harness.check(g, {"x": normal(70_000, width)}, twins=False)


def test_more_than_65535_matrices() -> None:
    g = Graph()
    a, b = g.input("a", (70_000, 2, 3)), g.input("b", (70_000, 3, 2))
    g.set_outputs({"y": a @ b})
    harness.check(g, {"a": normal(70_000, 2, 3), "b": normal(70_000, 3, 2)}, twins=False)


def test_softmax_over_a_middle_axis_and_long_rows() -> None:
    for shape, axis in (((2, 16, 4, 840), 1), ((1, 1023), -2), ((513, 7), -1), ((2, 49152), -1)):
        g = Graph()
        g.set_outputs({"y": g.softmax(g.input("x", shape), axis)})
        got = harness.check(g, {"x": normal(*shape) * 5}, twins=False)
        np.testing.assert_allclose(got["y"].sum(axis), 1, rtol=1e-5)


def test_sums_stay_accurate() -> None:
    g = Graph()
    x = g.input("x", (1_000_000,))
    g.set_outputs({"sum": g.sum(x), "mean": g.mean(x)})
    got = harness.run(compile_graph(g), {"x": np.ones(1_000_000, np.float32)})
    assert (got["sum"], got["mean"]) == (1_000_000, 1)


def test_nothing() -> None:
    """Zero-size dimensions: shapes are kept, empty outputs have no dispatch, sums of nothing are 0."""
    g = Graph()
    e, x = g.input("e", (2, 0)), g.input("x", (0, 3))
    g.set_outputs(
        {
            "add": e + g.input("one", (2, 1)),
            "transpose": g.transpose(x),
            "concat": g.concat([g.input("c", (0, 3)), g.input("d", (1, 3))]),
            "slice": g.input("f", (4, 3))[2:2],
            "sum": g.sum(e, 1),
            "mean": g.mean(e, 1),
            "sum_kept": g.sum(x, 1),
            "product": e @ x,
            "softmax": g.softmax(e, 1),
            "softmax0": g.softmax(e, 0),
            "max": g.max(x, 1),
        }
    )
    feeds = {node.op.label: np.ones(node.types[0].shape, np.float32) for node in g.build().nodes if node.op.name == "input"}  # type: ignore[attr-defined]
    got = harness.check(g, feeds)
    np.testing.assert_array_equal(got["sum"], [0, 0])
    assert np.isnan(got["mean"]).all()
    np.testing.assert_array_equal(got["product"], np.zeros((2, 3)))
    written = {d.name for d in compile_graph(g).plan.dispatches()}
    assert not [name for name in written if name.startswith(("transpose", "slice", "softmax", "max", "add"))]


def test_values_computed_from_nothing() -> None:
    """An empty scratch buffer is never home to anything else, and its readers may come before any write."""
    g = Graph()
    x, w = g.input("x", (3, 0)), g.input("w", (0, 4))
    y = g.exp(g.tanh(g.sum(g.exp(x), axes=1)))
    z = g.tanh(g.exp(x) @ w + 1.0)
    g.set_outputs({"y": y, "z": z})
    feeds = {"x": np.ones((3, 0), np.float32), "w": np.ones((0, 4), np.float32)}
    for target in ("webgpu", "cpu"):
        got = harness.check(g, feeds, target=target)
        np.testing.assert_array_equal(got["y"], [1, 1, 1])


def test_many_batch_dimensions() -> None:
    """Coordinates c1 and c10 are not mixed up, and ranks may pass NumPy's 32 where nothing is computed there."""
    g = Graph()
    a, b = g.input("a", (1, 2) * 6 + (3, 4)), g.input("b", (2, 1) * 6 + (4, 5))
    g.set_outputs({"y": a @ b})
    feeds = {"a": normal(*a.shape), "b": normal(*b.shape, seed=1)}
    harness.check(g, feeds, twins=False)
    g = Graph()
    g.set_outputs({"y": g.reshape(g.input("x", (1,) * 39 + (2,)) * 2.0, (2,))})
    assert compile_graph(g).plan.entries[0].dispatches[0].constants == (("N", 2),)


def test_product_over_nothing_has_its_epilogue() -> None:
    g = Graph()
    g.set_outputs({"y": g.input("a", (2, 0)) @ g.input("b", (0, 3)) + g.input("bias", (3,))})
    feeds = {"a": np.ones((2, 0), np.float32), "b": np.ones((0, 3), np.float32), "bias": np.arange(3, dtype=np.float32)}
    for target in ("webgpu", "cpu"):
        np.testing.assert_array_equal(harness.check(g, feeds, target=target)["y"], [[0, 1, 2]] * 2)


def test_one_tensor_in_several_places() -> None:
    """x*x, x+x, an output that is an input, a parameter, an intermediate, a view, and twice the same."""
    g = Graph()
    x, p = g.input("x", (5, 5)), g.parameter("p", (2,))
    y = g.exp(x)
    z = g.log(y)
    g.set_outputs(
        {
            "square": x * x,
            "double": x + x,
            "input": x,
            "parameter": p,
            "middle": y,
            "end": z,
            "view": g.reshape(y, (25,)),
            "again": z,
            "input_view": g.reshape(x, (1, 25)),
        }
    )
    feeds = {"x": normal(5, 5), "p": normal(2)}
    got = harness.check(g, feeds, slack={name: np.array(1e-5) for name in ("end", "again")})
    assert list(got) == ["square", "double", "input", "parameter", "middle", "end", "view", "again", "input_view"]
    np.testing.assert_array_equal(got["input"], feeds["x"])
    np.testing.assert_array_equal(got["parameter"], feeds["p"])
    got["input"][:] = 7  # a fresh array: writing to it changes nothing else
    assert (got["input_view"] != 7).all()


def test_more_tensors_than_bindings() -> None:
    """A sum of 12 inputs and a concat of 16: at most 8 storage buffers a dispatch."""
    g = Graph()
    inputs = [g.input(f"x{i}", (33,)) for i in range(16)]
    total = inputs[0]
    for x in inputs[1:12]:
        total = total + x
    g.set_outputs({"sum": total, "concat": g.concat(inputs)})
    feeds = {f"x{i}": normal(33, seed=i) for i in range(16)}
    program = compile_graph(g)
    assert max(len(d.bindings) for d in program.plan.dispatches()) <= 8
    harness.check(g, feeds, slack={"sum": np.full(33, 1e-5)})


def test_residual_into_a_dying_input() -> None:
    """The last reader of a buffer must not write into it."""
    g = Graph()
    x, w = g.input("x", (8, 8)), g.parameter("w", (8, 8))
    y = x
    for _ in range(5):
        y = g.tanh(y @ w) + y
    g.set_outputs({"y": y})
    ir = g.build()
    feeds = {"x": normal(8, 8), "w": normal(8, 8, seed=1) * 0.3}
    harness.check(ir, feeds, slack={"y": np.full((8, 8), 1e-4)})
    harness.check(ir, feeds, slack={"y": np.full((8, 8), 1e-4)}, optimize=False)


def test_rank_8_and_ones() -> None:
    g = Graph()
    x = g.input("x", (2, 1, 3, 1, 2, 1, 1, 2))
    g.set_outputs({"t": g.transpose(x, [7, 0, 5, 2, 1, 4, 3, 6]), "s": g.sum(x, [0, 4]), "m": x[..., 0] * 2.0})
    feeds = {"x": normal(2, 1, 3, 1, 2, 1, 1, 2)}
    got = harness.check(g, feeds)
    assert got["t"].shape == evaluate(g.build(), feeds)["t"].shape
