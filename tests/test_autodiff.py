"""Differentiation of whole graphs: coefficients, sharing, what is trained and what is not, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import GradientError, Graph, Tensor
from meganeura_aot.autodiff import differentiate
from meganeura_aot.graph import DType, GraphIR
from meganeura_aot.ops.state.leaf import Leaf
from meganeura_aot.passes import CLEANUP, run_passes
from meganeura_aot.target import find_target
from tests.gradients import assert_finite_differences, assert_kernels

Array = np.ndarray[Any, Any]


def feeds_of(graph: GraphIR, seed: int = 0) -> dict[str, Array]:
    """f32 leaves are normal, integers below 3."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for node in graph.nodes:
        if isinstance(node.op, Leaf):
            drawn = rng.standard_normal(node.types[0].shape)
            is_f32 = node.types[0].dtype is DType.F32
            feeds[node.op.label] = drawn if is_f32 else rng.integers(0, 3, drawn.shape).astype(np.uint32)
    return feeds


def two_losses(g: Graph) -> Tensor:
    x = g.relu(g.matmul_bt(g.input("x", (5, 4)), g.parameter("w", (3, 4))))
    return g.mse_loss(x, g.input("t", (5, 3))) + 0.3 * g.mean(g.tanh(x))


def coefficient(g: Graph) -> Tensor:
    return g.cross_entropy_loss(g.input("x", (6, 4)) @ g.parameter("w", (4, 3)), g.input("y", (6,), "u32")) * 2.5


def labels_of_any_sum(g: Graph) -> Tensor:
    return g.cross_entropy_loss(g.input("x", (6, 4)) @ g.parameter("w", (4, 3)), g.input("y", (6, 3))) * -0.5


def square(g: Graph) -> Tensor:
    x = g.parameter("w", (4, 3)) * 1.5
    return g.sum(x * x * g.input("c", (4, 3)))


def twice(g: Graph) -> Tensor:
    x = g.parameter("w", (4, 3))
    return g.sum((x + x) * g.tanh(x))


def itself(g: Graph) -> Tensor:
    x = g.parameter("w", (4, 3))
    return g.sum(g.input("c", (4, 4)) * g.matmul_bt(x, x))


def tied(g: Graph) -> Tensor:
    table = g.parameter("embed", (7, 4))
    h = g.tanh(g.embedding(g.input("ids", (2, 5), "u32"), table) @ g.parameter("w", (4, 4)))
    return g.cross_entropy_loss(g.matmul_bt(h, table), g.input("next", (2, 5), "u32"))


def parameter_itself(g: Graph) -> Tensor:
    return g.parameter("w", ())


def one_element(g: Graph) -> Tensor:
    return g.reshape(g.sum(g.exp(g.parameter("w", (3,)))), (1, 1))


def state_between(g: Graph) -> Tensor:
    """A recurrent state: the gradient goes through what is assigned, and stops at what was there."""
    h = g.state("h", (3,))
    new = g.assign(h, g.tanh(h * g.parameter("w", (3,)) + g.input("x", (3,))))
    return g.sum(new * new)


LOSSES: dict[str, Callable[[Graph], Tensor]] = {
    build.__name__: build
    for build in (
        two_losses,
        coefficient,
        labels_of_any_sum,
        square,
        twice,
        itself,
        tied,
        parameter_itself,
        one_element,
        state_between,
    )
}


def loss_graph(build: Callable[[Graph], Tensor]) -> GraphIR:
    g = Graph()
    g.set_outputs({"loss": build(g)})
    return g.build()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    graph = loss_graph(LOSSES[name])
    assert_finite_differences(graph, feeds_of(graph))
    assert_kernels(graph, feeds_of(graph))


def test_only_what_is_trained_has_a_gradient() -> None:
    """No input, no frozen parameter, no parameter without a path, no integer; and their products are not computed."""
    g = Graph()
    x, frozen = g.input("x", (5, 4)), g.parameter("frozen", (4, 4), trainable=False)
    ids, stopped = g.parameter("ids", (5,), "u32"), g.parameter("stopped", (4,))
    g.parameter("unused", (3,))
    side = g.parameter("side", (4,))
    h = g.tanh(x @ frozen) @ g.parameter("w", (4, 3)) + g.sum(g.stop_gradient(g.exp(stopped)))
    g.set_outputs({"side": g.exp(side), "loss": g.mean(h * g.one_hot(ids, 3))})
    graph = differentiate(g.build(), "loss")
    assert [name for name, _ in graph.gradients] == ["w"]
    before = run_passes(g.build(), find_target("webgpu"), CLEANUP)
    after = run_passes(graph, find_target("webgpu"), CLEANUP)
    products = [sum(node.op.name == "matmul" for node in ir.nodes) for ir in (before, after)]
    assert products == [2, 3]  # one more, for w: neither x nor frozen has a gradient


def test_gradients_come_in_the_order_of_the_parameters() -> None:
    g = Graph()
    a, b, c = (g.parameter(name, (2,)) for name in "abc")
    g.set_outputs([g.sum(c * a * b)])
    assert [name for name, _ in differentiate(g.build(), "output_0").gradients] == ["a", "b", "c"]


def test_gradient_nodes_say_what_they_are_for() -> None:
    """The line of the operator that they differentiate."""
    g = Graph()
    h = g.tanh(g.parameter("w", (2,)))
    g.set_outputs([g.sum(h)])
    graph = differentiate(g.build(), "output_0")
    here = __file__
    assert all(node.location.startswith(here) for node in graph.nodes)
    assert len({node.location for node in graph.nodes}) == 3


def refusal(build: Callable[[Graph], Tensor]) -> str:
    graph = loss_graph(build)
    with pytest.raises(GradientError) as error:
        differentiate(graph, "loss")
    return str(error.value)


def test_an_operator_without_gradient_is_named_with_its_way_to_the_loss() -> None:
    def cached(g: Graph) -> Tensor:
        position = g.state("position", (), "u32")
        k = g.matmul(g.input("x", (1, 1, 8)), g.parameter("w", (8, 8)))
        cache = g.cache_write(g.state("cache", (1, 4, 8)), k, position)
        return g.mean(g.exp(cache))

    message = refusal(cached)
    assert "cache_write has no gradient" in message
    assert message.count(f"(built at {__file__}:") == 3
    order = [message.index(name) for name in ("cache_write", " exp ", " mean ", "-> loss")]
    assert order == sorted(order)


def test_nothing_to_train() -> None:
    assert "expected a parameter that is trained" in refusal(lambda g: g.sum(g.input("x", (3,))))
    assert "expected a parameter that is trained" in refusal(lambda g: g.sum(g.parameter("w", (3,), trainable=False)))
    assert "expected a parameter that is trained" in refusal(lambda g: g.sum(g.round(g.parameter("w", (3,)))))


def test_a_path_that_an_assignment_ends() -> None:
    def overwritten(g: Graph) -> Tensor:
        state = g.state("s", (3,))
        g.assign(state, g.parameter("w", (3,)))
        g.assign(state, g.input("x", (3,)))
        return g.sum(state)

    assert "expected a parameter that is trained" in refusal(overwritten)


def test_a_loss_is_one_number() -> None:
    assert "expected f32 of one element, got f32[3]" in refusal(lambda g: g.parameter("w", (3,)))
    assert "expected f32 of one element, got u32[]" in refusal(lambda g: g.argmax(g.parameter("w", (3,))))
