"""The results that a correct f32 program may give: noisy runs of the reference measure the tolerance of a whole graph.

A noisy run moves each result of an operator by the error that tests/tolerance.py allows it: up, down, or by a random share.
The distance that an output moves is the error that it may have. An element that moves too far (an argmax between near ties,
a difference of equal numbers) cannot be wrong in a way that shows, so it is not compared; the report counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meganeura_aot.graph import GraphIR, Node, Value
from meganeura_aot.ops.optimizer.op import Update
from meganeura_aot.ops.pointwise.op import Pointwise
from meganeura_aot.ops.state.leaf import Constant, Leaf, Parameter, State, gradient_label
from tests.tolerance import SMALLEST_NORMAL, bound

Array = np.ndarray[Any, Any]

# The kinds of noise. A float: the same share for all elements. So one of the first two runs crosses each edge (of floor, of
# a comparison) that a correct value may cross. An int: the seed of normal shares, one for each element. The errors of two
# operators may cancel in one run, but hardly in six random ones.
RUNS: tuple[float | int, ...] = (1.0, -1.0, 1, 2, 3, 4, 5, 6)
SLACK = 2.0  # allowed error, as a multiple of the largest move of any run
ROUNDING = 2.0**-22  # allowed relative error of the last store, whatever the operator
VAGUE = 1e-2  # an element with a larger tolerance than this share of the largest element is not compared

# Operators whose f32 result is one of their inputs, or an integer: they add no error.
EXACT_NAMES = """
floor ceil round sign neg abs relu maximum minimum clip clip_low clip_high where cast
greater greater_equal less less_equal equal not_equal maximum_grad minimum_grad clip_grad relu_grad
"""
EXACT = frozenset(EXACT_NAMES.split())

# Operators that subtract a mean: an element close to the mean has the error of the mean, not of its own size.
CENTRED = frozenset(["batch_norm_training", "group_norm", "layer_norm"])

# Slopes that are 0 where two terms cancel: there the error is that of the terms, which are as large as the slope at 0.
SLOPES = frozenset(["silu_grad", "swiglu_grad_gate", "gelu_grad", "gelu_tanh_grad", "hard_swish_grad"])


class Noisy:
    """An evaluation as `reference.evaluate`, with noise of one kind: see RUNS."""

    def __init__(self, kind: float | int) -> None:
        self.kind = kind
        self.rng = np.random.default_rng(kind if isinstance(kind, int) else 0)

    def __call__(self, graph: GraphIR, feeds: Mapping[str, Array]) -> dict[str, Array]:
        values: dict[Value, Array] = {}
        results: dict[str, Array] = {}
        labels: dict[Value, str] = {}
        for index, node in enumerate(graph.nodes):
            made = self.leaf(node, feeds) if isinstance(node.op, Leaf) else self.result(node, values)
            if isinstance(node.op, Leaf):
                labels[Value(index)] = node.op.label
            values |= {Value(index, port): array for port, array in enumerate(made)}
            for before, after in graph.writes(index):
                labels[after] = labels[before]
                results[labels[after]] = values[after]
        named = [*graph.outputs, *((gradient_label(name), value) for name, value in graph.gradients)]
        return results | {name: values[value] for name, value in named}

    @staticmethod
    def leaf(node: Node, feeds: Mapping[str, Array]) -> tuple[Array]:
        op = node.op
        assert isinstance(op, Leaf)
        array = np.asarray(feeds[op.label])
        if isinstance(op, Parameter | State) and op.storage == "f16":
            array = array.astype(np.float16)
        return (array.astype(np.float64) if array.dtype.kind == "f" else array,)

    def result(self, node: Node, values: Mapping[Value, Array]) -> tuple[Array, ...]:
        inputs = [values[value] for value in node.inputs]
        made = node.op.reference(*inputs)
        arrays = made if isinstance(made, tuple) else (made,)
        if isinstance(node.op, Constant) or node.op.name in EXACT:
            return arrays
        return tuple(self.moved(node, inputs, array, port) for port, array in enumerate(arrays))

    def moved(self, node: Node, inputs: Sequence[Array], array: Array, port: int) -> Array:
        with np.errstate(all="ignore"):
            size = bound(node.op, inputs, array, port)
            if array.dtype.kind != "f" or not np.any(size):
                return array
            finite = np.isfinite(size) & np.isfinite(array)
            size = np.where(finite, size, 0)
            if node.op.name in CENTRED:
                size += ROUNDING * np.abs(array).max(initial=0, where=finite)
            if isinstance(node.op, Pointwise):
                size = np.where(array == 0, 0, size)
            if node.op.name in SLOPES:
                dy, x, *rest = map(np.abs, inputs)
                size += ROUNDING * node.op.reference(dy, np.zeros_like(x), *rest)
        sign = self.kind if isinstance(self.kind, float) else self.rng.standard_normal(array.shape)
        moved = np.asarray(array + sign * size)
        squares = isinstance(node.op, Update) and bool((array >= 0).all())  # whose root is taken
        return np.maximum(moved, 0) if squares else moved


@dataclass(frozen=True)
class Comparison:
    """How many elements there are, how many could be compared, and what is wrong of those ('' for nothing)."""

    elements: int
    compared: int
    wrong: str


def compare(name: str, got: Array, ref: Array, moved: Sequence[Array]) -> Comparison:
    """The result of a program against the reference and its noisy runs."""
    if got.shape != ref.shape:
        return Comparison(ref.size, 0, f"{name}: shape {got.shape}, expected {ref.shape}")
    if ref.dtype.kind != "f":
        allowed = np.zeros(ref.shape)
        certain = np.all([run == ref for run in moved], axis=0) | np.zeros(ref.shape, bool)
        agrees = got == ref
    else:
        allowed, certain = tolerance(ref, moved)
        agrees = within(got, ref, allowed)
    wrong = certain & ~agrees
    text = ""
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        share = f"{int(wrong.sum())} of {wrong.size} elements wrong"
        text = f"{name}: {share}; at {at}: got {got[at]!r}, expected {ref[at]!r} within {allowed[at]:.3g}"
    return Comparison(ref.size, int(certain.sum()), text)


def tolerance(ref: Array, moved: Sequence[Array]) -> tuple[Array, Array]:
    """The allowed error of every element, and whether it is small enough to say something."""
    with np.errstate(all="ignore"):
        rounded = ref.astype(np.float32)
        finite = np.isfinite(rounded)
        same = np.ones(ref.shape, bool)
        far = np.zeros(ref.shape)
        for run in moved:
            other = run.astype(np.float32)
            same &= (finite & np.isfinite(other)) | (rounded == other) | (np.isnan(rounded) & np.isnan(other))
            far = np.maximum(far, np.where(finite & np.isfinite(run), np.abs(run - ref), 0))
        size = np.where(finite, np.abs(ref), 0)
        allowed = SLACK * far + ROUNDING * size + SMALLEST_NORMAL
        largest = size.max(initial=0)
        return allowed, same & (allowed <= VAGUE * largest + 2 * SMALLEST_NORMAL)


def within(got: Array, ref: Array, allowed: Array) -> Array:
    """NaN and infinity where the reference has them; errors within what is allowed elsewhere."""
    with np.errstate(all="ignore"):
        rounded = ref.astype(np.float32)
        near = np.abs(got.astype(np.float64) - ref) <= allowed
        special = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        return np.asarray(np.where(np.isfinite(rounded), near, special))
