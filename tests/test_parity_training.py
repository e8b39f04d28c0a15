"""Training as PyTorch does it: the same losses, step by step, from the same weights and data."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Training, compile_graph
from meganeura_aot.ops.random.dropout import RandomDropout
from tests import harness
from tests.whole_models import MODELS, Model, torch_heads, torch_linear

pytestmark = pytest.mark.parity

Array = np.ndarray[Any, Any]
STEPS, BATCHES = 50, 4
ROOT = Path(__file__).resolve().parents[1]

OPTIMIZERS: dict[str, tuple[Training, Callable[[Any, Any], Any]]] = {
    "plain sgd": (Training("sgd", lr=0.1), lambda t, p: t.optim.SGD(p, 0.1)),
    "sgd": (
        Training("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
        lambda t, p: t.optim.SGD(p, 0.05, 0.9, weight_decay=1e-3, nesterov=True),
    ),
    "adam": (
        Training("adam", lr=3e-3, betas=(0.8, 0.99), weight_decay=1e-3),
        lambda t, p: t.optim.Adam(p, 3e-3, (0.8, 0.99), weight_decay=1e-3),
    ),
    "adamw": (
        Training("adamw", lr=3e-3, weight_decay=0.1, clip_norm=1.0),
        lambda t, p: t.optim.AdamW(p, 3e-3, weight_decay=0.1),
    ),
}


def torch_batch(torch: Any, batch: dict[str, Array]) -> dict[str, Any]:
    return {k: torch.from_numpy(a.astype(np.int64 if a.dtype.kind == "u" else np.float64)) for k, a in batch.items()}


def torch_losses(torch: Any, model: Model, optimizer: str) -> tuple[list[float], dict[str, Array]]:
    """In double precision; the losses, then the states and parameters after the last step."""
    training, make = OPTIMIZERS[optimizer]
    p = {name: torch.nn.Parameter(torch.from_numpy(a).double()) for name, a in model.weights().items()}
    states = {n: torch.full(s, float(n.endswith("var"))).double() for n, s in model.states.items()}
    update = make(torch, list(p.values()))
    losses = []
    for step in range(STEPS):
        update.zero_grad()
        loss = model.theirs(torch, p | states, torch_batch(torch, model.batch(step % BATCHES)))
        loss.backward()
        if "clip_norm" in training.numbers:
            torch.nn.utils.clip_grad_norm_(list(p.values()), training.numbers["clip_norm"])
        update.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach().numpy() for name, tensor in (p | states).items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_curve(name: str, optimizer: str) -> None:
    torch = pytest.importorskip("torch")
    model = MODELS[name]
    expected, after = torch_losses(torch, model, optimizer)
    with harness.load(compile_graph(model.build(), name=name, train=OPTIMIZERS[optimizer][0])) as runner:
        runner.load_weights(model.weights())
        for state, shape in model.states.items():
            runner.set_state(state, np.full(shape, float(state.endswith("var"))))
        got = [runner.train_step(**model.batch(step % BATCHES)) for step in range(STEPS)]
        runner.assert_tails()
        np.testing.assert_allclose(got, expected, rtol=1e-3)
        assert expected[-1] < 0.9 * expected[0]
        for state in model.states:
            np.testing.assert_allclose(runner.get_state(state), after[state], rtol=1e-3, atol=1e-3)


def torch_transformer(torch: Any, p: Any, ids: Any, layers: int, heads: int) -> Any:
    """examples/char_transformer.py's logits."""
    f = torch.nn.functional

    def norm(name: str, h: Any) -> Any:
        return f.layer_norm(h, h.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])

    h = p["embed.weight"][ids] + p["positions"]
    for i in range(layers):
        n = norm(f"layers.{i}.norm1", h)
        q, k, v = (torch_heads(torch_linear(torch, p, f"layers.{i}.{name}", n), heads) for name in "qkv")
        o = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + torch_linear(torch, p, f"layers.{i}.o", o)
        n = norm(f"layers.{i}.norm2", h)
        h = h + torch_linear(torch, p, f"layers.{i}.fc2", f.gelu(torch_linear(torch, p, f"layers.{i}.fc1", n)))
    return norm("norm", h) @ p["embed.weight"].T


def test_character_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example on its own text, from its own starting weights."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("char_transformer")
    text = (ROOT / example.TEXT).read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    data = example.batches(np.array([alphabet.index(c) for c in text], np.uint32), STEPS)
    program = compile_graph(example.build(len(alphabet)), train=Training("adamw", lr=3e-3))
    with harness.load(program) as runner:
        runner.init_weights(seed=0)
        p = {name: torch.nn.Parameter(torch.from_numpy(a).double()) for name, a in runner.weights().items()}
        update = torch.optim.AdamW(list(p.values()), 3e-3)
        for batch in data:
            ids, following = (torch.from_numpy(batch[name].astype(np.int64)) for name in ("ids", "next"))
            logits = torch_transformer(torch, p, ids, example.LAYERS, example.HEADS)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
            update.zero_grad()
            loss.backward()
            update.step()
            np.testing.assert_allclose(runner.train_step(**batch), loss.item(), rtol=1e-3)
        runner.assert_tails()


def test_stop_gradient() -> None:
    torch = pytest.importorskip("torch")
    g = Graph()
    w = g.parameter("w", (5, 7))
    g.set_outputs({"loss": g.sum(g.tanh(w) * g.stop_gradient(g.exp(w)))})
    value = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    p = torch.from_numpy(value).double().requires_grad_()
    (p.tanh() * p.exp().detach()).sum().backward()
    with harness.load(compile_graph(g, train=Training("sgd"))) as runner:
        runner.load_weights({"w": value})
        runner.accumulate()
        np.testing.assert_allclose(runner.gradients()["w"], p.grad, rtol=1e-5)


def test_dropout() -> None:
    """Nothing outside of a step; in a step PyTorch's with the same mask, forward and backward."""
    torch = pytest.importorskip("torch")
    g = Graph()
    g.set_outputs({"loss": g.sum(g.tanh(g.dropout(g.parameter("w", (40, 30)), 0.3)))})
    value = np.random.default_rng(0).standard_normal((40, 30)).astype(np.float32)
    mask = RandomDropout(0.3).reference(np.ones((40, 30)), np.zeros(4, np.uint32))
    p = torch.from_numpy(value).double().requires_grad_()
    trained = (p * torch.from_numpy(mask)).tanh().sum()
    trained.backward()
    with harness.load(compile_graph(g, train=Training("sgd"))) as runner:
        runner.load_weights({"w": value})
        plain = torch.nn.functional.dropout(p, 0.3, training=False).tanh().sum()
        np.testing.assert_allclose(runner.run()["loss"], plain.item(), rtol=1e-5)
        np.testing.assert_allclose(runner.accumulate(), trained.item(), rtol=1e-5)
        np.testing.assert_allclose(runner.gradients()["w"], p.grad, rtol=1e-5, atol=1e-6)
