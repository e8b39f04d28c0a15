"""Every operator. Importing this package fills the registry."""

from . import gather, layout, leaf, matmul, pointwise_table, random, reduce, rope, sort, state

__all__ = ["gather", "layout", "leaf", "matmul", "pointwise_table", "random", "reduce", "rope", "sort", "state"]
