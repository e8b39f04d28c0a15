"""Passes that remove work: what they find, what they leave alone, and that the numbers stay what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor, compile_graph
from meganeura_aot.graph import GraphIR
from meganeura_aot.passes import PASSES, fold_constants, fuse_expand, run_passes
from meganeura_aot.target import find_target
from tests import harness
from tests.gradients import gradients_of

TARGET = find_target("webgpu")


def rewritten(build: Callable[[Graph], Any]) -> tuple[GraphIR, Counter[str]]:
    """The graph after all passes, and how many operators of each name it has, leaves left out."""
    g = Graph()
    g.set_outputs({"y": build(g)})
    graph = run_passes(g.build(), TARGET, PASSES)
    return graph, Counter(node.op.name for node in graph.nodes if not node.op.is_leaf)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda g: g.constant(2.0) * 3.0, 6.0),
        (lambda g: g.constant(0.1) + g.constant(0.2), np.float32(0.1) + np.float64(np.float32(0.2))),
        (lambda g: g.exp(g.expand(g.constant(1.0), (1, 1))), [[np.e]]),
        (lambda g: g.constant(7) // 2, 3),
        (lambda g: g.cast(g.constant(2.9), "i32"), 2),
        (lambda g: g.where(g.constant(0.5) < 1.0, g.constant(5, "u32"), g.constant(6, "u32")), 5),
        (lambda g: g.reshape(g.constant([-0.0]), ()), -0.0),
    ],
)
def test_constants_of_one_element(build: Callable[[Graph], Tensor], expected: Any) -> None:
    graph, counts = rewritten(build)
    assert not counts
    value = graph.outputs[0][1]
    folded = graph.nodes[value.node].op.reference()
    exact = np.asarray(expected).astype(graph.type_of(value).dtype.numpy)
    np.testing.assert_array_equal(folded, exact)
    assert (np.signbit(folded) == np.signbit(exact)).all()
    g = Graph()
    g.set_outputs({"y": build(g)})
    harness.check(g, {})


@pytest.mark.parametrize(
    "build",
    [
        lambda g: g.exp(g.constant(100.0)),
        lambda g: g.log(g.constant(-1.0)),
        lambda g: g.constant(1.0) / 0.0,
        lambda g: g.constant([1.0, 2.0]) * 2.0,
        lambda g: g.expand(g.constant(1.0), (3,)),
        lambda g: g.sum(g.constant(3.0)),
    ],
)
def test_what_is_not_folded(build: Callable[[Graph], Tensor]) -> None:
    assert rewritten(build)[1]
    g = Graph()
    g.set_outputs({"y": build(g)})
    harness.check(g, {})


def test_a_factor_of_one() -> None:
    """On either side and of integers; not where it makes the shape, and not another number or operator."""

    def work(build: Callable[[Graph, Tensor], Tensor], dtype: str = "f32") -> Counter[str]:
        return rewritten(lambda g: build(g, g.input("x", (3,), dtype)))[1]

    assert not work(lambda g, x: x * 1.0)
    assert not work(lambda g, x: 1.0 * x)
    assert not work(lambda g, x: x * 1, "i32")
    assert not work(lambda g, x: x * g.constant([1.0]))
    assert work(lambda g, x: x * g.constant([[1.0]])) == {"mul": 1}
    assert work(lambda g, x: x * g.constant([1.0, 1.0, 1.0])) == {"mul": 1}
    assert work(lambda g, x: x * 1.0000001) == {"mul": 1}
    assert work(lambda g, x: x + 1.0) == {"add": 1}
    assert work(lambda g, x: x - 0.0) == {"sub": 1}


def test_a_state_read_through_a_factor_of_one_is_the_old_version() -> None:
    g = Graph()
    state = g.state("s", (3,))
    old = state * 1.0
    g.assign(state, state + 1.0)
    g.set_outputs({"old": old, "new": state * 1.0})
    runner = harness.load(compile_graph(g))
    for call in range(3):
        got = runner.run()
        np.testing.assert_array_equal(got["old"], np.full(3, call))
        np.testing.assert_array_equal(got["new"], np.full(3, call + 1))


def test_expansions_that_alone_make_the_shape_stay() -> None:
    """One of two may go, not both; through several expansions, and reshapes of one element."""
    g = Graph()
    row, column, one = g.input("row", (8,)), g.input("column", (4, 1)), g.input("one", (1, 1, 1))
    x = g.input("x", (4, 8))
    twice = g.expand(g.expand(row, (1, 8)), (4, 8))
    spread = g.reshape(g.expand(one, (1, 2, 16)), (4, 8))
    outputs = {
        "both": g.expand(row, (4, 8)) * g.expand(column, (4, 8)),
        "same": g.expand(row, (4, 8)) * g.expand(row, (4, 8)),
        "twice": x * twice,
        "ranks": x + spread,
        "integers": g.where(g.expand(column, (4, 8)), g.expand(g.input("i", (), "i32"), (4, 8)), g.constant(3)),
    }
    g.set_outputs(outputs)
    after = fuse_expand(g.build(), TARGET).verify()
    assert Counter(node.op.name for node in after.nodes)["expand"] == 3  # of "same", "ranks" (rank 3) and "integers"
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=s).astype(np.float32) for name, s in [("row", 8), ("column", (4, 1)), ("x", (4, 8))]}
    harness.check(g, {**feeds, "one": np.full((1, 1, 1), 0.5, np.float32), "i": np.array(-7, np.int32)})


def test_a_gradient_is_not_spread_before_it_is_used() -> None:
    """The gradient of mean((x * w)^2) is pointwise from its seed on: nothing is expanded, no number computed."""
    g = Graph()
    x, w = g.input("x", (16, 8)), g.parameter("w", (8,))
    y = x * w
    g.set_outputs({"loss": g.mean(y * y) * 0.5})
    graph = run_passes(gradients_of(g.build()), TARGET, PASSES)
    names = Counter(node.op.name for node in graph.nodes if not node.op.is_leaf)
    assert "expand" not in names
    assert all(any(v in graph.users() for v in node.inputs) for node in graph.nodes if not node.op.is_leaf)
    for node in graph.nodes:
        assert node.op.is_leaf or node.types[0].size > 1, f"{node.op.name} of numbers"


def test_passes_do_not_change_numbers() -> None:
    rng = np.random.default_rng(0)
    g = Graph()
    x, w = g.input("x", (16, 8)), g.parameter("w", (8,))
    h = g.softmax(x * w * 1.0 + g.expand(g.constant(0.5), (16, 8)))
    loss = g.cross_entropy_loss(h, g.input("ids", (16,), "u32")) * 0.7 + g.mse_loss(h, x) * g.constant(2.0) / 4.0
    g.set_outputs({"loss": loss})
    feeds = {"x": rng.normal(size=(16, 8)), "w": rng.normal(size=8), "ids": rng.integers(0, 8, 16).astype(np.uint32)}
    feeds = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    graph = gradients_of(g.build())
    fast, slow = (harness.run(compile_graph(graph, optimize=on), feeds) for on in (True, False))
    np.testing.assert_allclose(fast["grad.w"], slow["grad.w"], rtol=1e-5, atol=1e-6)
    assert fold_constants(graph, TARGET).verify() != graph
