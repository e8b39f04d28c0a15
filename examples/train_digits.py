"""Trains the digits classifier with scikit-learn, once, and keeps the weights and the right answers under .cache/.

digits_mlp.py is the network. The answers (images, labels, what scikit-learn predicts) let run_digits.py compare without
scikit-learn.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / ".cache" / "digits.safetensors"
ANSWERS = ROOT / ".cache" / "digits_answers.npz"
TRAIN_IMAGES = 1400  # of 1797; the other 397 are held out


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 numbers in 0 .. 1, labels 0 .. 9, shuffled once and for all."""

    train_x: NDArray[np.float64]
    train_y: NDArray[np.int64]
    test_x: NDArray[np.float64]
    test_y: NDArray[np.int64]


def load_digits() -> Digits:
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(images))
    train, test = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
    images = images / 16.0
    return Digits(images[train], labels[train], images[test], labels[test])


def train(weights: Path = WEIGHTS, answers: Path = ANSWERS) -> float:
    """Trains, writes both files and returns the accuracy on the held-out images."""
    from safetensors.numpy import save_file
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier
    from threadpoolctl import threadpool_limits

    digits = load_digits()
    classifier = MLPClassifier((64, 32), random_state=0, max_iter=200)
    with threadpool_limits(1), warnings.catch_warnings():  # such small matrices gain nothing from threads
        warnings.simplefilter("ignore", ConvergenceWarning)
        classifier.fit(digits.train_x, digits.train_y)

    tensors = {}
    for i, (weight, bias) in enumerate(zip(classifier.coefs_, classifier.intercepts_, strict=True), start=1):
        tensors[f"fc{i}.weight"] = np.ascontiguousarray(weight.T, dtype=np.float32)  # [out, in], as PyTorch keeps it
        tensors[f"fc{i}.bias"] = bias.astype(np.float32)
    weights.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, weights)

    probabilities = classifier.predict_proba(digits.test_x)
    predictions = classifier.predict(digits.test_x)
    np.savez(answers, x=digits.test_x, labels=digits.test_y, predictions=predictions, probabilities=probabilities)
    return float((predictions == digits.test_y).mean())


def main() -> None:
    if WEIGHTS.exists() and ANSWERS.exists():
        print(f"reusing {WEIGHTS.relative_to(ROOT)}")
        return
    accuracy = train()
    print(f"scikit-learn: {accuracy:.1%} of the held-out images are right; wrote {WEIGHTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
