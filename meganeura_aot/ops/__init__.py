"""Every operator. Importing this package fills the registry."""

from . import layout, leaf, loss, matmul, norm, optimizer, pointwise_table, reduce, state

__all__ = ["layout", "leaf", "loss", "matmul", "norm", "optimizer", "pointwise_table", "reduce", "state"]
