"""Random numbers: the published words, the state that moves on, and what the numbers look like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, compile_graph
from meganeura_aot.ops.random.op import RandomBits, philox_4x32
from tests import harness

# key and counter of two words each, the other two of the counter being 0 here, and the words of the generator's authors
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def runner_of(*kinds: str, shape: tuple[int, ...] = (10,)) -> Any:
    """Draws one tensor of each kind from one state, in order."""
    g = Graph()
    state = g.state("random", (4,), "u32")
    draws = {"bits": g.random_bits, "uniform": g.random_uniform, "normal": g.random_normal}
    g.set_outputs([draws[kind](shape, state) for kind in kinds])
    return harness.load(compile_graph(g))


def bits_of(state: list[int], count: int) -> np.ndarray[Any, Any]:
    return RandomBits((count,)).reference(np.array(state, np.uint32))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_words(counter: list[int], key: list[int], words: list[int]) -> None:
    got = philox_4x32(np.array([counter], np.uint32), np.array(key, np.uint32))
    np.testing.assert_array_equal(got, [words])


def test_a_state_of_zeros_is_seed_0() -> None:
    runner = runner_of("bits", shape=(4,))
    np.testing.assert_array_equal(runner.run()["output_0"], KNOWN[0][2])
    np.testing.assert_array_equal(runner.get_state("random"), [0, 0, 1, 0])


def test_draws_of_one_call_and_of_the_next_go_on_in_one_stream() -> None:
    """10 numbers use three blocks of four; each draw starts at a block."""
    runner = runner_of("bits", "uniform", "bits")
    seed = [0xA4093822, 0x299F31D0, 0, 0]
    runner.set_state("random", np.array(seed, np.uint32))
    stream = bits_of(seed, 72).reshape(6, 12)[:, :10]
    for call in (0, 3):
        got = runner.run()
        np.testing.assert_array_equal(got["output_0"], stream[call])
        np.testing.assert_array_equal(got["output_1"], (stream[call + 1] >> 8) * 2.0**-24)
        np.testing.assert_array_equal(got["output_2"], stream[call + 2])
    runner.assert_tails()
    first = runner_of("bits").run()["output_0"]
    runner.reset()
    np.testing.assert_array_equal(runner.run()["output_0"], first)


@pytest.mark.parametrize("counter", [[0xFFFFFFFE, 6], [0xFFFFFFFF, 0xFFFFFFFF], [5, 0xFFFFFFFF]])
def test_the_counter_has_64_bits(counter: list[int]) -> None:
    runner = runner_of("bits")
    state = [1, 2, *counter]
    runner.set_state("random", np.array(state, np.uint32))
    np.testing.assert_array_equal(runner.run()["output_0"], bits_of(state, 10))
    moved = (counter[0] + (counter[1] << 32) + 3) % 2**64
    np.testing.assert_array_equal(runner.get_state("random"), [1, 2, moved % 2**32, moved >> 32])
    np.testing.assert_array_equal(runner.run()["output_0"], bits_of([1, 2, moved % 2**32, moved >> 32], 10))


def test_moments() -> None:
    got = runner_of("uniform", "normal", shape=(512, 513)).run()
    uniform, normal = got["output_0"].astype(np.float64), got["output_1"].astype(np.float64)
    assert 0 <= uniform.min() < 2e-5
    assert 1 - 2e-5 < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 2e-3
    assert abs(uniform.var() - 1 / 12) < 1e-3
    assert np.isfinite(normal).all()
    assert [abs(normal.mean()) < 6e-3, abs(normal.var() - 1) < 9e-3, abs((normal**4).mean() - 3) < 0.1] == [True] * 3
    assert abs((normal[:, :-1] * normal[:, 1:]).mean()) < 8e-3
    inside = np.abs(normal)[..., None] < [0.5, 1.0, 2.0, 3.0]
    np.testing.assert_allclose(inside.mean((0, 1)), [0.38292, 0.68269, 0.95450, 0.99730], atol=4e-3)


@pytest.mark.parametrize(("counter", "radius"), [(14_883_995, 0.0), (38_471_471, np.sqrt(48 * np.log(2)))])
def test_normal_at_the_ends_of_its_range(counter: int, radius: float) -> None:
    """The uniform numbers 0 and 1 - 2^-24: no radius is infinite."""
    g = Graph()
    g.set_outputs({"y": g.random_normal((4,), g.state("random", (4,), "u32"))})
    got = harness.check(g, {"random": np.array([0, 0, counter, 0], np.uint32)})["y"]
    np.testing.assert_allclose(np.hypot(got[0], got[1]), radius, rtol=1e-6)


def test_nothing_is_drawn() -> None:
    runner = runner_of("normal", "bits", shape=(0, 3))
    assert runner.run()["output_0"].shape == (0, 3)
    np.testing.assert_array_equal(runner.get_state("random"), [0, 0, 0, 0])


def test_what_does_not_fit() -> None:
    g = Graph()
    with pytest.raises(GraphError, match=r"random_uniform.*test_random.py:\d+.*expected a state, got"):
        g.random_uniform((3,), g.input("x", (4,), "u32"))
    with pytest.raises(GraphError, match=r"random_bits: expected a state u32\[4\], got u32\[2\]"):
        g.random_bits((3,), g.state("small", (2,), "u32"))
    for shape in ((-1,), 3, (1.5,)):
        with pytest.raises(GraphError, match="expected a (?:shape of integers >= 0|sequence)"):
            g.random_normal(shape, g.state(f"of {shape}", (4,), "u32"))
    position = g.state("position", (4,), "u32")
    g.advance(position, 1, limit=9)
    with pytest.raises(GraphError, match="random_normal to state 'position'"):
        g.random_normal((3,), position)
