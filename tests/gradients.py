"""Gradients against finite differences: in float64 through the reference, and the kernels against that.

An operator stands mid-graph: loss = coefficient * sum(weights * operator(parameters)), with a random weight an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from meganeura_aot.autodiff import differentiate
from meganeura_aot.builder import extend
from meganeura_aot.graph import DType, GraphIR, Node, Value
from meganeura_aot.op import Sample
from meganeura_aot.ops.leaf import Input, Leaf, Parameter
from meganeura_aot.reference import evaluate
from meganeura_aot.tensor import Tensor
from tests import harness

Array = np.ndarray[Any, Any]
COEFFICIENT = 0.7
STEP = 1e-5
FD_RTOL = 1e-6  # of finite differences in float64
KERNEL_RTOL = 1e-4  # of the norm of a gradient, for kernels in f32
ROUNDINGS = 30  # inside an operator, for each of a value between two: what is left of a gradient that cancels


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
    graph: GraphIR, feeds: Mapping[str, Array], loss: str = "loss", rtol: float = FD_RTOL, step: float = STEP
) -> dict[str, Array]:
    """Every gradient against central differences of the reference, in float64, along random directions and axes.

    rtol is relative to the sum of the absolute values of the products that make the slope. Returns the gradients.
    """
    exact = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    found = evaluate(gradients_of(graph, loss), exact)
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
            sides = [
                float(evaluate(graph, {**exact, name: exact[name] + s * step * direction})[loss].reshape(()))
                for s in (1, -1)
            ]
            slope = (sides[0] - sides[1]) / (2 * step)
            size = float(np.sum(np.abs(gradient * direction)))
            noise = 1e-15 * max(map(abs, sides)) / step * 10
            np.testing.assert_allclose(
                np.sum(gradient * direction), slope, rtol=0, atol=rtol * max(size, abs(slope)) + noise, err_msg=name
            )
    return found


def assert_kernels(graph: GraphIR, feeds: Mapping[str, Array], loss: str = "loss", **options: Any) -> None:
    """Every gradient of the emitted program, within 1e-4 of its norm of the reference's.

    One that cancels (of a softmax over a single key it is 0) is held to what f32 leaves of the terms.
    """
    wanted = gradients_of(graph, loss)
    feeds = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    expected = evaluate(wanted, feeds)
    rounded = evaluate_in_f32(wanted, feeds)
    got = harness.run(harness.compile_graph(wanted, **options), feeds)
    for name, reference in expected.items():
        error = np.linalg.norm((got[name] - reference).ravel())
        norm = np.linalg.norm(reference.ravel())
        noise = ROUNDINGS * np.linalg.norm((rounded[name] - reference).ravel())
        assert error <= KERNEL_RTOL * norm + noise + 1e-30, f"{name}: error {error} of a norm {norm}, noise {noise}"


def evaluate_in_f32(graph: GraphIR, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs by the reference where every value between two operators is rounded to f32."""
    values: dict[Value, Array] = {}
    for index, node in enumerate(graph.nodes):
        leaf = isinstance(node.op, Leaf)
        result = feeds[node.op.label] if leaf else node.op.reference(*(values[value] for value in node.inputs))
        for port, array in enumerate(result if isinstance(result, tuple) else (result,)):
            with np.errstate(over="ignore"):
                exact = array.dtype.kind != "f"
                values[Value(index, port)] = array if exact else array.astype(np.float32).astype(np.float64)
    return {name: values[value] for name, value in graph.outputs}
