"""Gradients of attention as PyTorch's autograd computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Causal, Full, Graph, Window, compile_graph
from meganeura_aot.ops.attention.op import Mask
from tests import harness
from tests.gradients import COEFFICIENT, KERNEL_RTOL, gradients_of

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("mask", [Full(), Causal(), Causal(9), Window(6)], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "s", "t", "hd", "options"),
    [
        (9, 3, 65, 65, 64, {}),
        (4, 4, 24, 33, 16, {"attn_mask": "rows", "scale": 0.3}),
        (5, 1, 3, 40, 20, {"attn_mask": "heads", "soft_cap": 2.0}),
    ],
)
def test_attention(heads: int, kv_heads: int, s: int, t: int, hd: int, options: dict[str, Any], mask: Mask) -> None:
    """Of q, k, v, and a mask: a bias [1, S, T] or [2, H, 1, T]. Beside the output, the log-sum-exp is in the loss."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(s * t + hd)
    shapes = {"q": (2, s, heads * hd), "k": (2, t, kv_heads * hd), "v": (2, t, kv_heads * hd)}
    options = dict(options)
    if "attn_mask" in options:
        shapes["m"] = (1, s, t) if options.pop("attn_mask") == "rows" else (2, heads, 1, t)
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    g = Graph()
    leaves = {name: g.parameter(name, shape) for name, shape in shapes.items()}
    out, lse = g.attention_with_lse(
        leaves["q"], leaves["k"], leaves["v"], heads, kv_heads, hd, mask, attn_mask=leaves.get("m"), **options
    )
    weights = {"w0": rng.normal(size=out.shape), "w1": rng.normal(size=lse.shape)}
    terms = [g.sum(g.input(name, w.shape) * y) for (name, w), y in zip(weights.items(), (out, lse), strict=True)]
    g.set_outputs({"loss": COEFFICIENT * (terms[0] + terms[1])})
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    got = harness.run(compile_graph(gradients_of(g.build())), feeds | weights)

    x = {name: torch.from_numpy(a).double().requires_grad_() for name, a in feeds.items()}
    q, k, v = (x[name].view(2, x[name].shape[1], -1, hd).transpose(1, 2) for name in "qkv")
    k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v))
    scores = q @ k.transpose(-1, -2) * options.get("scale", hd**-0.5)
    if "soft_cap" in options:
        scores = options["soft_cap"] * torch.tanh(scores / options["soft_cap"])
    scores = scores + x.get("m", 0)
    place, keys = torch.arange(s)[:, None] + getattr(mask, "offset", 0), torch.arange(t)
    if not isinstance(mask, Full):
        scores = scores.masked_fill(keys > place, -np.inf)
    if isinstance(mask, Window):
        scores = scores.masked_fill(keys <= place - mask.size, -np.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, s, -1)
    w0, w1 = (torch.from_numpy(w).double() for w in weights.values())
    (COEFFICIENT * ((w0 * y).sum() + (w1 * scores.logsumexp(-1)).sum())).backward()
    for name, leaf in x.items():
        expected = leaf.grad.numpy()
        error = np.linalg.norm(got[f"grad.{name}"] - expected)
        assert error <= KERNEL_RTOL * np.linalg.norm(expected), name
