"""The same gradients as PyTorch: losses, softmax, log-softmax, and sums of several losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from tests import harness
from tests.gradients import KERNEL_RTOL, gradients_of

pytestmark = pytest.mark.parity

Array = np.ndarray[Any, Any]
COEFFICIENT = 0.7


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def torch_of(array: Array) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array).double()


def probabilities(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(0.02, 0.98, shape).astype(np.float32)


def ids_below(limit: int, *shape: int, seed: int = 5) -> Array:
    return np.random.default_rng(seed).integers(0, limit, shape).astype(np.uint32)


def compare(build: Callable[..., Tensor], theirs: Callable[..., Any], *arrays: Array) -> dict[str, Array]:
    """The gradients of a weighted sum of `build`, times a coefficient, for every f32 array; returns ours."""
    torch = pytest.importorskip("torch")
    g = Graph()
    names = [f"x{i}" for i in range(len(arrays))]
    pairs = list(zip(names, arrays, strict=True))
    ours = [g.parameter(n, a.shape) if a.dtype.kind == "f" else g.input(n, a.shape, "u32") for n, a in pairs]
    y = build(g, *ours)
    weights = normal(*y.shape, seed=9)
    g.set_outputs({"loss": g.sum(y * g.constant(weights)) * COEFFICIENT})
    got = harness.run(harness.compile_graph(gradients_of(g.build())), dict(pairs))
    wide = [
        (
            torch.from_numpy(a).double().requires_grad_()
            if a.dtype.kind == "f"
            else torch.from_numpy(a.astype(np.int32)).long()
        )
        for a in arrays
    ]
    out = theirs(torch.nn.functional, *wide)
    (torch.sum(out * torch.from_numpy(weights).double().reshape(out.shape)) * COEFFICIENT).backward()
    for name, tensor in zip(names, wide, strict=True):
        if tensor.dtype is torch.float64:
            expected = tensor.grad.numpy()
            error, norm = np.linalg.norm(got[f"grad.{name}"] - expected), np.linalg.norm(expected)
            assert error <= KERNEL_RTOL * norm, f"{name}: error {error} of a norm {norm}"
    return {name.removeprefix("grad."): gradient for name, gradient in got.items()}


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 65), 1), ((65, 3), 0), ((2, 5, 7, 3), 2), ((7,), 0), ((4, 4096), 1), ((2, 49152), 1), ((9000, 3), 0)],
    ids=str,
)
def test_softmax(shape: tuple[int, ...], axis: int) -> None:
    x = normal(*shape) * 2
    compare(lambda g, x: g.softmax(x, axis), lambda f, x: f.softmax(x, axis), x)
    compare(lambda g, x: g.log_softmax(x, axis), lambda f, x: f.log_softmax(x, axis), x)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(5, 7), (3, 2, 65), (9,), (4, 9000), (2, 49152), (600, 12)], ids=str)
def test_class_ids(shape: tuple[int, ...], smoothing: float) -> None:
    x, ids = normal(*shape) * 2, ids_below(shape[-1], *shape[:-1])

    def theirs(ignore: int) -> Callable[..., Any]:
        def loss(f: Any, x: Any, t: Any) -> Any:
            rows, ids = x.reshape(-1, shape[-1]), t.reshape(-1)
            return f.cross_entropy(rows, ids, ignore_index=ignore, label_smoothing=smoothing)

        return loss

    compare(lambda g, x, t: g.cross_entropy_loss(x, t, label_smoothing=smoothing), theirs(-100), x, ids)
    ignored = int(ids.reshape(-1)[0])
    if (ids != ignored).any():
        options = {"ignore_index": ignored, "label_smoothing": smoothing}
        got = compare(lambda g, x, t: g.cross_entropy_loss(x, t, **options), theirs(ignored), x, ids)
        assert not got["x0"][ids == ignored].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(5, 7), (3, 257), (2, 9000)], ids=str)
def test_label_weights(shape: tuple[int, int], smoothing: float) -> None:
    """Of any sign and sum: their rows add up to neither 1 nor one number."""
    x, weights = normal(*shape) * 2, normal(*shape, seed=1)
    compare(
        lambda g, x, t: g.cross_entropy_loss(x, t, label_smoothing=smoothing),
        lambda f, x, t: f.cross_entropy(x, t, label_smoothing=smoothing),
        x,
        weights,
    )


def test_no_row_counts() -> None:
    """The loss is NaN, and the gradient zero: a step on such a batch changes nothing."""
    torch = pytest.importorskip("torch")
    x, ids = normal(4, 6), np.full(4, 3, np.uint32)
    g = Graph()
    g.set_outputs({"loss": g.cross_entropy_loss(g.parameter("x", (4, 6)), g.input("t", (4,), "u32"), 3)})
    got = harness.run(harness.compile_graph(gradients_of(g.build())), {"x": x, "t": ids})["grad.x"]
    theirs = torch.from_numpy(x).requires_grad_()
    torch.nn.functional.cross_entropy(theirs, torch.full((4,), 3), ignore_index=3).backward()
    np.testing.assert_array_equal(got, theirs.grad.numpy())


@pytest.mark.parametrize("shape", [(3, 65), (1,), (), (70, 70)], ids=str)
def test_pairs(shape: tuple[int, ...]) -> None:
    a, b = normal(*shape), normal(*shape, seed=1)
    a, b = np.asarray(a), np.asarray(b)
    compare(lambda g, a, b: g.mse_loss(a, b), lambda f, a, b: f.mse_loss(a, b), a, b)
    compare(lambda g, a, b: g.l1_loss(a, b), lambda f, a, b: f.l1_loss(a, b), a, b)
    p, t = np.asarray(probabilities(*shape)), np.asarray(probabilities(*shape, seed=1))
    compare(lambda g, p, t: g.bce_loss(p, t), lambda f, p, t: f.binary_cross_entropy(p, t), p, t)


def test_bce_where_probabilities_end() -> None:
    """Each element on its own: slopes are from 0 to 1e12."""
    ends = np.array([0, 1e-40, 1e-20, 1e-13, 1e-9, 1e-7, 0.5, 1 - 2**-23, 1 - 2**-24, 1], np.float32)
    for probability in ends:
        for target in (0, 0.25, 1):
            p, t = np.full(1, probability, np.float32), np.full(1, target, np.float32)
            compare(
                lambda g, p, t=t: g.bce_loss(p, g.constant(t)),
                lambda f, p, t=t: f.binary_cross_entropy(p, torch_of(t)),
                p,
            )


def test_losses_add_up() -> None:
    """loss * c and loss1 + w * loss2, of a graph in which they share their input."""
    x, ids, target = normal(6, 9) * 2, ids_below(9, 6), normal(6, 9, seed=1)
    compare(
        lambda g, x, t, y: g.cross_entropy_loss(x, t) * 3.0 + g.mse_loss(g.softmax(x), y) * 0.1,
        lambda f, x, t, y: f.cross_entropy(x, t) * 3.0 + f.mse_loss(f.softmax(x, 1), y) * 0.1,
        x,
        ids,
        target,
    )
    compare(
        lambda g, x, y: g.bce_loss(g.sigmoid(x), g.sigmoid(y)) - 2.0 * g.l1_loss(x, y),
        lambda f, x, y: f.binary_cross_entropy(f.sigmoid(x), f.sigmoid(y)) - 2.0 * f.l1_loss(x, y),
        x,
        target,
    )
