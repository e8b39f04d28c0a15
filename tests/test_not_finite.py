"""NaN and infinities come out of every operator where the reference has them: no shader compiler may fold them away.

Compilers of shaders take floats for finite: they make 0 of `x * 0.0` and `x - x`, and y of `(x + y) - x`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor
from meganeura_aot.graph import DType
from meganeura_aot.op import OPS, make
from meganeura_aot.ops.pointwise import Pointwise
from meganeura_aot.reference import evaluate
from tests import harness
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
            expected = np.where(agree(got[name], kept[name]), kept[name], zeroed[name])
            try:
                assert_within(got[name], expected, 1e-4 * np.abs(expected) + 1e-6, name)
            except AssertionError as error:
                wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


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
