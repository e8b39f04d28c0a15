"""The same numbers as PyTorch, operator by operator: the reference is ours, so this is the check of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from tests import harness

pytestmark = pytest.mark.parity

SHAPES = [(1, 7), (3, 65), (2, 5, 33)]

# name -> (ours, PyTorch's); both take f32 tensors
UNARY: dict[str, tuple[Callable[[Graph, Tensor], Tensor], Callable[[Any, Any], Any]]] = {
    "relu": (lambda g, x: g.relu(x), lambda t, x: t.relu(x)),
    "leaky_relu": (lambda g, x: g.leaky_relu(x), lambda t, x: t.nn.functional.leaky_relu(x)),
    "elu": (lambda g, x: g.elu(x, 0.7), lambda t, x: t.nn.functional.elu(x, 0.7)),
    "sigmoid": (lambda g, x: g.sigmoid(x), lambda t, x: t.sigmoid(x)),
    "hard_sigmoid": (lambda g, x: g.hard_sigmoid(x, 1 / 6), lambda t, x: t.nn.functional.hardsigmoid(x)),
    "hard_swish": (lambda g, x: g.hard_swish(x), lambda t, x: t.nn.functional.hardswish(x)),
    "tanh": (lambda g, x: g.tanh(x), lambda t, x: t.tanh(x)),
    "silu": (lambda g, x: g.silu(x), lambda t, x: t.nn.functional.silu(x)),
    "gelu": (lambda g, x: g.gelu(x), lambda t, x: t.nn.functional.gelu(x)),
    "gelu_tanh": (lambda g, x: g.gelu(x, "tanh"), lambda t, x: t.nn.functional.gelu(x, approximate="tanh")),
    "softplus": (lambda g, x: g.softplus(x), lambda t, x: t.nn.functional.softplus(x, threshold=1e9)),
    "exp": (lambda g, x: g.exp(x), lambda t, x: t.exp(x)),
    "expm1": (lambda g, x: g.expm1(x), lambda t, x: t.expm1(x)),
    "erf": (lambda g, x: g.erf(x), lambda t, x: t.erf(x)),
    "sin": (lambda g, x: g.sin(x), lambda t, x: t.sin(x)),
    "cos": (lambda g, x: g.cos(x), lambda t, x: t.cos(x)),
    "floor": (lambda g, x: g.floor(x), lambda t, x: t.floor(x)),
    "ceil": (lambda g, x: g.ceil(x), lambda t, x: t.ceil(x)),
    "round": (lambda g, x: g.round(x * 4.0), lambda t, x: t.round(x * 4)),
    "sign": (lambda g, x: g.sign(x), lambda t, x: t.sign(x)),
    "log": (lambda g, x: g.log(x * x), lambda t, x: t.log(x * x)),
    "log1p": (lambda g, x: g.log1p(x * x), lambda t, x: t.log1p(x * x)),
    "sqrt": (lambda g, x: g.sqrt(x * x), lambda t, x: t.sqrt(x * x)),
    "rsqrt": (lambda g, x: g.rsqrt(x * x), lambda t, x: t.rsqrt(x * x)),
    "recip": (lambda g, x: g.recip(x), lambda t, x: t.reciprocal(x)),
    "pow": (lambda g, x: g.pow(g.abs(x), 1.7), lambda t, x: t.pow(x.abs(), 1.7)),
    "clip": (lambda g, x: g.clip(x, -0.5, 1.0), lambda t, x: t.clamp(x, -0.5, 1.0)),
    "softmax": (lambda g, x: g.softmax(x), lambda t, x: t.softmax(x, -1)),
    "softmax0": (lambda g, x: g.softmax(x, 0), lambda t, x: t.softmax(x, 0)),
    "log_softmax": (lambda g, x: g.log_softmax(x), lambda t, x: t.log_softmax(x, -1)),
    "sum": (lambda g, x: g.sum(x, -1), lambda t, x: x.sum(-1)),
    "mean": (lambda g, x: g.mean(x, 0, keepdims=True), lambda t, x: x.mean(0, keepdim=True)),
    "max": (lambda g, x: g.max(x, 1), lambda t, x: x.amax(1)),
    "min": (lambda g, x: g.min(x), lambda t, x: x.min()),
    "transpose": (lambda g, x: g.transpose(x), lambda t, x: x.transpose(-1, -2)),
    "slice": (lambda g, x: x[..., 1::2], lambda t, x: x[..., 1::2]),
    "swiglu": (lambda g, x: g.swiglu(x, x * 2.0), lambda t, x: t.nn.functional.silu(x) * x * 2),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = UNARY[name]
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    g = Graph()
    g.set_outputs({"y": ours(g, g.input("x", shape))})
    got = harness.run(harness.compile_graph(g), {"x": x})["y"]
    expected = theirs(torch, torch.from_numpy(x).double()).numpy()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("trans_b", [False, True])
def test_linear_layer(batch: int, trans_b: bool) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(batch)
    x = rng.normal(size=(batch, 9, 17)).astype(np.float32)
    w = rng.normal(size=(33, 17) if trans_b else (17, 33)).astype(np.float32)
    bias = rng.normal(size=33).astype(np.float32)
    g = Graph()
    product = g.matmul(g.input("x", x.shape), g.parameter("w", w.shape), trans_b=trans_b)
    g.set_outputs({"y": g.gelu(g.bias_add(product, g.parameter("b", (33,))))})
    got = harness.run(harness.compile_graph(g), {"x": x, "w": w, "b": bias})["y"]
    weight = torch.from_numpy(w).double()
    linear = torch.nn.functional.linear(
        torch.from_numpy(x).double(), weight if trans_b else weight.T, torch.from_numpy(bias).double()
    )
    np.testing.assert_allclose(got, torch.nn.functional.gelu(linear).numpy(), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("shapes", [((2, 1, 5, 7), (3, 7, 4)), ((4, 5, 7), (7, 3)), ((5, 7), (2, 7, 3))], ids=str)
def test_broadcast_matmul(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    g = Graph()
    g.set_outputs({"y": g.input("a", a.shape) @ g.input("b", b.shape)})
    got = harness.run(harness.compile_graph(g), {"a": a, "b": b})["y"]
    expected = (torch.from_numpy(a).double() @ torch.from_numpy(b).double()).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
