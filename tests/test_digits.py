"""The first example from end to end, with scikit-learn's weights and predictions, and what README.md says of it."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from examples import digits_mlp, run_digits, train_digits
from meganeura_aot import compile_graph

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float]:
    folder = tmp_path_factory.mktemp("digits")
    weights, answers = folder / "digits.safetensors", folder / "answers.npz"
    return weights, answers, train_digits.train(weights, answers)


def test_scikit_learn_reaches_the_known_accuracy(trained: tuple[Path, Path, float]) -> None:
    assert f"{trained[2]:.1%}" == "98.2%"


@pytest.mark.parametrize("target", ["webgpu", "native", "cpu"])
def test_predictions_equal_scikit_learn(trained: tuple[Path, Path, float], tmp_path: Path, target: str) -> None:
    weights, answers, _ = trained
    runner = tmp_path / f"digits_{target}.py"
    compile_graph(digits_mlp.build(), name="digits_mlp", target=target).save(runner)
    accuracy, differing, total = run_digits.compare(runner, weights, answers)
    assert (differing, total) == (0, 397)
    assert f"{accuracy:.1%}" == "98.2%"


def readme_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_model_runs_as_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, use, _ = readme_blocks()
    scope: dict[str, object] = {"images": np.ones((32, 64))}
    exec(model, scope)
    compile_graph(scope["build"](), name="model").save(tmp_path / "runner.py")  # type: ignore[operator]
    weights = {"fc.weight": np.zeros((10, 64), np.float32), "fc.bias": np.zeros(10, np.float32)}
    save_file(weights, tmp_path / "w.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(use, scope)
    np.testing.assert_allclose(scope["probabilities"], np.full((32, 10), 0.1), rtol=1e-5)  # type: ignore[arg-type]


def test_the_readme_excerpt_is_what_comes_out() -> None:
    golden = (ROOT / "out" / "digits_mlp.py").read_text(encoding="utf-8").splitlines()
    excerpt = [line for line in readme_blocks()[2].splitlines() if line.strip() not in ("", "...")]
    assert not [line for line in excerpt if line not in golden]
