"""Every operator. Importing this package fills the registry."""

from . import attention, cache, layout, leaf, matmul, pointwise_table, reduce, state

__all__ = ["attention", "cache", "layout", "leaf", "matmul", "pointwise_table", "reduce", "state"]
