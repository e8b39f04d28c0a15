"""States: order of reads and in-place writes, positions, several entry points."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, compile_graph
from tests import harness


def test_assign_is_seen_by_later_uses_and_later_calls() -> None:
    g = Graph()
    x, s = g.input("x", (3,)), g.state("s", (3,))
    before = s * 10.0
    g.assign(s, s + x)
    g.set_outputs({"before": before, "after": s * 1.0})
    runner = harness.load(compile_graph(g))
    one = np.array([1, 2, 3], np.float32)
    for step in range(3):
        got = runner.run(x=one)
        np.testing.assert_array_equal(got["before"], one * step * 10)
        np.testing.assert_array_equal(got["after"], one * (step + 1))
    np.testing.assert_array_equal(runner.get_state("s"), one * 3)
    runner.reset()
    np.testing.assert_array_equal(runner.get_state("s"), one * 0)
    runner.assert_tails()


def test_old_version_that_is_an_output_survives_the_write() -> None:
    g = Graph()
    x, s = g.input("x", (2,)), g.state("s", (2,))
    old = g.reshape(s, (2, 1))
    new = g.assign(s, x)
    g.set_outputs({"old": old, "new": new})
    runner = harness.load(compile_graph(g))
    runner.set_state("s", np.array([5, 6], np.float32))
    got = runner.run(x=np.array([7, 8], np.float32))
    np.testing.assert_array_equal(got["old"], [[5], [6]])
    np.testing.assert_array_equal(got["new"], [7, 8])


def test_swap_of_two_states() -> None:
    g = Graph()
    a, b = g.state("a", (2,)), g.state("b", (2,))
    a_old, b_old = g.reshape(a, (2, 1)), g.reshape(b, (2, 1))
    g.assign(a, g.reshape(b_old, (2,)))
    g.assign(b, g.reshape(a_old, (2,)))
    g.set_outputs({"a": a * 1.0})
    runner = harness.load(compile_graph(g))
    runner.set_state("a", np.array([1, 2], np.float32))
    runner.set_state("b", np.array([3, 4], np.float32))
    runner.run()
    np.testing.assert_array_equal(runner.get_state("a"), [3, 4])
    np.testing.assert_array_equal(runner.get_state("b"), [1, 2])


def test_a_fused_reader_of_the_old_version_still_reads_it() -> None:
    """The product reads the old state in its epilogue, which runs after the write: the state is saved first."""
    g = Graph()
    x, s = g.input("x", (2, 2)), g.state("s", (2, 2))
    product = x @ x
    late = product + s
    g.assign(s, x)
    g.set_outputs({"y": late, "s": s * 1.0})
    runner = harness.load(compile_graph(g))
    eye = np.eye(2, dtype=np.float32)
    runner.set_state("s", eye * 5)
    got = runner.run(x=eye)
    np.testing.assert_array_equal(got["y"], eye * 6)
    np.testing.assert_array_equal(got["s"], eye)


def position_graph(n: int | None) -> Graph:
    g = Graph()
    position = g.state("position", (2,), "u32")
    step = g.input("n", (), "u32") if n is None else n
    seen = g.cast(position, "f32")
    g.advance(position, step, limit=5)
    g.set_outputs({"seen": seen, "after": g.cast(position, "f32")})
    return g


def test_advance_by_a_number() -> None:
    runner = harness.load(compile_graph(position_graph(2)))
    for start in (0, 2):
        got = runner.run()
        np.testing.assert_array_equal(got["seen"], [start, start])
        np.testing.assert_array_equal(got["after"], [start + 2, start + 2])
    with pytest.raises(RuntimeError, match="position"):
        runner.run()
    np.testing.assert_array_equal(runner.get_state("position"), [4, 4])
    runner.set_state("position", np.array([0, 3], np.uint32))
    np.testing.assert_array_equal(runner.run()["after"], [2, 5])
    with pytest.raises(RuntimeError):
        runner.run()
    runner.reset()
    np.testing.assert_array_equal(runner.run()["seen"], [0, 0])


def test_advance_by_an_input() -> None:
    runner = harness.load(compile_graph(position_graph(None)))
    np.testing.assert_array_equal(runner.run(n=3)["after"], [3, 3])
    np.testing.assert_array_equal(runner.run(n=0)["after"], [3, 3])
    with pytest.raises(RuntimeError):
        runner.run(n=3)
    np.testing.assert_array_equal(runner.run(n=2)["after"], [5, 5])


def test_positions_are_moved_by_advance_alone() -> None:
    g = Graph()
    position = g.state("position", (), "u32")
    g.advance(position, 1, limit=5)
    with pytest.raises(GraphError, match=r"test_states.py:\d+"):
        g.assign(position, position + 1)
    g2 = Graph()
    other = g2.state("other", (), "u32")
    g2.assign(other, other + 1)
    with pytest.raises(GraphError, match="assign"):
        g2.advance(other, 1, limit=3)
    with pytest.raises(GraphError, match="u32"):
        g2.advance(g2.state("f", ()), 1, limit=3)


def entries() -> dict[str, Graph]:
    graphs = {}
    for name, rows in (("prefill", 4), ("decode", 1)):
        g = Graph()
        x = g.input("x", (rows, 3))
        w, total = g.parameter("w", (3, 3)), g.state("total", (3,))
        y = g.relu(x @ w)
        g.assign(total, total + g.sum(y, 0))
        g.set_outputs({"y": y, "total": total})
        graphs[name] = g
    return graphs


def test_entry_points_share_parameters_and_states() -> None:
    program = compile_graph(entries())
    runner = harness.load(program)
    runner.load_weights({"w": np.eye(3, dtype=np.float32)})
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(runner.prefill(x=x)["total"], x.sum(0))
    got = runner.decode(x=x[1:2])
    np.testing.assert_array_equal(got["y"], x[1:2])
    np.testing.assert_array_equal(got["total"], x.sum(0) + x[1])
    assert runner.entries["decode"].inputs == {"x": ((1, 3), "f32")}
    assert sum(b.kind == "parameter" for b in program.plan.buffers.values()) == 1
    runner.assert_tails()


def test_entry_points_share_scratch() -> None:
    graphs = {}
    for name in ("one", "two"):
        g = Graph()
        x = g.input("x", (100,))
        g.set_outputs({"y": g.exp(g.tanh(g.sin(x)))})
        graphs[name] = g
    assert sum(b.kind == "scratch" for b in compile_graph(graphs).plan.buffers.values()) == 2


def test_shared_names_must_agree() -> None:
    graphs = entries()
    g = Graph()
    g.set_outputs([g.parameter("w", (3, 4)) * 1.0])
    with pytest.raises(GraphError, match=r"'w' of entry 'other' .*: expected shape \[3, 3\] as .*, got shape \[3, 4\]"):
        compile_graph({**graphs, "other": g})


def test_one_entry_assigns_what_another_advances() -> None:
    a, b = Graph(), Graph()
    p = a.state("p", (), "u32")
    a.assign(p, p + 3)
    a.set_outputs([p * 2])
    q = b.state("p", (), "u32")
    b.advance(q, 1, limit=9)
    b.set_outputs([q * 2])
    with pytest.raises(GraphError, match="entry point 'a': writes state 'p', which 'b' advances"):
        compile_graph({"a": a, "b": b})


def test_an_output_keeps_its_buffer_when_another_entry_runs() -> None:
    graphs = {}
    for name in ("one", "two"):
        g = Graph()
        x, s = g.input("x", (4,)), g.state("s", (4,))
        old = g.reshape(s, (2, 2))
        g.assign(s, g.exp(g.sin(g.exp(x))))
        g.set_outputs({"old": old})
        graphs[name] = g
    runner = harness.load(compile_graph(graphs))
    runner.set_state("s", np.arange(4, dtype=np.float32))
    runner.one(x=np.zeros(4, np.float32))
    kept = runner.buffer("old", "one")
    runner.two(x=np.ones(4, np.float32))
    np.testing.assert_array_equal(np.frombuffer(runner.device.queue.read_buffer(kept, 0, 16), np.float32), [0, 1, 2, 3])


@pytest.mark.parametrize(
    "name", ["declare", "wgpu", "\ufb01", "reset", "load_weights", "not a name", "class", "_hidden", "b_x", ""]
)
def test_entry_names(name: str) -> None:
    g = Graph()
    g.set_outputs([g.input("x", (1,)) * 1.0])
    with pytest.raises(GraphError, match="entry point"):
        compile_graph({name: g})


def test_names_that_meet() -> None:
    """An output named as a parameter that comes later; a parameter named as a value, and as another entry's input."""
    graphs = {}
    for entry in ("one", "two"):
        g = Graph()
        x = g.input("x", (3,))
        y = g.exp(x)
        names = ["w", "one.x", "two.x", "exp_0", "t0", "one.exp_0", "b_t0"]
        for name in names:
            y = y * g.parameter(name, (3,))
        g.set_outputs({"w": g.relu(y), "t0": g.sin(y), "x": y})
        graphs[entry] = g
    weights = {name: np.full(3, i + 1, np.float32) for i, name in enumerate(names)}
    for program in (compile_graph(graphs), compile_graph({"one": graphs["one"]})):
        runner = harness.load(program)
        runner.load_weights(weights)
        got = runner.one(x=np.zeros(3, np.float32))
        np.testing.assert_array_equal(got["w"], np.full(3, 5040))
        np.testing.assert_array_equal(got["x"], np.full(3, 5040))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"dtype": "f16"}, {}, "expected dtype f16 as .* has, got dtype f32"),
        ({"init": "zeros"}, {"init": ("normal", 0.5)}, r"expected init zeros as .* has, got init \('normal', 0.5\)"),
        ({"trainable": False}, {}, "expected trainable False as .* has, got trainable True"),
        ({"shape": (4,), "dtype": "i32"}, {}, r"expected shape \[4\], dtype i32 as .* has, got shape \[2\], dtype f32"),
    ],
)
def test_entries_that_disagree_say_about_what(first: dict[str, Any], second: dict[str, Any], message: str) -> None:
    graphs = {}
    for entry, declared in {"one": first, "two": second}.items():
        g = graphs[entry] = Graph()
        g.set_outputs([g.reshape(g.parameter("w", **{"shape": (2,)} | declared), (1, -1))])
    with pytest.raises(GraphError, match=message) as caught:
        compile_graph(graphs)
    assert (
        len(re.findall(r"parameter 'w' of entry '(?:one|two)' \(built at \S+test_states\.py:\d+\)", str(caught.value)))
        == 2
    )


def test_a_state_is_no_parameter_of_another_entry() -> None:
    g, h = Graph(), Graph()
    g.set_outputs([g.state("w", (2,)) * 2.0])
    h.set_outputs([h.parameter("w", (2,)) * 2.0])
    with pytest.raises(GraphError, match="expected kind state, init 0.0 as .* has, got kind parameter, init None"):
        compile_graph({"one": g, "two": h})
