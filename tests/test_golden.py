"""Golden texts: graph and plan of the example models, their runners, and every pass before and after."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import black
import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from meganeura_aot.emit import LINE
from meganeura_aot.model_file import load_graphs
from meganeura_aot.passes import CLEANUP, PASSES
from meganeura_aot.reference import evaluate
from meganeura_aot.target import find_target
from tests.conftest import GOLDEN, OUT
from tests.golden_models import PASS_EXAMPLES, RUNNERS

ROOT = OUT.parent
Compare = Callable[[Path, str], None]


def compiled(name: str) -> Any:
    return compile_graph(load_graphs(ROOT / "examples" / f"{name}.py", {}), name=name)


@pytest.mark.parametrize("name", RUNNERS)
def test_graph_and_plan(name: str, golden: Compare) -> None:
    program = compiled(name)
    (graph,) = program.sources.values()
    golden(GOLDEN / f"{name}.graph.txt", graph.text())
    golden(GOLDEN / f"{name}.plan.txt", program.plan.text())


@pytest.mark.parametrize("name", RUNNERS)
def test_runner(name: str, golden: Compare) -> None:
    golden(OUT / f"{name}.py", compiled(name).text)


@pytest.mark.parametrize("name", RUNNERS)
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
    expected = {GOLDEN / f"{name}.{stage}.txt" for name in RUNNERS for stage in ("graph", "plan")}
    expected |= {GOLDEN / f"pass_{rewrite.__name__}.txt" for rewrite in (*CLEANUP, *PASSES)}
    expected |= {OUT / f"{name}.py" for name in RUNNERS}
    command = ["git", "ls-files", "--cached", "tests/golden", "out"]
    tracked = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {ROOT / path for path in tracked} == {path.resolve() for path in expected}
