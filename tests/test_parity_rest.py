"""Parity with PyTorch of the operators without a family, and the check that every operator has had its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from tests import harness

pytestmark = pytest.mark.parity

SHAPES = [(1, 7), (2, 5, 33), (3, 65)]

# name -> (ours, PyTorch's), of two f32 tensors of one shape
PAIRS: dict[str, tuple[Callable[[Graph, Tensor, Tensor], Tensor], Callable[[Any, Any, Any], Any]]] = {
    "add": (lambda g, a, b: a + b, lambda t, a, b: a + b),
    "sub": (lambda g, a, b: a - b, lambda t, a, b: a - b),
    "mul": (lambda g, a, b: a * b, lambda t, a, b: a * b),
    "div": (lambda g, a, b: a / b, lambda t, a, b: a / b),
    "neg": (lambda g, a, b: -a, lambda t, a, b: -a),
    "abs": (lambda g, a, b: g.abs(a), lambda t, a, b: a.abs()),
    "maximum": (lambda g, a, b: g.maximum(a, b), lambda t, a, b: t.maximum(a, b)),
    "minimum": (lambda g, a, b: g.minimum(a, b), lambda t, a, b: t.minimum(a, b)),
    "greater": (lambda g, a, b: a > b, lambda t, a, b: (a > b).double()),
    "greater_equal": (lambda g, a, b: a >= b, lambda t, a, b: (a >= b).double()),
    "less": (lambda g, a, b: a < b, lambda t, a, b: (a < b).double()),
    "less_equal": (lambda g, a, b: a <= b, lambda t, a, b: (a <= b).double()),
    "equal": (lambda g, a, b: g.floor(a) == g.floor(b), lambda t, a, b: (a.floor() == b.floor()).double()),
    "not_equal": (lambda g, a, b: g.floor(a) != g.floor(b), lambda t, a, b: (a.floor() != b.floor()).double()),
    "where": (lambda g, a, b: g.where(a > 0.0, a, b), lambda t, a, b: t.where(a > 0, a, b)),
    "concat": (lambda g, a, b: g.concat([a, b], -1), lambda t, a, b: t.cat([a, b], -1)),
    "split": (lambda g, a, b: g.split(a, 2, -1)[1], lambda t, a, b: t.split(a, 2, -1)[1]),
    "expand": (lambda g, a, b: g.expand(a[:1], (4, *a.shape[1:])), lambda t, a, b: a[:1].expand(4, *a.shape[1:])),
    "reshape": (lambda g, a, b: g.reshape(a, (-1,)), lambda t, a, b: a.reshape(-1)),
    "permute": (lambda g, a, b: g.permute(a, range(a.rank)[::-1]), lambda t, a, b: a.permute(*range(a.ndim)[::-1])),
    "silu_grad": (lambda g, a, b: g.silu_grad(b, a), lambda t, a, b: slope(t, t.nn.functional.silu, a, b)),
    "swiglu_grad_gate": (
        lambda g, a, b: g.swiglu_grad_gate(b, a, b),
        lambda t, a, b: slope(t, lambda x: t.nn.functional.silu(x) * b, a, b),
    ),
}

# of two i32 tensors
INTEGERS: dict[str, tuple[Callable[[Graph, Tensor, Tensor], Tensor], Callable[[Any, Any, Any], Any]]] = {
    "floor_div": (lambda g, a, b: a // b, lambda t, a, b: t.div(a, b, rounding_mode="floor")),
    "mod": (lambda g, a, b: a % b, lambda t, a, b: t.remainder(a, b)),
    "bitwise_and": (lambda g, a, b: a & b, lambda t, a, b: a & b),
    "bitwise_or": (lambda g, a, b: a | b, lambda t, a, b: a | b),
    "bitwise_xor": (lambda g, a, b: a ^ b, lambda t, a, b: a ^ b),
    "shift_left": (lambda g, a, b: a << (b & 15), lambda t, a, b: a << (b & 15)),
    "shift_right": (lambda g, a, b: a >> (b & 15), lambda t, a, b: a >> (b & 15)),
    "cast": (lambda g, a, b: g.cast(a, "f32"), lambda t, a, b: a.double()),
    "sum": (lambda g, a, b: g.sum(a, -1), lambda t, a, b: a.sum(-1).int()),
}


def slope(torch: Any, function: Callable[[Any], Any], x: Any, dy: Any) -> Any:
    """dy times the derivative of the function at x."""
    x = x.clone().requires_grad_()
    function(x).backward(dy)
    return x.grad


def compare(ours: Any, theirs: Any, arrays: list[Any], dtype: str) -> None:
    torch = pytest.importorskip("torch")
    g = Graph()
    g.set_outputs({"y": ours(g, *(g.input(f"x{i}", array.shape, dtype) for i, array in enumerate(arrays)))})
    got = harness.run(harness.compile_graph(g), {f"x{i}": array for i, array in enumerate(arrays)})["y"]
    tensors = [torch.from_numpy(array) for array in arrays]
    expected = theirs(torch, *(t.double() if dtype == "f32" else t for t in tensors)).numpy()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_pair(name: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    compare(*PAIRS[name], [rng.normal(size=shape).astype(np.float32) for _ in range(2)], "f32")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-1000, 1000, shape, np.int32), rng.integers(1, 40, shape, np.int32)
    compare(*INTEGERS[name], [a, b], "i32")


@pytest.mark.parametrize("name", ["conv", "matmul", "softmax", "layer_norm", "max_pool", "attention"])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_items_of_a_batch_do_not_meet(name: str, batch: int) -> None:
    """Item i of a batch equals item i alone."""
    builds: dict[str, tuple[tuple[int, ...], Callable[[Graph, Tensor], Tensor]]] = {
        "conv": ((3, 9, 9), lambda g, x: g.conv(x, g.input("w", (5, 3, 3, 3)), padding=1)),
        "matmul": ((9, 17), lambda g, x: x @ g.input("w", (17, 33))),
        "softmax": ((9, 65), lambda g, x: g.softmax(x)),
        "layer_norm": ((9, 65), lambda g, x: g.layer_norm(x)),
        "max_pool": ((3, 9, 9), lambda g, x: g.max_pool(x, 3, 2)),
        "attention": ((9, 32), lambda g, x: g.causal_attention(x, x, x, 4)),
    }
    shape, build = builds[name]
    rng = np.random.default_rng(4)
    whole = rng.normal(size=(batch, *shape)).astype(np.float32)
    weights: dict[str, Any] = {}

    def run(x: Any) -> Any:
        g = Graph()
        g.set_outputs({"y": build(g, g.input("x", x.shape))})
        for node in g.build().nodes:
            if node.op.name == "input" and node.op.label == "w":  # type: ignore[attr-defined]
                weights.setdefault("w", rng.normal(size=node.types[0].shape).astype(np.float32))
        return harness.run(harness.compile_graph(g), {"x": x, **weights})["y"]

    together = run(whole)
    for item in range(batch):
        alone = run(whole[item : item + 1])[0]
        np.testing.assert_allclose(together[item], alone, rtol=1e-5, atol=1e-5)
