"""The least and the largest number of each integer input. The runner checks them on the host, before it writes anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .errors import GraphError
from .graph import GraphIR, Value
from .ops.layout.op import Expand
from .ops.state.leaf import Input
from .ops.state.op import AdvancePosition


def input_bounds(graph: GraphIR) -> Mapping[Value, tuple[int, int]]:
    """The least and the largest number of every input that has bounds: declared bounds, and those that its uses need.

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
        low, high = op.bounds()
        largest = min(high, needed.get(value, high))
        if op.minimum is not None and low > largest:
            expected = f"a minimum of at most {largest}, the largest number that its uses allow"
            raise GraphError(f"input {op.label!r} (built at {node.location}): expected {expected}, got {low}")
        bounds[value] = (low, largest)
    return bounds


def largest_numbers(graph: GraphIR) -> Iterator[tuple[Value, int]]:
    """Yield (value, largest): a use of the value needs its numbers to be at most `largest`.

    An index is less than the size that it indexes. A step of a position is at most the number of rows that were written
    from this position on: attention would read the rows behind them, which an earlier conversation may have left.
    """
    rows: dict[Value, int] = {}  # position: rows that were written from it on
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
