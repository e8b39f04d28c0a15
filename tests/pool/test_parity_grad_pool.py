"""The same gradients as PyTorch: pointwise functions, pooling, padding, slices, lookups, reductions, RoPE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from tests import harness
from tests.gradients import COEFFICIENT, KERNEL_RTOL, gradients_of

pytestmark = pytest.mark.parity

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), dtype=np.float32)


def both(build: Callable[..., Any], theirs: Callable[..., Any], *arrays: Array) -> list[tuple[Array, Array]]:
    """Our gradients from the adapter and PyTorch's in double precision, of a weighted sum of all outputs, for every f32
    array. Those of u32 are indices."""
    torch = pytest.importorskip("torch")
    g = Graph()
    leaves = [
        g.input(f"x{i}", a.shape, "u32") if a.dtype.kind == "u" else g.parameter(f"x{i}", a.shape)
        for i, a in enumerate(arrays)
    ]
    wide = [
        torch.from_numpy(a.astype(np.int64)) if a.dtype.kind == "u" else torch.from_numpy(a).double().requires_grad_()
        for a in arrays
    ]
    ours, expected = build(g, *leaves), theirs(torch, *wide)
    outputs = ours if isinstance(ours, Sequence) else [ours]
    targets = expected if isinstance(expected, Sequence) else [expected]
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    loss, total = g.constant(0.0), 0.0
    for i, (y, target) in enumerate(zip(outputs, targets, strict=True)):
        assert y.shape == tuple(target.shape)
        feeds[f"w{i}"] = normal(*y.shape, seed=100 + i)
        loss = loss + g.sum(y * g.input(f"w{i}", y.shape))
        total = total + (target * torch.from_numpy(feeds[f"w{i}"])).sum()
    g.set_outputs({"loss": loss * COEFFICIENT})
    got = harness.run(harness.compile_graph(gradients_of(g.build())), feeds)
    (total * COEFFICIENT).backward()
    return [(got[f"grad.x{i}"], x.grad.numpy()) for i, x in enumerate(wide) if x.is_floating_point()]


def compare(build: Callable[..., Any], theirs: Callable[..., Any], *arrays: Array) -> None:
    """Within 1e-4 of the norm."""
    pairs = both(build, theirs, *arrays)
    assert pairs
    for got, expected in pairs:
        assert got.shape == expected.shape
        assert np.linalg.norm(got - expected) <= KERNEL_RTOL * np.linalg.norm(expected) + 1e-30


def compare_each(build: Callable[..., Any], theirs: Callable[..., Any], *arrays: Array) -> None:
    """Element by element, NaN and infinities too: for kinks and extreme values."""
    for got, expected in both(build, theirs, *arrays):
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(got, expected.astype(np.float32), rtol=2e-5, atol=2e-7)


# name -> (ours, PyTorch's) over one array, then over two
ONE: dict[str, tuple[Callable[[Graph, Tensor], Tensor], Callable[[Any, Any], Any]]] = {
    **{
        name: (lambda g, x, name=name: getattr(g, name)(x), lambda t, x, name=name: getattr(t, name)(x))
        for name in ("exp", "expm1", "sin", "cos", "erf", "abs", "neg", "relu", "sigmoid", "tanh")
    },
    "recip": (lambda g, x: g.recip(x), lambda t, x: t.reciprocal(x)),
    "silu": (lambda g, x: g.silu(x), lambda t, x: t.nn.functional.silu(x)),
    "softplus": (lambda g, x: g.softplus(x), lambda t, x: t.nn.functional.softplus(x)),
    "gelu": (lambda g, x: g.gelu(x), lambda t, x: t.nn.functional.gelu(x)),
    "gelu_tanh": (lambda g, x: g.gelu(x, "tanh"), lambda t, x: t.nn.functional.gelu(x, approximate="tanh")),
    "leaky_relu": (lambda g, x: g.leaky_relu(x, 0.2), lambda t, x: t.nn.functional.leaky_relu(x, 0.2)),
    "elu": (lambda g, x: g.elu(x, 1.5), lambda t, x: t.nn.functional.elu(x, 1.5)),
    "hard_sigmoid": (lambda g, x: g.hard_sigmoid(x, 1 / 6), lambda t, x: t.nn.functional.hardsigmoid(x)),
    "hard_swish": (lambda g, x: g.hard_swish(x), lambda t, x: t.nn.functional.hardswish(x)),
    "clip": (lambda g, x: g.clip(x, -1.0, 0.5), lambda t, x: t.clamp(x, -1.0, 0.5)),
    "clip_low": (lambda g, x: g.clip(x, low=-1.0), lambda t, x: t.clamp(x, min=-1.0)),
    "clip_high": (lambda g, x: g.clip(x, high=0.5), lambda t, x: t.clamp(x, max=0.5)),
    "squared": (lambda g, x: g.pow(x, 2.0), lambda t, x: x**2),
    "cubed": (lambda g, x: g.pow(x, 3.0), lambda t, x: x**3),
    "first_power": (lambda g, x: g.pow(x, 1.0), lambda t, x: x**1),
    "no_power": (lambda g, x: g.pow(x, 0.0), lambda t, x: x**0),
    "inverse": (lambda g, x: g.pow(x, -2.0), lambda t, x: x**-2),
    "swiglu_concat": (
        lambda g, x: g.swiglu_concat(x),
        lambda t, x: t.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    ),
}
OF_POSITIVE: dict[str, tuple[Callable[[Graph, Tensor], Tensor], Callable[[Any, Any], Any]]] = {
    **{
        name: (lambda g, x, name=name: getattr(g, name)(x), lambda t, x, name=name: getattr(t, name)(x))
        for name in ("log", "log1p", "sqrt", "rsqrt")
    },
    "root": (lambda g, x: g.pow(x, 0.5), lambda t, x: x**0.5),
}
TWO: dict[str, tuple[Callable[[Graph, Tensor, Tensor], Tensor], Callable[[Any, Any, Any], Any]]] = {
    **{
        name: (lambda g, a, b, name=name: getattr(g, name)(a, b), lambda t, a, b, name=name: getattr(t, name)(a, b))
        for name in ("add", "sub", "mul", "div", "maximum", "minimum")
    },
    "swiglu": (lambda g, a, b: g.swiglu(a, b), lambda t, a, b: t.nn.functional.silu(a) * b),
    "where": (lambda g, a, b: g.where(g.greater(a, b), a, b), lambda t, a, b: t.where(a > b, a, b)),
    "clip_between": (lambda g, a, b: g.clip(a, b, b + 0.5), lambda t, a, b: t.clamp(a, b, b + 0.5)),
    "clip_crossed": (lambda g, a, b: g.clip(a, b, -b), lambda t, a, b: t.clamp(a, b, -b)),
}


@pytest.mark.parametrize("name", ONE)
def test_functions(name: str) -> None:
    compare(*ONE[name], normal(5, 66) * 2)
    compare(*ONE[name], normal(3, 4, seed=1) * 0.01)


@pytest.mark.parametrize("name", OF_POSITIVE)
def test_functions_of_positive_numbers(name: str) -> None:
    compare(*OF_POSITIVE[name], np.abs(normal(5, 66)) + 0.01)


@pytest.mark.parametrize("name", TWO)
def test_functions_of_two(name: str) -> None:
    a, b = normal(5, 66), normal(5, 66, seed=1)
    compare(*TWO[name], a, b)
    compare(*TWO[name], a, b[:1])
    compare(*TWO[name], a[:, :1], b[0])


def test_powers() -> None:
    a, b = np.abs(normal(5, 66)) + 0.1, normal(5, 66, seed=1)
    compare(lambda g, a, b: g.pow(a, b), lambda t, a, b: a**b, a, b)
    compare(lambda g, a, b: g.pow(a, b), lambda t, a, b: a**b, a, b[:, :1])


# Kinks, and values where slopes vanish or a formula overflows.
EDGES = np.array([0, 1, -1, 0.5, 3, -3, 100, -100, 20, -20, 1e-20, -1e-20, 2, -2, 30, -30, 5, -5], np.float32)
LIMITS = {
    "inverse": (2.0, -3.0, 5.0),
    "recip": (2.0, -3.0, 1e-10, 1e10),
    "exp": (0.0, -100, 80),
    "expm1": (0.0, -100, 80),
}


@pytest.mark.parametrize("name", ONE)
def test_functions_at_kinks_and_far_out(name: str) -> None:
    compare_each(*ONE[name], np.array(LIMITS.get(name, EDGES), np.float32)[: len(EDGES) // 2 * 2])


@pytest.mark.parametrize("name", OF_POSITIVE)
def test_functions_at_zero(name: str) -> None:
    compare_each(*OF_POSITIVE[name], np.array([0, 1, 1e-10, 1e10], np.float32))


@pytest.mark.parametrize("name", TWO)
def test_functions_of_equal_numbers(name: str) -> None:
    a = np.array([1, 1, 2, -1, -1, 0, np.nan, 1, 2.5, -3], np.float32)
    b = np.array([1, 2, 1, -1, 3, 5, 1, np.nan, 2, -3], np.float32)
    compare_each(*TWO[name], a, b)


@pytest.mark.parametrize(
    ("a", "b"), [(0, 2), (0, 1), (0, 0), (0, 0.5), (-2, 3), (-2, 2), (2, 0), (0, -1), (1, 5), (-1.5, 1)], ids=str
)
def test_powers_at_the_edges(a: float, b: float) -> None:
    compare_each(lambda g, a, b: g.pow(a, b), lambda t, a, b: a**b, np.float32([a]), np.float32([b]))


def test_what_is_not_taken_does_not_count() -> None:
    """NaN and infinities there do not spoil the gradient."""
    c, a, b = np.float32([1, 0, 1]), np.float32([1, np.nan, 2]), np.float32([np.inf, 5, np.nan])
    g = Graph()
    x, y = g.parameter("a", (3,)), g.parameter("b", (3,))
    g.set_outputs({"loss": g.sum(g.where(g.input("c", (3,)), x, y))})
    got = harness.run(harness.compile_graph(gradients_of(g.build())), {"a": a, "b": b, "c": c})
    np.testing.assert_array_equal(got["grad.a"], [1, 0, 1])
    np.testing.assert_array_equal(got["grad.b"], [0, 1, 0])


# ---- pooling

ROUNDED = np.round(normal(2, 3, 11, 9) * 2)  # with many equal numbers in a window


@pytest.mark.parametrize("x", [normal(2, 3, 11, 9), ROUNDED, -np.abs(ROUNDED)], ids=["normal", "ties", "negative"])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [
        (3, 2, 1, 1, False),
        (2, 2, 0, 1, False),
        (3, 1, 1, 1, False),
        ((3, 2), (1, 3), (1, 0), (2, 1), False),
        (3, 2, 1, 1, True),
        (2, 3, 1, 2, True),
        ((11, 9), 1, 0, 1, False),
    ],
    ids=str,
)
def test_max_pool(x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> None:
    compare(
        lambda g, x: g.max_pool(x, kernel, stride, padding, dilation, ceil),
        lambda t, x: t.nn.functional.max_pool2d(x, kernel, stride, padding, dilation, ceil),
        x,
    )


@pytest.mark.parametrize("count_include_pad", [False, True])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "ceil"),
    [
        (3, 2, 1, False),
        (2, 2, 0, False),
        (3, 1, 1, True),
        ((3, 2), (1, 3), (1, 1), False),
        (4, 3, 2, True),
        (2, 3, 1, True),
    ],
    ids=str,
)
def test_avg_pool(kernel: Any, stride: Any, padding: Any, ceil: bool, count_include_pad: bool) -> None:
    compare(
        lambda g, x: g.avg_pool(x, kernel, stride, padding, ceil, count_include_pad),
        lambda t, x: t.nn.functional.avg_pool2d(x, kernel, stride, padding, ceil, count_include_pad),
        normal(2, 3, 11, 9),
    )


def test_pools_of_sequences_and_of_all() -> None:
    x = normal(2, 3, 17)
    compare(lambda g, x: g.max_pool(x, 4, 3, 2), lambda t, x: t.nn.functional.max_pool1d(x, 4, 3, 2), x)
    compare(lambda g, x: g.avg_pool(x, 4, 3, 2), lambda t, x: t.nn.functional.avg_pool1d(x, 4, 3, 2, False, False), x)
    for x in (normal(2, 3, 5, 7), ROUNDED):
        compare(lambda g, x: g.global_avg_pool(x), lambda t, x: x.mean((2, 3)), x)
        compare(lambda g, x: g.global_max_pool(x, keepdims=True), lambda t, x: t.amax(x, (2, 3), keepdim=True), x)


# ---- layout

X = normal(4, 6, 10)
LAYOUT: dict[str, tuple[Callable[[Graph, Tensor], Any], Callable[[Any, Any], Any]]] = {
    "slice": (lambda g, x: x[1:3, 2, 3:], lambda t, x: x[1:3, 2, 3:]),
    "steps": (lambda g, x: x[::2, 1::3, 4], lambda t, x: x[::2, 1::3, 4]),
    "reversed": (lambda g, x: x[::-1, 4:0:-2, ::-3], lambda t, x: x.flip(0, 1, 2)[:, 1:5:2, ::3]),
    "split": (lambda g, x: g.split(x, [1, 2, 3], 1)[::2], lambda t, x: t.split(x, [1, 2, 3], 1)[::2]),
    "concat": (lambda g, x: g.concat([x, x * 2.0, x[:, :1]], 1), lambda t, x: t.cat([x, x * 2, x[:, :1]], 1)),
    "round_trip": (
        lambda g, x: g.concat(g.split(x, 4, 2)[::-1], 2),
        lambda t, x: t.cat(t.split(x, 4, 2)[::-1], 2),
    ),
    "permute": (lambda g, x: g.permute(x, (2, 0, 1)), lambda t, x: x.permute(2, 0, 1)),
    "expand": (lambda g, x: g.expand(x[:, :1], (3, 4, 5, 10)), lambda t, x: x[:, :1].expand(3, 4, 5, 10)),
    "reshape": (lambda g, x: g.reshape(x, (8, 30)), lambda t, x: x.reshape(8, 30)),
    "constant": (
        lambda g, x: g.pad(x, [(1, 2), (-2, 3)], (1, 2), value=3.0),
        lambda t, x: t.nn.functional.pad(x, (-2, 3, 1, 2), value=3.0),
    ),
    "reflect": (
        lambda g, x: g.pad(x, [(5, 2), (0, 9)], (1, 2), "reflect"),
        lambda t, x: t.nn.functional.pad(x[None], (0, 9, 5, 2), "reflect")[0],
    ),
    "edge": (
        lambda g, x: g.pad(x, [(8, 2), (0, 20)], (1, 2), "edge"),
        lambda t, x: t.nn.functional.pad(x[None], (0, 20, 8, 2), "replicate")[0],
    ),
    "upsample": (
        lambda g, x: g.upsample(g.reshape(x, (1, *x.shape)), (2, 3)),
        lambda t, x: x[None].repeat_interleave(2, 2).repeat_interleave(3, 3),
    ),
    "sum": (lambda g, x: g.sum(x, (0, 2)), lambda t, x: x.sum((0, 2))),
    "mean": (lambda g, x: g.mean(x, 1, keepdims=True), lambda t, x: x.mean(1, keepdim=True)),
    "max": (lambda g, x: g.max(x, (0, 2)), lambda t, x: x.amax((0, 2))),
    "min": (lambda g, x: g.min(x, 1, keepdims=True), lambda t, x: x.amin(1, keepdim=True)),
    "max_of_all": (lambda g, x: g.max(x), lambda t, x: x.amax()),
    "top_k": (lambda g, x: g.top_k(x, 3)[0], lambda t, x: x.topk(3)[0]),
}


@pytest.mark.parametrize("name", LAYOUT)
def test_layout_and_reductions(name: str) -> None:
    compare(*LAYOUT[name], X)
    if name in ("max", "min", "max_of_all"):
        compare(*LAYOUT[name], np.round(X))


def test_the_number_of_the_padding() -> None:
    def ours(g: Graph, x: Tensor, value: Tensor) -> Tensor:
        return g.pad(x, [(1, 2), (-2, 3)], (1, 2), value=value)

    def theirs(t: Any, x: Any, value: Any) -> Any:
        inside = t.nn.functional.pad(t.ones_like(x), (-2, 3, 1, 2))
        return t.nn.functional.pad(x, (-2, 3, 1, 2)) + (1 - inside) * value

    compare(ours, theirs, X, np.array(1.5, np.float32))


def test_extremes_of_rows_with_nan() -> None:
    x = np.float32([[1, 2, 2], [np.nan, 1, 3], [5, 4, 5]])
    compare_each(lambda g, x: g.max(x, 1), lambda t, x: x.amax(1), x)


# ---- lookups

TABLE = normal(50, 24)
IDS = np.random.default_rng(1).integers(0, 20, (7, 9)).astype(np.uint32)
PICKS = np.random.default_rng(2).integers(0, 6, (4, 100, 10)).astype(np.uint32)


def test_lookups() -> None:
    embedding: Any = (lambda g, ids, x: g.embedding(ids, x), lambda t, ids, x: t.nn.functional.embedding(ids, x))
    compare(*embedding, IDS, TABLE)
    compare(
        lambda g, ids, x: g.matmul(g.embedding(ids, x), x, trans_b=True),
        lambda t, ids, x: t.nn.functional.embedding(ids, x) @ x.T,
        IDS,
        TABLE,
    )
    for axis in (0, 1):
        compare(
            lambda g, x, ids, axis=axis: g.gather(x, ids, axis),
            lambda t, x, ids, axis=axis: t.index_select(x, axis, ids.reshape(-1)).unflatten(axis, ids.shape),
            TABLE,
            IDS,
        )
    compare(
        lambda g, ids, x: g.scatter_add(ids, x, 20),
        lambda t, ids, x: t.zeros(20, 24, dtype=x.dtype).index_add(0, ids, x[: ids.shape[0]]),
        IDS.reshape(-1)[:50],
        TABLE,
    )


@pytest.mark.parametrize("count", [1, 6, 64, 65, 100])
def test_gather_elements(count: int) -> None:
    picks = PICKS[:, :count]
    compare(lambda g, x, ids: g.gather_elements(x, ids, 1), lambda t, x, ids: t.gather(x, 1, ids), X, picks)
    smaller = picks[:3, :, :7]
    compare(lambda g, x, ids: g.gather_elements(x, ids, 1), lambda t, x, ids: t.gather(x, 1, ids), X, smaller)
    rows = np.ascontiguousarray(picks[:, :, 0])
    compare(lambda g, x, ids: g.gather_elements(x, ids, -1), lambda t, x, ids: t.gather(x, -1, ids), X[:, 0], rows)
    columns = np.minimum(np.ascontiguousarray(PICKS[0, :count]), 3)
    compare(lambda g, x, ids: g.gather_elements(x, ids, 0), lambda t, x, ids: t.gather(x, 0, ids), X[:, 0], columns)


# ---- RoPE


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rope(interleaved: bool, dynamic: bool, rotary_dim: int) -> None:
    pairs = rotary_dim // 2

    def ours(g: Graph, x: Tensor) -> Tensor:
        start: Any = g.constant(np.uint32(5)) if dynamic else 5
        return g.rope(x, head_dim=8, rotary_dim=rotary_dim, interleaved=interleaved, offset=start)

    def theirs(t: Any, x: Any) -> Any:
        heads = x.reshape(2, 7, 3, 8)
        angle = (5 + t.arange(7, dtype=x.dtype))[:, None, None] * 10000.0 ** (-t.arange(pairs, dtype=x.dtype) / pairs)
        turned, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
        a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
        first, second = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        both = t.stack([first, second], -1).flatten(-2) if interleaved else t.cat([first, second], -1)
        return t.cat([both, rest], -1).reshape(x.shape)

    compare(ours, theirs, normal(2, 7, 24))
