"""Gradients of norms as PyTorch's, and batch norm over several steps of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from tests import harness
from tests.gradients import COEFFICIENT, KERNEL_RTOL, gradients_of

pytestmark = pytest.mark.parity

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_near(got: Array, theirs: Any, what: str) -> None:
    """Within 1e-4 of the norm of PyTorch's."""
    expected = theirs.detach().numpy()
    error, norm = np.linalg.norm((got - expected).ravel()), np.linalg.norm(expected.ravel())
    assert got.shape == expected.shape
    assert error <= KERNEL_RTOL * norm + 1e-30, f"{what}: error {error} of a norm {norm}"


def compare(build: Callable[..., Tensor], theirs: Callable[..., Any], *arrays: Array) -> None:
    """The gradients of coefficient * sum(weights * y) for every array, in double precision there."""
    torch = pytest.importorskip("torch")
    g = Graph()
    y = build(g, *(g.parameter(f"x{i}", a.shape) for i, a in enumerate(arrays)))
    weights = normal(*y.shape, seed=9)
    g.set_outputs({"loss": g.sum(y * g.input("weights", y.shape)) * COEFFICIENT})
    feeds = {f"x{i}": a for i, a in enumerate(arrays)} | {"weights": weights}
    got = harness.run(harness.compile_graph(gradients_of(g.build())), feeds)
    wide = [torch.from_numpy(a).double().requires_grad_() for a in arrays]
    loss = (theirs(torch.nn.functional, *wide) * torch.from_numpy(weights).double()).sum() * COEFFICIENT
    loss.backward()
    assert len(got) == len(arrays)
    for i, tensor in enumerate(wide):
        assert_near(got[f"grad.x{i}"], tensor.grad, f"x{i}")


@pytest.mark.parametrize("shape", [(3, 65), (2, 5, 256), (7,), (2, 9000), (1, 49152), (3000, 24), (4096, 5)], ids=str)
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_rows(shape: tuple[int, ...], eps: float) -> None:
    x, w, b, n = normal(*shape) + 1, normal(shape[-1], seed=1), normal(shape[-1], seed=2), shape[-1:]
    compare(lambda g, x, w: g.rms_norm(x, w, eps), lambda f, x, w: f.rms_norm(x, n, w, eps), x, w)
    compare(lambda g, x: g.rms_norm(x, eps=eps), lambda f, x: f.rms_norm(x, n, eps=eps), x)
    compare(lambda g, x, w, b: g.layer_norm(x, w, b, eps), lambda f, x, w, b: f.layer_norm(x, n, w, b, eps), x, w, b)
    compare(lambda g, x, w: g.layer_norm(x, w, eps=eps), lambda f, x, w: f.layer_norm(x, n, w, eps=eps), x, w)
    compare(lambda g, x, b: g.layer_norm(x, b=b, eps=eps), lambda f, x, b: f.layer_norm(x, n, bias=b, eps=eps), x, b)
    compare(lambda g, x: g.layer_norm(x, eps=eps), lambda f, x: f.layer_norm(x, n, eps=eps), x)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((2, 6, 5, 4), 3), ((3, 8), 2), ((1, 4, 70, 70), 2), ((2, 6, 7), 6), ((40, 2, 33, 9), 1), ((2, 64, 16, 16), 32)],
    ids=str,
)
def test_groups(shape: tuple[int, ...], groups: int) -> None:
    x, w, b = normal(*shape) + 3, *(normal(shape[1], seed=seed) for seed in (1, 2))
    compare(lambda g, x, w, b: g.group_norm(x, groups, w, b), lambda f, x, w, b: f.group_norm(x, groups, w, b), x, w, b)
    compare(
        lambda g, x, w, b: g.group_norm(x, groups, w, b, 0.1, "silu"),
        lambda f, x, w, b: f.silu(f.group_norm(x, groups, w, b, 0.1)),
        x, w, b,
    )  # fmt: skip
    compare(lambda g, x: g.group_norm(x, groups), lambda f, x: f.group_norm(x, groups), x)
    compare(
        lambda g, x: g.group_norm(x, groups, activation="silu"), lambda f, x: f.silu(f.group_norm(x, groups)), x
    )  # fmt: skip


CHANNELS = [(2, 6, 5, 4), (33, 8), (4, 2, 70, 70), (2, 6, 7), (3, 5, 31, 9), (700, 3)]


@pytest.mark.parametrize("shape", CHANNELS, ids=str)
def test_batch_norm_with_given_statistics(shape: tuple[int, ...]) -> None:
    x, w, b, mean = normal(*shape) + 3, *(normal(shape[1], seed=seed) for seed in (1, 2, 3))
    variance = normal(shape[1], seed=4) ** 2 + 0.1

    def theirs(f: Any, x: Any, m: Any, v: Any, w: Any = None, b: Any = None) -> Any:
        m, v, *weights = (None if t is None else t.reshape(-1, *(1,) * (x.dim() - 2)) for t in (m, v, w, b))
        y = (x - m) / (v + 1e-3).sqrt()  # torch.nn.functional.batch_norm does not differentiate the statistics
        return y if w is None else y * weights[0] + weights[1]

    compare(lambda g, *t: g.batch_norm(*t, eps=1e-3), theirs, x, mean, variance, w, b)
    compare(lambda g, *t: g.batch_norm(*t, eps=1e-3), theirs, x, mean, variance)


@pytest.mark.parametrize("shape", CHANNELS, ids=str)
@pytest.mark.parametrize("weights", ["w and b", "w", "b", ""])
def test_batch_norm_in_training(shape: tuple[int, ...], weights: str) -> None:
    """Outputs, gradients and running statistics of several steps, then those of a step with the statistics given."""
    torch = pytest.importorskip("torch")
    channels = shape[1]
    initial = {name: normal(channels, seed=seed) for seed, name in enumerate("wb") if name in weights}
    g = Graph()
    x = g.parameter("x", shape)
    running = [g.state(name, (channels,)) for name in ("mean", "variance")]
    each = [g.parameter(name, (channels,)) if name in initial else None for name in "wb"]
    y = g.batch_norm(x, *running, *each, eps=1e-3, training=True, momentum=0.2)
    g.set_outputs({"y": y, "loss": g.sum(y * g.input("weights", shape)) * COEFFICIENT})
    forward = harness.load(harness.compile_graph(g))
    backward = harness.load(harness.compile_graph(gradients_of(g.build())))

    theirs = [torch.zeros(channels).double(), torch.ones(channels).double()]
    for runner in (forward, backward):
        runner.set_state("variance", np.ones(channels, np.float32))
    for step in range(3):
        feeds = {**initial, "x": normal(*shape, seed=step) * 2 + 5, "weights": normal(*shape, seed=9)}
        wide = {name: torch.from_numpy(a).double().requires_grad_() for name, a in feeds.items()}
        expected = torch.nn.functional.batch_norm(
            wide["x"], *theirs, wide.get("w"), wide.get("b"), True, momentum=0.2, eps=1e-3
        )
        (expected * wide["weights"]).sum().mul(COEFFICIENT).backward()
        assert_near(forward.run(**harness.feeds_of(forward, feeds))["y"], expected, "y")
        got = backward.run(**harness.feeds_of(backward, feeds))
        assert got.keys() == {f"grad.{name}" for name in ("x", *initial)}
        for name, gradient in got.items():
            assert_near(gradient, wide[name.removeprefix("grad.")].grad, name)
        for runner in (forward, backward):
            assert_near(runner.get_state("mean"), theirs[0], "mean")
            assert_near(runner.get_state("variance"), theirs[1], "variance")
            runner.assert_tails()
