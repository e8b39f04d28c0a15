"""Gradients of norms beyond the generated tests: what is dispatched, rows of every size, nothing, and states of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, Tensor, compile_graph
from meganeura_aot.autodiff import differentiate
from meganeura_aot.errors import GradientError
from meganeura_aot.ops.norm.batch import BatchNorm, BatchNormTraining
from meganeura_aot.reference import evaluate
from tests import harness
from tests.gradients import assert_finite_differences, assert_kernels, gradients_of

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def loss_of(build: Callable[..., Tensor], *shapes: tuple[int, ...], **options: Any) -> tuple[Graph, dict[str, Array]]:
    """A graph with loss = sum(weights * build(x0, x1, ...)) of parameters, and numbers for it."""
    g = Graph()
    y = build(g, *(g.parameter(f"x{i}", shape, **options) for i, shape in enumerate(shapes)))
    g.set_outputs({"loss": g.sum(y * g.input("weights", y.shape))})
    feeds = {f"x{i}": normal(*shape, seed=i) * 2 + 1 for i, shape in enumerate(shapes)}
    return g, feeds | {"weights": normal(*y.shape, seed=9)}


@pytest.mark.parametrize("columns", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 257])
def test_rows_and_columns(rows: int, columns: int) -> None:
    shapes = ((rows, columns), (columns,), (columns,))
    eps = 0.5 if columns == 1 else 1e-5  # with a small one the gradient of a row of one number is all rounding
    for graph, feeds in (
        loss_of(lambda g, x, w: g.rms_norm(x, w, eps), *shapes[:2]),
        loss_of(lambda g, x, w, b: g.layer_norm(x, w, b, eps), *shapes),
        loss_of(lambda g, x, w, b: g.group_norm(x, 1, w, b, eps, "silu"), *shapes),
    ):
        assert_kernels(graph.build(), feeds)


@pytest.mark.parametrize("columns", [4096, 4097, 8192, 8193, 8196, 49152])
def test_long_rows(columns: int) -> None:
    """About the lengths at which rows no longer fit in registers."""
    shapes = ((2, columns), (columns,), (columns,))
    for graph, feeds in (
        loss_of(lambda g, x, w: g.rms_norm(x, w), *shapes[:2]),
        loss_of(lambda g, x, w, b: g.layer_norm(x, w, b), *shapes),
        loss_of(lambda g, x: g.group_norm(g.reshape(x, (2, 1, columns)), 1, activation="silu"), shapes[0]),
    ):
        assert_kernels(graph.build(), feeds)


@pytest.mark.parametrize("rows", [8, 127, 128, 129, 1000, 5000])
@pytest.mark.parametrize("columns", [1, 3, 32, 33])
def test_many_rows(rows: int, columns: int) -> None:
    """About the lengths at which sums over rows are cut into chunks."""
    shapes = ((rows, columns), (columns,), (columns,))
    for graph, feeds in (
        loss_of(lambda g, x, w: g.rms_norm(x, w, 0.5), *shapes[:2]),
        loss_of(lambda g, x, w, b: g.layer_norm(x, w, b, 0.5), *shapes),
        loss_of(lambda g, x, w, b: training(g, x, w, b), *shapes),
    ):
        states = {name: np.zeros(columns, np.float32) for name in ("mean", "variance")}
        assert_kernels(graph.build(), feeds | states)


def training(g: Graph, x: Tensor, *weights: Tensor, **options: Any) -> Tensor:
    states = [g.state(name, x.shape[1:2]) for name in ("mean", "variance")]
    return g.batch_norm(x, *states, *weights, training=True, **options)


def test_outliers_and_large_means() -> None:
    rows = np.ones((64, 512), np.float32) + normal(64, 512) * 1e-3
    rows[3, 77] = 795
    rows[4] = normal(512, seed=1) + 1e5
    shapes = ((64, 512), (512,), (512,))
    for build, count in (
        (lambda g, x, w: g.rms_norm(x, w), 2),
        (lambda g, x, w, b: g.layer_norm(x, w, b), 3),
        (lambda g, x: g.group_norm(g.reshape(x, (2, 32, 16, 32)), 2), 1),
    ):
        graph, feeds = loss_of(build, *shapes[:count])
        assert_kernels(graph.build(), {**feeds, "x0": rows})


def test_long_rows_far_from_zero() -> None:
    """With an upstream like the rows themselves: then all that is not exact in them shows."""
    noise = normal(2, 9000)
    for build, shapes in (
        (lambda g, x: g.layer_norm(x), ((2, 9000),)),
        (lambda g, x: g.group_norm(g.reshape(x, (1, 2, 9000)), 2), ((2, 9000),)),
    ):
        graph, feeds = loss_of(build, *shapes)
        upstream = (noise + 0.1 * normal(2, 9000, seed=1)).reshape(feeds["weights"].shape)
        assert_kernels(graph.build(), {"x0": noise + np.float32(1e5), "weights": upstream})


def test_a_nan_stays_in_its_row() -> None:
    graph, feeds = loss_of(lambda g, x, w, b: g.layer_norm(x, w, b), (4, 300), (300,), (300,))
    feeds["x0"][1, 7] = np.nan
    got = harness.run(compile_graph(gradients_of(graph.build())), feeds)
    assert np.isnan(got["grad.x0"][1]).all()
    assert np.isfinite(got["grad.x0"][[0, 2, 3]]).all()
    assert np.isnan(got["grad.x1"]).all()
    assert np.isfinite(got["grad.x2"]).all()


def test_nothing() -> None:
    """Of no rows the gradients of weights are 0."""
    for build, shapes in (
        (lambda g, x, w: g.rms_norm(x, w), ((0, 4), (4,))),
        (lambda g, x, w, b: g.layer_norm(x, w, b), ((0, 4), (4,), (4,))),
        (lambda g, x, w, b: g.group_norm(x, 2, w, b), ((2, 4, 0), (4,), (4,))),
        (lambda g, x, w, b: g.layer_norm(x, w, b), ((3, 0), (0,), (0,))),
    ):
        graph, feeds = loss_of(build, *shapes)
        wanted = gradients_of(graph.build())
        got = harness.run(compile_graph(wanted), feeds)
        assert got.keys() == {f"grad.x{i}" for i in range(len(shapes))}
        for name, expected in evaluate(wanted, feeds).items():
            np.testing.assert_array_equal(got[name], expected)
            assert not got[name].any()


def test_weights_stored_as_halves() -> None:
    g = Graph()
    x = g.parameter("x", (3, 64))
    y = g.layer_norm(x, g.parameter("w", (64,), "f16", trainable=False), g.parameter("b", (64,), "f16"))
    y = g.group_norm(y, 4, *(g.parameter(name, (64,), "f16") for name in ("gw", "gb")), activation="silu")
    g.set_outputs({"loss": g.sum(y * g.input("weights", (3, 64)))})
    feeds = {name: normal(64, seed=seed) for seed, name in enumerate(("w", "b", "gw", "gb"))}
    feeds = {name: a.astype(np.float16).astype(np.float32) for name, a in feeds.items()}
    assert_kernels(g.build(), feeds | {"x": normal(3, 64), "weights": normal(3, 64, seed=9)})


# ---- what is dispatched


def dispatched(build: Callable[..., Tensor], *shapes: tuple[int, ...], trainable: tuple[int, ...]) -> list[str]:
    """Labels of what the gradients of these parameters add to the forward."""
    g = Graph()
    tensors = [g.parameter(f"x{i}", shape, trainable=i in trainable) for i, shape in enumerate(shapes)]
    g.set_outputs({"loss": g.sum(build(g, *tensors))})
    before = {d.label for d in compile_graph(g).plan.dispatches()}
    labels = [d.label for d in compile_graph(differentiate(g.build(), "loss")).plan.dispatches()]
    return [label for label in labels if label not in before and "grad" in label]


def test_stages() -> None:
    def rms(g: Graph, x: Tensor, w: Tensor) -> Tensor:
        return g.rms_norm(x, w)

    assert dispatched(rms, (8, 64), (64,), trainable=(0,)) == ["rms_norm_grad_x"]
    both = ["rms_norm_grad_x", "rms_norm_grad_w"]
    assert sorted(dispatched(rms, (8, 64), (64,), trainable=(0, 1))) == sorted(both)
    many = dispatched(rms, (1000, 64), (64,), trainable=(0, 1))
    assert sorted(many) == sorted([*both, "rms_norm_grad_w_sum"])
    long = dispatched(rms, (8, 49152), (49152,), trainable=(0,))
    assert long == ["rms_norm_grad_x_sums", "rms_norm_grad_x"]

    def batch(g: Graph, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return training(g, x, w, b)

    images = dispatched(batch, (2, 3, 96, 96), (3,), (3,), trainable=(0, 1, 2))
    assert sorted(images) == ["batch_norm_grad_wb", "batch_norm_grad_wb_sum", "batch_norm_grad_x"]


# ---- batch norm in training


def test_running_statistics() -> None:
    """They follow the batches, an entry for inference sees them, and `reset` clears them."""
    shape, momentum = (4, 3, 5, 2), 0.25

    def entry(train: bool) -> Graph:
        g = Graph()
        x, *weights = g.input("x", shape), g.parameter("w", (3,)), g.parameter("b", (3,))
        states = [g.state(name, (3,)) for name in ("mean", "variance")]
        g.set_outputs({"y": g.batch_norm(x, *states, *weights, training=train, momentum=momentum)})
        return g

    runner = harness.load(compile_graph({"train": entry(True), "run": entry(False)}))
    weights = {"w": normal(3, seed=1), "b": normal(3, seed=2)}
    runner.load_weights(weights)
    runner.set_state("variance", np.ones(3, np.float32))
    mean, variance = np.zeros(3), np.ones(3)
    spread = (-1, 1, 1)
    for step in range(3):
        x = normal(*shape, seed=step) * 3 - 2
        of_batch = x.mean((0, 2, 3), dtype=np.float64), x.var((0, 2, 3), dtype=np.float64)
        mean = (1 - momentum) * mean + momentum * of_batch[0]
        variance = (1 - momentum) * variance + momentum * of_batch[1] * 40 / 39
        for name, statistics in (("train", of_batch), ("run", (mean, variance))):
            m, v, w, b = (t.reshape(spread) for t in (*statistics, *weights.values()))
            expected = (x - m) / np.sqrt(v + 1e-5) * w + b
            np.testing.assert_allclose(getattr(runner, name)(x=x)["y"], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(runner.get_state("mean"), mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(runner.get_state("variance"), variance, rtol=1e-5)
    runner.assert_tails()


@pytest.mark.parametrize("port", [0, 1, 2])
def test_gradients_of_one_output(port: int) -> None:
    """Only y depends on the weights; statistics depend on x alone."""
    g = Graph()
    x, w = g.parameter("x", (4, 3, 5)), g.parameter("w", (3,))
    y = g.apply_many(BatchNormTraining(), x, w)[port]
    g.set_outputs({"loss": g.sum(y * g.input("weights", y.shape))})
    feeds = {"x": normal(4, 3, 5), "w": normal(3), "weights": normal(*y.shape, seed=1)}
    found = assert_finite_differences(g.build(), feeds)
    assert found.keys() == ({"grad.x", "grad.w"} if port == 0 else {"grad.x"})
    assert_kernels(g.build(), feeds)


WRONG: dict[str, tuple[Callable[[Graph, Tensor], Any], str]] = {
    "no state": (lambda g, x: g.batch_norm(x, x[0], x[0], training=True), r"assign .*: expected a state, got the"),
    "one number": (lambda g, x: training(g, x[:1]), "expected two numbers or more a channel, got f32.1, 6."),
    "weight": (
        lambda g, x: training(g, x, x[:, 0]),
        r"batch_norm: expected statistics and weights of \[6\], got f32\[4\]",
    ),
    "momentum": (
        lambda g, x: training(g, x, momentum=float("nan")),
        "expected a finite number that f32 holds as momentum, got nan",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_named(case: str) -> None:
    build, message = WRONG[case]
    g = Graph()
    x = g.input("x", (4, 6))
    with pytest.raises(GraphError, match=message):
        build(g, x)


def test_statistics_that_are_not_of_channels_have_no_gradient() -> None:
    g = Graph()
    x, mean = g.parameter("x", (2, 3, 4)), g.parameter("mean", (4,))
    g.set_outputs({"loss": g.sum(g.apply(BatchNorm(), x, mean, g.input("v", (4,)), 1.0, 0.0))})
    with pytest.raises(GradientError, match=r"batch_norm has no gradient: statistics f32\[4\] that are not"):
        differentiate(g.build(), "loss")
