"""Operators over indices: sizes around every edge, ids out of range, long lists, many rows, ties and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, compile_graph
from meganeura_aot.graph import DType, TensorType
from meganeura_aot.op import OPS
from meganeura_aot.ops.index.gather import Embedding, Gather, GatherElements, OneHot, ScatterAdd
from meganeura_aot.ops.reduce.sort import TILE, TopK
from meganeura_aot.reference import evaluate
from tests import harness

Array = np.ndarray[Any, Any]

AROUND_TILES = [1, 2, 3, 255, 256, 257, 2047, 2048, 2049, 4096, 4097, 6145]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ids_below(limit: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, limit, shape).astype(np.uint32)


# scatter_add


def scatter(ids: Array, src: Array, rows: int) -> Array:
    g = Graph()
    x = g.input("src", src.shape)
    g.set_outputs({"y": g.scatter_add(g.parameter("ids", ids.shape, "u32"), x, rows)})
    return harness.run(compile_graph(g), {"ids": ids, "src": src})["y"]


def in_order(ids: Array, src: Array, rows: int) -> Array:
    """The sums in f32, one after the other in ascending order of s."""
    sums = np.zeros((rows, src.shape[1]), np.float32)
    np.add.at(sums, ids[ids < rows], src[ids < rows])
    return sums


@pytest.mark.parametrize("count", AROUND_TILES)
def test_scatter_add_sums_in_ascending_order(count: int) -> None:
    """Bit by bit the sequential sums, with an id that takes a third of all rows, and ids out of range."""
    rng = np.random.default_rng(count)
    ids = np.where(rng.random(count) < 1 / 3, 5, rng.integers(0, 45, count)).astype(np.uint32)
    ids[count // 2] = 0xFFFFFFFF
    src = normal(count, 12) * 10.0 ** rng.integers(-6, 6, (count, 1)).astype(np.float32)
    np.testing.assert_array_equal(scatter(ids, src, 40), in_order(ids, src, 40))


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (511, 5), (512, 4), (1023, 7), (1024, 576), (20_000, 4)])
def test_scatter_add_rows_of_every_share(rows: int, width: int) -> None:
    """A workgroup owns 1 to 32 rows; those that no id names are 0."""
    ids, src = ids_below(rows + 3, 3000), normal(3000, width)
    np.testing.assert_array_equal(scatter(ids, src, rows), in_order(ids, src, rows))


def test_scatter_add_of_one_id_and_of_ascending_and_descending_ids() -> None:
    src = normal(5000, 8)
    up = np.arange(5000)
    for order in (np.full(5000, 3), up, up[::-1], np.repeat([4000, 0, 2], [2100, 2100, 800])):
        ids = order.astype(np.uint32)
        np.testing.assert_array_equal(scatter(ids, src, 5000), in_order(ids, src, 5000))


def test_scatter_add_replays_are_bit_identical() -> None:
    g = Graph()
    g.set_outputs({"y": g.scatter_add(g.parameter("ids", (5000,), "u32"), g.input("src", (5000, 33)), 50)})
    runner = harness.load(compile_graph(g))
    feeds = harness.feeds_of(runner, {"ids": ids_below(60, 5000), "src": normal(5000, 33)})
    first = runner.run(**feeds)
    for _ in range(19):
        harness.assert_same(first, runner.run(**feeds), "in a replay")


def test_scatter_add_shows_nan_and_infinity_where_they_go() -> None:
    src = np.ones((4, 2), np.float32)
    src[0, 0], src[1, 1] = np.nan, np.inf
    got = scatter(np.array([1, 3, 9, 0], np.uint32), src, 4)
    np.testing.assert_array_equal(got, [[1, 1], [np.nan, 1], [0, 0], [1, np.inf]])


# gather


def test_ids_of_any_rank_and_every_axis() -> None:
    g = Graph()
    x, ids, table = g.input("x", (3, 4, 5, 8)), g.parameter("ids", (2, 3), "u32"), g.input("table", (6, 7))
    outputs = {f"axis{axis}": g.gather(x, ids, axis) for axis in (0, 1, 2, 3, -1)}
    g.set_outputs(outputs | {"embedding": g.embedding(ids, table)})
    feeds = {"x": normal(3, 4, 5, 8), "ids": ids_below(3, 2, 3), "table": normal(6, 7)}
    got = harness.check(g, feeds)
    for axis in range(4):
        np.testing.assert_array_equal(got[f"axis{axis}"], np.take(feeds["x"], feeds["ids"].astype(int), axis))
    np.testing.assert_array_equal(got["embedding"], feeds["table"][feeds["ids"]])


def test_more_than_65535_workgroups() -> None:
    count = 16_777_217
    g = Graph()
    x, ids = g.input("x", (1000,)), g.parameter("ids", (count,), "u32")
    g.set_outputs({"y": g.gather_elements(x, ids)})
    feeds = {"x": normal(1000), "ids": ids_below(1001, count)}
    expected = np.append(feeds["x"], np.float32(0))[feeds["ids"]]
    np.testing.assert_array_equal(harness.run(compile_graph(g), feeds)["y"], expected)
    rows = 32 * 65_536 + 5
    few = np.array([rows - 1, 0, rows, rows - 1], np.uint32)
    np.testing.assert_array_equal(scatter(few, normal(4, 1), rows), in_order(few, normal(4, 1), rows))


def test_index_limits() -> None:
    ids, x = TensorType((2, 3), DType.U32), TensorType((5, 7))
    assert Embedding().index_limits(ids, x) == {0: 5}
    assert Gather(1).index_limits(x, ids) == {1: 7}
    assert GatherElements(0).index_limits(x, ids) == {1: 5}
    assert ScatterAdd(9).index_limits(ids, x) == {0: 9}
    assert OneHot(4).index_limits(ids) == OPS["relu"]().index_limits(x) == {}


def test_gradients() -> None:
    """<dy, op(x)> = <gradient(dy), x>: all of these are linear."""
    cases = [
        (Embedding(), ("ids", "x"), (5, 6), (4, 3)),
        (Gather(0), ("x", "ids"), (7, 2, 3), (4, 5)),
        (Gather(1), ("x", "ids"), (2, 9, 3), (4, 5)),
        (Gather(2), ("x", "ids"), (2, 3, 5), (6,)),
        (Gather(1), ("x", "ids"), (2, 5, 3), ()),
        (ScatterAdd(6), ("ids", "x"), (11, 3), (11,)),
    ]
    for op, order, shape, ids_shape in cases:
        g = Graph()
        leaves = {"x": g.input("x", shape), "ids": g.parameter("ids", ids_shape, "u32")}
        operands = [leaves[name] for name in order]
        y = g.apply(op, *operands)
        dy = g.input("dy", y.shape)
        parts = dict(zip(order, op.gradient(g, dy, y, *operands), strict=True))
        assert parts["ids"] is None
        g.set_outputs({"y": y, "dx": parts["x"]})
        feeds = {"x": normal(*shape), "ids": ids_below(7, *ids_shape), "dy": normal(*y.shape, seed=1)}
        exact = evaluate(g.build(), feeds)
        assert exact["dx"].shape == shape
        assert np.sum(exact["y"] * feeds["dy"]) == pytest.approx(np.sum(exact["dx"] * feeds["x"]), rel=1e-12)
        harness.check(g, feeds, twins=False, slack={"dx": np.array(1e-5)})


def test_gradient_of_top_k_goes_where_the_values_came_from() -> None:
    g = Graph()
    x, dy = g.input("x", (2, 3, 9)), g.input("dy", (2, 3, 4))
    y = g.top_k(x, 4)
    node = g._nodes[y[0].value.node]
    (dx,) = node.op.gradient(g, (dy, None), y, x)
    g.set_outputs({"dx": dx, "indices": y[1]})
    feeds = {"x": normal(2, 3, 9), "dy": normal(2, 3, 4, seed=1)}
    got = harness.check(g, feeds, twins=False, slack={"dx": np.array(1e-6)})
    expected = np.zeros((2, 3, 9), np.float32)
    np.put_along_axis(expected, got["indices"].astype(int), feeds["dy"], -1)
    np.testing.assert_array_equal(got["dx"], expected)


# argmax and top_k


def ordered(x: Array, axis: int = -1) -> Array:
    """Indices by descending value, NaN first, equal ones by index."""
    nan = np.isnan(x)
    return np.lexsort((-np.where(nan, 0, x).astype(np.float64), ~nan), axis=axis).astype(np.uint32)


@pytest.mark.parametrize("count", [*AROUND_TILES, 63, 64, 65, 49_152, 200_000])
def test_rows_of_every_length(count: int) -> None:
    """Numbers that repeat, NaN among them."""
    g = Graph()
    x = g.input("x", (3, count))
    k = min(count, 50)
    values, indices = g.top_k(x, k)
    g.set_outputs({"values": values, "indices": indices, "max": g.argmax(x), "min": g.argmin(x, 1, keepdims=True)})
    x_value = np.round(normal(3, count, seed=count) * 50)
    x_value[1, count // 3 :: 700] = np.nan
    got = harness.check(g, {"x": x_value}, twins=count in (257, 2049))
    order = ordered(x_value)[:, :k]
    np.testing.assert_array_equal(got["indices"], order)
    np.testing.assert_array_equal(got["values"], np.take_along_axis(x_value, order, 1))
    np.testing.assert_array_equal(got["max"], np.argmax(x_value, 1))
    np.testing.assert_array_equal(got["min"][:, 0], np.argmin(x_value, 1))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 31, 32, 33, 63, 64])
def test_every_k(k: int) -> None:
    x = normal(5, 3000, seed=k)
    g = Graph()
    values, indices = g.top_k(g.input("x", x.shape), k)
    g.set_outputs({"values": values, "indices": indices})
    got = harness.check(g, {"x": x}, twins=False)
    np.testing.assert_array_equal(got["indices"], ordered(x)[:, :k])


@pytest.mark.parametrize("row", ["equal", "infinite", "zeros", "nan", "subnormal"])
def test_rows_that_tie(row: str) -> None:
    """-0 equals 0, all -inf is a row as any other, the first NaN wins in both directions."""
    x = np.zeros((2, 5000), np.float32)
    if row == "equal":
        x[:] = -3.4e38
    elif row == "infinite":
        x[:] = -np.inf
    elif row == "zeros":
        x[0, ::2], x[1, 1::2] = -0.0, -0.0
    elif row == "nan":
        x[:, [4000, 4500, 20]] = [np.nan, -np.nan, np.inf]
    else:
        x[:, 4000], x[:, 4001] = 1e-45, -1e-45
    g = Graph()
    value = g.input("x", x.shape)
    values, indices = g.top_k(value, 4)
    g.set_outputs({"values": values, "indices": indices, "max": g.argmax(value), "min": g.argmin(value)})
    got = harness.run(compile_graph(g), {"x": x})
    np.testing.assert_array_equal(got["indices"], ordered(x)[:, :4])
    np.testing.assert_array_equal(got["values"].view(np.uint32), np.take_along_axis(x, ordered(x)[:, :4], 1).view("u4"))
    np.testing.assert_array_equal(got["max"], np.argmax(x, 1))
    np.testing.assert_array_equal(got["min"], np.argmin(x, 1))


def test_arg_of_many_rows_and_of_every_axis() -> None:
    many = normal(70_000, 300)
    g = Graph()
    x, y = g.input("x", (70_000, 300)), g.input("y", (3, 130, 7, 4))
    g.set_outputs({"many": g.argmax(x), **{f"axis{axis}": g.argmin(y, axis) for axis in range(4)}})
    y_value = np.round(normal(3, 130, 7, 4) * 3)
    got = harness.run(compile_graph(g), {"x": many, "y": y_value})
    np.testing.assert_array_equal(got["many"], np.argmax(many, 1))
    for axis in range(4):
        np.testing.assert_array_equal(got[f"axis{axis}"], np.argmin(y_value, axis))


def test_top_k_of_few_experts_and_many_tokens() -> None:
    x = np.round(normal(1001, 60) * 10)
    g = Graph()
    _, indices = g.top_k(g.input("x", x.shape), 8)
    g.set_outputs({"indices": indices})
    np.testing.assert_array_equal(harness.check(g, {"x": x})["indices"], ordered(x)[:, :8])


def test_a_vocabulary_takes_two_dispatches() -> None:
    g = Graph()
    x = g.input("x", (1, 49_152))
    values, _ = g.top_k(x, 64)
    g.set_outputs({"values": values, "argmax": g.argmax(x)})
    assert [d.grid[0] for d in compile_graph(g).plan.dispatches()] == [49_152 // TILE, 1] * 2


# errors


def test_what_does_not_fit() -> None:
    g = Graph()
    x, ids, real = g.input("x", (4, 5)), g.parameter("ids", (3,), "u32"), g.input("real", (3,))
    scalar = g.input("scalar", ())
    wide, long = g.input("wide", (4, 6), "u32"), g.input("long", (100,))
    wrong = [
        (r"embedding: expected u32 ids .* got f32\[3\]", lambda: g.embedding(real, x)),
        (r"embedding: expected .* table \[V, H\], got", lambda: g.embedding(ids, real)),
        ("gather: expected u32 ids", lambda: g.gather(x, real)),
        ("axis: expected one of", lambda: g.gather(x, ids, 2)),
        (r"gather_elements: expected ids .* got u32\[3\]", lambda: g.gather_elements(x, ids)),
        ("gather_elements: expected ids no larger", lambda: g.gather_elements(x, wide, 0)),
        (r"scatter_add: expected ids \[...\]", lambda: g.scatter_add(ids, x, 3)),
        ("scatter_add: expected .* rows >= 0", lambda: g.scatter_add(ids, g.input("src", (3, 2)), -1)),
        ("one_hot: expected .* depth >= 0", lambda: g.one_hot(ids, -1)),
        ("argmax: expected a tensor with elements", lambda: g.argmax(g.input("none", (3, 0)))),
        (r"top_k: expected k in 1\.\.64 .* got 6 of", lambda: g.top_k(x, 6)),
        (r"top_k: expected k in 1\.\.64 .* got 65 of", lambda: g.top_k(long, 65)),
        (r"top_k: expected k in 1\.\.64 .* got 0 of", lambda: g.top_k(x, 0)),
        (r"top_k: expected k in 1\.\.64 .* got 1 of f32\[\]", lambda: g.top_k(scalar, 1)),
    ]
    for message, build in wrong:
        with pytest.raises(GraphError, match=message):
            build()
    assert TopK(2).infer(x.type)[1] == TensorType((4, 2), DType.U32)
