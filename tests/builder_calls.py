"""One valid call of every public method of Graph, with every argument that the method has.

Arrays stand for tensors, `StateOf` for a state. Generated tests take the calls apart: see test_arguments.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meganeura_aot import Causal, Graph, Tensor
from meganeura_aot.builder import NO_WORDS
from meganeura_aot.op import OPS
from meganeura_aot.rope_scaling import Linear

Arguments = Mapping[str, Any]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StateOf:
    """A state of the graph; two of one name are one."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    name: str = "state"
    init: float = 0


def f32(*shape: int) -> Array:
    """Numbers above 0, no two alike."""
    count = int(np.prod(shape, dtype=np.int64))
    return (np.arange(1, count + 1, dtype=np.float32) / np.float32(count + 1)).reshape(shape)


def i32(*shape: int) -> Array:
    return np.arange(1, int(np.prod(shape)) + 1, dtype=np.int32).reshape(shape)


def ids(*values: int) -> Array:
    return np.array(values, np.uint32)


X = f32(2, 4)
IMAGE = f32(1, 4, 6, 6)
CHANNELS = {"w": f32(4), "b": f32(4)}
MASK_OPTIONS = {"attn_mask": f32(2, 4, 4), "scale": 0.5, "soft_cap": 30.0}
HEADS = {"heads": 2, "kv_heads": 1, "head_dim": 4}
QKV = {"q": f32(1, 4, 8), "k": f32(1, 4, 4), "v": f32(1, 4, 4)} | HEADS
CACHES = {"k_cache": f32(1, 6, 4), "v_cache": f32(1, 6, 4), "position": ids(1)}
DRAW = {"shape": (3, 2), "state": StateOf((4,), "u32")}
CONV: Arguments = {
    "x": IMAGE,
    "w": f32(4, 2, 3, 3),
    "bias": f32(4),
    "stride": (1, 2),
    "padding": (1, 0),
    "dilation": 2,
    "groups": 2,
}
TRANSPOSED = {**CONV, "stride": (3, 2), "output_padding": (1, 0)}
POOL: Arguments = {"x": IMAGE, "kernel": (2, 3), "stride": 2, "padding": (1, 0), "ceil_mode": True}

UNARY_F32 = """
exp expm1 log log1p sqrt rsqrt recip sin cos erf floor ceil round relu sigmoid tanh silu hard_swish softplus
"""
UNARY = "neg abs sign stop_gradient swiglu_concat"
BINARY = "add sub mul div maximum minimum greater greater_equal less less_equal equal not_equal pow"
INTEGERS = "floor_div mod bitwise_and bitwise_or bitwise_xor shift_left shift_right"
REDUCTIONS = "sum mean max min"

