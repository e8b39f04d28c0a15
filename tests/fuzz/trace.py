"""A trace: calls of builder methods, which can be replayed on a Graph, printed as Python, and evaluated one by one.

Evaluated alone, each call is a graph of its own over numbers. So the order of reads and writes of a state is that of the calls, and
owes nothing to the builder's own bookkeeping, which is on trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meganeura_aot import Graph
from meganeura_aot.graph import GraphIR, TensorType
from meganeura_aot.tensor import Tensor

Array = np.ndarray[Any, Any]
Evaluate = Callable[[GraphIR, Mapping[str, Array]], dict[str, Array]]
FED = ("input", "parameter")


@dataclass(frozen=True)
class Ref:
    """Result `port` of call `number`; of a call of `state`, its handle."""

    number: int
    port: int | None = None

    def __repr__(self) -> str:
        return f"t{self.number}" if self.port is None else f"t{self.number}[{self.port}]"

    @property
    def label(self) -> str:
        """Its name in the graph of a single call."""
        return f"t{self.number}_{self.port or 0}"


@dataclass(frozen=True)
class Call:
    """A call of a method. operands: every value it reads. alone: the call in a graph of its own, None for named leaves."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]
    types: tuple[TensorType, ...]
    alone: GraphIR | None

    @property
    def is_state(self) -> bool:
        return self.method == "state"

    @property
    def label(self) -> str:
        """The name of a leaf."""
        return str(self.arguments[0])

    def writes(self) -> bool:
        """Whether it writes a state."""
        return self.alone is not None and bool(self.alone.written())

    def on(self, g: Graph, value: Callable[[Ref], Tensor]) -> Any:
        """Call the method on g."""
        arguments = [substitute(a, value) for a in self.arguments]
        named = {name: substitute(a, value) for name, a in self.named.items()}
        return getattr(g, self.method)(*arguments, **named)

    def __str__(self) -> str:
        shown = [show(a) for a in self.arguments] + [f"{name}={show(a)}" for name, a in self.named.items()]
        types = ", ".join(map(str, self.types))
        return f"t{self.number} = g.{self.method}({', '.join(shown)})  # {types}"


def show(argument: Any) -> str:
    """The argument as Python that makes it."""
    if isinstance(argument, np.ndarray):
        return f"np.array({argument.tolist()}, np.{argument.dtype})"
    return repr(str(argument) if isinstance(argument, str) else argument)


def substitute(argument: Any, value: Callable[[Ref], Any]) -> Any:
    """The argument with tensors in place of references, also inside a list."""
    if isinstance(argument, Ref):
        return value(argument)
    return [substitute(item, value) for item in argument] if isinstance(argument, list) else argument


def references(argument: Any) -> Iterator[Ref]:
    if isinstance(argument, Ref):
        yield argument
    if isinstance(argument, list):
        for item in argument:
            yield from references(item)


@dataclass
class Trace:
    """The calls that build one graph, and what it returns."""

    calls: list[Call] = field(default_factory=list)
    outputs: dict[str, Ref] = field(default_factory=dict)

    def make(self, method: str, *arguments: Any, **named: Any) -> Call:
        """The next call, not yet added. Raises GraphError where the builder refuses it."""
        number = self.calls[-1].number + 1 if self.calls else 0
        operands = tuple(dict.fromkeys(ref for a in (*arguments, *named.values()) for ref in references(a)))
        call = Call(number, method, arguments, named, operands, (), (), None)
        g = Graph()
        leaves = {ref: self.declare(g, ref) for ref in operands}
        made = call.on(g, leaves.__getitem__)
        several = isinstance(made, list | tuple)
        tensors = list(made) if several else [made]
        results = tuple(Ref(number, port if several else None) for port in range(len(tensors)))
        types = tuple(tensor.type for tensor in tensors)
        if method not in (*FED, "state"):
            g.set_outputs({f"result_{port}": tensor for port, tensor in enumerate(tensors)})
            call = replace(call, alone=g.build())
        return replace(call, results=results, types=types)

    def declare(self, g: Graph, ref: Ref) -> Tensor:
        """The value as a leaf of another graph: a state as itself, any other as an input."""
        call = self.call_of(ref)
        if call.is_state:
            state: Tensor = call.on(g, lambda ref: self.declare(g, ref))
            return state
        type_ = self.type_of(ref)
        return g.input(ref.label, type_.shape, type_.dtype)

    def call_of(self, ref: Ref) -> Call:
        return next(call for call in reversed(self.calls) if call.number == ref.number)

    def type_of(self, ref: Ref) -> TensorType:
        return self.call_of(ref).types[ref.port or 0]

    def leaves(self, *methods: str) -> list[Call]:
        return [call for call in self.calls if call.method in methods]

    def graph(self) -> Graph:
        """All calls on one builder."""
        g = Graph()
        values: dict[Ref, Tensor] = {}
        for call in self.calls:
            made = call.on(g, values.__getitem__)
            values |= zip(call.results, made if isinstance(made, list | tuple) else [made], strict=True)
        g.set_outputs({name: values[ref] for name, ref in self.outputs.items()})
        return g

    def evaluate(
        self, feeds: Mapping[str, Array], states: Mapping[str, Array], evaluate: Evaluate
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The outputs and the states afterwards, call by call."""
        values = Values(self, feeds, states)
        for call in self.calls:
            values.perform(call, evaluate)
        return {name: values.of(ref) for name, ref in self.outputs.items()}, values.states

    def without(self, number: int) -> Trace | None:
        """The trace without a call; None where something needs its results."""
        needed = {ref for call in self.calls for ref in call.operands} | {*self.outputs.values()}
        if any(ref.number == number for ref in needed):
            return None
        return Trace([call for call in self.calls if call.number != number], self.outputs)

    def __str__(self) -> str:
        lines = [*map(str, self.calls), f"g.set_outputs({self.outputs})"]
        return "\n".join(lines)


class Values:
    """What the values of a trace are in one call of its graph."""

    def __init__(self, trace: Trace, feeds: Mapping[str, Array], states: Mapping[str, Array]) -> None:
        self.feeds, self.states = feeds, dict(states)
        self.values: dict[Ref, Array] = {}
        self.handles: dict[Ref, str] = {}

    def perform(self, call: Call, evaluate: Evaluate) -> None:
        if call.is_state:
            self.handles[call.results[0]] = call.label
            return
        if call.alone is None:
            self.values[call.results[0]] = exact(self.feeds[call.label], call)
            return
        results = evaluate(call.alone, {self.handles.get(ref, ref.label): self.of(ref) for ref in call.operands})
        self.accept(call, results)

    def accept(self, call: Call, results: Mapping[str, Array]) -> None:
        self.values |= {ref: results[f"result_{port}"] for port, ref in enumerate(call.results)}
        self.states |= {label: results[label] for label in self.states if label in results}

    def of(self, ref: Ref) -> Array:
        """A state's handle stands for what it holds now."""
        return self.states[self.handles[ref]] if ref in self.handles else self.values[ref]


def exact(array: Array, leaf: Call) -> Array:
    """What operators see of a leaf: halves are rounded, floats are exact."""
    if "f16" in leaf.arguments:
        array = array.astype(np.float16)
    return array.astype(np.float64) if array.dtype.kind == "f" else array
