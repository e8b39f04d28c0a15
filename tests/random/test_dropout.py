"""Dropout: the identity, and in a training step masks that forward and backward share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, compile_graph
from meganeura_aot.autodiff import differentiate
from meganeura_aot.graph import GraphIR
from meganeura_aot.ops.random.dropout import RandomDropout
from meganeura_aot.ops.random.op import RandomUniform
from meganeura_aot.passes import activate_dropout, advance_dropout
from meganeura_aot.reference import evaluate
from tests import harness

SHAPE = (100, 103)
RATE = 0.3


def plain(p: float = RATE) -> GraphIR:
    """y = dropout(x), z = dropout(x) of ones in effect; the loss is a weighted sum of both."""
    g = Graph()
    x, w = g.parameter("x", SHAPE), g.input("w", (2, *SHAPE))
    y, z = g.dropout(x, p), g.dropout(x, p)
    g.set_outputs({"loss": g.sum(y * w[0]) + g.sum(z * w[1]), "y": y, "z": z})
    return g.build()


def trained(graph: GraphIR) -> GraphIR:
    """What a training step runs: the outputs, and the gradients as grad.NAME."""
    both = advance_dropout(differentiate(activate_dropout(graph), "loss"))
    outputs = tuple((f"grad.{name}", value) for name, value in both.gradients)
    return replace(both, outputs=both.outputs + outputs, gradients=()).verify()


def feeds(seed: int = 0) -> dict[str, Any]:
    w = np.random.default_rng(seed).normal(size=(2, *SHAPE)).astype(np.float32)
    return {"x": np.ones(SHAPE, np.float32), "w": w, "dropout.rng": np.array([5, 6, 7, 0], np.uint32)}


def test_it_is_the_identity_outside_of_training() -> None:
    graph = plain()
    got = harness.check(graph, feeds())
    np.testing.assert_array_equal(got["y"], feeds()["x"])
    program = compile_graph(graph)
    assert "random" not in {dispatch.template for dispatch in program.plan.dispatches()}
    assert not harness.load(program).states


def test_masks() -> None:
    """Dropped as often as said, the mean kept; other elements in each node and at each call."""
    runner = harness.load(compile_graph(trained(plain())))
    inputs = harness.feeds_of(runner, feeds())
    calls = [runner.run(**inputs) for _ in range(3)]
    runner.assert_tails()
    masks = [call[name] for call in calls for name in "yz"]
    count = masks[0].size
    for mask in masks:
        np.testing.assert_array_equal(np.unique(mask), np.array([0, 1 / (1 - RATE)], np.float32))
        assert abs(np.sum(mask == 0) - RATE * count) < 4 * np.sqrt(count * RATE * (1 - RATE))
        assert abs(mask.mean() - 1) < 4 * np.sqrt(RATE / (1 - RATE) / count)
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            both = np.mean((mask == 0) & (other == 0))
            assert abs(both - RATE**2) < 4 * np.sqrt(RATE**2 / count)
    blocks = -(-count // 4)
    np.testing.assert_array_equal(runner.get_state("dropout.rng"), [5, 6, 7 + 3 * 2 * blocks, 0])
    again = harness.load(compile_graph(trained(plain())))
    harness.assert_same(calls[0], again.run(**harness.feeds_of(again, feeds())), "of the same seed")


def test_backward_uses_the_masks_of_forward() -> None:
    runner = harness.load(compile_graph(trained(plain())))
    inputs = harness.feeds_of(runner, feeds())
    w = feeds()["w"]
    for _ in range(2):
        got = runner.run(**inputs)
        expected = got["y"] * w[0] + got["z"] * w[1]
        np.testing.assert_allclose(got["grad.x"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("p", [0.0, 2.0**-24, 0.1, 0.5, 0.75, 1 - 2.0**-24, 1 - 2.0**-30])
@pytest.mark.parametrize("size", [4096, 4099])
def test_kernel_drops_what_the_uniform_numbers_say(p: float, size: int) -> None:
    """Exactly, at the numbers that are equal to p too: the uniform numbers of that place in the stream."""
    g = Graph()
    x, state = g.input("x", (size,)), g.state("state", (4,), "u32")
    g.set_outputs({"y": g.apply(RandomDropout(p, 2**32 - 2000), x, state)})
    values = {"x": np.arange(1, size + 1, dtype=np.float32), "state": np.array([1, 2, 4000, 9], np.uint32)}
    got = harness.check(g, values)["y"]
    uniform = RandomUniform((size,)).reference(np.array([1, 2, 2000, 10], np.uint32))
    np.testing.assert_array_equal(got != 0, uniform >= p)


@pytest.mark.parametrize("index", range(4))
def test_a_number_equal_to_p_is_kept(index: int) -> None:
    """And one that is less by the smallest difference of doubles is dropped."""
    uniform = RandomUniform((4,)).reference(np.zeros(4, np.uint32))
    for p in (uniform[index], np.nextafter(uniform[index], 1)):
        g = Graph()
        g.set_outputs({"y": g.apply(RandomDropout(float(p)), g.input("x", (4,)), g.state("state", (4,), "u32"))})
        got = harness.check(g, {"x": np.ones(4, np.float32), "state": np.zeros(4, np.uint32)})["y"]
        np.testing.assert_array_equal(got != 0, uniform >= p)
        assert (got[index] != 0) == (p == uniform[index])


def test_what_is_not_a_number_stays_visible() -> None:
    g = Graph()
    g.set_outputs({"y": g.apply(RandomDropout(0.5), g.input("x", (8,)), g.state("state", (4,), "u32"))})
    x = np.array([np.nan, np.inf, -np.inf, -0.0] * 2, np.float32)
    got = harness.check(g, {"x": x, "state": np.zeros(4, np.uint32)})["y"]
    assert np.isnan(got[[0, 4]]).all()
    assert np.signbit(got[[3, 7]]).all()


def test_reference_of_a_step() -> None:
    graph = trained(plain())
    values = feeds()
    harness.check(graph, values, twins=False)
    ends = [node.op for node in graph.nodes if node.op.writes]
    assert graph.nodes[-1].op is ends[0]
    assert evaluate(graph, values)["y"].shape == SHAPE


def test_the_state_is_not_copied_for_the_gradients() -> None:
    dispatches = list(compile_graph(trained(plain())).plan.dispatches())
    assert dispatches[-1].template == "random"
    assert not any("before it is written" in dispatch.comment for dispatch in dispatches)


def test_a_chain_gets_a_gradient_through_every_mask() -> None:
    g = Graph()
    x = g.parameter("x", (64, 9))
    y = g.dropout(g.relu(g.dropout(g.dropout(x, 0.2), 0.5)), 0.1)
    g.set_outputs({"loss": g.sum(y * y), "y": y})
    runner = harness.load(compile_graph(trained(g.build())))
    value = np.random.default_rng(0).normal(size=(64, 9)).astype(np.float32)
    got = runner.run(**harness.feeds_of(runner, {"x": value}))
    np.testing.assert_allclose(got["grad.x"] * value, 2 * got["y"] ** 2, rtol=1e-5)
    assert 0 < np.mean(got["y"] != 0) < 0.36


def test_nothing_to_do() -> None:
    g = Graph()
    x = g.parameter("x", (3,))
    assert g.dropout(x, 0) is x
    g.set_outputs({"loss": g.sum(x * 2.0)})
    graph = g.build()
    assert activate_dropout(graph) == graph
    assert advance_dropout(graph) == graph
    g = Graph()
    g.set_outputs({"y": g.dropout(g.input("x", (0, 3)), 0.5)})
    assert not advance_dropout(activate_dropout(g.build())).written()


def test_what_does_not_fit() -> None:
    g = Graph()
    x = g.input("x", (3,))
    for p in (1.0, -0.1, float("nan"), 1.5):
        with pytest.raises(GraphError, match=r"dropout: .*test_dropout.py:\d+"):
            g.dropout(x, p)
    with pytest.raises(GraphError, match="dropout: expected f32"):
        g.dropout(g.input("i", (3,), "u32"), 0.5)
    g.set_outputs({"y": g.dropout(g.state("dropout.rng", (3,)), 0.5)})
    with pytest.raises(GraphError, match=r"state 'dropout.rng' \(built at .*expected another name"):
        activate_dropout(g.build())