CALLS: dict[str, Arguments] = {
    # leaves, states, outputs
    "input": {"name": "n", "shape": (2, 3), "dtype": "u32", "minimum": 1, "maximum": 5},
    "parameter": {"name": "w", "shape": (2, 3), "dtype": "f32", "init": ("normal", 0.5), "trainable": True},
    "state": {"name": "s", "shape": (2, 3), "dtype": "f32", "init": 0.5},
    "constant": {"array": X, "dtype": "f32"},
    "assign": {"state": StateOf((2, 4)), "value": X},
    "advance": {"state": StateOf((), "u32"), "n": 2, "limit": 8},
    "set_outputs": {"outputs": {"y": X}},
    "apply": {"op": OPS["add"](), "inputs": (X, X)},
    "apply_many": {"op": OPS["top_k"](2), "inputs": (X,)},
    "lift": {"x": X, "like": X},
    # pointwise
    **{name: {"x": X} for name in (UNARY_F32 + UNARY).split()},
    **{name: {"a": X, "b": f32(4)} for name in BINARY.split()},
    **{name: {"a": i32(2, 3), "b": i32(3)} for name in INTEGERS.split()},
    "clip": {"x": X, "low": 0.25, "high": 0.75},
    "where": {"condition": ids(1, 0, 0, 1), "a": X, "b": 0.5},
    "cast": {"x": X, "dtype": "i32"},
    "leaky_relu": {"x": X, "alpha": 0.5},
    "elu": {"x": X, "alpha": 0.5},
    "hard_sigmoid": {"x": X, "alpha": 0.25, "beta": 0.5},
    "gelu": {"x": X, "approximate": "tanh"},
    "swiglu": {"gate": X, "up": X},
    "silu_grad": {"dy": X, "x": X},
    "swiglu_grad_gate": {"dy": X, "gate": X, "up": X},
    "swiglu_grad_up": {"dy": X, "gate": X},
    # products, reductions, layout
    "matmul": {"a": f32(3, 2), "b": f32(4, 3), "trans_a": True, "trans_b": True},
    "matmul_at": {"a": f32(3, 2), "b": f32(3, 4)},
    "matmul_bt": {"a": f32(2, 3), "b": f32(4, 3)},
    "bias_add": {"x": X, "bias": f32(4)},
    **{name: {"x": X, "axes": (0, 1), "keepdims": True} for name in REDUCTIONS.split()},
    "softmax": {"x": X, "axis": 1},
    "log_softmax": {"x": X, "axis": 1},
    "reshape": {"x": X, "shape": (4, 2)},
    "transpose": {"x": X, "axes": (1, 0)},
    "permute": {"x": X, "axes": (1, 0)},
    "expand": {"x": X, "shape": (3, 2, 4)},
    "concat": {"tensors": (X, f32(1, 4)), "axis": 0},
    "split": {"x": X, "sizes": (1, 3), "axis": 1},
    "slice": {"x": X, "index": (slice(None), 2)},
    "sum_to": {"x": X, "shape": (1, 4)},
    "expand_axes": {"x": f32(2), "shape": (2, 4), "axes": (1,)},
    # indices, order, random numbers, positions
    "embedding": {"ids": ids(2, 0), "table": f32(3, 2)},
    "gather": {"x": X, "ids": ids(1, 0, 3), "axis": 1},
    "gather_elements": {"x": X, "ids": ids(1, 0).reshape(2, 1), "axis": 1},
    "scatter_add": {"ids": ids(2, 0), "src": X, "rows": 3},
    "one_hot": {"ids": ids(2, 0), "depth": 3},
    "argmax": {"x": X, "axis": 1, "keepdims": True},
    "argmin": {"x": X, "axis": 1, "keepdims": True},
    "top_k": {"x": X, "k": 2},
    **dict.fromkeys(("random_bits", "random_uniform", "random_normal"), DRAW),
    "dropout": {"x": X, "p": 0.5},
    "rope": {
        "x": f32(3, 8),
        "head_dim": 4,
        "base": 100.0,
        "rotary_dim": 2,
        "interleaved": True,
        "offset": 5,
        "scaling": Linear(2.0),
    },
    # norms and losses
    "rms_norm": {"x": X, "w": f32(4), "eps": 0.5},
    "layer_norm": {"x": X, **CHANNELS, "eps": 0.5},
    "group_norm": {"x": IMAGE, "num_groups": 2, **CHANNELS, "eps": 0.5, "activation": "silu"},
    "batch_norm": {
        "x": IMAGE,
        "mean": StateOf((4,), name="mean"),
        "variance": StateOf((4,), name="variance", init=1),
        **CHANNELS,
        "eps": 0.5,
        "training": True,
        "momentum": 0.25,
    },
    "cross_entropy_loss": {"logits": X, "labels": ids(3, 1), "ignore_index": 3, "label_smoothing": 0.25},
    "bce_loss": {"pred": X, "labels": X},
    **{name: {"pred": X, "target": f32(2, 4)[::-1]} for name in ("mse_loss", "l1_loss")},
    # attention and caches
    "attention": {**QKV, "mask": Causal(), **MASK_OPTIONS},
    "attention_with_lse": {**QKV, "mask": Causal(), **MASK_OPTIONS},
    "full_attention": {**QKV, "options": MASK_OPTIONS},
    "cross_attention": {**QKV, "options": MASK_OPTIONS},
    "multi_head_attn": {**QKV, "is_cross": True, "options": MASK_OPTIONS},
    "causal_attention": {**QKV, "offset": 1, "options": MASK_OPTIONS},
    "sliding_window_attention": {**QKV, "window": 2, "offset": 1, "options": MASK_OPTIONS},
    "cache_write": {"cache": StateOf((1, 6, 4)), "rows": f32(1, 2, 4), "position": ids(1), "ring": True},
    "cached_attention": {
        "q": f32(1, 4, 8),
        **CACHES,
        **HEADS,
        "window": 2,
        "ring": True,
        **MASK_OPTIONS,
        "attn_mask": f32(2, 4, 6),
    },
    # images and sequences
    **dict.fromkeys(("conv", "conv1d", "conv2d"), CONV),
    **dict.fromkeys(("conv_transpose", "conv_transpose1d", "conv_transpose2d"), TRANSPOSED),
    "max_pool": {**POOL, "dilation": (1, 2)},
    "avg_pool": {**POOL, "count_include_pad": True},
    "global_avg_pool": {"x": IMAGE, "keepdims": True},
    "global_max_pool": {"x": IMAGE, "keepdims": True},
    "upsample": {"x": IMAGE, "factor": (2, 3)},
    "upsample_2x": {"x": IMAGE},
    "pad": {"x": X, "widths": ((1, 0), (2, 1)), "axes": (1, 0), "mode": "constant", "value": 0.5},
}


def methods() -> list[str]:
    public = [name for name in dir(Graph) if not name.startswith("_") and callable(getattr(Graph, name))]
    return [name for name in public if name not in NO_WORDS]


def signature(name: str) -> inspect.Signature:
    """Of a method, without `self`."""
    whole = inspect.signature(getattr(Graph, name))
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def call(g: Graph, name: str, arguments: Arguments) -> Any:
    """Call a method with its arguments by name; `*inputs` are a tuple, and `**options` a mapping."""
    bound = inspect.BoundArguments(signature(name), dict(arguments))  # type: ignore[arg-type]
    return getattr(g, name)(*bound.args, **bound.kwargs)


def tensors_of(result: Any) -> list[Tensor]:
    """What a method gives, as a list."""
    if isinstance(result, Tensor):
        return [result]
    return list(result) if isinstance(result, tuple | list) else []
