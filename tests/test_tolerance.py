"""The tolerance rule of norms: what is computed correctly in f32 keeps it, and what is a little wrong does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph
from meganeura_aot.op import Op, make
from tests import harness
from tests.tolerance import bound

Array = np.ndarray[Any, Any]
ROWS = 24
KINDS = ("normal", "far", "balanced", "heavy")


def hard_rows(kind: str, count: int) -> Array:
    """Rows whose mean is hard to keep: the first and the last number of each are next to it."""
    rng = np.random.default_rng(count)
    x = rng.normal(size=(ROWS, count))
    if kind == "far":
        x += 1e4
    elif kind == "balanced":  # a mean next to 0
        half = count // 2
        x[:, [0, half - 1]] = 0
        x[:, half : 2 * half] = -x[:, :half]
        x += 1e-4
    elif kind == "heavy":  # few numbers far from the mean disturb those next to it
        x *= 10.0 ** rng.uniform(-4, 4, x.shape)
    mean = x.mean(1)
    x[:, 0] = mean * (1 + 1e-4)
    x[:, -1] = mean
    return x.astype(np.float32)


def in_f32(
    x: Array, w: Array, b: Array, *, eps: float = 1e-5, ddof: int = 0, twice: bool = True, once: bool = False
) -> Array:
    """A norm over the last axis, every operation rounded. ddof, twice and once: mistakes a kernel may make."""
    mean = x.mean(-1, keepdims=True, dtype=np.float32)
    d = x - mean
    rest = d.mean(-1, keepdims=True, dtype=np.float32)
    squares = (x * x).mean(-1, keepdims=True) - mean * mean if once else (d * d).mean(-1, keepdims=True) - rest * rest
    variance = np.maximum(squares, np.float32(0)) * np.float32(x.shape[-1] / (x.shape[-1] - ddof))
    if twice:
        d = d - rest
    return np.asarray(d / np.sqrt(variance + np.float32(eps)) * w + b)


MISTAKES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "without eps": ("small", {"eps": 0.0}),
    "the unbiased variance": ("normal", {"ddof": 1}),
    "the mean in one number": ("far", {"twice": False}),
    "squares of large numbers": ("far", {"once": True}),
}


def norm_of(x: Array) -> tuple[Op, list[Array]]:
    """A layer norm whose weights hide nothing, and its inputs."""
    rng = np.random.default_rng(1)
    return make("layer_norm"), [x, *(rng.normal(size=x.shape[1]).astype(np.float32) for _ in range(2))]


def error_of(got: Array, op: Op, inputs: list[Array], port: int = 0) -> float:
    """The largest error, as a multiple of the allowed one."""
    wide = [a.astype(np.float64) for a in inputs]
    result = op.reference(*wide)
    expected = result[port] if isinstance(result, tuple) else result
    return float(np.max(np.abs(got - expected) / bound(op, wide, expected, port)))


@pytest.mark.parametrize("count", [2, 16, 1000, 20000])
@pytest.mark.parametrize("kind", KINDS)
def test_correct_rows_keep_the_rule(kind: str, count: int) -> None:
    op, inputs = norm_of(hard_rows(kind, count))
    assert error_of(in_f32(*inputs), op, inputs) <= 1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_rows_break_the_rule(mistake: str) -> None:
    kind, how = MISTAKES[mistake]
    x = hard_rows(kind, 1000) * np.float32(0.01 if kind == "small" else 1)
    op, inputs = norm_of(x)
    assert error_of(in_f32(*inputs, **how), op, inputs) > 2


KERNELS: Mapping[str, Callable[[Array], tuple[Op, Array]]] = {
    "batch_norm_training": lambda x: (make("batch_norm_training"), np.ascontiguousarray(x.T)),
    "group_norm of single numbers": lambda x: (
        make("group_norm", 3),
        x.reshape(ROWS, -1, 1)[:, : x.size // ROWS // 3 * 3],
    ),
    "group_norm": lambda x: (make("group_norm", 2, 1e-5, "silu"), x.reshape(ROWS // 6, 6, -1)),
    "layer_norm": lambda x: (make("layer_norm"), x),
}


@pytest.mark.parametrize("count", [16, 20000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_keep_the_rule(name: str, kind: str, count: int) -> None:
    """With large weights, and a shift that is 0 or cancels now and then."""
    op, x = KERNELS[name](hard_rows(kind, count))
    channels = x.shape[-1] if op.name == "layer_norm" else x.shape[1]
    rng = np.random.default_rng(2)
    w, b = ((rng.normal(size=channels) * size).astype(np.float32) for size in (100, 30))
    b[::2] = 0
    g = Graph()
    inputs = [g.input(key, array.shape) for key, array in (("x", x), ("w", w), ("b", b))]
    outputs = g.apply_many(op, *inputs)
    g.set_outputs({f"y{port}": y for port, y in enumerate(outputs)})
    harness.check(g, {"x": x, "w": w, "b": b})
