"""The one tolerance rule: |y - ref| <= rtol * |ref| + atol * scale, scale = max |ref| of the row (last axis).

Contractions: 2e-6 * sqrt(K) * (|A| @ |B|) elementwise. Sums are contractions with ones. Data movement and max/min: exact.
NaN and infinity only where the reference has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meganeura_aot.op import Op
from meganeura_aot.ops.conv import ConvOp
from meganeura_aot.ops.matmul import MatMul
from meganeura_aot.ops.pool import AvgPool

Array = np.ndarray[Any, Any]

RTOL, ATOL = 1e-5, 1e-6
CONTRACTION = 2e-6
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)  # adapters may flush what is below to zero


def pointwise_bound(ref: Array) -> Array:
    """The allowed error of every element of a pointwise or row operator."""
    size = np.abs(np.where(np.isfinite(ref), ref, 0))
    if not size.size:
        return size
    scale = size.max(axis=-1, keepdims=True) if size.ndim > 1 else size.max()
    return RTOL * size + ATOL * scale + SMALLEST_NORMAL


def contraction_bound(op: MatMul, a: Array, b: Array) -> Array:
    """The allowed error of a matrix product."""
    depth = op.split(a.shape, op.trans_a)[1]
    return CONTRACTION * np.sqrt(max(depth, 1)) * op.product(np.abs(a), np.abs(b)) + SMALLEST_NORMAL


def sum_bound(op: Any, x: Array) -> Array:
    """The allowed error of a sum or a mean: a contraction with ones."""
    count = max(int(np.prod([x.shape[axis] for axis in op.axes])), 1)
    return CONTRACTION * np.sqrt(count) * op.reference(np.abs(x)) + SMALLEST_NORMAL


def conv_bound(op: ConvOp, x: Array, w: Array) -> Array:
    """The allowed error of a convolution: a sum has a term for every input channel of a group and every tap."""
    depth = x.shape[1] // op.groups * int(np.prod(w.shape[2:]))
    return CONTRACTION * np.sqrt(max(depth, 1)) * op.product(np.abs(x), np.abs(w)) + SMALLEST_NORMAL


def pool_bound(op: AvgPool, x: Array) -> Array:
    """The allowed error of the mean of a window."""
    return CONTRACTION * np.sqrt(np.prod(op.kernel)) * op.reference(np.abs(x)) + SMALLEST_NORMAL


# The allowed error of operators that are not held to the pointwise rule, from the operator and its inputs.
BOUNDS: dict[str, Callable[..., Array]] = {
    "matmul": lambda op, a, b, *extras: contraction_bound(op, a, b),
    "avg_pool": pool_bound,
    "conv": lambda op, x, w, *extras: conv_bound(op, x, w),
    "conv_transpose": lambda op, x, w, *extras: conv_bound(op, x, w),
    "sum": sum_bound,
    "mean": sum_bound,
}


def bound(op: Op, inputs: Sequence[Array], ref: Array) -> Array:
    """The allowed error of an operator's output."""
    if ref.dtype.kind != "f" or op.tolerance == "exact":
        return np.zeros(ref.shape)
    if op.tolerance in ("contraction", "sum"):
        return BOUNDS[op.name](op, *inputs)
    return pointwise_bound(ref)


def assert_within(got: Array, ref: Array, allowed: Array, what: str = "") -> None:
    """Raise AssertionError that names the worst element."""
    assert got.shape == ref.shape, f"{what}: shape {got.shape}, expected {ref.shape}"
    if ref.dtype.kind != "f":
        np.testing.assert_array_equal(got, ref, err_msg=what)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = ref.astype(np.float32)
        special = ~np.isfinite(rounded)
        error = np.where(special, 0, np.abs(got.astype(np.float64) - ref))
        agrees = np.where(special, (got == rounded) | (np.isnan(got) & np.isnan(rounded)), error <= allowed)
        # next to the largest number an error within the rule may round to infinity
        agrees |= np.isinf(got) & (np.abs(ref) >= 3.4e38) & (np.sign(got) == np.sign(ref))
    if agrees.all():
        return
    worst = np.unravel_index(int(np.argmax(np.where(agrees, -1, np.nan_to_num(error, nan=np.inf)))), ref.shape)
    share = f"{int((~agrees).sum())} of {agrees.size} elements wrong"
    limit = np.broadcast_to(allowed, ref.shape)[worst]
    raise AssertionError(f"{what}: {share}; at {worst}: got {got[worst]!r}, expected {ref[worst]!r} within {limit:.3g}")
