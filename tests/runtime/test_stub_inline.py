"""The stub's files merge into one: no name twice, and nothing that runs at import."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FILES = ("weights", "core", "cli", "doctor", "profile")
TREES = {name: ast.parse((ROOT / "runtime_stub" / f"{name}.py").read_text()) for name in FILES}


def merged(order: tuple[str, ...]) -> str:
    """One file: imports first, those within the package left out, then the rest."""
    imports, rest = [], []
    for name in order:
        for node in TREES[name].body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += [ast.unparse(node)] if getattr(node, "level", 0) == 0 else []
            else:
                rest.append(ast.unparse(node))
    scale = (ROOT / "tests/runtime/runners.py").read_text()
    shader = scale[scale.index("SCALE = ") : scale.index("ADD = ")]
    model = scale[scale.index("class Scale") : scale.index("class Kinds")]
    return "\n".join([*dict.fromkeys(imports), *rest, shader, model, "if __name__ == '__main__':\n    main(Scale)"])


def names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_top_level_names_are_unique() -> None:
    found = [name for tree in TREES.values() for node in tree.body for name in names(node)]
    assert len(found) == len(set(found)) > 20


def test_modules_only_define() -> None:
    for tree in TREES.values():
        for node in tree.body[1:]:
            assert isinstance(
                node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
            )


def test_only_the_standard_library_and_numpy_are_imported() -> None:
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "level", 0) == 0:
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                for module in modules:
                    assert module.split(".")[0] in {*sys.stdlib_module_names, "numpy"}


def test_private_names_of_wgpu_stay_in_two_functions() -> None:
    private = []
    for tree in TREES.values():
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.FunctionDef) else ""
            if "_internal" in text or "wgpu_native" in text:
                private.append(node.name if isinstance(node, ast.FunctionDef) else "")
    assert sorted(private) == ["__init__", "create_module"]


@pytest.mark.parametrize("order", [FILES, ("weights", "doctor", "core", "profile", "cli")])
def test_a_merged_runner_runs_alone(tmp_path: Path, order: tuple[str, ...]) -> None:
    runner = tmp_path / "runner.py"
    runner.write_text(merged(order))
    np.save(tmp_path / "x.npy", np.ones((2, 3)))
    command = [sys.executable, "-I", str(runner)]
    done = subprocess.run([*command, "--list"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "input x f32[2, 3]" in done.stdout
    done = subprocess.run([*command, "--bench", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "wall" in done.stdout
