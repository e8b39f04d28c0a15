"""Gradients against finite differences: in float64 through the reference, and the kernels against that.

An operator stands mid-graph: loss = coefficient * sum(weights * operator(parameters)), with a random weight an element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from meganeura_aot.autodiff import differentiate
from meganeura_aot.builder import extend
from meganeura_aot.graph import DType, GraphIR, Node, Value
from meganeura_aot.op import Sample
from meganeura_aot.ops.leaf import Input, Parameter
from meganeura_aot.reference import evaluate
from meganeura_aot.tensor import Tensor
from tests import harness

Array = np.ndarray[Any, Any]
COEFFICIENT = 0.7
STEP = 1e-5
SMOOTH_STEPS = (1e-1, 1e-2, 1e-3, 1e-4)
FD_RTOL = 1e-6  # of finite differences in float64
KERNEL_RTOL = 1e-4  # of the norm of a gradient, for kernels in f32


def loss_graph(sample: Sample, coefficient: float = COEFFICIENT) -> GraphIR:
    """The operator over parameters x0, x1, ... (integers are inputs), its f32 outputs in one loss; w0, w1, ... weigh."""
    nodes: list[Node] = []
    for i, type_ in enumerate(sample.inputs):
        leaf = Parameter if type_.dtype is DType.F32 or i in sample.op.index_limits(*sample.inputs) else Input
        nodes.append(Node(leaf(f"x{i}", type_), (), (type_,)))
    types = sample.op.inferred(*sample.inputs)
    nodes.append(Node(sample.op, tuple(Value(i) for i in range(len(nodes))), types, "sample.py:1"))
    g = extend(GraphIR(tuple(nodes), ()))
    terms = []
    for port, type_ in enumerate(types):
        if type_.dtype is DType.F32:
            weight = g.input(f"w{port}", type_.shape)
            terms.append(g.sum(weight * Tensor(g, Value(len(sample.inputs), port), type_)))
    loss = terms[0]
    for term in terms[1:]:
        loss = loss + term
    g.set_outputs({"loss": loss * coefficient})
    return g.build()


def gradients_of(graph: GraphIR, loss: str = "loss") -> GraphIR:
    """The differentiated graph with the gradients as its outputs: grad.NAME each."""
    both = differentiate(graph, loss)
    outputs = tuple((f"grad.{name}", value) for name, value in both.gradients)
    return replace(both, outputs=outputs, gradients=())


def weights_for(sample: Sample, rng: np.random.Generator) -> dict[str, Array]:
    types = sample.op.inferred(*sample.inputs)
    return {f"w{i}": rng.standard_normal(t.shape) for i, t in enumerate(types) if t.dtype is DType.F32}


def assert_finite_differences(
    graph: GraphIR,
    feeds: Mapping[str, Array],
    loss: str = "loss",
    rtol: float = FD_RTOL,
    step: float = STEP,
    smooth: bool = False,
) -> dict[str, Array]:
    """Every gradient against central differences of the reference, in float64, along random directions and axes.

    rtol is relative to the sum of the absolute values of the products that make the slope. Returns the gradients.
    smooth: of a function without kinks, by points that are apart by what is much for each number: those of one tensor may
    differ by decades, or lie close together far from zero.
    """
    exact = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    found = {name: a for name, a in evaluate(gradients_of(graph, loss), exact).items() if name.startswith("grad.")}
    rng = np.random.default_rng(1)
    assert found
    for name, gradient in found.items():
        name = name.removeprefix("grad.")
        assert gradient.shape == exact[name].shape
        directions = [rng.standard_normal(gradient.shape) for _ in range(3)]
        for _ in range(min(5, gradient.size)):
            axis = np.zeros(gradient.size)
            axis[rng.integers(gradient.size)] = 1
            directions.append(axis.reshape(gradient.shape))
        for direction in directions:
            direction = direction * reach(exact[name]) if smooth else direction

            def along(distance: float, name: str = name, direction: Array = direction) -> float:
                moved = {**exact, name: exact[name] + distance * direction}
                return float(evaluate(graph, moved)[loss].reshape(()))

            slope, step, largest = smooth_slope(along) if smooth else plain_slope(along, step)
            size = float(np.sum(np.abs(gradient * direction)))
            noise = 1e-15 * largest / step * 10
            if smooth:  # numbers far from zero are rounded themselves
                noise += np.finfo(np.float64).eps * float(np.sum(np.abs(gradient * exact[name]))) / step
            np.testing.assert_allclose(
                np.sum(gradient * direction), slope, rtol=0, atol=rtol * max(size, abs(slope)) + noise, err_msg=name
            )
    return found


def reach(x: Array) -> Array:
    """How far each number may move before a function of all of them changes much."""
    return np.minimum(np.abs(x), np.std(x) if x.size > 1 else np.inf)


def plain_slope(along: Callable[[float], float], step: float) -> tuple[float, float, float]:
    """The slope at 0 from two points, their distance from it, and the largest value."""
    ahead, behind = along(step), along(-step)
    return (ahead - behind) / (2 * step), step, max(abs(ahead), abs(behind))


def smooth_slope(along: Callable[[float], float]) -> tuple[float, float, float]:
    """The same from four points: of several distances the one at which twice the distance changes the slope least."""
    found = []
    for step in SMOOTH_STEPS:
        near, _, largest = plain_slope(along, step)
        far, _, largest_far = plain_slope(along, 2 * step)
        slope, largest = (4 * near - far) / 3, max(largest, largest_far)
        rounding = 1e-13 * largest / step
        found.append((abs(slope - near) + rounding, slope, step, largest))
    return min(found)[1:]


def assert_kernels(graph: GraphIR, feeds: Mapping[str, Array], loss: str = "loss", **options: Any) -> None:
    """Every gradient of the emitted program, within 1e-4 of its norm of the reference's."""
    wanted = gradients_of(graph, loss)
    feeds = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    expected = evaluate(wanted, feeds)
    got = harness.run(harness.compile_graph(wanted, **options), feeds)
    for name, _ in wanted.outputs:
        reference = expected[name]
        error = np.linalg.norm((got[name] - reference).ravel())
        norm = np.linalg.norm(reference.ravel())
        assert error <= KERNEL_RTOL * norm + 1e-30, f"{name}: error {error} of a norm {norm}"
