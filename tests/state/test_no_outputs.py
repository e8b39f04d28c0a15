"""An entry point that only writes states, as an encoder that fills caches, needs no output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, Training, compile_graph
from meganeura_aot.reference import evaluate
from tests import harness

X = np.arange(6, dtype=np.float32).reshape(1, 2, 3)


def encoder() -> Graph:
    g = Graph()
    cache = g.state("cache", (1, 4, 3))
    g.cache_write(cache, g.input("x", (1, 2, 3)) * g.parameter("w", (3,), init="ones"), g.constant(1, "u32"))
    g.set_outputs({})
    return g


def decoder() -> Graph:
    g = Graph()
    g.set_outputs({"sum": g.sum(g.state("cache", (1, 4, 3)), 1)})
    return g


@pytest.mark.parametrize("optimize", [True, False])
def test_the_state_is_written(optimize: bool) -> None:
    program = compile_graph(encoder(), optimize=optimize)
    runner = harness.load(program)
    runner.init_weights()
    assert runner.run(x=X) == {}
    assert runner.outputs == {}
    expected = evaluate(program.sources["run"], {"x": X, "cache": np.zeros((1, 4, 3)), "w": np.ones(3)})
    np.testing.assert_array_equal(runner.get_state("cache"), expected["cache"])
    assert expected.keys() == {"cache"}
    runner.assert_tails()


def test_beside_an_entry_that_reads() -> None:
    runner = harness.load(compile_graph({"encode": encoder(), "decode": decoder()}))
    runner.init_weights()
    assert runner.encode(x=X) == {}
    np.testing.assert_array_equal(runner.decode()["sum"], X.sum(1))


def test_beside_an_entry_that_is_trained() -> None:
    g = Graph()
    g.set_outputs({"loss": g.sum(g.parameter("w", (3,), init="ones") * g.input("x", (3,)))})
    program = compile_graph({"encode": encoder(), "train": g}, train=Training("sgd", lr=0.5))
    runner = harness.load(program)
    runner.init_weights()
    assert runner.train_step(x=np.array([2, 0, 0], np.float32)) == 2
    runner.encode(x=X)
    np.testing.assert_array_equal(runner.get_state("cache")[0, 1:3], X[0] * [0, 1, 1])


def test_the_file(tmp_path: Path) -> None:
    """--list, a run and --bench, of the emitted file alone."""
    path = tmp_path / "runner.py"
    program = compile_graph(encoder())
    program.save(path)
    assert "-> no outputs" in program.text
    assert "Outputs:  none" in program.text
    np.save(tmp_path / "x.npy", X)

    def script(*arguments: str) -> str:
        done = subprocess.run([sys.executable, str(path), *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "state cache f32[1, 4, 3]" in script("--list")
    assert "1 runs in a row" in script("--bench", "1", "--profile")
    (tmp_path / "w.safetensors").write_bytes(one_tensor("w", np.ones(3, np.float32)))
    script("--weights", "w.safetensors", "--input", "x=x.npy", "--output", "out.npz")
    assert list(np.load(tmp_path / "out.npz")) == []


def one_tensor(name: str, array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    header = f'{{"{name}":{{"dtype":"F32","shape":[{array.size}],"data_offsets":[0,{array.nbytes}]}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + array.tobytes()


def test_without_a_write_it_is_an_error() -> None:
    g = Graph()
    g.state("s", (2,))
    g.input("x", (2,))
    for nothing in ({}, []):
        with pytest.raises(GraphError, match="one output or more where no state is written, got none") as caught:
            g.set_outputs(nothing)
        assert "test_no_outputs.py" in str(caught.value)


def test_outputs_are_set_all_the_same() -> None:
    """A forgotten set_outputs is told, also where states are written."""
    g = Graph()
    s = g.state("s", (2,))
    g.assign(s, s + 1.0)
    with pytest.raises(GraphError, match="expected outputs, got none; call set_outputs"):
        compile_graph(g)


def test_training_needs_a_loss() -> None:
    with pytest.raises(GraphError, match="training: expected an output of the trained entry, its loss, got none"):
        compile_graph(encoder(), train=Training("sgd"))
