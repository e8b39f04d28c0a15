"""The training examples on real data, as users run them, and what docs/training.md says."""

from __future__ import annotations

import gzip
import importlib
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.idx import read_idx
from meganeura_aot.cli import main

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of examples/ as its own script sees it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_digits(example: Any, model: str) -> None:
    command = [sys.executable, str(EXAMPLES / "digits_train.py"), "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    reached = float(re.search(rf"{model}: ([\d.]+)% of 397 held-out images are right", done.stdout)[1])  # type: ignore[index]
    assert reached >= 97


def test_character_transformer(example: Any) -> None:
    """It learns: the loss of random characters is log(70) = 4.2, that of their frequencies alone about 3.1."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    losses, said = example("char_transformer").train(text, 100)
    assert len(losses) == 100
    assert np.mean(losses[-10:]) < 2.85
    assert len(said) == len("The graph ") + 200
    assert set(said) <= set(text)


def test_adapters(example: Any, tmp_path: Path) -> None:
    lora, train_digits = example("lora"), example("train_digits")
    train_digits.train(tmp_path / "base.safetensors", tmp_path / "answers.npz")
    before, after = lora.adapt(lora.load_file(tmp_path / "base.safetensors"))
    assert before < 0.6
    assert after > 0.9


def test_idx(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    data = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 3, 4) + array.tobytes()
    (tmp_path / "plain").write_bytes(data)
    (tmp_path / "zipped.gz").write_bytes(gzip.compress(data))
    np.testing.assert_array_equal(read_idx(tmp_path / "plain"), array)
    np.testing.assert_array_equal(read_idx(tmp_path / "zipped.gz"), array)
    (tmp_path / "floats").write_bytes(struct.pack(">BBBBI", 0, 0, 0x0D, 1, 2) + np.array([1.5, -2], ">f4").tobytes())
    np.testing.assert_array_equal(read_idx(tmp_path / "floats"), [1.5, -2])
    for wrong in (b"", b"\0\0", data[:-1], data + b"\0", b"\x1f\x8b..", b"\0\0\x07\x01\0\0\0\0", data[:9]):
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(ValueError, match="wrong: "):
            read_idx(tmp_path / "wrong")


def test_the_document_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    model, use, resume = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    command = re.search(r"```\nmeganeura-aot (.*?)\n```", text)
    assert command is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(model)
    assert main(command[1].split()) == 0
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 10, 500)
    images = rng.standard_normal((500, 64)) + np.eye(64)[classes] * 8
    scope: dict[str, Any] = {"images": images, "classes": classes, "held_out": images[:397]}
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("trainer", None)
    exec(use, scope)
    exec(resume, scope | {"held_out_classes": classes[:397]})
    sys.modules.pop("trainer")
    assert (scope["answers"].argmax(axis=1) == classes[:397]).mean() > 0.9
    assert main(["model.py", "-o", "predictor.py"]) == 0
    sys.modules.pop("predictor", None)
    with importlib.import_module("predictor").Runner() as runner:
        runner.load_weights("best.safetensors")
        assert (runner.predict(x=images[:397])["logits"].argmax(axis=1) == classes[:397]).mean() > 0.9
