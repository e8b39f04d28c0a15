"""NaN and infinities come out of every operator where the reference has them: no shader compiler may fold them away.

Compilers of shaders take floats for finite: they make 0 of `x * 0.0` and `x - x`, and y of `(x + y) - x`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from meganeura_aot.graph import DType
from meganeura_aot.op import OPS, Sample, make
from meganeura_aot.ops.pointwise.op import Pointwise
from meganeura_aot.reference import evaluate
from meganeura_aot.target import TARGETS
from tests import harness
from tests.test_operators import feeds_of, graph_of
from tests.tolerance import SMALLEST_NORMAL, assert_within

Array = np.ndarray[Any, Any]

X = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40, -1e-40, 1e6, -1e6, 1.0, -1.0, 0.5, 7.0], np.float32)
OTHER = np.array([np.nan, 2.0, np.inf, -np.inf, 0.0, -3.0], np.float32)
NAMES = sorted(
    name
    for name, op in OPS.items()
    if issubclass(op, Pointwise) and name != "cast" and DType.F32 in [t.dtype for t in op.samples()[0].inputs]
)

# What may stand beside x: the builder and the shape of x to a tensor or a number.
BESIDE: Mapping[str, Callable[[Graph, tuple[int, ...]], Any]] = {
    "0": lambda g, shape: 0.0,
    "1": lambda g, shape: 1.0,
    "-1": lambda g, shape: -1.0,
    "inf": lambda g, shape: g.constant(np.inf),
    "zeros": lambda g, shape: g.constant(np.zeros(shape)),
    "expanded": lambda g, shape: g.expand(g.constant(0.0), shape),
}


def variants(name: str) -> list[Any]:
    """The operator as it is, and with every number among its attributes 0."""
    numbers = [field.name for field in fields(OPS[name]) if field.type == "float"]  # type: ignore[arg-type]
    zeros = [make(name, **dict.fromkeys(numbers, 0.0))] if numbers else []
    return [make(name), *zeros]


def results(g: Graph, name: str, source: Callable[[], Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The operator over x in one place and each of what may stand beside it in the others, and over x in every place.

    source: gives x, which may be another node each time.
    """
    found: dict[str, Tensor] = {}
    for number, op in enumerate(variants(name)):
        found[f"same {number}"] = g.apply(op, *(source(),) * op.arity)
        for place in range(op.arity if op.arity > 1 else 0):
            for key in [*BESIDE, *others]:
                x = source()
                value = others[key] if key in others else BESIDE[key](g, x.shape)
                inputs = [value] * op.arity
                inputs[place] = x
                found[f"{number}: {key}, x at {place}"] = g.apply(op, *inputs)
    return found


def check(g: Graph, feeds: Mapping[str, Array], optimize: bool) -> None:
    """Every output has the NaNs and infinities of the reference, where an adapter may take a subnormal number for 0."""
    ir = g.build()
    got = harness.run(harness.compile_graph(ir, optimize=optimize), feeds)
    flushed = {name: np.where(np.abs(a) < SMALLEST_NORMAL, np.copysign(0, a), a) for name, a in feeds.items()}
    wrong = []
    with np.errstate(all="ignore"):
        kept, zeroed = (evaluate(ir, numbers) for numbers in (feeds, flushed))
        for name, _ in ir.outputs:
            expected = np.where(near(got[name], kept[name]), kept[name], zeroed[name])
            try:
                assert_within(got[name], expected, allowed(expected), name)
            except AssertionError as error:
                wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def allowed(ref: Array) -> Array:
    return np.asarray(1e-4 * np.abs(ref) + 1e-6)


def near(got: Array, ref: Array) -> Array:
    """Where a result is what the reference has: a sign or a comparison of a subnormal number is not that of 0."""
    special = ~np.isfinite(ref.astype(np.float32))
    return agree(got, ref) & (special | ~(np.abs(got.astype(np.float64) - ref) > allowed(ref)))


def agree(got: Array, ref: Array) -> Array:
    """Where a result is of the kind that the reference has: the same NaN or infinity, or a number."""
    rounded = ref.astype(np.float32)
    same = (np.isnan(got) & np.isnan(rounded)) | (got == rounded) | (np.isfinite(got) & np.isfinite(rounded))
    return np.asarray(same)


def numbers_for(name: str) -> dict[str, Array]:
    """Two inputs, whose elements meet all of each other."""
    x = X
    if name == "pow_grad_base":  # b * a^(b - 1) of subnormal numbers overflows on the way
        x = x[(x == 0) | ~(np.abs(x) < SMALLEST_NORMAL)]
    return {"x": np.repeat(x, OTHER.size), "z": np.tile(OTHER, x.size)}


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_operands(name: str, optimize: bool) -> None:
    """Alone."""
    feeds = numbers_for(name)
    g = Graph()
    x, z = (g.input(key, array.shape) for key, array in feeds.items())
    g.set_outputs(results(g, name, lambda: x, {"z": z}))
    check(g, feeds, optimize)


