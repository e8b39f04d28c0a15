"""A small transformer that learns a text character by character, then goes on from a few words:

python examples/char_transformer.py --text README.md --steps 300
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from run_digits import load_runner

from meganeura_aot import Graph, Tensor, Training, compile_graph

ROOT = Path(__file__).resolve().parents[1]
TEXT = "docs/architecture.md"
BATCH, TOKENS, WIDTH, LAYERS, HEADS = 16, 64, 64, 2, 4


class Transformer:
    """A decoder: learned positions, causal attention, GELU; the head is the embedding."""

    def __init__(self, g: Graph, vocabulary: int) -> None:
        self.g = g
        self.embed = g.parameter("embed.weight", (vocabulary, WIDTH), init=("normal", 0.1))
        self.positions = g.parameter("positions", (TOKENS, WIDTH), init=("normal", 0.1))

    def linear(self, name: str, x: Tensor, outputs: int) -> Tensor:
        weight = self.g.parameter(f"{name}.weight", (outputs, x.shape[-1]), init=("normal", x.shape[-1] ** -0.5))
        return self.g.bias_add(self.g.matmul_bt(x, weight), self.g.parameter(f"{name}.bias", (outputs,), init="zeros"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = self.g.parameter(f"{name}.weight", (WIDTH,), init="ones")
        return self.g.layer_norm(x, scale, self.g.parameter(f"{name}.bias", (WIDTH,), init="zeros"))

    def layer(self, name: str, h: Tensor) -> Tensor:
        n = self.norm(f"{name}.norm1", h)
        q, k, v = (self.linear(f"{name}.{which}", n, WIDTH) for which in "qkv")
        h = h + self.linear(f"{name}.o", self.g.causal_attention(q, k, v, HEADS), WIDTH)
        n = self.norm(f"{name}.norm2", h)
        return h + self.linear(f"{name}.fc2", self.g.gelu(self.linear(f"{name}.fc1", n, 4 * WIDTH)), WIDTH)

    def logits(self, ids: Tensor) -> Tensor:
        """ids u32 [batch, TOKENS] to [batch, TOKENS, vocabulary]"""
        h = self.g.embedding(ids, self.embed) + self.positions
        for index in range(LAYERS):
            h = self.layer(f"layers.{index}", h)
        return self.g.matmul_bt(self.norm("norm", h), self.embed)


def build(vocabulary: int = 128) -> dict[str, Graph]:
    """train: ids and the characters after them to the loss. predict: what may follow each character of one text."""
    train, predict = Graph(), Graph()
    logits = Transformer(train, vocabulary).logits(train.input("ids", (BATCH, TOKENS), "u32"))
    train.set_outputs({"loss": train.cross_entropy_loss(logits, train.input("next", (BATCH, TOKENS), "u32"))})
    logits = Transformer(predict, vocabulary).logits(predict.input("ids", (1, TOKENS), "u32"))
    predict.set_outputs({"logits": logits})
    return {"train": train, "predict": predict}


def batches(codes: NDArray[np.uint32], count: int, seed: int = 0) -> list[dict[str, NDArray[np.uint32]]]:
    """Pieces of the text from random places, each with the same piece one character later."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(codes) - TOKENS, (count, BATCH))
    pieces = codes[starts[..., None] + np.arange(TOKENS + 1)]
    return [{"ids": piece[:, :-1], "next": piece[:, 1:]} for piece in pieces]


def train(text: str, steps: int, start: str = "The graph ") -> tuple[list[float], str]:
    """Trains on the text; the loss of every step, and what the model says after `start`."""
    alphabet = sorted(set(text))
    codes = np.array([alphabet.index(c) for c in text], np.uint32)
    program = compile_graph(build(len(alphabet)), name="char_transformer", train=Training("adamw", lr=3e-3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{program.name}.py"
        program.save(path)
        trainer = load_runner(path)  # from here on, nothing but the emitted file is used
    losses: list[float] = []
    with trainer.Runner() as runner:
        runner.init_weights(seed=0)
        data = batches(codes, steps)
        runner.fit(data, lr=lambda step: 3e-3 * min(1, step / 20), on_step=lambda _, loss: losses.append(loss))
        said = start
        for _ in range(200):
            seen = [alphabet.index(c) for c in said[-TOKENS:]]
            padded = seen + [0] * (TOKENS - len(seen))
            said += alphabet[int(runner.predict(ids=[padded])["logits"][0, len(seen) - 1].argmax())]
    return losses, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=ROOT / TEXT)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    _, said = train(args.text.read_text(encoding="utf-8"), args.steps)
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
