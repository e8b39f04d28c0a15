"""Every operator. Importing this package fills the registry."""

from . import (
    attention,
    cache,
    gather,
    layout,
    leaf,
    loss,
    matmul,
    norm,
    optimizer,
    pointwise_table,
    random,
    reduce,
    rope,
    sort,
    state,
)

__all__ = [
    "attention",
    "cache",
    "gather",
    "layout",
    "leaf",
    "loss",
    "matmul",
    "norm",
    "optimizer",
    "pointwise_table",
    "random",
    "reduce",
    "rope",
    "sort",
    "state",
]
