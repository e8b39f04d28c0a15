"""Conditions as attention masks: they would be added to the scores as 0 and 1, so they are refused, with the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, Tensor
from tests import harness
from tests.builder_calls import CALLS, f32, signature

S, T, WIDTH, HEADS = 3, 4, 8, 2
SEEN = np.tri(S, T, 1, dtype=bool)

CONDITIONS: dict[str, Callable[[Graph, Tensor], Any]] = {
    "NumPy's bool": lambda g, m: SEEN,
    "bool constant": lambda g, m: g.constant(SEEN),
    "less": lambda g, m: m < 0.5,
    "not_equal": lambda g, m: m != 0,
    "reshape": lambda g, m: g.reshape(g.reshape(m < 0.5, (T, S)), (1, S, T)),
    "expand": lambda g, m: g.expand(m[:1] < 0.5, (2, S, T)),
    "permute": lambda g, m: g.transpose(g.transpose(m) < 0.5),
    "slice": lambda g, m: g.concat([m < 0.5, m > 0.5])[:S],
    "both": lambda g, m: (m < 0.5) * (m > 0.1),
    "either": lambda g, m: g.maximum(m < 0.5, g.minimum(m > 0.9, m < 2.0)),
    "integers": lambda g, m: g.cast(g.cast(m < 0.5, "u32") & g.cast(m > 0.1, "u32"), "f32"),
    "stop_gradient": lambda g, m: g.stop_gradient(m < 0.5),
    "integers of an input": lambda g, m: g.input("mask", (S, T), "i32"),
    "NumPy's 0 and 1": lambda g, m: SEEN.astype(np.int64),
    "NumPy's 1 alone": lambda g, m: np.ones((1, T), np.uint8),
    "1": lambda g, m: 1,
    "not": lambda g, m: 1 - (m < 0.5),
    "a choice": lambda g, m: g.where(m, 1.0, 0.0),
    "times 1": lambda g, m: (m < 0.5) * 1.0,
    "pad": lambda g, m: g.pad(m[1:] < 0.5, [(1, 0), (0, 0)]),
    "gather": lambda g, m: g.gather(m < 0.5, np.arange(S)),
    "any": lambda g, m: g.max(g.expand(m, (2, S, T)) < 0.5, 0),
}
METHODS = [name for name in CALLS if {"attn_mask", "options"} & set(signature(name).parameters)]


def attend(g: Graph, method: str, attn_mask: Any) -> Any:
    q, k, v = (g.input(name, (1, n, WIDTH)) for name, n in (("q", S), ("k", T), ("v", T)))
    position = [g.constant(np.uint32(0))] if method == "cached_attention" else []
    more = {"window": T} if method == "sliding_window_attention" else {}
    return getattr(g, method)(q, k, v, *position, HEADS, attn_mask=attn_mask, **more)


def test_every_method_with_a_mask_is_tried() -> None:
    assert len(METHODS) == 8


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_is_no_additive_mask(name: str, method: str) -> None:
    g = Graph()
    condition = CONDITIONS[name](g, g.input("m", (S, T)))
    remedy = r"expected attn_mask as f32 .* where\(attn_mask, 0, -inf\) \(built at \S+test_masks\.py:\d+\)"
    with pytest.raises(GraphError, match=remedy):
        attend(g, method, condition)


ADDITIVE: dict[str, Callable[[Graph, Tensor], Any]] = {
    "where": lambda g, m: g.where(m < 0.5, 0, -math.inf),
    "where of NumPy's": lambda g, m: g.where(SEEN, 0, -math.inf),  # type: ignore[arg-type]
    "weighed": lambda g, m: (m > 0.5) * -1e9,
    "numbers": lambda g, m: np.where(SEEN, 0, -np.inf),
    "half a condition": lambda g, m: (m < 0.5) * m,
    "hidden by a product": lambda g, m: (1 - (m < 0.5)) * -1e9,
    "integers": lambda g, m: np.where(SEEN, 0, -10000),
    "nothing hidden": lambda g, m: np.zeros((S, T), np.int64),
    "zeros in parts": lambda g, m: g.concat([np.zeros((1, T)), np.zeros((S - 1, T))]),
    "gathered": lambda g, m: g.gather(m, g.cast(m[:, 0] < 0.5, "u32")),
}


@pytest.mark.parametrize("name", ADDITIVE)
def test_an_additive_mask_is_taken(name: str) -> None:
    g = Graph()
    g.set_outputs({"y": attend(g, "attention", ADDITIVE[name](g, g.input("m", (S, T))))})
    feeds = {"m": f32(S, T)} | {key: f32(1, n, WIDTH) for key, n in (("q", S), ("k", T), ("v", T))}
    harness.check(g, feeds, twins=False)
