"""Gradients of the losses and of softmax: wide and many rows, ends of ranges, no elements, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor, compile_graph
from meganeura_aot.graph import DType
from meganeura_aot.ops.loss.gradient import BceGrad, CrossEntropyGrad
from meganeura_aot.ops.reduce.softmax_gradient import LogSoftmaxGrad, SoftmaxGrad
from tests import harness
from tests.gradients import assert_finite_differences, assert_kernels, gradients_of

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def checked(op: Any, *arrays: Array, twins: bool = True) -> Array:
    """The operator's kernel against its reference."""
    g = Graph()
    dtypes = {"f": "f32", "u": "u32"}
    inputs = [g.input(f"x{i}", a.shape, dtypes[a.dtype.kind]) for i, a in enumerate(arrays)]
    g.set_outputs({"y": g.apply(op, *inputs)})
    return harness.check(g, {f"x{i}": a for i, a in enumerate(arrays)}, twins=twins)["y"]


def labels(g: Graph, *outputs: Tensor) -> list[str]:
    g.set_outputs(list(outputs))
    return [dispatch.label for dispatch in compile_graph(g).plan.dispatches()]


@pytest.mark.parametrize("shape", [(3, 49152), (2, 49151), (513, 4), (513, 3), (1, 1), (70_000, 2), (5, 8193)], ids=str)
def test_rows_of_every_length(shape: tuple[int, int]) -> None:
    x, dy = normal(*shape) * 3, np.array(0.7, np.float32)
    e = np.exp(x.astype(np.float64))
    y = (e / e.sum(1, keepdims=True)).astype(np.float32)
    checked(SoftmaxGrad(1), normal(*shape, seed=1), y, twins=False)
    checked(LogSoftmaxGrad(1), normal(*shape, seed=1), np.log(np.maximum(y, 1e-37)), twins=False)
    ids = np.random.default_rng(2).integers(0, shape[1], shape[0]).astype(np.uint32)
    got = checked(CrossEntropyGrad(int(ids[0]) if shape[0] > 5 else None), dy, x, ids, twins=False)
    np.testing.assert_allclose(got.sum(1, dtype=np.float64), 0, atol=1e-6)
    checked(CrossEntropyGrad(None, 0.1), dy, x, normal(*shape, seed=3), twins=False)


def test_more_chunks_than_threads_of_a_row() -> None:
    """Rows whose elements are apart: eight threads each, and 24 chunks."""
    y = np.random.default_rng(0).uniform(0, 1e-3, (3000, 40)).astype(np.float32)
    checked(SoftmaxGrad(0), normal(3000, 40), y, twins=False)
    checked(LogSoftmaxGrad(0), normal(3000, 40), np.log(y), twins=False)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes(axis: int) -> None:
    y = np.random.default_rng(0).dirichlet(np.ones(5), (33, 40)).astype(np.float32)
    for op in (SoftmaxGrad(axis), LogSoftmaxGrad(axis)):
        checked(op, normal(33, 40, 5), y if op.name == "softmax_grad" else np.log(y))


def test_dispatches() -> None:
    """One kernel where a row fits a team, two where not; the counted rows are one more."""
    for name in ("softmax_grad", "log_softmax_grad"):
        op = SoftmaxGrad(1) if name == "softmax_grad" else LogSoftmaxGrad(1)
        g = Graph()
        assert labels(g, g.apply(op, g.input("dy", (8, 1000)), g.input("y", (8, 1000)))) == [name]
        g = Graph()
        assert labels(g, g.apply(op, g.input("dy", (8, 49152)), g.input("y", (8, 49152)))) == [f"{name}_sums", name]
    g = Graph()
    inputs = g.input("dy", ()), g.input("x", (8, 1000)), g.input("ids", (8,), "u32")
    assert labels(g, g.apply(CrossEntropyGrad(), *inputs)) == ["cross_entropy_grad"]
    assert labels(g, g.apply(CrossEntropyGrad(3), *inputs)) == ["counted", "cross_entropy_grad"]


@pytest.mark.parametrize("dtype", ["u32", "f32"])
def test_memory(dtype: str) -> None:
    """Of the size of the logits there is the gradient, and nothing else."""
    g = Graph()
    shape = (64, 49152)
    x, t = g.parameter("x", shape), g.input("t", shape[:1] if dtype == "u32" else shape, dtype)
    g.set_outputs({"loss": g.cross_entropy_loss(x, t, label_smoothing=0.1) * 0.5})
    plan = compile_graph(gradients_of(g.build())).plan
    large = [b.kind for b in plan.buffers.values() if b.nbytes * 8 > 64 * 49152 * 4]
    assert sorted(large) == sorted(["parameter", "output"] + ["input"] * (dtype == "f32"))