class Products:
    """Products that are x, each another node, so that each can have an epilogue. A sum that starts at 0 has no -0.0."""

    def __init__(self, g: Graph, feeds: dict[str, Array], convolution: bool) -> None:
        """Adds the inputs that are needed to `feeds`, whose x becomes the left operand."""
        self.g, self.feeds, self.convolution = g, feeds, convolution
        size = feeds["x"].size
        feeds["x"] = feeds["x"] + np.float32(0)
        if convolution:  # one tap and a stride
            feeds["x"] = np.repeat(feeds["x"], 2)
        self.x = g.input("x", (1, 1, 2 * size) if convolution else (size, 1))
        feeds["x"] = feeds["x"].reshape(self.x.shape)
        self.shape = (1, 1, size) if convolution else (size, 1)
        feeds["z"] = feeds["z"].reshape(self.shape)
        self.z = g.input("z", self.shape)
        feeds["copy"] = feeds["x"][..., ::2] if convolution else feeds["x"]
        self.copy = g.input("copy", self.shape)

    def __call__(self) -> Tensor:
        name = f"one{len(self.feeds)}"
        one = self.g.input(name, (1, 1, 1) if self.convolution else (1, 1))
        self.feeds[name] = np.ones(one.shape, np.float32)
        return self.g.conv(self.x, one, stride=2) if self.convolution else self.g.matmul(self.x, one)


@pytest.mark.parametrize("name", NAMES)
def test_epilogues(name: str) -> None:
    """In the store of a product."""
    g, feeds = Graph(), numbers_for(name)
    product = Products(g, feeds, convolution=False)
    g.set_outputs(results(g, name, product, {"z": product.z}))
    check(g, feeds, True)


CHAINS: Mapping[str, Callable[[Graph, Tensor, Tensor, Tensor], Tensor]] = {
    "(p + x) - x": lambda g, p, x, z: (p + x) - x,
    "(p + z) - z": lambda g, p, x, z: (p + z) - z,
    "x - (p + x)": lambda g, p, x, z: x - (p + x),
    "(p - z) + z": lambda g, p, x, z: (p - z) + z,
    "(p > z) * x": lambda g, p, x, z: g.greater(p, z) * x,
    "x * (p == z)": lambda g, p, x, z: x * g.equal(p, z),
    "sigmoid(p) * 0": lambda g, p, x, z: g.sigmoid(p) * 0.0,
    "(p + z) * 0": lambda g, p, x, z: (p + z) * 0.0,
    "relu(p) * 0": lambda g, p, x, z: g.relu(p) * 0.0,
    "(p * z) / z": lambda g, p, x, z: (p * z) / z,
    "(p / z) * z": lambda g, p, x, z: (p / z) * z,
    "(p * 0) * 0": lambda g, p, x, z: (p * 0.0) * 0.0,
    "p * 1e-30 * 1e-30": lambda g, p, x, z: p * 1e-30 * 1e-30,
    "1 - (1 - p)": lambda g, p, x, z: 1.0 - (1.0 - p),
    "(p * 1) - p, of two": lambda g, p, x, z: (p * 1.0 + 0.0) - x,
    "exp(log(p))": lambda g, p, x, z: g.exp(g.log(p)),
    "max(p, z) - z": lambda g, p, x, z: g.maximum(p, z) - z,
    "sqrt(p * p)": lambda g, p, x, z: g.sqrt(p * p),
}


@pytest.mark.parametrize("kind", ["alone", "matmul", "conv"])
@pytest.mark.parametrize("optimize", [True, False])
def test_chains(kind: str, optimize: bool) -> None:
    """Steps that would cancel if every number were finite."""
    g, feeds = Graph(), numbers_for("add")
    product = Products(g, feeds, kind == "conv")
    outputs = {}
    for name, build in CHAINS.items():
        p = product.copy if kind == "alone" else product()
        outputs[name] = build(g, p, product.copy, product.z)
    g.set_outputs(outputs)
    check(g, feeds, optimize)


# In these, rounding and underflow of intermediate results decide whether the result is a NaN or an infinity.
UNORDERED = (
    "attention",
    "attention_grad_kv",
    "attention_grad_mask",
    "attention_grad_q",
    "cross_entropy_grad",
    "cross_entropy_loss",
    "layer_norm_grad_x",
    "log_softmax_grad",
    "rms_norm_grad_x",
)


