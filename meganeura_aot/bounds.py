"""What the numbers of an input may be: the runner checks them on the host, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from .errors import GraphError
from .graph import GraphIR, Value
from .ops.layout import Expand
from .ops.leaf import Input
from .ops.state import AdvancePosition


def input_bounds(graph: GraphIR) -> Mapping[Value, tuple[int, int]]:
    """The least and the largest number of every input that has bounds: declared ones, and those that its users need.

    Raises GraphError where no number is within both.
    """
    needed: dict[Value, int] = {}
    for value, largest in largest_numbers(graph):
        needed[value] = min(largest, needed.get(value, largest))
    bounds = {}
    for index, node in enumerate(graph.nodes):
        value, op = Value(index), node.op
        if not isinstance(op, Input) or (op.minimum is None and op.maximum is None and value not in needed):
            continue
        limits = np.iinfo(op.type.dtype.numpy)
        low = int(limits.min) if op.minimum is None else op.minimum
        high = int(limits.max) if op.maximum is None else op.maximum
        largest = min(high, needed.get(value, high))
        if op.minimum is not None and low > largest:
            expected = f"a minimum of at most {largest}, the largest number that its uses allow"
            raise GraphError(f"input {op.label!r} (built at {node.location}): expected {expected}, got {low}")
        bounds[value] = (low, largest)
    return bounds


def largest_numbers(graph: GraphIR) -> Iterator[tuple[Value, int]]:
    """Values, and what their users need them to be at most.

    An index stays below the size of what it indexes. A position moves by no more rows than were written from it on:
    attention would see what an earlier conversation left in the others.
    """
    rows: dict[Value, int] = {}
    for node in graph.nodes:
        types = [graph.type_of(value) for value in node.inputs]
        for place, limit in node.op.index_limits(*types).items():
            yield spread_number(graph, node.inputs[place]), limit - 1
        for place, count in node.op.rows_written(*types).items():
            position = spread_number(graph, node.inputs[place])
            rows[position] = min(count, rows.get(position, count))
    for node in graph.nodes:
        if isinstance(node.op, AdvancePosition) and len(node.inputs) == 2:
            position, step = (spread_number(graph, value) for value in node.inputs)
            if position in rows:
                yield step, rows[position]


def spread_number(graph: GraphIR, value: Value) -> Value:
    """What holds the numbers of a value, each once: it may be a view of them, or repeat them for every image."""
    while (node := graph.nodes[value.node]).op.is_view or isinstance(node.op, Expand):
        value = node.inputs[0]
    return value
