"""Matrix products at every awkward size, and what is fused into their store."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor, compile_graph
from meganeura_aot.ops.matmul.op import MatMul
from tests import harness
from tests.tolerance import contraction_bound, pointwise_bound

FORMS = list(itertools.product([False, True], repeat=2))
SMALL = [1, 2, 3, 5, 7]
EDGES = [31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257]


def product(
    m: int, n: int, k: int, trans_a: bool, trans_b: bool, *, target: str = "webgpu", twins: bool = False
) -> None:
    """Check one product of normal numbers."""
    rng = np.random.default_rng(m * 7919 + n * 131 + k)
    g = Graph()
    a = g.input("a", (k, m) if trans_a else (m, k))
    b = g.input("b", (n, k) if trans_b else (k, n))
    g.set_outputs({"y": g.matmul(a, b, trans_a, trans_b)})
    feeds = {name: rng.normal(size=t.shape).astype(np.float32) for name, t in (("a", a), ("b", b))}
    harness.check(g, feeds, target=target, twins=twins)


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
@pytest.mark.parametrize("m", SMALL)
def test_small_sizes(m: int, target: str) -> None:
    for index, (n, k) in enumerate(itertools.product(SMALL, SMALL)):
        product(m, n, k, *FORMS[(index + m) % 4], target=target, twins=index % 10 == 0)


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
@pytest.mark.parametrize("k", [1, 3, 7, 8, 24, 104, 136, 440])
def test_depths(k: int, target: str) -> None:
    """Odd numbers of stages of K: reads past the end meet the canary."""
    for index, form in enumerate(FORMS):
        product(33, 65, k, *form, target=target, twins=index == 0)


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
@pytest.mark.parametrize("m", EDGES)
def test_tile_edges(m: int, target: str) -> None:
    for index, n in enumerate((m, 1, 130)):
        product(m, n, 17, *FORMS[(index + m) % 4], target=target, twins=index == 1)


@pytest.mark.parametrize("rows", [128, 129, 143, 144, 159, 160, 191, 192, 193, 223, 224, 255, 256])
def test_rows_between_tiles(rows: int) -> None:
    product(rows, 96, 8, *FORMS[rows % 4])


def test_tall_and_narrow() -> None:
    for index, k in enumerate((1, 3, 7, 8, 24, 104, 136, 440)):
        product(4096, 208, k, False, k == 8, target="webgpu" if index % 3 else "cpu")


def test_a_hundred_replays_are_bit_identical() -> None:
    rng = np.random.default_rng(6)
    g = Graph()
    x, w = g.input("x", (1500, 384)), g.parameter("w", (384, 384))
    g.set_outputs({"y": g.bias_add(g.matmul_bt(x, w), g.parameter("b", (384,)))})
    runner = harness.load(compile_graph(g, target="cpu"))
    runner.load_weights({"w": rng.normal(size=(384, 384)), "b": rng.normal(size=384)})
    feeds = {"x": rng.normal(size=(1500, 384)).astype(np.float32)}
    first = runner.run(**feeds)
    for _ in range(99):
        harness.assert_same(first, runner.run(**feeds), "in a replay")


@pytest.mark.parametrize("size", [2048])
def test_large_tiles(size: int) -> None:
    """The 128 x 128 tile, with edges: enough workgroups to be chosen, few terms to be quick."""
    product(size + 1, size - 1, 9, False, False)


def check_epilogue(build: Callable[[Graph, Tensor], Tensor], dispatches: int = 1, m: int = 33, n: int = 65) -> None:
    """x @ w, then `build`; its slope in the product is below 1.2."""
    rng = np.random.default_rng(5)
    g = Graph()
    x, w = g.input("x", (m, 17)), g.parameter("w", (n, 17))
    g.set_outputs({"y": build(g, g.matmul_bt(x, w))})
    ir = g.build()
    feeds = {
        node.op.label: rng.normal(size=node.types[0].shape).astype(np.float32)
        for node in ir.nodes
        if hasattr(node.op, "label")
    }
    product_bound = contraction_bound(MatMul(trans_b=True), feeds["x"].astype(float), feeds["w"].astype(float))
    y = harness.evaluate(ir, feeds)["y"]
    slack = {"y": 1.2 * product_bound + 2 * pointwise_bound(y)}
    fused = harness.check(ir, feeds, slack=slack)
    plain = harness.check(ir, feeds, slack=slack, optimize=False, twins=False)
    np.testing.assert_allclose(fused["y"], plain["y"], atol=float(slack["y"].max()) * 2)
    assert len(compile_graph(ir).plan.entries[0].dispatches) == dispatches


def test_epilogue_bias_relu() -> None:
    check_epilogue(lambda g, y: g.relu(g.bias_add(y, g.parameter("bias", (65,)))))


def test_epilogue_bias_shapes() -> None:
    for shape in ((), (1,), (65,), (1, 65), (33, 1), (33, 65)):
        check_epilogue(lambda g, y, shape=shape: y + g.input("d", shape))  # type: ignore[misc]


def test_epilogue_alpha_beta() -> None:
    check_epilogue(lambda g, y: y * 0.7 + g.input("c", (33, 1)) * 0.25, dispatches=2)


def test_epilogue_operands_in_both_places() -> None:
    check_epilogue(lambda g, y: g.input("d", (65,)) - y)


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "silu", "gelu", "neg", "abs"])
def test_epilogue_activation(name: str) -> None:
    check_epilogue(lambda g, y: getattr(g, name)(y))


def test_epilogue_chain_of_everything() -> None:
    def build(g: Graph, y: Tensor) -> Tensor:
        y = g.tanh(g.bias_add(y, g.parameter("bias", (65,))))
        return g.maximum(g.where(g.input("mask", (33, 65)), y, 0.5), g.input("floor", (33, 1))) + g.input(
            "skip", (33, 65)
        )

    check_epilogue(build)


def test_epilogue_stops_at_eight_buffers() -> None:
    def build(g: Graph, y: Tensor) -> Tensor:
        for index in range(12):
            y = y + g.input(f"d{index}", (33, 65))
        return y

    check_epilogue(build, dispatches=8)


def test_product_that_is_an_output_is_not_swallowed() -> None:
    g = Graph()
    x, w = g.input("x", (3, 5)), g.input("w", (5, 4))
    y = x @ w
    g.set_outputs({"y": y, "z": g.relu(y)})
    assert [d.label for d in compile_graph(g).plan.dispatches()] == ["matmul", "relu"]


def test_product_used_twice_is_not_swallowed() -> None:
    g = Graph()
    x, w = g.input("x", (3, 5)), g.input("w", (5, 4))
    y = x @ w
    g.set_outputs({"z": y + y})
    assert [d.label for d in compile_graph(g).plan.dispatches()] == ["matmul", "add"]


def test_two_products_added() -> None:
    g = Graph()
    x, w = g.input("x", (3, 5)), g.input("w", (5, 4))
    g.set_outputs({"z": x @ w + (x * x) @ w})
    assert len(compile_graph(g).plan.entries[0].dispatches) == 3  # x * x, one product, the other with the sum


def test_product_with_itself() -> None:
    rng = np.random.default_rng(1)
    for m, k in ((3, 5), (33, 17), (64, 64)):
        g = Graph()
        x = g.input("x", (m, k))
        g.set_outputs({"y": g.matmul_bt(x, x)})
        harness.check(g, {"x": rng.normal(size=(m, k)).astype(np.float32)})


def test_batched_epilogue() -> None:
    """Bias over columns, a residual over everything, a scale a matrix."""
    rng = np.random.default_rng(2)
    g = Graph()
    x, w = g.input("x", (2, 3, 5, 7)), g.input("w", (3, 7, 6))
    y = g.relu(x @ w + g.input("bias", (6,))) * g.input("scale", (2, 3, 1, 1)) + g.input("skip", (2, 3, 5, 6))
    g.set_outputs({"y": y})
    ir = g.build()
    assert len(compile_graph(ir).plan.entries[0].dispatches) == 1
    feeds = {
        node.op.label: rng.normal(size=node.types[0].shape).astype(np.float32)
        for node in ir.nodes
        if hasattr(node.op, "label")
    }
    bound = contraction_bound(MatMul(), feeds["x"].astype(float), feeds["w"].astype(float)) * np.abs(feeds["scale"])
    harness.check(ir, feeds, slack={"y": bound + 2 * pointwise_bound(harness.evaluate(ir, feeds)["y"])})


def test_vectors() -> None:
    g = Graph()
    a, v = g.input("a", (4, 5)), g.input("v", (5,))
    g.set_outputs({"av": a @ v, "va": v @ g.transpose(a), "vv": v @ v})
    rng = np.random.default_rng(3)
    feeds = {"a": rng.normal(size=(4, 5)).astype(np.float32), "v": rng.normal(size=5).astype(np.float32)}
    got = harness.run(compile_graph(g), feeds)
    np.testing.assert_allclose(got["av"], feeds["a"] @ feeds["v"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["va"], feeds["a"] @ feeds["v"], rtol=1e-5, atol=1e-5)
    assert got["vv"].shape == ()
    np.testing.assert_allclose(got["vv"], feeds["v"] @ feeds["v"], rtol=1e-5)


def test_nan_stays_in_its_row() -> None:
    """A tile loads neighbours; what is clamped or padded must not spread a NaN."""
    for m, n, k in ((5, 7, 3), (65, 33, 20)):
        g = Graph()
        g.set_outputs({"y": g.input("a", (m, k)) @ g.input("b", (k, n))})
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        a[m - 1, k - 1], b[k - 1, n - 1] = np.nan, np.inf
        got = harness.run(compile_graph(g), {"a": a, "b": b})["y"]
        assert np.isnan(got[m - 1]).all()
        assert (got[: m - 1, n - 1] == np.inf).all()
        assert (got[: m - 1, : n - 1] == k).all()
