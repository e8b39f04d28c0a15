"""Every operator. Importing this package fills the registry."""

from . import gather, layout, leaf, loss, matmul, norm, optimizer, pointwise_table, random, reduce, rope, sort, state

__all__ = [
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
