"""Attention as PyTorch computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Causal, Full, Graph, Window, compile_graph
from meganeura_aot.ops.attention.op import Mask
from tests import harness

pytestmark = pytest.mark.parity


def run(g: Graph, feeds: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    return harness.run(compile_graph(g), feeds)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (5, 1)])
@pytest.mark.parametrize("mask", [Full(), Causal(), Causal(9), Window(6)], ids=str)
@pytest.mark.parametrize(("s", "t", "hd"), [(24, 33, 16), (33, 33, 80), (3, 40, 20)])
def test_scaled_dot_product_attention(heads: int, kv_heads: int, mask: Mask, s: int, t: int, hd: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(s * t + hd)
    widths = {"q": (s, heads), "k": (t, kv_heads), "v": (t, kv_heads)}
    feeds = {name: rng.normal(size=(2, n, h * hd)).astype(np.float32) for name, (n, h) in widths.items()}
    feeds["m"] = rng.normal(size=(2, 1, s, t)).astype(np.float32)
    g = Graph()
    q, k, v, m = (g.input(name, x.shape) for name, x in feeds.items())
    plain = g.attention(q, k, v, heads, kv_heads, hd, mask)
    biased = g.attention(q, k, v, heads, kv_heads, hd, mask, attn_mask=m, scale=0.3)
    g.set_outputs({"plain": plain, "biased": biased})
    got = run(g, feeds)

    place, keys = torch.arange(s)[:, None] + getattr(mask, "offset", 0), torch.arange(t)
    seen = torch.ones(s, t, dtype=torch.bool) if isinstance(mask, Full) else keys <= place
    if isinstance(mask, Window):
        seen = seen & (keys > place - mask.size)
    heads_of = {
        name: torch.from_numpy(x).double().view(2, x.shape[1], -1, hd).transpose(1, 2)
        for name, x in feeds.items()
        if name != "m"
    }
    bias = torch.zeros(s, t, dtype=torch.double).masked_fill(~seen, -np.inf)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = {
        "plain": attend(heads_of["q"], heads_of["k"], heads_of["v"], bias, enable_gqa=True),
        "biased": attend(
            heads_of["q"],
            heads_of["k"],
            heads_of["v"],
            bias + torch.from_numpy(feeds["m"]).double(),
            scale=0.3,
            enable_gqa=True,
        ),
    }
    for name, y in expected.items():
        np.testing.assert_allclose(got[name], y.transpose(1, 2).reshape(2, s, -1).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("s", "t"), [(12, 12), (9, 30), (30, 9)])
def test_is_causal_aligns_the_starts(s: int, t: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(s)
    feeds = {name: rng.normal(size=(n, 16)).astype(np.float32) for name, n in (("q", s), ("k", t), ("v", t))}
    g = Graph()
    g.set_outputs({"y": g.causal_attention(*(g.input(name, x.shape) for name, x in feeds.items()), 1)})
    q, k, v = (torch.from_numpy(x)[None, None] for x in feeds.values())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
    np.testing.assert_allclose(run(g, feeds)["y"], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_log_sum_exp() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    feeds = {name: rng.normal(size=(17, 32)).astype(np.float32) for name in "qkv"}
    g = Graph()
    out, lse = g.attention_with_lse(*(g.input(name, (17, 32)) for name in "qkv"), 2, mask=Causal())
    g.set_outputs({"out": out, "lse": lse})
    q, k = (torch.from_numpy(feeds[name]).double().view(17, 2, 16).transpose(0, 1) for name in "qk")
    scores = (q @ k.transpose(1, 2) / 4).masked_fill(torch.ones(17, 17).triu(1).bool(), -np.inf)
    np.testing.assert_allclose(run(g, feeds)["lse"], torch.logsumexp(scores, -1).numpy(), rtol=1e-5, atol=1e-6)


def test_multi_head_attention_layer() -> None:
    """torch.nn.MultiheadAttention with its own weights."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(24, 3, batch_first=True).double().eval()
    x, memory = torch.randn(2, 9, 24).double(), torch.randn(2, 13, 24).double()
    expected = layer(x, memory, memory, need_weights=False)[0].detach().numpy()
    w, b = layer.in_proj_weight.detach().numpy(), layer.in_proj_bias.detach().numpy()
    g = Graph()
    inputs = (g.input("x", (2, 9, 24)), *[g.input("memory", (2, 13, 24))] * 2)
    q, k, v = (
        g.bias_add(
            g.matmul_bt(y, g.constant(w[i : i + 24].astype(np.float32))), g.constant(b[i : i + 24].astype(np.float32))
        )
        for y, i in zip(inputs, (0, 24, 48), strict=True)
    )
    y = g.matmul_bt(
        g.multi_head_attn(q, k, v, 3, 3, 8, True), g.constant(layer.out_proj.weight.detach().numpy().astype(np.float32))
    )
    g.set_outputs({"y": g.bias_add(y, g.constant(layer.out_proj.bias.detach().numpy().astype(np.float32)))})
    got = run(g, {"x": x.numpy().astype(np.float32), "memory": memory.numpy().astype(np.float32)})["y"]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
