"""Attributes that are no numbers, or not the right ones: a GraphError that names the user's line, never a broken file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Causal, Graph, GraphError, Tensor, compile_graph
from meganeura_aot.rope_scaling import Yarn
from tests import harness


def qkv(g: Graph) -> list[Tensor]:
    return [g.input(name, (1, 4, 16)) for name in "qkv"]


def cached(g: Graph, position: Any) -> Tensor:
    q, k, v = qkv(g)
    return g.cached_attention(q, k, v, position, 2)


MISTAKES: dict[str, Callable[[Graph], Any]] = {
    "position below 0": lambda g: cached(g, -3),
    "position of f32": lambda g: cached(g, g.input("p", ())),
    "no position": lambda g: cached(g, None),
    "additive mask of u32": lambda g: g.causal_attention(*qkv(g), 2, attn_mask=g.input("m", (), "u32")),
    "mask as text": lambda g: g.attention(*qkv(g), 2, mask="causal"),  # type: ignore[arg-type]
    "mask class": lambda g: g.attention(*qkv(g), 2, mask=Causal),  # type: ignore[arg-type]
    "no mask": lambda g: g.attention(*qkv(g), 2, mask=None),  # type: ignore[arg-type]
    "offset None": lambda g: g.attention(*qkv(g), 2, mask=Causal(None)),  # type: ignore[arg-type]
    "offset over i32": lambda g: g.attention(*qkv(g), 2, mask=Causal(2**31)),
    "fractional heads": lambda g: g.attention(*qkv(g), 2.0),  # type: ignore[arg-type]
    "no kv heads": lambda g: g.attention(*qkv(g), 2, 0),
    "scale over f32": lambda g: g.attention(*qkv(g), 2, scale=1e300),
    "infinite soft cap": lambda g: g.attention(*qkv(g), 2, soft_cap=float("inf")),
    "eps NaN": lambda g: g.rms_norm(g.input("x", (3, 4)), eps=float("nan")),
    "fractional k": lambda g: g.top_k(g.input("x", (3, 4)), 2.0),  # type: ignore[arg-type]
    "k of bool": lambda g: g.top_k(g.input("x", (3, 4)), True),
    "fractional depth": lambda g: g.one_hot(g.input("i", (3,), "u32"), 3.0),  # type: ignore[arg-type]
    "fractional rows": lambda g: g.scatter_add(g.input("i", (3,), "u32"), g.input("s", (3, 2)), 2.5),  # type: ignore[arg-type]
    "fractional groups": lambda g: g.conv(g.input("x", (1, 4, 5)), g.input("w", (2, 2, 3)), groups=2.0),  # type: ignore[arg-type]
    "fractional rope offset": lambda g: g.rope(g.input("x", (4, 16)), head_dim=8, offset=1.5),  # type: ignore[arg-type]
    "rope base 1": lambda g: g.rope(g.input("x", (4, 16)), head_dim=8, base=1.0, scaling=Yarn(4.0, 128)),
    "fractional pad": lambda g: g.pad(g.input("x", (4,)), [(1.5, 0)]),  # type: ignore[list-item]
    "value of an edge": lambda g: g.pad(g.input("x", (4,)), [(1, 0)], mode="edge", value=7),
    "global pool of rank 2": lambda g: g.global_avg_pool(g.input("x", (4, 5))),
    "bias of layer_norm": lambda g: g.layer_norm(g.input("x", (1, 8)), None, g.input("b", (4, 8))),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str) -> None:
    g = Graph()
    with pytest.raises(GraphError, match=r"\(built at \S+test_misuse\.py:\d+\)"):
        MISTAKES[name](g)


def test_numbers_of_numpy() -> None:
    """np.int64 wherever an int may stand: the emitted text holds Python's."""
    g = Graph()
    q, k, v = qkv(g)
    n = np.int64
    g.set_outputs(
        {
            "attention": g.causal_attention(q, k, v, n(2), n(2)),
            "top_k": g.top_k(q, n(3))[0],
            "one_hot": g.one_hot(g.input("ids", (3,), "u32"), n(5)),
            "conv": g.conv(g.input("x", (1, 4, 6)), g.input("w", (4, 2, 3)), groups=n(2), stride=n(2)),
            "pad": g.pad(q, [(n(1), n(0))], axes=n(1)),
            "scatter": g.scatter_add(g.input("places", (3,), "u32"), g.input("s", (3, 2)), n(4)),
        }
    )
    text = compile_graph(g).text
    assert "np.int64" not in text.split("# ==== Model ====")[1]


def test_transposed_convolution_of_one_tap_with_output_padding() -> None:
    for shape, w in (((1, 2, 4), (2, 1, 1)), ((2, 3, 4, 5), (3, 4, 1, 1))):
        g = Graph()
        g.set_outputs({"y": g.conv_transpose(g.input("x", shape), g.input("w", w), output_padding=1, dilation=2)})
        rng = np.random.default_rng(0)
        feeds = {"x": rng.normal(size=shape).astype(np.float32), "w": rng.normal(size=w).astype(np.float32)}
        for target in ("webgpu", "cpu"):
            harness.check(g, feeds, target=target)


def test_a_window_past_the_end_in_ceil_mode() -> None:
    g = Graph()
    x = g.input("x", (1, 1, 2, 2))
    g.set_outputs({"max": g.max_pool(x, 3, 2, ceil_mode=True), "avg": g.avg_pool(x, 3, 2, ceil_mode=True)})
    got = harness.check(g, {"x": np.array([[[[1, 2], [3, 6]]]], np.float32)})
    assert (float(got["max"].item()), float(got["avg"].item())) == (6, 3)


def test_a_variance_that_overflows_is_not_hidden() -> None:
    g = Graph()
    x = g.input("x", (2, 300))
    g.set_outputs({"layer": g.layer_norm(x)})
    values = np.ones((2, 300), np.float32)
    values[0, 0] = 1e30
    got = harness.run(compile_graph(g), {"x": values})["layer"]
    assert np.isnan(got[0]).all() or (np.abs(got[0]) < 20).all()
    np.testing.assert_array_equal(got[1], 0)
