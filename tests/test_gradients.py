"""Generated from the registry: the gradient of every operator, mid-graph."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from meganeura_aot.graph import DType
from meganeura_aot.op import OPS, Op, Sample
from meganeura_aot.ops.attention.op import Attention
from meganeura_aot.ops.state.leaf import Leaf
from meganeura_aot.reference import evaluate
from tests.draws import draw
from tests.gradients import assert_finite_differences, assert_kernels, gradients_of, loss_graph, weights_for

WITHOUT_GRADIENT = {  # they change states, which the loss does not look behind, or are gradients and updates themselves
    "advance",
    "advance_counter",
    "cache_write",
    "scatter_add_onto",
    "clip_scale",
    "sgd_update",
    "adam_update",
    "adamw_update",
}
UNSMOOTH = ("special", "zero", "outside", "one nan", "mask with nan")  # draws whose numbers have no slope
MILD = {  # draws whose slopes vanish or leave f32, or on an edge that a step would cross, and what stands for them
    "small": "near zero",
    "positive": "near one",
    "mask": "mask off the edge",
}
SMOOTH = {  # the same for single operators: off the clipped ends, and where the gradient is not all rounding
    "bce_loss": {"probability": "inner probability"},
    "softmax": {"large": "normal"},
}


def takes_part(op: type[Op]) -> bool:
    """Whether an operator has f32 inputs and outputs and is not flat: then it must have a gradient."""
    if issubclass(op, Leaf) or op.is_leaf or op.is_flat or op.name in WITHOUT_GRADIENT or "_grad" in op.name:
        return False
    return any(smooth(sample) for sample in op.samples())


def smooth(sample: Sample) -> bool:
    types = sample.op.inferred(*sample.inputs)
    f32 = any(t.dtype is DType.F32 for t in sample.inputs) and any(t.dtype is DType.F32 for t in types)
    elements = all(t.size for t in (*sample.inputs, *types))
    return f32 and elements and not any(recipe.startswith(UNSMOOTH) for recipe in sample.draws())


def refused(sample: Sample) -> bool:
    """Whether the rule says that there is no gradient: for attention over a cache."""
    return isinstance(sample.op, Attention) and sample.op.split(sample.inputs[3:])[1] is not None


CASES = [
    pytest.param(sample, id=f"{name}-{index}")
    for name, op in sorted(OPS.items())
    if takes_part(op)
    for index, sample in enumerate(op.samples())
    if smooth(sample) and not refused(sample) and sum(t.size for t in sample.inputs) <= 20000
]


def feeds_of(sample: Sample, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Numbers like those of the kernel's tests, and weights; without their signs where the operator is not finite."""
    rng = np.random.default_rng(zlib.crc32(request.node.callspec.id.encode()))
    mild = MILD | SMOOTH.get(sample.op.name, {})
    recipes = zip((mild.get(recipe, recipe) for recipe in sample.draws()), sample.inputs, strict=True)
    feeds = {f"x{i}": draw(recipe, type_, rng) for i, (recipe, type_) in enumerate(recipes)}
    results = sample.op.reference(*(a.astype(np.float64) if a.dtype.kind == "f" else a for a in feeds.values()))
    if not all(np.isfinite(array).all() for array in (results if isinstance(results, tuple) else (results,))):
        feeds = {name: np.abs(array) for name, array in feeds.items()}
    return feeds | weights_for(sample, rng)


def test_every_operator_has_a_gradient() -> None:
    without = {name for name, op in OPS.items() if takes_part(op) and not hasattr(op, "gradient")}
    without |= {name for name, op in OPS.items() if takes_part(op) and getattr(op, "derivative", True) is None}
    assert without == set()


@pytest.mark.parametrize("sample", CASES)
def test_finite_differences(sample: Sample, request: pytest.FixtureRequest) -> None:
    feeds = feeds_of(sample, request)
    found = assert_finite_differences(loss_graph(sample), feeds)
    doubled = evaluate(gradients_of(loss_graph(sample, 1.4)), feeds)
    for name, gradient in evaluate(gradients_of(loss_graph(sample)), feeds).items():
        np.testing.assert_allclose(doubled[name], 2 * gradient, rtol=1e-9, atol=1e-12 * np.abs(gradient).max(initial=0))
    assert found.keys() == doubled.keys()


@pytest.mark.parametrize("sample", CASES)
def test_kernels(sample: Sample, request: pytest.FixtureRequest) -> None:
    assert_kernels(loss_graph(sample), feeds_of(sample, request))
