"""Gradients against finite differences: in float64 through the reference, and the kernels against that.

An operator stands mid-graph: loss = coefficient * sum(weights * operator(parameters)), with a random weight an element. The products that add up to the
loss are outputs too: term0, term1, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meganeura_aot.autodiff import differentiate
from meganeura_aot.builder import Graph
from meganeura_aot.graph import DType, GraphIR, Node, Value
from meganeura_aot.op import Sample
from meganeura_aot.ops.state.leaf import Input, Leaf, Parameter
from meganeura_aot.reference import evaluate
from meganeura_aot.tensor import Tensor
from tests import harness

Array = np.ndarray[Any, Any]
COEFFICIENT = 0.7
STEP = 1e-3  # of an element of size 1 or more, of smaller ones in proportion
FD_RTOL = 1e-6  # of finite differences in float64
VAGUE = 1e-4  # a slope with a larger error says nothing
ROUNDING = 3e-14  # of the reference, of its results
ROUNDINGS = 30  # inside an operator, for each of a value between two: what is left of a gradient that cancels
FLUSHED = 1e-30  # norms below may be made of numbers that adapters flush to zero
KERNEL_RTOL = 1e-4  # of the norm of a gradient, for kernels in f32


def loss_graph(sample: Sample, coefficient: float = COEFFICIENT) -> GraphIR:
    """The operator over parameters x0, x1, ... (integers are inputs), its f32 outputs in one loss; w0, w1, ... weigh."""
    nodes: list[Node] = []
    for i, type_ in enumerate(sample.inputs):
        leaf = Parameter if type_.dtype is DType.F32 or i in sample.op.index_limits(*sample.inputs) else Input
        nodes.append(Node(leaf(f"x{i}", type_), (), (type_,)))
    types = sample.op.inferred(*sample.inputs)
    nodes.append(Node(sample.op, tuple(Value(i) for i in range(len(nodes))), types, "sample.py:1"))
    g = Graph.from_ir(GraphIR(tuple(nodes), ()))
    terms = []
    for port, type_ in enumerate(types):
        if type_.dtype is DType.F32:
            weight = g.input(f"w{port}", type_.shape)
            terms.append(weight * Tensor(g, Value(len(sample.inputs), port), type_))
    loss = g.sum(terms[0])
    for term in terms[1:]:
        loss = loss + g.sum(term)
    g.set_outputs({"loss": loss * coefficient} | {f"term{i}": term * coefficient for i, term in enumerate(terms)})
    return g.build()


def gradients_of(graph: GraphIR, loss: str = "loss") -> GraphIR:
    """The differentiated graph with the gradients as its outputs: grad.NAME each."""
    both = differentiate(graph, loss)
    outputs = tuple((f"grad.{name}", value) for name, value in both.gradients)
    return replace(both, outputs=outputs, gradients=())


def weights_for(sample: Sample, rng: np.random.Generator) -> dict[str, Array]:
    types = sample.op.inferred(*sample.inputs)
    return {f"w{i}": rng.standard_normal(t.shape) for i, t in enumerate(types) if t.dtype is DType.F32}


@dataclass(frozen=True)
class Slope:
    """A derivative along a line. size: of what adds up to it; rounding: of the numbers it was computed from; error: how
    far two ways to compute it are apart."""

    value: float
    size: float
    rounding: float
    error: float


def slope_along(terms: Callable[[float], Array], step: float = STEP, rtol: float = FD_RTOL) -> Slope:
    """The derivative at 0 of the sum of terms(h), each term differentiated on its own, so that no large one hides another.

    Richardson's extrapolation of central differences, twice: where the two disagree by more than rtol, for there is a
    kink or much curvature, the steps become smaller.
    """
    best = Slope(0.0, 0.0, 0.0, np.inf)
    for h in (step, step / 10, step / 100, step / 1000):
        sides = [(terms(h / n), terms(-h / n)) for n in (1, 2, 4)]
        wide, middle, near = ((up - down) * n / (2 * h) for (up, down), n in zip(sides, (1, 2, 4), strict=True))
        coarse, fine = (4 * middle - wide) / 3, (4 * near - middle) / 3
        sizes = np.abs(sides[2][0])
        rounding = ROUNDING * float(sizes.sum() + sizes[near != 0].sum() * 4 / h)
        slope = Slope(float(fine.sum()), float(np.abs(fine).sum()), rounding, float(np.abs(fine - coarse).sum()))
        if not best.error + best.rounding <= slope.error + slope.rounding:
            best = slope
        if best.error <= rtol * best.size + best.rounding:
            break
    return best


def directions_of(x: Array, rng: np.random.Generator) -> list[Array]:
    """Random lines through x and a few along one element; elements move in proportion to their size, so that what is
    next to a kink at 0 stays on its side."""
    scale = np.where(x == 0, 1.0, np.minimum(np.abs(x), 1.0))
    directions = [rng.standard_normal(x.shape) * scale for _ in range(3)]
    for _ in range(min(5, x.size)):
        axis = np.zeros(x.size)
        axis[rng.integers(x.size)] = 1
        directions.append(axis.reshape(x.shape) * scale)
    return directions


def assert_finite_differences(
    graph: GraphIR, feeds: Mapping[str, Array], loss: str = "loss", rtol: float = FD_RTOL, step: float = STEP
) -> dict[str, Array]:
    """Every gradient against finite differences of the reference, in float64. Returns the gradients.

    rtol is relative to the sum of the absolute values of what makes the slope. Outputs term0, term1, ... are what adds up
    to the loss, where the graph has them.
    """
    exact = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    found = {name: a for name, a in evaluate(gradients_of(graph, loss), exact).items() if name.startswith("grad.")}
    parts = [name for name, _ in graph.outputs if name.startswith("term")] or [loss]
    rng = np.random.default_rng(1)
    assert found
    for name, gradient in found.items():
        name = name.removeprefix("grad.")
        assert gradient.shape == exact[name].shape
        for direction in directions_of(exact[name], rng):

            def terms(h: float, name: str = name, direction: Array = direction) -> Array:
                results = evaluate(graph, {**exact, name: exact[name] + h * direction})
                return np.concatenate([results[part].ravel() for part in parts])

            slope = slope_along(terms, step, rtol)
            product = gradient * direction
            size = max(float(np.abs(product).sum()), slope.size)
            assert slope.error <= VAGUE * size + slope.rounding, f"{name}: no slope, {slope} where {size} is expected"
            allowed = rtol * size + 2 * slope.error + slope.rounding
            assert abs(product.sum() - slope.value) <= allowed, f"{name}: {product.sum()}, {slope}"
    return found


def assert_kernels(graph: GraphIR, feeds: Mapping[str, Array], loss: str = "loss", **options: Any) -> None:
    """Every gradient of the emitted program, within 1e-4 of its norm of the reference's.

    One that cancels (of a softmax over a single key it is 0, of a saturated tanh next to it) is held to what f32 leaves
    of the terms.
    """
    wanted = gradients_of(graph, loss)
    feeds = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in feeds.items()}
    expected = evaluate(wanted, feeds)
    rounded = [evaluate_in_f32(wanted, feeds, seed) for seed in range(4)]  # one alone may be close by luck
    got = harness.run(harness.compile_graph(wanted, **options), feeds)
    for name, _ in wanted.outputs:
        reference = expected[name]
        error = np.linalg.norm((got[name] - reference).ravel())
        norm = np.linalg.norm(reference.ravel())
        noise = ROUNDINGS * np.linalg.norm([(one[name] - reference).ravel() for one in rounded]) / len(rounded) ** 0.5
        assert error <= KERNEL_RTOL * norm + noise + FLUSHED, f"{name}: error {error} of a norm {norm}, noise {noise}"


def evaluate_in_f32(graph: GraphIR, feeds: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """The outputs by the reference where every value between two operators has the error of an f32, drawn at random."""
    rng = np.random.default_rng(seed)
    values: dict[Value, Array] = {}
    for index, node in enumerate(graph.nodes):
        leaf = isinstance(node.op, Leaf)
        result = feeds[node.op.label] if leaf else node.op.reference(*(values[value] for value in node.inputs))
        for port, array in enumerate(result if isinstance(result, tuple) else (result,)):
            if array.dtype.kind == "f" and not leaf and node.op.tolerance != "exact":
                array = array * (1 + rng.uniform(-(2**-24), 2**-24, array.shape))
            values[Value(index, port)] = array
    return {name: values[value] for name, value in graph.outputs}
