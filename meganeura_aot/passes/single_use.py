"""The one helper that decides whether a value may disappear into its user."""

from __future__ import annotations

from collections.abc import Mapping

from ..graph import GraphIR, Value


def single_uses(graph: GraphIR) -> Mapping[Value, int]:
    """Values with exactly one use, and their user. Edges are counted, and an output or a gradient is a user."""
    roots = {value for _, value in graph.outputs + graph.gradients}
    return {value: users[0] for value, users in graph.users().items() if len(users) == 1 and value not in roots}
