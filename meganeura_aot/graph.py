"""The intermediate representation: a frozen list of nodes in which inputs come before their users."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import GraphError

if TYPE_CHECKING:
    from .op import Op


class DType(enum.StrEnum):
    """Element types of arithmetic. All are 4 bytes."""

    F32 = "f32"
    I32 = "i32"
    U32 = "u32"

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype({"f32": np.float32, "i32": np.int32, "u32": np.uint32}[self.value])

    @property
    def nbytes(self) -> int:
        return 4

    @property
    def is_integer(self) -> bool:
        return self is not DType.F32


@dataclass(frozen=True)
class TensorType:
    """Shape (row-major, () is a scalar) and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: DType = DType.F32

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.nbytes

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, order=True)
class Value:
    """Output `port` of node `node`: an edge of the graph."""

    node: int
    port: int = 0

    def __str__(self) -> str:
        return f"%{self.node}" if self.port == 0 else f"%{self.node}.{self.port}"


@dataclass(frozen=True)
class Node:
    """One application of an operator. `location` is the user's file:line that built it, or ''."""

    op: Op
    inputs: tuple[Value, ...]
    types: tuple[TensorType, ...]
    location: str = ""


@dataclass(frozen=True)
class Advance:
    """A position state that moves by `step` (an int, or the name of a scalar u32 input) and must stay <= limit."""

    state: str
    step: int | str
    limit: int


@dataclass(frozen=True)
class GraphIR:
    """A whole graph: nodes (the id is the index), named outputs in the user's order, position states.

    gradients: of a differentiated graph, the gradient of its loss for every parameter that it depends on, by label.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, Value], ...]
    advances: tuple[Advance, ...] = ()
    gradients: tuple[tuple[str, Value], ...] = ()

    def type_of(self, value: Value) -> TensorType:
        return self.nodes[value.node].types[value.port]

    def roots(self) -> Iterator[Value]:
        """What must be computed: the outputs, the gradients, and every write of a state."""
        for _, value in self.outputs + self.gradients:
            yield value
        for index, node in enumerate(self.nodes):
            if node.op.writes:
                yield Value(index)

    def writes(self, index: int) -> Iterator[tuple[Value, Value]]:
        """What a node writes in place: each value before and after."""
        node = self.nodes[index]
        for port, place in enumerate(node.op.writes[: len(node.types)]):
            yield node.inputs[place], Value(index, port)

    def viewed(self, value: Value) -> Value:
        """What `value` is a view of, or itself."""
        while self.nodes[value.node].op.is_view:
            value = self.nodes[value.node].inputs[0]
        return value

    def written(self) -> set[str]:
        """Labels of the leaves that the graph writes in place."""
        labels: dict[Value, str] = {}
        for index in range(len(self.nodes)):
            for before, after in self.writes(index):
                labels[after] = labels.get(before) or str(getattr(self.nodes[before.node].op, "label", ""))
        return set(labels.values())

    def users(self) -> dict[Value, list[int]]:
        """Each value's users, one entry per edge: a node that reads a value twice is listed twice."""
        table: dict[Value, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                table.setdefault(value, []).append(index)
        return table

    def verify(self) -> GraphIR:
        """Return self; raises GraphError when an edge or a type is wrong."""
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                if not (0 <= value.node < index and 0 <= value.port < len(self.nodes[value.node].types)):
                    raise GraphError(f"%{index} {node.op.name}: input {value} is not an earlier value")
            if node.op.inferred(*map(self.type_of, node.inputs)) != node.types:
                raise GraphError(f"%{index} {node.op.name}: type differs from what the operator infers")
        names = [name for name, _ in self.outputs]
        if len(set(names)) != len(names):
            raise GraphError(f"outputs: duplicate name in {names}")
        for name, value in self.outputs + self.gradients:
            if not (0 <= value.node < len(self.nodes) and 0 <= value.port < len(self.nodes[value.node].types)):
                raise GraphError(f"output or gradient {name}: {value} does not exist")
        return self

    def text(self) -> str:
        """The stable text form: one line a node, one line an output."""
        lines = [_node_line(index, node) for index, node in enumerate(self.nodes)]
        lines += [f"advance {a.state} by {a.step} up to {a.limit}" for a in self.advances]
        lines += [f"output {name} = {value}" for name, value in self.outputs]
        lines += [f"gradient {name} = {value}" for name, value in self.gradients]
        return "\n".join(lines) + "\n"


def _node_line(index: int, node: Node) -> str:
    operands = f"({', '.join(map(str, node.inputs))})" if node.inputs else ""
    attributes = "".join(
        f" {value}" if key in ("label", "digest") else f" {key}={value}" for key, value in attributes_of(node.op)
    )
    return f"%{index} = {node.op.name}{operands}{attributes} : {', '.join(map(str, node.types))}"


def attributes_of(op: Op) -> list[tuple[str, str]]:
    """Name and text of every attribute that differs from its default, in declaration order."""
    return [
        (field.name, _attribute_text(getattr(op, field.name)))
        for field in fields(op)
        if field.repr and getattr(op, field.name) != field.default
    ]


def _attribute_text(value: object) -> str:
    if isinstance(value, tuple) and value and not any(isinstance(item, int | float | str | None) for item in value):
        return "[" + "; ".join(map(str, value)) + "]"
    return str(value)
