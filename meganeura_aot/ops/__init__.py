"""Every operator. Importing this package fills the registry."""

from . import conv, layout, leaf, matmul, pointwise_table, pool, reduce, resample, state

__all__ = ["conv", "layout", "leaf", "matmul", "pointwise_table", "pool", "reduce", "resample", "state"]