def test_bce_at_the_ends() -> None:
    """Finite at p = 0 and 1, and what is outside counts as an end; the exact labels do not cancel there."""
    p = np.array([0, 0, 1, 1, 1e-9, 1 - 2**-24, 0.5, 0.3, -1, 2], np.float32)
    t = np.array([0, 1, 0, 1, 1, 1, 0.5, 2, 1, 0], np.float32)
    got = checked(BceGrad(), np.array(0.5, np.float32), p, t)
    expected = [0, -1e12, 1e12, 0, -1e9, -1, 0, (0.3 - 2) / 0.21, -1e12, 1e12]
    np.testing.assert_allclose(got, 0.5 * np.array(expected), rtol=2e-6)


def test_bce_slope_is_that_of_the_loss_near_zero() -> None:
    """Nothing is clipped there, so finite differences see it."""
    g = Graph()
    p, t = g.parameter("p", (6,)), g.parameter("t", (6,))
    g.set_outputs({"loss": g.bce_loss(p, t)})
    feeds = {"p": np.array([1e-10, 1e-9, 1e-8, 1e-7, 1e-3, 0.5]), "t": np.array([0, 1, 0.5, 1, 2, -1])}
    assert_finite_differences(g.build(), feeds)


def test_nan_in_a_row_stays_in_it() -> None:
    x, ids = normal(4, 9), np.array([0, 1, 9, 3], np.uint32)
    x[1, 2] = np.nan
    x[3, 5] = np.inf
    got = checked(CrossEntropyGrad(), np.array(1, np.float32), x, ids)
    np.testing.assert_array_equal(np.isnan(got).all(1), [False, True, True, True])
    assert np.isfinite(got[0]).all()
    got = checked(CrossEntropyGrad(1), np.array(1, np.float32), x, ids)
    assert not got[1].any()
    x, y = normal(3, 65), np.abs(normal(3, 65, seed=1))
    x[1, 64] = np.nan
    for op in (SoftmaxGrad(1), LogSoftmaxGrad(1)):
        assert np.isnan(checked(op, x, y)).all(1).tolist() == [False, True, False]
        assert np.isnan(checked(op, y, x)).any(1).tolist() == [False, True, False]


def test_classes_that_are_ruled_out() -> None:
    """Logits of -inf have no gradient; of a row of them alone there is no softmax."""
    x, ids = normal(3, 6), np.array([1, 2, 0], np.uint32)
    x[0, 3] = x[2, :] = -np.inf
    got = checked(CrossEntropyGrad(), np.array(1, np.float32), x, ids)
    assert got[0, 3] == 0
    assert np.isfinite(got[:2]).all()
    assert np.isnan(got[2]).any()


LOSSES: dict[str, Callable[[Graph, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda g, x, t: g.cross_entropy_loss(x, t),
    "bce": lambda g, x, t: g.bce_loss(x, t),
    "mse": lambda g, x, t: g.mse_loss(x, t),
    "l1": lambda g, x, t: g.l1_loss(x, t),
}


@pytest.mark.parametrize("name", LOSSES)
def test_no_elements(name: str) -> None:
    g = Graph()
    x, t = g.parameter("x", (0, 3)), g.parameter("t", (0, 3))
    g.set_outputs({"loss": LOSSES[name](g, x, t) * 2.0})
    got = harness.run(compile_graph(gradients_of(g.build())), {n: np.zeros((0, 3), np.float32) for n in "xt"})
    assert [array.shape for array in got.values()] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("name", LOSSES)
def test_labels_are_trained_too(name: str) -> None:
    """Both inputs depend on one parameter, and a loss is a number among others."""
    g = Graph()
    x, t = g.parameter("x", (6, 5)), g.parameter("t", (6, 5))
    p, q = g.sigmoid(x * t), g.sigmoid(t)
    first, second = LOSSES[name](g, p, q), LOSSES[name](g, q, p)
    g.set_outputs({"loss": first * 0.3 + second * second})
    feeds = {"x": normal(6, 5), "t": normal(6, 5, seed=1)}
    assert_finite_differences(g.build(), feeds)
    assert_kernels(g.build(), feeds)


def test_counts_of_ignored_rows() -> None:
    """Rows of one workgroup, and more than a stage of the count takes."""
    for rows in (1, 3, 255, 4096, 8193, 20_000):
        ids = np.random.default_rng(rows).integers(0, 3, rows).astype(np.uint32)
        ids[0] = 1
        got = checked(CrossEntropyGrad(2), np.array(1, np.float32), normal(rows, 3), ids, twins=False)
        assert not got[ids == 2].any()
        assert got.dtype == DType.F32.numpy
