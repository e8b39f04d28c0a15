"""The one tolerance rule: |y - ref| <= rtol * |ref| + atol * scale, scale = max |ref| of the row (last axis).

Contractions: 2e-6 * sqrt(K) * (|A| @ |B|) elementwise; attention with weights P over T keys: 2e-6 * (sqrt(head_dim) *
max |q| @ |k| * scale + sqrt(T)) * (P @ |V|). Norms: relative to the terms of their last sum, plus what the error of the mean
becomes. Sums are contractions with ones. Data movement and max/min: exact.
NaN and infinity only where the reference has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meganeura_aot.op import Op
from meganeura_aot.ops.conv.gradient import ConvGradWeight
from meganeura_aot.ops.conv.op import ConvOp
from meganeura_aot.ops.matmul.op import MatMul
from meganeura_aot.ops.pool.op import AvgPool

Array = np.ndarray[Any, Any]

RTOL, ATOL = 1e-5, 1e-6
CONTRACTION = 2e-6
ROUNDING = 2.0**-24  # of one operation in f32
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


def scatter_bound(op: Any, ids: Array, src: Array) -> Array:
    """The allowed error of sums of rows: contractions with ones."""
    count = op.reference(ids, np.ones_like(src))
    return CONTRACTION * np.sqrt(np.maximum(count, 1)) * op.reference(ids, np.abs(src)) + SMALLEST_NORMAL


def scatter_onto_bound(op: Any, base: Array, ids: Array, src: Array) -> Array:
    """The same with one more to add."""
    count = op.reference(np.ones_like(base), ids, np.ones_like(src))
    return CONTRACTION * np.sqrt(count) * op.reference(np.abs(base), ids, np.abs(src)) + SMALLEST_NORMAL


def loss_bound(op: Any, *inputs: Array) -> Array:
    """The allowed error of a loss whose terms may cancel: relative to their absolute values."""
    return (RTOL + ATOL) * op.magnitude(*inputs) + SMALLEST_NORMAL


def log_softmax_bound(op: Any, x: Array) -> Array:
    """The allowed error of (x - max) - log(sum of exp(x - max)), whose terms cancel where one element outweighs the others.

    The sum is 1 or more. Its rounding error, relative to the sum, is an absolute error of its logarithm, however small that is.
    """
    with np.errstate(all="ignore"):
        shifted = x - x.max(op.axis, keepdims=True, initial=-np.inf)
        of_sum = np.log(np.exp(shifted).sum(op.axis, keepdims=True))
        size = np.where(np.isfinite(shifted), np.abs(shifted), 0) + np.where(np.isfinite(of_sum), of_sum, 0)
        ref = np.abs(shifted - of_sum)
    return RTOL * np.where(np.isfinite(ref), ref, 0) + ATOL * (1 + size) + SMALLEST_NORMAL


def update_bound(op: Any, param: Array, grad: Array, numbers: Array, *more: Array) -> tuple[Array, ...]:
    """The allowed errors of an update: also relative to its step, and to what the step is taken from. They may cancel."""
    made = op.reference(param, grad, numbers, *more)
    after = made if isinstance(made, tuple) else (made,)
    before = (param, *more[: len(op.moments)])
    with np.errstate(all="ignore"):
        sizes = [np.nan_to_num(ATOL * np.abs(b), posinf=0) for b in before]
        sizes[0] = sizes[0] + np.nan_to_num(RTOL * np.abs(after[0] - param), posinf=0)
    return tuple(pointwise_bound(a) + size for a, size in zip(after, sizes, strict=True))


def attention_bound(op: Any, q: Array, k: Array, v: Array, *extras: Array) -> tuple[Array, Array]:
    """The allowed errors of attention and of its log-sum-exp: those of a product over head_dim and one over the keys."""
    size = op.sizes(q, k)
    _, seen = op.scores(q, k, *extras)
    largest = op.per_head(np.abs(q), size.heads, size) @ op.per_head(np.abs(k), size.kv_heads, size).swapaxes(-1, -2)
    in_scores = np.sqrt(size.head_dim) * abs(op.factor(size)) * largest.max(-1, initial=0, where=seen, keepdims=True)
    plain = op.reference(q, k, np.abs(v), *extras)
    mean = op.per_head(plain[0] if op.with_lse else plain, size.heads, size)
    out = CONTRACTION * (in_scores + np.sqrt(size.keys)) * mean
    lse = CONTRACTION * (in_scores[..., 0] + np.sqrt(size.keys))
    if op.with_lse:
        lse += pointwise_bound(plain[1]).reshape(lse.shape)
    return out.transpose(0, 2, 1, 3).reshape(q.shape) + SMALLEST_NORMAL, lse.reshape(*q.shape[:-2], *lse.shape[1:])


def attention_grad_bound(op: Any, dy: Array, q: Array, k: Array, v: Array, stat: Array, *mask: Array) -> Any:
    """The allowed errors of the gradients of attention: of products over head_dim, over the keys, over the queries."""
    size, factor = op.of.sizes(q, k), abs(op.of.factor(op.of.sizes(q, k)))
    p, _, _, seen = op.pairs(dy, q, k, v, stat, *mask)
    rows = np.abs(stat).reshape(size.batch, size.heads, size.queries, 2)
    dys, qs = (op.of.per_head(np.abs(x), size.heads, size) for x in (dy, q))
    ks, vs = (op.of.per_head(np.abs(x), size.kv_heads, size) for x in (k, v))
    with np.errstate(all="ignore"):
        in_scores = np.sqrt(size.head_dim) * factor * (qs @ ks.swapaxes(-1, -2)) + rows[..., :1]
        ds = p * (dys @ vs.swapaxes(-1, -2) + rows[..., 1:])
        if op.name == "attention_grad_mask":
            over = [a for a, n in enumerate((1,) * (4 - mask[0].ndim) + mask[0].shape) if n == 1]
            count = np.sqrt(np.prod([ds.shape[a] for a in over]))
            terms = np.where(seen, ds * (in_scores + count + np.sqrt(size.head_dim)), 0)
            return CONTRACTION * np.nan_to_num(terms).sum(tuple(over)).reshape(mask[0].shape) + SMALLEST_NORMAL
        length = size.keys if op.name == "attention_grad_q" else size.queries * size.heads // size.kv_heads
        spread = in_scores + np.sqrt(length) + np.sqrt(size.head_dim)
        p, ds = (np.nan_to_num(np.where(seen, x * spread, 0), posinf=0) for x in (p, ds * factor))
        ks, qs, dys = map(np.nan_to_num, (ks, qs, dys))
        if op.name == "attention_grad_q":
            return CONTRACTION * op.merged(ds @ ks, q, size) + SMALLEST_NORMAL
        dk, dv = (op.merged(x.swapaxes(-1, -2) @ rows, k, size) for x, rows in ((ds, qs), (p, dys)))
    return CONTRACTION * dk + SMALLEST_NORMAL, CONTRACTION * dv + SMALLEST_NORMAL


def attention_rows_bound(op: Any, dy: Array, y: Array, lse: Array, *dlse: Array) -> Array:
    """The allowed error of a dot product, and of a number that is copied."""
    size = op.reference(np.abs(dy), np.abs(y), np.zeros_like(lse), *(-np.abs(x) for x in dlse))
    return CONTRACTION * np.sqrt(dy.shape[-1] // op.heads) * size + SMALLEST_NORMAL


def conv_bound(op: ConvOp, x: Array, w: Array) -> Array:
    """The allowed error of a convolution: a sum has a term for every input channel of a group and every tap."""
    depth = x.shape[1] // op.groups * int(np.prod(w.shape[2:]))
    return CONTRACTION * np.sqrt(max(depth, 1)) * op.product(np.abs(x), np.abs(w)) + SMALLEST_NORMAL


def conv_grad_bound(op: ConvGradWeight, dy: Array, x: Array) -> Array:
    """The allowed error of the gradient of weights: a sum has a term for every position of every image."""
    depth = dy.shape[0] * int(np.prod(dy.shape[2:]))
    return CONTRACTION * np.sqrt(max(depth, 1)) * op.reference(np.abs(dy), np.abs(x)) + SMALLEST_NORMAL


def pool_bound(op: AvgPool, x: Array) -> Array:
    """The allowed error of the mean of a window."""
    return CONTRACTION * np.sqrt(np.prod(op.kernel)) * op.reference(np.abs(x)) + SMALLEST_NORMAL


def pool_grad_bound(op: Any, dy: Array, *others: Array) -> Array:
    """The allowed error of a sum over the windows of an element."""
    return CONTRACTION * np.sqrt(np.prod(op.kernel)) * op.reference(np.abs(dy), *others) + SMALLEST_NORMAL


def pad_grad_bound(op: Any, dy: Array) -> Array:
    """The allowed error of a sum over the places of an element."""
    places = op.reference(np.ones_like(dy))
    return CONTRACTION * np.sqrt(places) * op.reference(np.abs(dy)) + SMALLEST_NORMAL


def normalized_bound(d: Array, scale: Array, w: Array, b: Array, of_mean: Array | float = 0.0) -> Array:
    """The allowed error of y = d * scale * w + b, d = x - mean and scale = 1 / sqrt(variance + eps).

    of_mean: the error of the mean. The errors of d, of the scale and of the two products are relative to the first term, also
    where b cancels it; the error of the sum is relative to both terms.
    """
    term = np.abs(d * scale * w)
    return RTOL * term + ATOL * (term + np.abs(b)) + scale * np.abs(w) * of_mean + SMALLEST_NORMAL


def mean_bound(x: Array, d: Array, axes: tuple[int, ...]) -> Array:
    """The error of a mean that is summed twice: a first mean, plus the mean of what is left over. d = x - mean.

    A sum of n terms is a contraction with ones. The error of the first mean is at most e = CONTRACTION * sqrt(n) * mean |x|.
    The numbers left over are at most |d| + e, so the error of the second mean is CONTRACTION * sqrt(n) * (mean |d| + e): a
    large mean allows no larger error, but numbers far from the mean allow one to those next to it.
    """
    of_sum = CONTRACTION * np.sqrt(np.prod([x.shape[axis] for axis in axes]))
    sizes = [np.mean(np.abs(values), axis=axes, keepdims=True) for values in (d, x)]
    return np.asarray(of_sum * (sizes[0] + of_sum * sizes[1]))


def batch_norm_bound(op: Any, x: Array, mean: Array, variance: Array, scale: Array, shift: Array) -> Array:
    """With given statistics nothing is summed."""
    return normalized_bound(x - mean, 1 / np.sqrt(variance + op.eps), scale, shift)


def batch_norm_training_bound(op: Any, x: Array, *weights: Array) -> tuple[Array, ...]:
    """The mean is rounded to f32 once more, as an output from which y is computed."""
    mean, variance = op.reference(x)[1:]
    spread, axes = (-1, *(1,) * (x.ndim - 2)), (0, *range(2, x.ndim))
    w, b = (t.reshape(spread) for t in (*weights, *(np.ones(x.shape[1]), np.zeros(x.shape[1]))[len(weights) :]))
    d = x - mean.reshape(spread)
    of_mean = mean_bound(x, d, axes) + ROUNDING * np.abs(mean).reshape(spread)
    y = normalized_bound(d, 1 / np.sqrt(variance.reshape(spread) + op.eps), w, b, of_mean)
    return y, of_mean.reshape(mean.shape) + SMALLEST_NORMAL, RTOL * variance + SMALLEST_NORMAL


def layer_norm_bound(op: Any, x: Array, w: Array | float = 1.0, b: Array | float = 0.0) -> Array:
    """Rows of the last axis."""
    if not x.size:
        return np.zeros(x.shape)
    d = x - x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(np.mean(d * d, axis=-1, keepdims=True) + op.eps)
    return normalized_bound(d, scale, np.asarray(w), np.asarray(b), mean_bound(x, d, (x.ndim - 1,)))


def group_norm_bound(op: Any, x: Array, w: Array | float = 1.0, b: Array | float = 0.0) -> Array:
    """Rows are groups of channels; silu, whose slope is below 1.1, adds a pointwise error of its own."""
    if not x.size:
        return np.zeros(x.shape)
    rows = x.reshape(x.shape[0], op.num_groups, -1)
    spread = (1, -1, *(1,) * (x.ndim - 2))
    each = [np.broadcast_to(np.reshape(t, spread), x.shape).reshape(rows.shape) for t in (w, b)]
    allowed = layer_norm_bound(op, rows, *each).reshape(x.shape)
    return 1.1 * allowed + RTOL * np.abs(op.reference(x, w, b)) if op.activation else allowed


def norm_grad_bound(op: Any, *inputs: Array) -> tuple[Array, ...]:
    """The allowed errors of the gradient of a row, whose terms may cancel, and of its statistics.

    What an adapter flushes to zero is multiplied by the scale of the row afterwards, at most 1 / sqrt(eps).
    """
    flushed = SMALLEST_NORMAL * max(1.0, op.eps**-0.5 if op.eps else 1.0)
    return tuple((RTOL + ATOL) * size + flushed for size in op.magnitude(*inputs))


def weight_sum_bound(op: Any, *inputs: Array) -> Any:
    """The allowed error of the gradient of weights: that of a contraction."""
    sizes = op.magnitude(*inputs)
    each = sizes if isinstance(sizes, tuple) else (sizes,)
    return tuple(CONTRACTION * size + SMALLEST_NORMAL for size in each)


def batch_norm_grad_bound(op: Any, dy: Array, x: Array, *each: Array) -> Array:
    """The allowed error of a sum of three terms that may cancel: a contraction of that length."""
    mean, variance, w, dw, db = each
    size = op.reference(np.abs(dy), np.abs(x), -np.abs(mean), variance, np.abs(w), -np.abs(dw), -np.abs(db))
    return CONTRACTION * np.sqrt(3) * size + SMALLEST_NORMAL


# The allowed error of operators that are not held to the pointwise rule, from the operator and its inputs; a tuple for
# operators of several outputs.
BOUNDS: dict[str, Callable[..., Any]] = {
    "attention": attention_bound,
    "attention_grad_rows": attention_rows_bound,
    "attention_grad_q": attention_grad_bound,
    "attention_grad_kv": attention_grad_bound,
    "attention_grad_mask": attention_grad_bound,
    "batch_norm": batch_norm_bound,
    "batch_norm_grad_wb": weight_sum_bound,
    "batch_norm_grad_x": batch_norm_grad_bound,
    "batch_norm_training": batch_norm_training_bound,
    "group_norm": group_norm_bound,
    "group_norm_grad_wb": weight_sum_bound,
    "group_norm_grad_x": norm_grad_bound,
    "layer_norm": layer_norm_bound,
    "layer_norm_grad_wb": weight_sum_bound,
    "layer_norm_grad_x": norm_grad_bound,
    "rms_norm_grad_w": weight_sum_bound,
    "rms_norm_grad_x": norm_grad_bound,
    "matmul": lambda op, a, b, *extras: contraction_bound(op, a, b),
    "avg_pool": pool_bound,
    "pad_grad": pad_grad_bound,
    "avg_pool_grad": pool_grad_bound,
    "max_pool_grad": pool_grad_bound,
    "conv": lambda op, x, w, *extras: conv_bound(op, x, w),
    "conv_grad_weight": conv_grad_bound,
    "conv_transpose": lambda op, x, w, *extras: conv_bound(op, x, w),
    "sum": sum_bound,
    "mean": sum_bound,
    "sgd_update": update_bound,
    "adam_update": update_bound,
    "adamw_update": update_bound,
    "scatter_add": scatter_bound,
    "scatter_add_onto": scatter_onto_bound,
    "scatter_elements": scatter_bound,
    "cross_entropy_loss": loss_bound,
    "cross_entropy_grad": loss_bound,
    "softmax_grad": loss_bound,
    "log_softmax": log_softmax_bound,
    "log_softmax_grad": loss_bound,
}


def bound(op: Op, inputs: Sequence[Array], ref: Array, port: int = 0) -> Array:
    """The allowed error of an operator's output."""
    if ref.dtype.kind != "f" or op.tolerance == "exact":
        return np.zeros(ref.shape)
    if op.name not in BOUNDS:
        return pointwise_bound(ref)
    allowed = BOUNDS[op.name](op, *inputs)
    return np.asarray(allowed[port] if isinstance(allowed, tuple) else allowed)


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
