"""Every operator. Importing this package fills the registry."""

from . import layout, leaf, matmul, pointwise_table, reduce, state

__all__ = ["layout", "leaf", "matmul", "pointwise_table", "reduce", "state"]