def spread_alike(got: Array, ref: Array) -> Array:
    """Where a result is a number, or is none, as in the reference."""
    return np.asarray(np.isfinite(got) == np.isfinite(ref.astype(np.float32)))


def test_an_infinite_number_is_a_binding_of_its_own() -> None:
    """A product with as many more inputs as buffers are allowed: the number does not fit into its store."""
    g = Graph()
    y = g.matmul(g.input("a", (4, 4)), g.input("b", (4, 4)))
    for i in range(5):
        y = y + g.input(f"e{i}", (4, 4))
    g.set_outputs({"y": g.minimum(y, g.constant(np.inf))})
    ones = np.ones((4, 4), np.float32)
    harness.check(g, dict.fromkeys(("a", "b", *(f"e{i}" for i in range(5))), ones))


SPREADING = [
    pytest.param(sample, id=f"{name}-{index}")
    for name, op in sorted(OPS.items())
    if not issubclass(op, Pointwise)
    for index, sample in enumerate(op.samples())
    if any(t.dtype is DType.F32 and t.size for t in sample.inputs) and all(t.size for t in sample.inputs)
]


WINDOWED = [case for case in SPREADING if re.match("conv|.*pool|matmul|pad|upsample", str(case.id))]


@pytest.mark.parametrize("sample", SPREADING)
def test_one_element(sample: Sample, request: pytest.FixtureRequest) -> None:
    check_one_element(sample, "webgpu", request)


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "webgpu"])
@pytest.mark.parametrize("sample", WINDOWED)
def test_one_element_on_other_targets(sample: Sample, target: str, request: pytest.FixtureRequest) -> None:
    check_one_element(sample, target, request)


def check_one_element(sample: Sample, target: str, request: pytest.FixtureRequest) -> None:
    """A single NaN or infinity among finite numbers reaches the outputs that it reaches in the reference."""
    graph, feeds = graph_of(sample), feeds_of(sample, request)
    program = harness.compile_graph(graph, target=target)
    runner = harness.load(program)
    rng = np.random.default_rng(0)
    wrong = []
    for name, type_ in zip(feeds, sample.inputs, strict=True):
        if type_.dtype is not DType.F32:
            continue
        for place in {0, type_.size - 1, int(rng.integers(type_.size))}:
            for value in (np.nan, np.inf):
                spoilt = feeds[name].copy()
                spoilt.reshape(-1)[place] = value
                numbers = {**feeds, name: spoilt}
                with np.errstate(all="ignore"):
                    expected = evaluate(graph, numbers)
                got = runner.run(**harness.feeds_of(runner, numbers))
                for output, _ in graph.outputs:
                    compare = spread_alike if sample.op.name in UNORDERED else agree
                    same = compare(got[output], np.asarray(expected[output]))
                    if not same.all():
                        at = np.unravel_index(int(np.argmin(same)), same.shape)
                        values = f"got {got[output][at]}, expected {expected[output][at]} at {at}"
                        wrong.append(f"{name}[{place}] = {value}: {output}: {(~same).sum()} of {same.size}, {values}")
    assert not wrong, "\n".join(wrong)


ROWS_OF_ONE: Mapping[str, Callable[[Graph, Tensor], Tensor]] = {
    "softmax": lambda g, x: g.softmax(x),
    "log_softmax": lambda g, x: g.log_softmax(x),
    "layer_norm": lambda g, x: g.layer_norm(x),
    "rms_norm": lambda g, x: g.rms_norm(x),
    "group_norm": lambda g, x: g.group_norm(x, 1),
    "sum": lambda g, x: g.sum(x, -1),
    "mean": lambda g, x: g.mean(x, -1),
    "max": lambda g, x: g.max(x, -1),
    "product": lambda g, x: g.matmul(x, g.constant(np.zeros((1, 1)))),
    "rope": lambda g, x: g.rope(g.reshape(g.concat([x, x], -1), (-1, 1, 2)), head_dim=2),
    "attention": lambda g, x: g.attention(*[g.reshape(x, (-1, 1, 1))] * 3, heads=1),
    "avg_pool": lambda g, x: g.avg_pool(g.reshape(x, (-1, 1, 1)), 1),
}


@pytest.mark.parametrize("name", ROWS_OF_ONE)
def test_rows_of_one_number(name: str) -> None:
    """A compiler knows more of a row of one number: it is its own maximum and mean, and its position is 0."""
    g = Graph()
    g.set_outputs({"y": ROWS_OF_ONE[name](g, g.input("x", (X.size, 1)))})
    check(g, {"x": X[:, None]}, True)
