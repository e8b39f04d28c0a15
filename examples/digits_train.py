"""Trains a classifier of handwritten digits on the GPU: python examples/digits_train.py --model mlp (or cnn)

As any model file, it can be compiled by hand: meganeura-aot examples/digits_train.py --set model=cnn --train adam -o trainer.py
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from run_digits import load_runner
from train_digits import Digits, load_digits

from meganeura_aot import Graph, Tensor, Training, compile_graph

BATCH, HELD_OUT = 50, 397


def linear(g: Graph, name: str, x: Tensor, outputs: int) -> Tensor:
    """x [batch, inputs] to [batch, outputs], started as He et al. do for ReLU."""
    weight = g.parameter(f"{name}.weight", (outputs, x.shape[-1]), init=("normal", (2 / x.shape[-1]) ** 0.5))
    return g.bias_add(g.matmul_bt(x, weight), g.parameter(f"{name}.bias", (outputs,), init="zeros"))


def conv(g: Graph, name: str, x: Tensor, channels: int) -> Tensor:
    """3 x 3, then a norm over groups of 4 channels, ReLU, and the largest of every 2 x 2."""
    weight = g.parameter(f"{name}.weight", (channels, x.shape[1], 3, 3), init=("normal", (2 / x.shape[1] / 9) ** 0.5))
    h = g.conv(x, weight, padding=1)
    scale = g.parameter(f"{name}.norm.weight", (channels,), init="ones")
    shift = g.parameter(f"{name}.norm.bias", (channels,), init="zeros")
    return g.max_pool(g.relu(g.group_norm(h, channels // 4, scale, shift)), 2)


def mlp(g: Graph, x: Tensor) -> Tensor:
    """64 - 128 - 10, with half of the hidden numbers dropped while it trains."""
    return linear(g, "fc2", g.dropout(g.relu(linear(g, "fc1", x, 128)), 0.5), 10)


def cnn(g: Graph, x: Tensor) -> Tensor:
    """Two convolutions and a linear layer, on images of 8 x 8."""
    h = conv(g, "conv2", conv(g, "conv1", g.reshape(x, (-1, 1, 8, 8)), 16), 32)
    return linear(g, "fc", g.reshape(h, (x.shape[0], -1)), 10)


MODELS = {"mlp": mlp, "cnn": cnn}


def build(model: str = "mlp", batch: int = BATCH) -> dict[str, Graph]:
    """train: x [batch, 64] and labels to the loss. predict: the probabilities of the held-out images, all at once."""
    train, predict = Graph(), Graph()
    logits = MODELS[model](train, train.input("x", (batch, 64)))
    train.set_outputs({"loss": train.cross_entropy_loss(logits, train.input("labels", (batch,), "u32"))})
    logits = MODELS[model](predict, predict.input("x", (HELD_OUT, 64)))
    predict.set_outputs({"probabilities": predict.softmax(logits)})
    return {"train": train, "predict": predict}


def train(model: str = "mlp", epochs: int = 20, digits: Digits | None = None) -> float:
    """Trains, and returns the share of the held-out images that are recognised."""
    data = digits or load_digits()
    program = compile_graph(build(model), name=f"digits_{model}_train", train=Training("adam", lr=3e-3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{program.name}.py"
        program.save(path)
        trainer = load_runner(path)  # from here on, nothing but the emitted file is used
    with trainer.Runner() as runner:
        runner.init_weights(seed=0)
        loader = trainer.DataLoader({"x": data.train_x, "labels": data.train_y}, BATCH)
        steps = epochs * len(loader)
        runner.fit(loader, epochs, lr=lambda step: 3e-3 * (1 - step / steps) + 1e-5)
        return accuracy(runner.predict(x=data.test_x)["probabilities"], data.test_y)


def accuracy(probabilities: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    return float((probabilities.argmax(axis=1) == labels).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    reached = train(args.model, args.epochs)
    print(f"{args.model}: {reached:.1%} of {HELD_OUT} held-out images are right")
    return 0 if reached >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
