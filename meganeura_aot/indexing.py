"""NumPy's indexing, as ranges: what a slice keeps of every axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import GraphError
from .graph import TensorType


def slice_ranges(type_: TensorType, index: Any) -> tuple[list[tuple[int, int, int]], bool, tuple[int, ...]]:
    """(start, count, step) an axis, whether an axis is dropped or added, and the shape of the result."""
    items = list(index) if isinstance(index, tuple) else [index]
    real = sum(item is not None and item is not Ellipsis for item in items)
    if real > type_.rank or sum(item is Ellipsis for item in items) > 1:
        raise GraphError(f"slice: expected at most {type_.rank} indices for {type_}, got {index}")
    rest = [slice(None)] * (type_.rank - real)
    if not any(item is Ellipsis for item in items):
        items += rest
    else:
        at = next(position for position, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = rest
    ranges: list[tuple[int, int, int]] = []
    shape: list[int] = []
    for item in items:
        if item is None:
            shape.append(1)
            continue
        size, axis = type_.shape[len(ranges)], len(ranges)
        if isinstance(item, slice):
            kept = range(size)[item]
            ranges.append((kept.start if len(kept) else 0, len(kept), kept.step if len(kept) > 1 else 1))
            shape.append(len(kept))
            continue
        is_integer = not isinstance(item, bool) and np.ndim(item) == 0 and np.asarray(item).dtype.kind in "iu"
        if not is_integer or not -size <= item < size:
            expected = f"an integer in [{-size}, {size}) or a slice"
            raise GraphError(f"slice: axis {axis} of {type_}: expected {expected}, got {item!r}")
        ranges.append((int(item) % size, 1, 1))
    return ranges, any(not isinstance(item, slice) for item in items), tuple(shape)
