"""Gradients of convolutions are PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph
from tests import harness
from tests.conv.test_parity_conv import CONV, TRANSPOSED
from tests.gradients import COEFFICIENT, KERNEL_RTOL, gradients_of

pytestmark = pytest.mark.parity

DEPTHWISE: tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]] = (
    (1, 4, 4, 4),
    (4, 1, 3, 3),
    {"padding": 1, "stride": 2, "groups": 4},
)
LEFT_OVER: tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]] = (
    (2, 6, 12, 14),
    (8, 3, 3, 2),
    {"padding": (4, 0), "stride": (4, 3), "groups": 2},
)
CASES = [*((False, case) for case in [*CONV, DEPTHWISE, LEFT_OVER]), *((True, case) for case in TRANSPOSED)]


@pytest.mark.parametrize(("transposed", "case"), CASES)
def test_gradients(transposed: bool, case: tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]) -> None:
    torch = pytest.importorskip("torch")
    x_shape, w_shape, attributes = case
    channels = w_shape[1] * attributes.get("groups", 1) if transposed else w_shape[0]
    rng = np.random.default_rng(0)
    shapes = {"x": x_shape, "w": w_shape, "b": (channels,)}
    feeds = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = [torch.from_numpy(array).double().requires_grad_() for array in feeds.values()]
    name = f"conv{'_transpose' * transposed}{len(x_shape) - 2}d"
    y = getattr(torch.nn.functional, name)(*tensors, **attributes)
    feeds["weights"] = rng.normal(size=tuple(y.shape)).astype(np.float32)
    (torch.sum(y * torch.from_numpy(feeds["weights"]).double()) * COEFFICIENT).backward()

    g = Graph()
    parameters = [g.parameter(name, shape) for name, shape in shapes.items()]
    ours = (g.conv_transpose if transposed else g.conv)(*parameters, **attributes)
    g.set_outputs({"loss": g.sum(ours * g.input("weights", tuple(y.shape))) * COEFFICIENT})
    got = harness.run(harness.compile_graph(gradients_of(g.build())), feeds)
    for name, tensor in zip(shapes, tensors, strict=True):
        expected = tensor.grad.numpy()
        error = np.linalg.norm((got[f"grad.{name}"] - expected).ravel())
        assert error <= KERNEL_RTOL * np.linalg.norm(expected.ravel()), name
