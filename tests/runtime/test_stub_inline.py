"""The stub's files merge into one: no name twice, and nothing that runs at import."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FILES = ("weights", "weight_files", "core", "cli", "doctor", "files", "profile")
TRAINING = ("optimizer", "fit", "checkpoint", "train")
TREES = {name: ast.parse((ROOT / "runtime_stub" / f"{name}.py").read_text()) for name in (*FILES, *TRAINING)}


def merged(order: tuple[str, ...]) -> str:
    """One file: imports first, those within the package left out, then the rest."""
    imports, rest = [], []
    for name in order:
        for node in TREES[name].body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += [ast.unparse(node)] if getattr(node, "level", 0) == 0 else []
            else:
                rest.append(ast.unparse(node))
    if "train" in order:
        text = (ROOT / "tests/runtime/trainers.py").read_text()
        model, name = text[text.index("HEAD = ") : text.index("class Oracle")], "Stateful"
    else:
        text = (ROOT / "tests/runtime/runners.py").read_text()
        model = text[text.index("SCALE = ") : text.index("ADD = ")] + text[text.index("class Scale") :]
        model, name = model[: model.index("class Kinds")], "Scale"
    return "\n".join([*dict.fromkeys(imports), *rest, model, f"if __name__ == '__main__':\n    main({name})"])


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


def test_private_names_of_wgpu_stay_in_four_functions() -> None:
    private = []
    for tree in TREES.values():
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.FunctionDef) else ""
            if "_internal" in text or "wgpu_native" in text:
                private.append(node.name if isinstance(node, ast.FunctionDef) else "")
    assert sorted(private) == [
        "__init__",
        "create_module",
        "find_adapters_without_gl",
        "keep_what_was_inherited",
    ]


@pytest.mark.parametrize("order", [FILES, ("weights", "weight_files", "files", "doctor", "core", "profile", "cli")])
def test_a_merged_runner_runs_alone(tmp_path: Path, order: tuple[str, ...]) -> None:
    runner = tmp_path / "runner.py"
    runner.write_text(merged(order))
    np.save(tmp_path / "x.npy", np.ones((2, 3)))
    command = [sys.executable, "-I", str(runner)]
    done = subprocess.run([*command, "--list"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "input x f32[2, 3]" in done.stdout
    done = subprocess.run([*command, "--bench", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "wall" in done.stdout


def test_inference_runners_know_nothing_of_training() -> None:
    for name in FILES:
        found = [node.module for node in TREES[name].body if isinstance(node, ast.ImportFrom) and node.level]
        assert not {*found} & {*TRAINING}


SCRIPT = """
import numpy as np
from runner import DataLoader, Stateful
x = np.random.default_rng(0).standard_normal((9, 3)).astype("f4")
runner = Stateful(on_nan="raise")
runner.init_weights(1)
history = runner.fit(DataLoader({"x": x, "t": x * [1, 2, 3] + 0.5}, 4), epochs=30, lr=lambda step: 0.2, log_every=0)
assert history[-1].loss < history[0].loss / 2 and runner.step == 60
runner.save_checkpoint("c.safetensors")
again = Stateful()
again.load_checkpoint("c.safetensors")
assert again.weights()["w"].tobytes() == runner.weights()["w"].tobytes()
"""


def test_a_merged_runner_trains_alone(tmp_path: Path) -> None:
    (tmp_path / "runner.py").write_text(
        merged(("weights", "weight_files", "files", "doctor", "core", "profile", "cli", *TRAINING))
    )
    (tmp_path / "script.py").write_text(SCRIPT)

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert run("script.py") == ""
    listed = run("-I", "runner.py", "--list")
    assert "parameter head.b f32[3]" in listed and "accumulate: input x f32[4, 3]" in listed and "moment" not in listed
    assert "wall" in run("-I", "runner.py", "--bench", "2"), "the forward entry needs no name"
    assert "grad_w_0" in run("-I", "runner.py", "--entry", "accumulate", "--profile")


def test_the_compiler_inlines_them() -> None:
    from meganeura_aot.inline import INFERENCE, inline

    whole = inline((*INFERENCE, *TRAINING))
    assert {"TrainingRunner", "DataLoader", "sgd_numbers", "adam_numbers"} <= whole.names
    body = ast.parse(whole.imports + whole.body)
    assert not [node for node in ast.walk(body) if isinstance(node, ast.ImportFrom) and node.level]
    assert not {"TrainingRunner", "DataLoader"} & inline().names
