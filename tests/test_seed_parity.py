"""Everything that the seed does, done here; the generated documents are up to date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph
from meganeura_aot.graph import DType
from meganeura_aot.ops.state.leaf import Leaf
from tests import harness
from tests.seed_entries import OPERATORS, SHADER_ENTRIES, Build

ROOT = Path(__file__).parents[1]
BUILDS = {name: build for name, build in (SHADER_ENTRIES | OPERATORS).items() if not isinstance(build, str)}


def feeds_of(g: Graph) -> dict[str, np.ndarray[Any, Any]]:
    """Positive numbers, which log and the losses take too; small indices and positions."""
    rng = np.random.default_rng(0)
    feeds = {}
    for node in g.build().nodes:
        if not isinstance(node.op, Leaf):
            continue
        type_ = node.types[0]
        if type_.dtype is DType.F32:
            feeds[node.op.label] = rng.uniform(0.05, 0.95, type_.shape).astype(np.float32)
        else:
            feeds[node.op.label] = rng.integers(0, 5, type_.shape).astype(type_.dtype.numpy)
    return feeds


@pytest.mark.parametrize("name", BUILDS)
def test_entry(name: str) -> None:
    build: Build = BUILDS[name]
    g = Graph()
    g.set_outputs({"y": build(g)})
    feeds = feeds_of(g)
    expected = harness.evaluate(g.build(), feeds)["y"]
    got = harness.run(harness.compile_graph(g), feeds)["y"]
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5 * max(1e-3, np.abs(expected).max()))


def test_all_80_shader_entries() -> None:
    assert len(SHADER_ENTRIES) == 80


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["builder.md", "ops.md", "seed_parity.md"])
def test_document_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == generator().TEXTS[name](), "run python docs/generate.py"


def test_named_tests_are_collected(request: pytest.FixtureRequest) -> None:
    """Every test that the document names is one of this run (and so red when it fails)."""
    named = re.findall(r"`(tests/\S+)`", (ROOT / "docs" / "seed_parity.md").read_text())
    collected = {item.nodeid for item in request.session.items}
    if any(node.startswith("tests/test_seed_parity.py::test_entry") for node in collected):
        assert set(named) == {f"tests/test_seed_parity.py::test_entry[{name}]" for name in BUILDS}
        assert set(named) <= collected
