"""Runs out/digits_mlp.py, the file that the compiler emitted, on the held-out digits, and compares with scikit-learn.

Needs numpy and wgpu: neither meganeura_aot nor scikit-learn is imported.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def load_runner(path: Path) -> ModuleType:
    """The emitted file as a module; a program that ships with it would simply import it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def compare(runner: Path, weights: Path, answers: Path) -> tuple[float, int, int]:
    """Accuracy, the number of images predicted otherwise than by scikit-learn, and the number of images."""
    known = np.load(answers)
    with load_runner(runner).Runner() as model:
        model.load_weights(weights)
        probabilities = model.run(x=known["x"])["probabilities"]
    predictions = probabilities.argmax(axis=1)
    return (
        float((predictions == known["labels"]).mean()),
        int((predictions != known["predictions"]).sum()),
        len(predictions),
    )


def main() -> int:
    cache = ROOT / ".cache"
    accuracy, differing, total = compare(
        ROOT / "out" / "digits_mlp.py", cache / "digits.safetensors", cache / "digits_answers.npz"
    )
    print(f"out/digits_mlp.py: {accuracy:.1%} of {total} held-out images are right")
    if differing:
        print(f"{differing} of {total} predictions differ from scikit-learn's")
        return 1
    print(f"all {total} predictions equal scikit-learn's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
