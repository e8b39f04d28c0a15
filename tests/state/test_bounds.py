"""Bounds of inputs: declared, of indices, and of the step of a position; checked before anything is written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, Tensor, Training, compile_graph
from tests import harness

ROWS, SIZE, WIDTH = 4, 12, 4


def prompt(minimum: int | None = 1, maximum: int | None = None) -> Graph:
    """A prompt of up to ROWS tokens, of which `count` are given: the state after the last one, and what attention sees."""
    g = Graph()
    x = g.input("x", (1, ROWS, WIDTH))
    count = g.input("count", (), "u32", minimum=minimum, maximum=maximum)
    position, cache = g.state("position", (), "u32"), g.state("cache", (1, SIZE, WIDTH))
    g.cache_write(cache, x, position)
    y = g.cached_attention(x, cache, cache, position, 1)
    g.advance(position, count, limit=SIZE)
    g.set_outputs({"last": g.gather(y, g.reshape(count - 1, (1,)), axis=1)})
    return g


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("count", [0, ROWS + 1, 2**32 - 1])
def test_a_step_past_the_rows_that_were_written(count: int, optimize: bool) -> None:
    runner = harness.load(compile_graph(prompt(), optimize=optimize))
    x = np.ones((1, ROWS, WIDTH), np.float32)
    runner.run(x=x, count=3)
    with pytest.raises(ValueError, match=f"input 'count' of run: expected numbers from 1 to {ROWS}, got {count}$"):
        runner.run(x=x * 2, count=count)
    np.testing.assert_array_equal(runner.get_state("cache")[0, :, 0], [1] * ROWS + [0] * (SIZE - ROWS))
    assert runner.get_state("position") == 3
    runner.run(x=x * 2, count=ROWS)
    assert runner.get_state("position") == 3 + ROWS


@pytest.mark.parametrize(
    ("minimum", "maximum", "expected"),
    [(None, None, (0, ROWS)), (1, None, (1, ROWS)), (None, 3, (0, 3)), (2, 3, (2, 3)), (1, 100, (1, ROWS))],
)
def test_the_bound_of_a_step_is_known(minimum: int | None, maximum: int | None, expected: tuple[int, int]) -> None:
    program = compile_graph(prompt(minimum, maximum))
    assert bounds_of(program)["count"] == expected
    assert f"bounds={expected}" in program.text
    assert f"each from {expected[0]} to {expected[1]}" in program.plan.text()


def bounds_of(program: Any) -> dict[str, Any]:
    return {buffer.label: buffer.bounds for buffer in program.plan.buffers.values() if buffer.kind == "input"}


def two_caches(g: Graph, position: Tensor, n: Tensor) -> None:
    for name, rows in (("k", 3), ("v", 2)):
        g.cache_write(g.state(name, (2, 8, 4)), g.input(name + "_rows", (2, rows, 4)), position)
    g.advance(position, n, limit=8)


def through_a_view(g: Graph, position: Tensor, n: Tensor) -> None:
    g.cache_write(g.state("k", (2, 8, 4)), g.input("rows", (2, 2, 4)), g.reshape(g.reshape(position, (2, 1)), (2,)))
    g.advance(position, n, limit=8)


def for_every_image(g: Graph, position: Tensor, n: Tensor) -> None:
    """One position, repeated for two images."""
    one = g.state("one", (), "u32")
    g.cache_write(g.state("k", (2, 8, 4)), g.input("rows", (2, 2, 4)), g.expand(g.reshape(one, (1,)), (2,)))
    g.advance(one, n, limit=8)


def after_the_advance(g: Graph, position: Tensor, n: Tensor) -> None:
    """The rows go where the position was."""
    start = position[:]
    g.advance(position, n, limit=8)
    g.cache_write(g.state("k", (2, 8, 4)), g.input("rows", (2, 2, 4)), start)


def behind_what_a_number_moved(g: Graph, position: Tensor, n: Tensor) -> None:
    """One row, then two more: only those are moved by the input."""
    cache = g.state("k", (2, 8, 4))
    g.cache_write(cache, g.input("one", (2, 1, 4)), position)
    g.advance(position, 1, limit=8)
    g.cache_write(cache, g.input("two", (2, 2, 4)), position)
    g.advance(position, n, limit=8)


def elsewhere(g: Graph, position: Tensor, n: Tensor) -> None:
    g.cache_write(g.state("k", (2, 8, 4)), g.input("rows", (2, 2, 4)), position + 1)
    g.advance(position, n, limit=8)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (two_caches, (0, 2)),
        (through_a_view, (0, 2)),
        (for_every_image, (0, 2)),
        (after_the_advance, (0, 2)),
        (behind_what_a_number_moved, (0, 2)),
        (elsewhere, None),
    ],
)
@pytest.mark.parametrize("optimize", [True, False])
def test_rows_written_at_a_position(
    build: Callable[..., None], expected: tuple[int, int] | None, optimize: bool
) -> None:
    g = Graph()
    position = g.state("position", (2,), "u32")
    build(g, position, g.input("n", (), "u32"))
    g.set_outputs({})
    assert bounds_of(compile_graph(g, optimize=optimize))["n"] == expected


def test_one_row_without_an_axis() -> None:
    g = Graph()
    position = g.state("position", (), "u32")
    g.cache_write(g.state("k", (8, 4)), g.input("row", (4,)), position)
    g.advance(position, g.input("n", (), "u32"), limit=8)
    g.set_outputs({})
    assert bounds_of(compile_graph(g))["n"] == (0, 1)


def test_a_minimum_past_what_the_uses_allow() -> None:
    expected = f"a minimum of at most {ROWS}, the largest number that its uses allow, got {ROWS + 1}"
    with pytest.raises(GraphError, match=rf"input 'count' \(built at \S+test_bounds\.py:\d+\): expected {expected}$"):
        compile_graph(prompt(minimum=ROWS + 1))


def test_a_bound_is_of_one_entry() -> None:
    g = Graph()
    g.advance(g.state("position", (), "u32"), g.input("count", (), "u32"), limit=SIZE)
    g.set_outputs({})
    runner = harness.load(compile_graph({"prompt": prompt(), "skip": g}))
    runner.skip(count=7)
    assert runner.get_state("position") == 7


def test_declared_and_of_indices() -> None:
    g = Graph()
    ids, offset = g.input("ids", (2,), "u32", minimum=2, maximum=20), g.input("offset", (2,), "i32", maximum=-1)
    least, free = g.input("least", (1,), "i32", minimum=np.int64(-3)), g.input("free", (1,), "u32")
    g.set_outputs([g.embedding(ids, g.constant(np.ones((9, 2), np.float32))), offset * 2, least * 2, free * 2])
    program = compile_graph(g)
    limits = {"ids": (2, 8), "offset": (-(2**31), -1), "least": (-3, 2**31 - 1), "free": None}
    assert bounds_of(program) == limits
    runner = harness.load(program)
    good: dict[str, Any] = {"ids": [2, 8], "offset": [-1, -(2**31)], "least": [-3], "free": [2**32 - 1]}
    runner.run(**good)
    for name, wrong in (("ids", 1), ("ids", 9), ("offset", 0), ("least", -4)):
        low, high = limits[name] or (0, 0)
        with pytest.raises(
            ValueError, match=f"input '{name}' of run: expected numbers from {low} to {high}, got {wrong}$"
        ):
            runner.run(**good | {name: np.full(np.shape(good[name]), wrong)})


def test_in_a_training_step() -> None:
    g = Graph()
    kind = g.input("kind", (), "u32", minimum=1, maximum=2)
    g.set_outputs({"loss": g.sum(g.parameter("w", (3,), init="ones") * g.cast(kind, "f32"))})
    runner = harness.load(compile_graph(g, train=Training("sgd")))
    runner.init_weights()
    with pytest.raises(ValueError, match="input 'kind' of train_step: expected numbers from 1 to 2, got 3"):
        runner.train_step(kind=3)
    assert runner.train_step(kind=2) == 6


def test_what_bench_makes_up_is_within(tmp_path: Path) -> None:
    path = tmp_path / "runner.py"
    compile_graph(prompt(minimum=2)).save(path)
    done = subprocess.run([sys.executable, str(path), "--bench", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "input count: all 2" in done.stdout


@pytest.mark.parametrize(
    ("dtype", "minimum", "maximum", "message"),
    [
        ("f32", 0, None, "an input of i32 or u32, got one of f32"),
        ("u32", -1, None, "integers from 0 to 4294967295, the minimum first, got -1 and None"),
        ("i32", 3, 2, "got 3 and 2"),
    ],
)
def test_wrong_bounds(dtype: str, minimum: Any, maximum: Any, message: str) -> None:
    g = Graph()
    with pytest.raises(GraphError, match=f"bounds of input 'n' .*test_bounds.py.*: expected .*{message}"):
        g.input("n", (), dtype, minimum=minimum, maximum=maximum)
