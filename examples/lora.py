"""Adapters on a frozen base (LoRA): a classifier of digits learns mirrored ones, its own weights staying as they are.

    python examples/train_digits.py; python examples/lora.py

W x becomes W x + B (A x), with A [rank, inputs] and B [outputs, rank], B starting at zero: the formula of
https://arxiv.org/abs/2106.09685.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from digits_mlp import LAYERS
from run_digits import load_runner
from safetensors.numpy import load_file
from train_digits import WEIGHTS, load_digits

from meganeura_aot import Graph, Tensor, Training, compile_graph

BATCH, HELD_OUT, RANK = 50, 397, 8


def adapted(g: Graph, name: str, x: Tensor, outputs: int) -> Tensor:
    """A linear layer that stays as it is, and its adapter."""
    inputs = x.shape[-1]
    weight = g.parameter(f"{name}.weight", (outputs, inputs), init="zeros", trainable=False)
    bias = g.parameter(f"{name}.bias", (outputs,), init="zeros", trainable=False)
    down = g.parameter(f"{name}.lora_a", (RANK, inputs), init=("normal", inputs**-0.5))
    up = g.parameter(f"{name}.lora_b", (outputs, RANK), init="zeros")
    return g.bias_add(g.matmul_bt(x, weight), bias) + g.matmul_bt(g.matmul_bt(x, down), up)


def logits(g: Graph, x: Tensor) -> Tensor:
    for name, (_, outputs) in LAYERS.items():
        x = adapted(g, name, x if name == "fc1" else g.relu(x), outputs)
    return x


def build() -> dict[str, Graph]:
    """train: x [BATCH, 64] and labels to the loss. predict: logits of the held-out images, all at once."""
    train, predict = Graph(), Graph()
    loss = train.cross_entropy_loss(logits(train, train.input("x", (BATCH, 64))), train.input("y", (BATCH,), "u32"))
    train.set_outputs({"loss": loss})
    predict.set_outputs({"logits": logits(predict, predict.input("x", (HELD_OUT, 64)))})
    return {"train": train, "predict": predict}


def adapt(base: dict[str, np.ndarray], epochs: int = 30) -> tuple[float, float]:
    """The share of mirrored held-out digits that are recognised, before and after."""
    digits = load_digits()
    train_x, test_x = (x.reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64) for x in (digits.train_x, digits.test_x))
    program = compile_graph(build(), name="lora", train=Training("adam", lr=5e-3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{program.name}.py"
        program.save(path)
        trainer = load_runner(path)  # from here on, nothing but the emitted file is used
    with trainer.Runner() as runner:
        runner.init_weights(seed=0)
        runner.load_weights({**runner.weights(), **base})

        def accuracy() -> float:
            return float((runner.predict(x=test_x)["logits"].argmax(axis=1) == digits.test_y).mean())

        before = accuracy()
        runner.fit(trainer.DataLoader({"x": train_x, "y": digits.train_y}, BATCH), epochs)
        for name, array in base.items():
            np.testing.assert_array_equal(runner.weights()[name], array)
        return before, accuracy()


def main() -> int:
    before, after = adapt(load_file(WEIGHTS))
    print(f"mirrored digits: {before:.1%} right before, {after:.1%} after; the base is unchanged, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
