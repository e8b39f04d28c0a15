"""The same numbers as PyTorch: norms, losses and optimizer updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from tests import harness

pytestmark = pytest.mark.parity

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compare(build: Callable[..., Tensor], theirs: Callable[..., Any], *arrays: Array) -> None:
    """`build` of a graph and inputs like `arrays` against `theirs` of PyTorch and the arrays in double precision."""
    torch = pytest.importorskip("torch")
    g = Graph()
    inputs = [g.input(f"x{i}", a.shape, "u32" if a.dtype.kind == "u" else "f32") for i, a in enumerate(arrays)]
    g.set_outputs({"y": build(g, *inputs)})
    got = harness.run(harness.compile_graph(g), {f"x{i}": a for i, a in enumerate(arrays)})["y"]
    wide = [
        torch.from_numpy(a.astype(np.int32)).long() if a.dtype.kind == "u" else torch.from_numpy(a).double()
        for a in arrays
    ]
    expected = theirs(torch.nn.functional, *wide).numpy()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6 * max(1, np.abs(np.nan_to_num(expected)).max()))


@pytest.mark.parametrize("shape", [(3, 65), (2, 5, 256), (7,), (2, 9000)], ids=str)
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_rows(shape: tuple[int, ...], eps: float) -> None:
    x, w, b, n = normal(*shape), normal(shape[-1], seed=1), normal(shape[-1], seed=2), shape[-1:]
    compare(lambda g, x, w: g.rms_norm(x, w, eps), lambda f, x, w: f.rms_norm(x, n, w, eps), x, w)
    compare(lambda g, x: g.rms_norm(x, eps=eps), lambda f, x: f.rms_norm(x, n, eps=eps), x)
    compare(lambda g, x, w, b: g.layer_norm(x, w, b, eps), lambda f, x, w, b: f.layer_norm(x, n, w, b, eps), x, w, b)
    compare(lambda g, x, w: g.layer_norm(x, w, eps=eps), lambda f, x, w: f.layer_norm(x, n, w, eps=eps), x, w)
    compare(lambda g, x, b: g.layer_norm(x, b=b, eps=eps), lambda f, x, b: f.layer_norm(x, n, bias=b, eps=eps), x, b)


@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 6, 5, 4), 3), ((3, 8), 4), ((1, 4, 70, 70), 2), ((2, 6, 7), 6)], ids=str
)
def test_channels(shape: tuple[int, ...], groups: int) -> None:
    x, w, b, mean = normal(*shape) + 3, *(normal(shape[1], seed=seed) for seed in (1, 2, 3))
    variance = normal(shape[1], seed=4) ** 2
    compare(lambda g, x, w, b: g.group_norm(x, groups, w, b), lambda f, x, w, b: f.group_norm(x, groups, w, b), x, w, b)
    compare(
        lambda g, x, w, b: g.group_norm(x, groups, w, b, 0.1, "silu"),
        lambda f, x, w, b: f.silu(f.group_norm(x, groups, w, b, 0.1)),
        x, w, b,
    )  # fmt: skip
    compare(lambda g, x: g.group_norm(x, groups), lambda f, x: f.group_norm(x, groups), x)
    compare(
        lambda g, x, m, v, w, b: g.batch_norm(x, m, v, w, b, 1e-3),
        lambda f, x, m, v, w, b: f.batch_norm(x, m, v, w, b, eps=1e-3),
        x, mean, variance, w, b,
    )  # fmt: skip
    compare(lambda g, x, m, v: g.batch_norm(x, m, v), lambda f, x, m, v: f.batch_norm(x, m, v), x, mean, variance)


@pytest.mark.parametrize("shape", [(4, 7), (3, 2, 64), (2, 9000)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(shape: tuple[int, ...], smoothing: float) -> None:
    classes = shape[-1]
    x, weights = normal(*shape) * 4, normal(*shape, seed=1)
    labels = np.random.default_rng(2).integers(0, classes, shape[:-1]).astype(np.uint32)

    def theirs(f: Any, x: Any, labels: Any, **options: Any) -> Any:
        flat = labels.reshape(-1) if labels.dim() < x.dim() else labels.reshape(-1, classes)
        return f.cross_entropy(x.reshape(-1, classes), flat, label_smoothing=smoothing, **options)

    def ours(g: Graph, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return g.cross_entropy_loss(x, labels, label_smoothing=smoothing, **options)

    compare(ours, theirs, x, weights)
    compare(ours, theirs, x, labels)
    ignored = int(labels.reshape(-1)[0])
    compare(
        lambda g, x, y: ours(g, x, y, ignore_index=ignored),
        lambda f, x, y: theirs(f, x, y, ignore_index=ignored),
        x,
        labels,
    )
    labels.reshape(-1)[-1] = 2**32 - 100  # PyTorch's default ignore_index
    compare(ours, theirs, x, labels)
    compare(ours, theirs, x, np.full_like(labels, 2**32 - 100))


@pytest.mark.parametrize("shape", [(5, 33), (), (4, 300)], ids=str)
def test_pairs(shape: tuple[int, ...]) -> None:
    x, t = normal(*shape), normal(*shape, seed=1)
    compare(lambda g, x, t: g.mse_loss(x, t), lambda f, x, t: f.mse_loss(x, t), x, t)
    compare(lambda g, x, t: g.l1_loss(x, t), lambda f, x, t: f.l1_loss(x, t), x, t)
    p, q = (np.asarray(1 / (1 + np.exp(-a)), dtype=np.float32) for a in (x, t))
    compare(lambda g, p, q: g.bce_loss(p, q), lambda f, p, q: f.binary_cross_entropy(p, q), p, q)


def test_bce_where_probabilities_end() -> None:
    for probability in np.array([0, 1e-40, 1e-20, 1e-9, 0.5, 1 - 2**-24, 1], np.float32):
        for target in (0, 0.25, 1):
            p, t = np.full(1, probability), np.full(1, target, np.float32)
            compare(lambda g, p, t: g.bce_loss(p, t), lambda f, p, t: f.binary_cross_entropy(p, t), p, t)
