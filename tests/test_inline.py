"""What the compiler assumes of the runtime stub, and the stub of the compiler."""

from __future__ import annotations

import ast
from pathlib import Path

from meganeura_aot.compiler import RUNNER_NAMES
from meganeura_aot.inline import INFERENCE, inline, read_module
from runtime_stub import TrainingRunner

ROOT = Path(__file__).parents[1]


def top_level(source: str) -> list[str]:
    """Names that a module defines."""
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def test_no_entry_point_can_hide_an_attribute_of_the_runner() -> None:
    public = {name for name in dir(TrainingRunner) if not name.startswith(("_", "encode_"))}
    assert public <= RUNNER_NAMES
    source = (ROOT / "runtime_stub" / "core.py").read_text()
    assigned = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute) and is_self(node)}
    assert {name for name in assigned if not name.startswith("_")} - instance_only() <= RUNNER_NAMES


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def instance_only() -> set[str]:
    """Attributes that core.py assigns in its other classes."""
    tree = ast.parse((ROOT / "runtime_stub" / "core.py").read_text())
    others = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "ModelRunner"]
    return {a.attr for node in others for a in ast.walk(node) if isinstance(a, ast.Attribute) and is_self(a)}


def test_reserved_names_are_found() -> None:
    assert inline().names == {name for module in INFERENCE for name in top_level(read_module(module).body)}
    assert {"ModelRunner", "DTYPES", "main"} <= inline().names
