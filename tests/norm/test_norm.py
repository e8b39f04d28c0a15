"""Norms, softmax, losses and optimizer updates beyond the generated tests: sizes about every edge, numbers that mislead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, Tensor, compile_graph
from meganeura_aot.ops.reduce.rows import GROUP, Team, row_over, rows_of
from tests import harness

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ids(classes: int, *shape: int) -> Array:
    return np.random.default_rng(1).integers(0, classes, shape).astype(np.uint32)


# ---- how threads share rows


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40, 1000])
def test_a_team_reads_every_position_once(rows: int, apart: bool) -> None:
    for count in [*range(1, 300), 4095, 4096, 4097, 8192, 8193, 8196, 32768, 200_000]:
        row = row_over((count, rows), (0,)) if apart and rows > 1 else rows_of(rows, count)
        team = Team.keeping(row.in_fours(), rows)
        assert GROUP % team.size == 0
        assert team.steps <= 16
        assert team.members == count
        per_chunk = team.size * team.steps
        assert (team.chunks - 1) * per_chunk < team.row.count <= team.chunks * per_chunk
        if team.chunks == 1:  # only the last step may be past the end
            assert (team.steps - 1) * team.size < team.row.count
        loose = team.variant()["loose"]
        assert loose == [team.chunks > 1 or step == team.steps - 1 for step in range(team.steps)]
        assert team.groups * (GROUP // team.size) >= rows * team.chunks


def test_rows_are_read_in_fours_only_where_all_runs_are_aligned() -> None:
    shapes = {((3, 8), (1,)): 4, ((3, 6), (1,)): 1, ((8, 3), (0,)): 1, ((4, 2, 8), (0, 2)): 4, ((2, 3, 5), (0, 2)): 1}
    shapes |= {((3, 0), (1,)): 1, ((8,), (0,)): 4, ((5, 1), (1,)): 1, ((4, 4, 4), (1,)): 1}
    assert {key: row_over(*key).in_fours().lanes for key in shapes} == shapes


# ---- rows of every size


@pytest.mark.parametrize("columns", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 257])
def test_rows_and_columns(rows: int, columns: int) -> None:
    g = Graph()
    x, t = g.input("x", (rows, columns)), g.input("t", (rows, columns))
    w, b, variance = (g.parameter(name, (columns,)) for name in ("w", "b", "variance"))
    labels = g.input("labels", (rows,), "u32")
    g.set_outputs(
        {
            "rms": g.rms_norm(x, w),
            "layer": g.layer_norm(x, w, b),
            "group": g.group_norm(g.reshape(x, (rows, 1, columns)), 1, activation="silu"),
            "batch": g.batch_norm(x, b, variance, w, b),
            "softmax": g.softmax(x),
            "log": g.log_softmax(x),
            "weights": g.cross_entropy_loss(x, t),  # which do not add up to 1
            "ids": g.cross_entropy_loss(x, labels),
            "smooth": g.cross_entropy_loss(x, labels, label_smoothing=0.1),
            "mse": g.mse_loss(x, t),
            "l1": g.l1_loss(x, t),
            "bce": g.bce_loss(g.sigmoid(x), g.sigmoid(t)),
        }
    )
    feeds = {"x": normal(rows, columns) * 3, "t": normal(rows, columns, seed=1), "labels": ids(columns, rows)}
    weights = {"w": normal(columns, seed=2), "b": normal(columns, seed=3), "variance": normal(columns, seed=2) ** 2}
    harness.check(g, feeds | weights, twins=rows == 3)


@pytest.mark.parametrize("columns", [4096, 4097, 8192, 8193, 8196, 50_257, 152_064, 200_000])
def test_long_rows(columns: int) -> None:
    """About the lengths at which rows no longer fit in registers, and the widths of vocabularies."""
    rows = 3 if columns < 10_000 else 1
    g = Graph()
    x, t = g.input("x", (rows, columns)), g.input("t", (rows, columns))
    w, b = g.parameter("w", (columns,)), g.parameter("b", (columns,))
    labels = g.input("labels", (rows,), "u32")
    g.set_outputs(
        {
            "softmax": g.softmax(x),
            "log": g.log_softmax(x),
            "rms": g.rms_norm(x, w),
            "layer": g.layer_norm(x, w, b),
            "weights": g.cross_entropy_loss(x, t),
            "ids": g.cross_entropy_loss(x, labels),
            "smooth": g.cross_entropy_loss(x, labels, label_smoothing=0.1),
            "mse": g.mse_loss(x, t),
        }
    )
    feeds = {"x": normal(rows, columns) * 5, "t": normal(rows, columns, seed=1), "labels": ids(columns, rows)}
    got = harness.check(g, {**feeds, "w": normal(columns, seed=2), "b": normal(columns, seed=3)}, twins=rows > 1)
    np.testing.assert_allclose(got["softmax"].sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 16, 4, 8400), 1), ((1, 1023), -2), ((513, 65), -1), ((3, 1023, 5), 1), ((9000, 3), 0)]
)
def test_softmax_over_other_axes(shape: tuple[int, ...], axis: int) -> None:
    g = Graph()
    x = g.input("x", shape)
    g.set_outputs({"y": g.softmax(x, axis), "log": g.log_softmax(x, axis)})
    feeds = {"x": normal(*shape) * 5}
    wide = feeds["x"].astype(np.float64)
    shifted = wide - wide.max(axis, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))
    # the row of the rule is the row of the operator, which is not the last axis here
    slack = {
        name: 1e-5 * np.abs(y) + 1e-6 * np.abs(y).max(axis, keepdims=True)
        for name, y in (("log", log), ("y", np.exp(log)))
    }
    got = harness.check(g, feeds, twins=len(shape) == 3, slack=slack)
    np.testing.assert_allclose(got["y"].sum(axis), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((20_000, 3), 0),
        ((600, 70), 0),
        ((3, 40_000), 1),
        ((2, 300, 8), (0, 1)),
        ((30, 4, 900), (0, 2)),
        ((7, 5, 9), (0, 2)),
    ],
)
def test_reductions_of_every_layout(shape: tuple[int, ...], axes: Any) -> None:
    g = Graph()
    x = g.input("x", shape)
    n = g.input("n", shape, "i32")
    g.set_outputs(
        {"sum": g.sum(x, axes), "mean": g.mean(x, axes), "max": g.max(x, axes), "min": g.min(x, axes)}
        | {"isum": g.sum(n, axes), "imax": g.max(n, axes)}
    )
    integers = np.random.default_rng(2).integers(-(2**30), 2**30, shape).astype(np.int32)
    harness.check(g, {"x": normal(*shape) + 1, "n": integers}, twins=shape[0] in (600, 30))


def test_more_rows_than_a_grid_has_in_x() -> None:
    rows = 65_535 * 256 + 3
    g = Graph()
    x = g.input("x", (rows, 1))
    g.set_outputs({"rms": g.rms_norm(x), "ids": g.cross_entropy_loss(x, g.input("labels", (rows,), "u32"))})
    got = harness.run(compile_graph(g), {"x": normal(rows, 1), "labels": ids(1, rows)})
    np.testing.assert_allclose(got["rms"], (x_value := normal(rows, 1)) / np.sqrt(x_value**2 + 1e-5), rtol=1e-5)
    assert got["ids"] == 0


def test_nothing() -> None:
    """No elements: shapes are kept, nothing is dispatched, the mean of nothing is NaN."""
    g = Graph()
    e, x, labels = g.input("e", (3, 0)), g.input("x", (0, 4)), g.input("labels", (0,), "u32")
    g.set_outputs(
        {
            "rms": g.rms_norm(e),
            "layer": g.layer_norm(x),
            "group": g.group_norm(g.reshape(x, (0, 4)), 2),
            "batch": g.batch_norm(x, g.input("mean", (4,)), g.input("variance", (4,))),
            "mse": g.mse_loss(x, x),
            "weights": g.cross_entropy_loss(x, x),
            "ids": g.cross_entropy_loss(x, labels),
        }
    )
    feeds = {"e": normal(3, 0), "x": normal(0, 4), "labels": ids(1, 0), "mean": normal(4), "variance": normal(4) ** 2}
    got = harness.check(g, feeds)
    assert all(np.isnan(got[name]) for name in ("mse", "weights", "ids"))
    assert {d.name for d in compile_graph(g).plan.dispatches()} == {
        "mse_loss_0",
        "cross_entropy_loss_0",
        "cross_entropy_loss_1",
    }


# ---- numbers that mislead


def test_outliers_and_large_means() -> None:
    """One number 795 in a row of ones; rows whose mean hides their deviation from sums of squares; constant rows."""
    rows = np.ones((512, 512), np.float32) + normal(512, 512) * 1e-3
    rows[3, 77] = 795
    rows[4] = normal(512, seed=1) + 1e5
    rows[5] = -7.3
    w, b = normal(512, seed=2), normal(512, seed=3)
    g = Graph()
    x, weight, bias = g.input("x", (512, 512)), g.parameter("w", (512,)), g.parameter("b", (512,))
    image = g.reshape(x, (2, 256, 2, 256))
    g.set_outputs(
        {
            "rms": g.rms_norm(x, weight),
            "layer": g.layer_norm(x, weight, bias),
            "group": g.group_norm(image, 2),
            "images": g.group_norm(g.reshape(x, (2, 64, 64, 32)), 1),
        }
    )
    harness.check(g, {"x": rows, "w": w, "b": b})


def test_a_nan_stays_in_its_row() -> None:
    x = normal(4, 300)
    x[1, 7] = np.nan
    x[2, 299] = np.inf
    long = np.stack([normal(9000), normal(9000)])
    long[1, 8999] = np.nan
    g = Graph()
    rows, longer = g.input("x", x.shape), g.input("long", long.shape)
    g.set_outputs(
        {
            "rms": g.rms_norm(rows),
            "layer": g.layer_norm(rows),
            "softmax": g.softmax(rows),
            "log": g.log_softmax(rows),
            "long_layer": g.layer_norm(longer),
            "long_softmax": g.softmax(longer),
            "mse": g.mse_loss(rows, rows),
            "bce": g.bce_loss(rows, rows),
            "cross": g.cross_entropy_loss(rows, rows),
        }
    )
    got = harness.check(g, {"x": x, "long": long})
    for name in ("rms", "layer", "softmax", "log"):
        assert np.isfinite(got[name][[0, 3]]).all()
        assert np.isnan(got[name][1]).all()
    assert np.isfinite(got["long_layer"][0]).all()
    assert np.isnan(got["long_softmax"][1]).all()
    assert all(np.isnan(got[name]) for name in ("mse", "bce", "cross"))


# ---- losses


def test_losses_are_numbers_that_the_graph_can_use() -> None:
    """loss * coefficient, a sum of losses, a loss added to every element: with more than one row each."""
    g = Graph()
    x, t = g.input("x", (5, 33)), g.input("t", (5, 33))
    cross, mse = g.cross_entropy_loss(x, t), g.mse_loss(x, t)
    assert cross.shape == mse.shape == ()
    g.set_outputs({"scaled": cross * 2.5, "both": cross + mse * 0.1, "spread": x + mse, "cross": cross})
    got = harness.check(g, {"x": normal(5, 33), "t": normal(5, 33, seed=1)})
    np.testing.assert_allclose(got["scaled"], got["cross"] * 2.5, rtol=1e-6)


def test_bce() -> None:
    p, t = np.array([0.9, 0.1, 0.8, 0.2], np.float32), np.array([1, 0, 1, 0], np.float32)
    g = Graph()
    g.set_outputs({"bce": g.bce_loss(g.input("p", (4,)), g.input("t", (4,)))})
    program = compile_graph(g)
    np.testing.assert_allclose(harness.run(program, {"p": p, "t": t})["bce"], 0.164252, rtol=1e-5)
    np.testing.assert_allclose(harness.run(program, {"p": t, "t": t})["bce"], 0)
    np.testing.assert_allclose(harness.run(program, {"p": 1 - t, "t": t})["bce"], 100)
    np.testing.assert_allclose(harness.run(program, {"p": t * 4 - 2, "t": t})["bce"], 0)


@pytest.mark.parametrize("classes", [6, 8, 9000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ids_that_do_not_count(classes: int, smoothing: float) -> None:
    g = Graph()
    x, labels = g.input("x", (4, classes)), g.input("labels", (4,), "u32")
    losses = {"all": g.cross_entropy_loss(x, labels, None, smoothing)}
    losses |= {"default": g.cross_entropy_loss(x, labels, label_smoothing=smoothing)}
    losses |= {"two": g.cross_entropy_loss(x, labels, 2, smoothing)}
    g.set_outputs(losses)
    program = compile_graph(g)

    def run(x: Array, *labels: int) -> dict[str, Array]:
        feeds = {"x": x, "labels": np.array(labels).astype(np.uint32)}
        harness.check(g, feeds, twins=False)
        return harness.run(program, feeds)

    x_value = normal(4, classes)
    got = run(x_value, 0, 1, 3, -100)  # no class, and PyTorch's ignore_index
    assert np.isnan(got["all"])
    assert np.isnan(got["two"])
    assert np.isfinite(got["default"])
    got = run(x_value, 2, 2, 2, 2)
    assert np.isnan(got["two"])
    assert np.isfinite(got["all"])
    x_value[1] = np.nan
    got = run(x_value, 0, 2, 3, classes - 1)
    assert np.isnan(got["all"])
    assert np.isfinite(got["two"])


def test_extreme_logits() -> None:
    """Logits that overflow exp, a class of probability 0, and a row of -inf but for one class."""
    x = np.array([[1e4, 1e4 - 1, 0, 0], [-1e30, 0, 1e30, 5], [-np.inf, 3, -np.inf, -np.inf]], np.float32)
    g = Graph()
    logits, labels = g.input("x", x.shape), g.input("labels", (3,), "u32")
    g.set_outputs({"y": g.cross_entropy_loss(logits, labels), "row": g.softmax(logits)})
    got = harness.check(g, {"x": x, "labels": np.array([1, 2, 1], np.uint32)})
    np.testing.assert_allclose(got["y"], np.log1p(np.exp(1)) / 3, rtol=1e-5)
    got = harness.check(g, {"x": x, "labels": np.array([0, 2, 0], np.uint32)})
    assert got["y"] == np.inf


def test_how_many_dispatches() -> None:
    def names(build: Callable[[Graph, Tensor], Tensor], *shape: int) -> list[str]:
        g = Graph()
        g.set_outputs([build(g, g.input("x", shape))])
        return [dispatch.label for dispatch in compile_graph(g).plan.dispatches()]

    assert names(lambda g, x: g.layer_norm(x), 5, 4096) == ["layer_norm"]
    assert names(lambda g, x: g.group_norm(x, 2), 2, 4, 90, 90) == ["group_norm_statistics", "group_norm"]
    assert names(lambda g, x: g.softmax(x), 16, 8192) == ["softmax"]
    assert names(lambda g, x: g.softmax(x), 1, 50_000) == ["softmax_statistics", "softmax"]
    assert names(lambda g, x: g.mse_loss(x, x), 4, 1000) == ["mse_loss"]
    assert names(lambda g, x: g.cross_entropy_loss(x, x), 4, 1000) == ["cross_entropy_rows", "cross_entropy_loss"]


# ---- optimizer updates


# ---- what is refused

WRONG: dict[str, tuple[Callable[[Graph, Tensor], Any], str]] = {
    "rms weight": (lambda g, x: g.rms_norm(x, g.input("w", (2,))), r"rms_norm: expected weight f32\[6\], got f32\[2\]"),
    "rms scalar": (lambda g, x: g.rms_norm(x[0, 0]), r"rms_norm: expected f32 of rank 1 or more, got f32\[\]"),
    "layer dtype": (lambda g, x: g.layer_norm(g.input("i", (2,), "u32")), r"layer_norm: expected f32 .*u32\[2\]"),
    "layer bias": (lambda g, x: g.layer_norm(x, x[0], x), r"layer_norm: expected bias f32\[6\], got f32\[4, 6\]"),
    "groups": (lambda g, x: g.group_norm(x, 4), "group_norm: expected groups that divide 6 channels, got 4"),
    "no groups": (lambda g, x: g.group_norm(x, 0), "group_norm: expected groups that divide 6 channels, got 0"),
    "activation": (lambda g, x: g.group_norm(x, 2, activation="relu"), 'expected activation "" or "silu", got .relu'),
    "group weight": (
        lambda g, x: g.group_norm(x, 2, x[0]),
        "group_norm: expected both w and b or neither, got w alone",
    ),
    "batch rank": (lambda g, x: g.batch_norm(x[0], x[0], x[0]), r"batch_norm: expected rank 2 or more, got f32\[6\]"),
    "batch mean": (
        lambda g, x: g.batch_norm(x, x[:, 0], x[0]),
        r"batch_norm: expected statistics .*\[6\], got f32\[4\]",
    ),
    "ids": (
        lambda g, x: g.cross_entropy_loss(x, g.input("i", (6,), "u32")),
        r"expected labels u32\[4\] .*got u32\[6\]",
    ),
    "weights": (lambda g, x: g.cross_entropy_loss(x, x[0]), r"or f32\[4, 6\] \(weights\), got f32\[6\]"),
    "no classes": (lambda g, x: g.cross_entropy_loss(x[:, :0], x[:, :0]), r"expected f32 logits of one class or more"),
    "smoothing": (lambda g, x: g.cross_entropy_loss(x, x, label_smoothing=2), "label_smoothing from 0 to 1, got 2"),
    "loss shapes": (lambda g, x: g.mse_loss(x, x[0]), r"mse_loss: expected two f32 tensors of one shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_named(case: str) -> None:
    build, message = WRONG[case]
    g = Graph()
    x = g.input("x", (4, 6))
    with pytest.raises(GraphError, match=message):
        build(g, x)
