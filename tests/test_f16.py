"""Parameters stored as f16: the result is that of the rounded weight, in f32 arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, KernelError, Tensor, compile_graph
from meganeura_aot.kernel import Kernel, read_as_f16
from tests import harness

Build = Callable[[Graph, Tensor], Tensor]

# name -> (shape of the parameter, the graph over it)
USES: dict[str, tuple[tuple[int, ...], Build]] = {
    "matmul": ((17, 33), lambda g, p: g.input("x", (5, 17)) @ p),
    "matmul_vec4": ((16, 64), lambda g, p: g.input("x", (65, 16)) @ p),
    "matmul_bt": ((33, 17), lambda g, p: g.matmul_bt(g.input("x", (5, 17)), p)),
    "matmul_bt_vec2": ((33, 18), lambda g, p: g.matmul_bt(g.input("x", (40, 18)), p)),
    "matmul_bt_vec4": ((40, 64), lambda g, p: g.matmul_bt(g.input("x", (64, 64)), p)),
    "matmul_at": ((17, 33), lambda g, p: g.matmul_at(g.input("x", (17, 5)), p)),
    "matmul_of_a": ((17, 33), lambda g, p: p @ g.input("x", (33, 4))),
    "row": ((64, 260), lambda g, p: g.input("x", (1, 64)) @ p),
    "row_bt": ((257, 64), lambda g, p: g.matmul_bt(g.input("x", (1, 64)), p)),
    "row_bt_odd": ((7, 9), lambda g, p: g.matmul_bt(g.input("x", (1, 9)), p)),
    "bias": ((33,), lambda g, p: g.relu(g.bias_add(g.input("x", (5, 17)) @ g.input("w", (17, 33)), p))),
    "pad": ((3, 5), lambda g, p: g.pad(p, [(1, 2), (0, 1)]) * g.input("x", (6, 6))),
    "max_pool": ((2, 3, 6, 5), lambda g, p: g.max_pool(p, 2) * g.input("x", (2, 3, 3, 2))),
    "avg_pool": ((2, 3, 6, 5), lambda g, p: g.avg_pool(p, 3, padding=1) * g.input("x", (2, 3, 2, 2))),
    "upsample": ((2, 3, 3, 2), lambda g, p: g.upsample_2x(p) * g.input("x", (2, 3, 6, 4))),
    "embedding": ((11, 64), lambda g, p: g.embedding(g.input("ids", (7,), "u32"), p)),
    "embedding_odd": ((11, 33), lambda g, p: g.embedding(g.input("ids", (7,), "u32"), p)),
    "rms_norm": ((65,), lambda g, p: g.rms_norm(g.input("x", (3, 65)), p)),
    "rms_norm_vec4": ((64,), lambda g, p: g.rms_norm(g.input("x", (3, 64)), p)),
    "layer_norm": ((65,), lambda g, p: g.layer_norm(g.input("x", (3, 65)), p, p)),
    "conv": ((8, 3, 3, 3), lambda g, p: g.conv(g.input("x", (2, 3, 9, 9)), p, padding=1)),
    "pointwise": ((5, 7), lambda g, p: g.input("x", (3, 5, 7)) * p),
    "reshaped": ((5, 7), lambda g, p: g.input("x", (35,)) + g.reshape(p, (35,))),
    "transposed": ((33, 40), lambda g, p: g.transpose(p)),
    "softmax": ((3, 65), lambda g, p: g.softmax(p)),
}


def feeds_of(g: Graph) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(0)
    feeds = {}
    for node in g.build().nodes:
        if node.op.name in ("input", "parameter"):
            integers = node.types[0].dtype == "u32"
            values = rng.integers(0, 11, node.types[0].shape) if integers else rng.normal(size=node.types[0].shape)
            feeds[node.op.label] = values.astype(np.uint32 if integers else np.float32)  # type: ignore[attr-defined]
    return feeds


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
@pytest.mark.parametrize("name", USES)
def test_use(name: str, target: str) -> None:
    shape, build = USES[name]
    g = Graph()
    g.set_outputs({"y": build(g, g.parameter("p", shape, "f16"))})
    feeds = feeds_of(g)
    slack = {"y": np.array(1e-5)} if name == "bias" else None
    harness.check(g, feeds, target=target, slack=slack)
    (buffer,) = [b for b in compile_graph(g).plan.buffers.values() if b.label == "p"]
    assert buffer.nbytes == -(-int(np.prod(shape)) // 2) * 4


def test_a_parameter_that_is_an_output_is_read_as_f32() -> None:
    g = Graph()
    p = g.parameter("p", (5,), "f16")
    g.set_outputs({"p": p, "again": g.reshape(p, (5, 1)), "twice": p * 2.0})
    value = np.array([0.1, 1e-7, 70000, -2.5, 3], np.float32)
    got = harness.run(compile_graph(g), {"p": value})
    with np.errstate(over="ignore"):
        half = value.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got["p"], half)
    np.testing.assert_array_equal(got["again"], half.reshape(5, 1))
    np.testing.assert_array_equal(got["twice"], half * 2)


def test_sums_are_in_f32() -> None:
    """3072 products of 5 x 5: past the largest half."""
    g = Graph()
    g.set_outputs({"y": g.matmul_bt(g.input("x", (1, 3072)), g.parameter("w", (4, 3072), "f16"))})
    got = harness.run(
        compile_graph(g), {"x": np.full((1, 3072), 5, np.float32), "w": np.full((4, 3072), 5, np.float32)}
    )
    np.testing.assert_array_equal(got["y"], np.full((1, 4), 76800))


def test_norms_with_an_outlier() -> None:
    for shape, value in (((2, 64), 795.0), ((512, 512), 1.0)):
        g = Graph()
        g.set_outputs({"y": g.rms_norm(g.input("x", shape), g.parameter("w", shape[1:], "f16"))})
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32) * 0.01 + (value == 1.0)
        x[0, 3] = value
        harness.check(g, {"x": x, "w": np.linspace(0.5, 2, shape[1]).astype(np.float32)})


def test_only_what_is_read_can_be_halves() -> None:
    text = (
        "@group(0) @binding(0) var<storage, read_write> out: array<f32>;\n@compute @workgroup_size(1)\nfn main() {}\n"
    )
    with pytest.raises(KernelError, match="cannot be stored as f16"):
        read_as_f16(Kernel.of(text), "out")


def test_ids_out_of_range_are_refused_on_the_host() -> None:
    g = Graph()
    ids = g.input("ids", (3,), "u32")
    g.set_outputs({"y": g.embedding(ids, g.parameter("t", (11, 4))), "z": g.gather(g.parameter("u", (9, 2)), ids)})
    program = compile_graph(g)
    assert "input ids : u32[3], 12 bytes, each from 0 to 8" in program.plan.text()
    runner = harness.load(program)
    runner.load_weights({"t": np.ones((11, 4), np.float32), "u": np.ones((9, 2), np.float32)})
    runner.run(ids=[0, 8, 3])
    with pytest.raises(ValueError, match="ids.*from 0 to 8, got 9"):
        runner.run(ids=[0, 9, 3])


def cache_graph(rows: int, width: int, ring: bool) -> Graph:
    g = Graph()
    position = g.state("position", (2,), "u32")
    old = g.state("k", (2, 8, width), "f16")
    before = old * 1.0
    k = g.cache_write(old, g.input("k_rows", (2, rows, width)), position, ring)
    v = g.cache_write(g.state("v", (2, 8, width), "f16"), g.input("v_rows", (2, rows, width)), position, ring)
    window = 4 if ring else None
    y = g.cached_attention(g.input("q", (2, rows, 2 * width)), k, v, position, 4, 2, window=window, ring=ring)
    g.advance(position, rows, limit=100 if ring else 8)
    g.set_outputs({"y": y, "before": before, "k": k})
    return g


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("width", [2, 8, 12, 34])
def test_caches_of_halves(width: int, ring: bool) -> None:
    """Two calls: what was written is what the rounded numbers give, and the old version is kept for who reads it."""
    g = cache_graph(2, width, ring)
    rng = np.random.default_rng(0)
    program = compile_graph(g)
    for fill in (1e30, np.nan):
        runner = harness.load(program, fill=fill)
        states = {n: np.zeros((2, 8, width), np.float32) for n in "kv"} | {"position": np.array([0, 3], np.uint32)}
        runner.set_state("position", states["position"])
        for _ in range(2):
            shapes = {"q": (2, 2, 2 * width), "k_rows": (2, 2, width), "v_rows": (2, 2, width)}
            feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
            expected = harness.evaluate(g.build(), feeds | states)
            got = runner.run(**feeds)
            np.testing.assert_allclose(got["y"], expected["y"], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(got["before"], states["k"])
            np.testing.assert_array_equal(got["k"], expected["k"])
            states = {name: expected[name] for name in states}
        np.testing.assert_array_equal(runner.get_state("k").astype(np.float64), states["k"])
        runner.assert_tails()
    assert program.plan.buffers["k"].nbytes == 2 * 8 * width * 2


def test_halves_are_written_by_cache_write_alone() -> None:
    g = Graph()
    s = g.state("s", (2, 4), "f16")
    with pytest.raises(GraphError, match="not stored as f16"):
        g.assign(s, s * 2.0)
    odd = g.state("odd", (8, 3), "f16")
    with pytest.raises(GraphError, match="even width"):
        g.cache_write(odd, g.input("rows", (1, 3)), g.state("p", (), "u32"))
