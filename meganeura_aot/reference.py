"""The oracle: what a graph means, in NumPy and float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .graph import GraphIR, Value
from .ops.state.leaf import Leaf, Parameter, State, gradient_label

Array = np.ndarray[Any, Any]


def evaluate(graph: GraphIR, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name, gradients as grad.NAME, and all that is written in place under its own name.

    feeds holds inputs, parameters and states, and what other leaves there are, by label.
    """
    values: dict[Value, Array] = {}
    results: dict[str, Array] = {}
    labels: dict[Value, str] = {}
    for index, node in enumerate(graph.nodes):
        if isinstance(node.op, Leaf):
            array = np.asarray(feeds[node.op.label])
            if isinstance(node.op, Parameter | State) and node.op.storage == "f16":
                array = array.astype(np.float16)
            result = array.astype(np.float64) if array.dtype.kind == "f" else array
            labels[Value(index)] = node.op.label
        else:
            result = node.op.reference(*(values[value] for value in node.inputs))
        for port, array in enumerate(result if isinstance(result, tuple) else (result,)):
            values[Value(index, port)] = array
        for before, after in graph.writes(index):
            if before in labels:
                labels[after] = labels[before]
                results[labels[after]] = values[after]
    named = [*graph.outputs, *((gradient_label(name), value) for name, value in graph.gradients)]
    return results | {name: values[value] for name, value in named}
