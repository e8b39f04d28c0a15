"""Golden texts: graph and plan of the example models, their runners, and every pass before and after."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import black
import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from meganeura_aot.cli import stage_text
from meganeura_aot.emit import LINE
from meganeura_aot.model_file import load_graphs
from meganeura_aot.ops.state.leaf import Moment, State
from meganeura_aot.passes import CLEANUP, PASSES
from meganeura_aot.reference import evaluate
from meganeura_aot.target import find_target
from runtime_stub.optimizer import adam_numbers
from tests.conftest import GOLDEN, OUT
from tests.golden_models import PASS_EXAMPLES, RUNNERS, TRAINERS

ROOT = OUT.parent
Compare = Callable[[Path, str], None]


def compiled(name: str) -> Any:
    graphs = load_graphs(ROOT / "examples" / f"{name}.py", {})
    return compile_graph(graphs, name=name, train=TRAINERS.get(name))


@pytest.mark.parametrize("name", [*RUNNERS, *TRAINERS])
def test_graph_and_plan(name: str, golden: Compare) -> None:
    program = compiled(name)
    golden(GOLDEN / f"{name}.graph.txt", stage_text(program.whole))
    golden(GOLDEN / f"{name}.plan.txt", program.plan.text())


@pytest.mark.parametrize("name", [*RUNNERS, *TRAINERS])
def test_runner(name: str, golden: Compare) -> None:
    golden(OUT / f"{name}.py", compiled(name).text)


@pytest.mark.parametrize("name", [*RUNNERS, *TRAINERS])
def test_runner_is_formatted_and_clean(name: str) -> None:
    text = (OUT / f"{name}.py").read_text()
    assert black.format_str(text, mode=black.Mode(line_length=LINE)) == text
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(OUT / f"{name}.py")]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("name", RUNNERS)
def test_runner_runs(name: str, tmp_path: Path) -> None:
    """The golden file as a script of its own gives what the reference gives."""
    program = compiled(name)
    (graph,) = program.sources.values()
    rng = np.random.default_rng(3)
    command = [sys.executable, "-I", str(OUT / f"{name}.py"), "--output", str(tmp_path / "out.npz")]
    feeds, weights = {}, {}
    for node in graph.nodes:
        if node.op.name not in ("input", "parameter"):
            continue
        label = node.op.label  # type: ignore[attr-defined]
        feeds[label] = rng.normal(size=node.types[0].shape).astype(np.float32)
        if node.op.name == "parameter":
            weights[label] = feeds[label]
            continue
        np.save(tmp_path / f"{label}.npy", feeds[label])
        command += ["--input", f"{label}={tmp_path / label}.npy"]
    if weights:
        from safetensors.numpy import save_file

        save_file(weights, tmp_path / "w.safetensors")
        command += ["--weights", str(tmp_path / "w.safetensors")]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""})
    expected = evaluate(graph, feeds)
    with np.load(tmp_path / "out.npz") as got:
        assert list(got) == [output for output, _ in graph.outputs]
        for output in got:
            np.testing.assert_allclose(
                got[output], expected[output], rtol=2e-5, atol=2e-5 * np.abs(expected[output]).max()
            )


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of the golden file are two steps of the graphs: loss, gradients, weights, moments, random numbers."""
    program = compiled(name)
    module = types.ModuleType(name)
    exec(compile((OUT / f"{name}.py").read_text(), name, "exec"), module.__dict__)
    rng = np.random.default_rng(3)
    with module.Runner() as runner:
        runner.init_weights(seed=1)
        values: dict[str, Any] = {key: a.astype(np.float64) for key, a in runner.weights().items()}
        values |= {node.op.label: np.zeros(node.types[0].shape, node.types[0].dtype.numpy)
                   for graph in program.differentiated.values() for node in graph.nodes
                   if isinstance(node.op, Moment | State)}  # fmt: skip
        for step in (1, 2):
            batch = {"x": rng.standard_normal((50, 64)), "labels": rng.integers(0, 10, 50)}
            values |= {
                "x": batch["x"],
                "labels": batch["labels"].astype(np.uint32),
                "numbers": adam_numbers(3e-3, step),
            }
            values |= evaluate(program.differentiated["accumulate"], values)
            values |= evaluate(program.differentiated["apply"], values)
            np.testing.assert_allclose(runner.train_step(**batch), values["loss"], rtol=1e-5)
            for key, gradient in runner.gradients().items():
                expected = values[f"grad.{key}"]
                np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.linalg.norm(expected), rtol=0)
            for key, weight in runner.weights().items():
                np.testing.assert_allclose(weight, values[key], atol=1e-4)
        np.testing.assert_array_equal(runner.get_state("dropout.rng"), values["dropout.rng"])
        assert values["dropout.rng"][2] > 0


@pytest.mark.parametrize("rewrite", [*CLEANUP, *PASSES], ids=lambda rewrite: rewrite.__name__)
def test_pass(rewrite: Any, golden: Compare) -> None:
    """Each pass on the graph that shows what it does."""
    g = Graph()
    PASS_EXAMPLES[rewrite.__name__](g)
    before = g.build()
    after = rewrite(before, find_target("webgpu")).verify()
    golden(GOLDEN / f"pass_{rewrite.__name__}.txt", f"==== before ====\n{before.text()}==== after ====\n{after.text()}")


def test_no_orphans() -> None:
    """Every golden file that git tracks belongs to a test, and none is missing there."""
    expected = {GOLDEN / f"{name}.{stage}.txt" for name in [*RUNNERS, *TRAINERS] for stage in ("graph", "plan")}
    expected |= {GOLDEN / f"pass_{rewrite.__name__}.txt" for rewrite in (*CLEANUP, *PASSES)}
    expected |= {OUT / f"{name}.py" for name in [*RUNNERS, *TRAINERS]}
    command = ["git", "ls-files", "--cached", "tests/golden", "out"]
    tracked = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {ROOT / path for path in tracked} == {path.resolve() for path in expected}
