"""Every operator. Importing this package fills the registry."""

from . import layout, leaf, matmul, norm, pointwise_table, reduce, state

__all__ = ["layout", "leaf", "matmul", "norm", "pointwise_table", "reduce", "state"]
