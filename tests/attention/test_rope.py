"""RoPE: against angles computed in float64, at far positions, in both pairings, partial, scaled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, compile_graph
from meganeura_aot.graph import TensorType
from meganeura_aot.ops.attention.rope import Rope, turns_per_position
from meganeura_aot.reference import evaluate
from meganeura_aot.rope_scaling import Linear, Llama3, Plain, Scaling, Yarn
from tests import harness
from tests.tolerance import assert_within, pointwise_bound

Array = np.ndarray[Any, Any]

# from transformers 5.23, modeling_rope_utils: kind -> (scaling, base, dim, attention factor, pairs, their frequencies)
PUBLISHED: dict[str, tuple[Scaling, float, int, float, list[int], list[float]]] = {
    "linear": (Linear(4.0), 1e4, 64, 1.0, [0, 8, 31], [0.25, 0.02500000037252903, 3.333803761051968e-05]),
    "llama3": (
        Llama3(32.0),
        5e5,
        64,
        1.0,
        [0, 8, 16, 24, 31],
        [1.0, 0.03760603070259094, 0.000429556705057621, 1.6619674170215148e-06, 9.418306490260875e-08],
    ),
    "yarn": (
        Yarn(4.0, 32768),
        1e6,
        128,
        1.138629436111989,
        [0, 16, 32, 48, 63],
        [1.0, 0.03162277862429619, 0.0006029411451891065, 7.905693564680405e-06, 3.102344408034696e-07],
    ),
    "yarn with mscale": (
        Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.5),
        1e4,
        64,
        1.064468903941252,
        [0, 8, 16, 24, 31],
        [1.0, 0.10000000149011612, 0.005500000435858965, 2.499999936844688e-05, 3.3338035336782923e-06],
    ),
    "yarn, ramp between pairs": (
        Yarn(32.0, 4096, truncate=False),
        150000.0,
        64,
        1.3465735902799727,
        [0, 8, 16, 24, 31],
        [1.0, 0.05081327259540558, 0.0004564839182421565, 4.099978468730114e-06, 3.023511396804679e-07],
    ),
}


def rotated(x: Array, offset: Any, dim: int, frequencies: Array, interleaved: bool = False, gain: float = 1) -> Array:
    """x [B, S, heads, head_dim], the formula itself in float64."""
    position = np.reshape(offset, (-1, 1)) + np.arange(x.shape[1])
    angle = position[:, :, None, None] * frequencies
    a, b = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleaved else (x[..., : dim // 2], x[..., dim // 2 : dim])
    turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    pairs = np.stack(turned, axis=-1).reshape(*a.shape[:-1], dim) if interleaved else np.concatenate(turned, axis=-1)
    return np.concatenate([pairs * gain, x[..., dim:]], axis=-1)


def run_rope(x: Array, offset: Any = 0, **options: Any) -> Array:
    """x [B, S, heads, head_dim] through a compiled graph; offset: an int, or an array that becomes an input."""
    g = Graph()
    value = g.input("x", (*x.shape[:2], x.shape[2] * x.shape[3]))
    dynamic = isinstance(offset, np.ndarray)
    start = g.input("offset", offset.shape, "u32") if dynamic else offset
    g.set_outputs({"y": g.rope(value, head_dim=x.shape[3], offset=start, **options)})
    feeds = {"x": x.reshape(value.shape)} | ({"offset": offset} if dynamic else {})
    return harness.check(g, feeds, twins=False)["y"].reshape(x.shape)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_ones_at_two_positions() -> None:
    got = run_rope(np.ones((1, 2, 2, 4), np.float32))
    np.testing.assert_array_equal(got[0, 0], np.ones((2, 4)))
    np.testing.assert_allclose(got[0, 1, :, [0, 2]], [[-0.30117] * 2, [1.38177] * 2], rtol=1e-5)


@pytest.mark.parametrize("offset", [0, 1, 511, 4095, 99_999, 999_999])
@pytest.mark.parametrize("base", [1e4, 1e6])
def test_far_positions(offset: int, base: float) -> None:
    """A product of position and frequency in f32 would be off by 6e-3 at position 100 000."""
    x = normal(1, 3, 2, 64)
    exact = rotated(x.astype(np.float64), offset, 64, Plain().frequencies(base, 64))
    assert_within(run_rope(x, offset, base=base), exact, pointwise_bound(exact) / 10)


def test_small_angles_keep_their_relative_accuracy() -> None:
    """Down to 1e-9 radians, which is less than one part in 2^32 of a turn."""
    x = np.zeros((1, 3, 1, 64), np.float32)
    x[..., 32:] = 1
    got = run_rope(x, base=1e9)[0, :, 0, :32]
    np.testing.assert_allclose(got, -np.sin(np.arange(3)[:, None] * Plain().frequencies(1e9, 64)), rtol=5e-7)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "dim"), [(64, 64), (256, 64), (80, 32), (6, 2), (96, 96)])
def test_both_pairings_and_partial_rotation(interleaved: bool, head_dim: int, dim: int) -> None:
    """Partial rotation turns by base^(-2i / rotary_dim), and copies the rest bit by bit."""
    x = normal(2, 5, 3, head_dim)
    got = run_rope(x, 7, rotary_dim=dim, interleaved=interleaved)
    exact = rotated(x.astype(np.float64), 7, dim, Plain().frequencies(1e4, dim), interleaved)
    assert_within(got, exact, pointwise_bound(exact))
    np.testing.assert_array_equal(got[..., dim:], x[..., dim:])


def test_one_pairing_is_the_other_with_elements_moved() -> None:
    x = normal(1, 9, 3, 8)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    halves, interleaved = run_rope(x), run_rope(np.ascontiguousarray(x[..., order]), interleaved=True)
    np.testing.assert_array_equal(halves[..., order], interleaved)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_scalings(kind: str) -> None:
    scaling, base, dim, gain, pairs, published = PUBLISHED[kind]
    frequencies = scaling.frequencies(base, dim)
    np.testing.assert_allclose(frequencies[pairs], published, rtol=5e-7)  # theirs are computed in f32
    assert scaling.gain == pytest.approx(gain, rel=1e-12)
    x = normal(1, 4, 2, dim)
    exact = rotated(x.astype(np.float64), 12345, dim, frequencies, gain=gain)
    assert_within(run_rope(x, 12345, base=base, scaling=scaling), exact, pointwise_bound(exact))


def test_llama3_bands() -> None:
    ratio = Llama3(32.0).frequencies(5e5, 64) / Plain().frequencies(5e5, 64)
    np.testing.assert_allclose(ratio[:15], 1, rtol=1e-14)
    assert (np.diff(ratio[14:19]) < 0).all()
    np.testing.assert_allclose(ratio[18:], 1 / 32, rtol=1e-14)


def test_an_offset_in_the_graph_is_one_at_run_time() -> None:
    x = normal(3, 4, 5, 16)
    fixed = run_rope(x, 1000)
    np.testing.assert_array_equal(run_rope(x, np.array(1000, np.uint32)), fixed)
    np.testing.assert_array_equal(run_rope(x, np.full(3, 1000, np.uint32)), fixed)
    mixed = run_rope(x, np.array([0, 1000, 7], np.uint32))
    np.testing.assert_array_equal(mixed[1], fixed[1])
    np.testing.assert_array_equal(mixed[0], run_rope(x)[0])


def test_step_by_step_is_all_at_once() -> None:
    """The position is a state that `advance` moves, as in a decoder."""
    x = normal(1, 6, 3, 32)
    g = Graph()
    position = g.state("position", (1,), "u32")
    y = g.rope(g.input("x", (1, 1, 96)), head_dim=32, offset=position)
    g.advance(position, 1, limit=6)
    g.set_outputs({"y": y})
    runner = harness.load(compile_graph(g))
    steps = [runner.run(x=x[:, s].reshape(1, 1, 96))["y"].reshape(3, 32) for s in range(6)]
    np.testing.assert_array_equal(np.stack(steps), run_rope(x)[0])


def test_layers_share_one_table() -> None:
    g = Graph()
    x = g.input("x", (4, 128))
    for _ in range(3):
        x = g.rope(x, head_dim=64, scaling=Linear(2.0))
    g.set_outputs({"y": g.rope(x, head_dim=64)})
    assert sum(node.op.name == "constant" for node in g.build().nodes) == 2


@pytest.mark.parametrize("gain", [1.0, 1.5])
def test_gradient_is_the_transpose(gain: float) -> None:
    """<dy, rope(x)> = <gradient(dy), x> for the same dynamic offsets."""
    op = Rope(16, interleaved=True, gain=gain)
    g = Graph()
    x, dy, offset = g.input("x", (2, 3, 32)), g.input("dy", (2, 3, 32)), g.input("offset", (2,), "u32")
    table = g.constant(turns_per_position(Plain().frequencies(1e4, 8)))
    y = g.apply(op, x, table, offset)
    dx, *others = op.gradient(g, dy, y, x, table, offset)
    assert others == [None, None]
    g.set_outputs({"y": y, "dx": dx})
    feeds = {"x": normal(2, 3, 32), "dy": normal(2, 3, 32, seed=1), "offset": np.array([5, 70], np.uint32)}
    got = harness.check(g, feeds)
    exact = evaluate(g.build(), feeds)
    assert np.sum(exact["y"] * feeds["dy"]) == pytest.approx(np.sum(exact["dx"] * feeds["x"]), rel=1e-12)
    assert np.sum(got["y"] * feeds["dy"]) == pytest.approx(np.sum(got["dx"] * feeds["x"]), rel=1e-4)


def test_positions_wrap_at_2_to_the_32() -> None:
    x = normal(1, 2, 1, 8)
    got = run_rope(x, np.array(2**32 - 1, np.uint32))
    np.testing.assert_array_equal(got[0, 1], x[0, 1])  # position 0


def test_what_does_not_fit() -> None:
    g = Graph()
    x = g.input("x", (2, 3, 32))
    for options in ({"head_dim": 5}, {"head_dim": 16, "rotary_dim": 18}, {"head_dim": 16, "rotary_dim": 3}):
        with pytest.raises(GraphError, match=r"rope: expected .*got"):
            g.rope(x, **options)
    for offset in (-1, 2**32, g.input("three", (3,), "u32"), g.input("real", (2,))):
        with pytest.raises(GraphError, match=r"rope: expected an (?:offset|integer) .*test_rope.py:\d+"):
            g.rope(x, head_dim=16, offset=offset)
    with pytest.raises(GraphError, match="base > 0"):
        g.rope(x, head_dim=16, base=0.0)
    with pytest.raises(GraphError, match=r"rope: expected f32 \[B, S"):
        g.rope(g.input("flat", (32,)), head_dim=16)
    with pytest.raises(GraphError, match="finite"), np.errstate(divide="ignore"):
        g.rope(x, head_dim=16, scaling=Linear(0.0))
    assert Rope(16).infer(TensorType((3, 16)), g.constant(np.zeros((2, 4), np.uint32)).type) == TensorType((3, 16))
