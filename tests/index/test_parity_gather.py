"""Lookups, order and RoPE against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from tests import harness

pytestmark = pytest.mark.parity

X = np.random.default_rng(0).normal(size=(6, 5, 24)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 5, (3, 4)).astype(np.uint32)
PICKS = np.random.default_rng(2).integers(0, 5, (6, 5, 24)).astype(np.uint32)

# name -> (ours, PyTorch's), over x f32[6, 5, 24], ids [3, 4] and picks [6, 5, 24], indices below 5
CASES: dict[str, tuple[Callable[[Graph, Tensor, Tensor, Tensor], Any], Callable[[Any, Any, Any, Any], Any]]] = {
    "embedding": (
        lambda g, x, ids, picks: g.embedding(ids, g.reshape(x, (30, 24))),
        lambda t, x, ids, picks: t.nn.functional.embedding(ids, x.reshape(30, 24)),
    ),
    "gather": (
        lambda g, x, ids, picks: g.gather(x, ids, 1),
        lambda t, x, ids, picks: x[:, ids],
    ),
    "gather_elements": (
        lambda g, x, ids, picks: g.gather_elements(x, picks, 1),
        lambda t, x, ids, picks: t.gather(x, 1, picks),
    ),
    "gather_elements_first_axis": (
        lambda g, x, ids, picks: g.gather_elements(x, picks[:4, :3], 0),
        lambda t, x, ids, picks: t.gather(x, 0, picks[:4, :3]),
    ),
    "scatter_add": (
        lambda g, x, ids, picks: g.scatter_add(g.reshape(ids, (12,)), g.reshape(x, (30, 24))[:12], 7),
        lambda t, x, ids, picks: t.zeros(7, 24, dtype=x.dtype).index_add(0, ids.reshape(12), x.reshape(30, 24)[:12]),
    ),
    "one_hot": (
        lambda g, x, ids, picks: g.one_hot(ids, 9),
        lambda t, x, ids, picks: t.nn.functional.one_hot(ids, 9),
    ),
    "argmax": (
        lambda g, x, ids, picks: g.argmax(x, 1),
        lambda t, x, ids, picks: x.argmax(1),
    ),
    "argmin": (
        lambda g, x, ids, picks: g.argmin(x, -1, keepdims=True),
        lambda t, x, ids, picks: x.argmin(-1, keepdim=True),
    ),
    "top_k": (
        lambda g, x, ids, picks: g.top_k(x, 7)[0],
        lambda t, x, ids, picks: x.topk(7).values,
    ),
    "top_k_indices": (
        lambda g, x, ids, picks: g.top_k(x, 7)[1],
        lambda t, x, ids, picks: x.topk(7).indices,
    ),
    "transpose_tiles": (
        lambda g, x, ids, picks: g.transpose(x, (2, 0, 1)),
        lambda t, x, ids, picks: x.permute(2, 0, 1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_lookups(name: str) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = CASES[name]
    g = Graph()
    ids, picks = g.input("ids", IDS.shape, "u32"), g.input("picks", PICKS.shape, "u32")
    g.set_outputs({"y": ours(g, g.input("x", X.shape), ids, picks)})
    got = harness.run(harness.compile_graph(g), {"x": X, "ids": IDS, "picks": PICKS})["y"]
    indices = (torch.from_numpy(array.astype(np.int64)) for array in (IDS, PICKS))
    expected = theirs(torch, torch.from_numpy(X).double(), *indices).numpy()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def rotate_half(torch: Any, x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@pytest.mark.parametrize("rotary", [32, 8])
def test_rope_as_in_hugging_face(rotary: int) -> None:
    """x cos + rotate_half(x) sin over [B, heads, S, rotary], and what is past `rotary` passes through."""
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(3).normal(size=(2, 11, 3 * 32)).astype(np.float32)
    g = Graph()
    g.set_outputs({"y": g.rope(g.input("x", x.shape), head_dim=32, base=5e5, rotary_dim=rotary, offset=100)})
    got = harness.run(harness.compile_graph(g), {"x": x})["y"]
    heads = torch.from_numpy(x).double().reshape(2, 11, 3, 32).transpose(1, 2)
    frequencies = 5e5 ** (-torch.arange(0, rotary, 2).double() / rotary)
    angle = torch.outer(torch.arange(100, 111).double(), frequencies)
    cosine, sine = torch.cat((angle, angle), dim=-1).cos(), torch.cat((angle, angle), dim=-1).sin()
    turning, passing = heads[..., :rotary], heads[..., rotary:]
    y = torch.cat((turning * cosine + rotate_half(torch, turning) * sine, passing), dim=-1)
    np.testing.assert_allclose(got, y.transpose(1, 2).reshape(2, 11, 96).numpy(), rtol=1e-5, atol=2e-6)


def test_interleaved_rope_is_a_complex_product() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(4).normal(size=(7, 2 * 16)).astype(np.float32)
    g = Graph()
    g.set_outputs({"y": g.rope(g.input("x", x.shape), head_dim=16, interleaved=True)})
    got = harness.run(harness.compile_graph(g), {"x": x})["y"]
    angle = torch.outer(torch.arange(7).double(), 1e4 ** (-torch.arange(0, 16, 2).double() / 16))
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_complex(torch.from_numpy(x).double().reshape(7, 2, 8, 2))
    expected = torch.view_as_real(pairs * turn).reshape(7, 32).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)
