"""Rebuild a graph node by node: how every pass changes a frozen graph."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import GraphIR, Node, Value
from ..op import Op


class Rebuild:
    """A new graph under construction, and where each value of the old one went."""

    def __init__(self, graph: GraphIR) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.moved: dict[Value, Value] = {}

    def copy(self, value: Value) -> None:
        """Copy the node of `value` unchanged."""
        self.replace(value, self.graph.nodes[value.node].op, self.graph.nodes[value.node].inputs)

    def replace(self, value: Value, op: Op, inputs: Sequence[Value]) -> None:
        """Put `op` over old values where the node of `value` was; its first outputs stand for that node's."""
        old = self.graph.nodes[value.node]
        types = op.inferred(*map(self.graph.type_of, inputs))
        self.nodes.append(Node(op, tuple(self.moved[v] for v in inputs), types, old.location))
        for port in range(len(types)):
            self.moved[Value(value.node, port)] = Value(len(self.nodes) - 1, port)

    def insert(self, op: Op, inputs: Sequence[Value] = (), location: str = "") -> Value:
        """Append a node that the old graph does not have, over values of the new one."""
        types = op.inferred(*(self.nodes[v.node].types[v.port] for v in inputs))
        self.nodes.append(Node(op, tuple(inputs), types, location))
        return Value(len(self.nodes) - 1)

    def alias(self, value: Value, source: Value) -> None:
        """Let old value `source` stand for old value `value`, whose node is dropped."""
        self.moved[value] = self.moved[source]

    def finish(self) -> GraphIR:
        outputs, gradients = (
            tuple((name, self.moved[value]) for name, value in named)
            for named in (self.graph.outputs, self.graph.gradients)
        )
        return GraphIR(tuple(self.nodes), outputs, self.graph.advances, gradients)
