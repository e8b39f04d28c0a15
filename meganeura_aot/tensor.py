"""Tensor: a value in a graph under construction. StateHandle: a state, of which each write makes a new value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import GraphError
from .graph import DType, TensorType, Value

if TYPE_CHECKING:
    from .builder import Graph

Number = int | float


class Tensor:
    """A value with `.shape`, `.dtype` and NumPy's operators: + - * / // % ** @ & | ^ << >> == != < <= > >= []."""

    __array_ufunc__ = None  # so that NumPy leaves array + tensor to us
    __hash__ = object.__hash__

    def __init__(self, graph: Graph, value: Value, type_: TensorType) -> None:
        self.graph, self.type = graph, type_
        self._value = value

    @property
    def value(self) -> Value:
        return self._value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return self.type.rank

    def __repr__(self) -> str:
        return f"{self.value} {self.type}"

    def __bool__(self) -> bool:
        raise GraphError("tensor: expected `where` or arithmetic; a tensor has no truth value while the graph is built")

    def __iter__(self) -> Any:
        raise GraphError("tensor: expected indices; iteration over a tensor is not supported, use split")

    def __add__(self, other: Any) -> Tensor:
        return self.graph.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return self.graph.add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return self.graph.sub(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return self.graph.sub(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return self.graph.mul(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return self.graph.mul(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return self.graph.div(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return self.graph.div(other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return self.graph.floor_div(self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return self.graph.floor_div(other, self)

    def __mod__(self, other: Any) -> Tensor:
        return self.graph.mod(self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return self.graph.mod(other, self)

    def __pow__(self, other: Any) -> Tensor:
        return self.graph.pow(self, other)

    def __and__(self, other: Any) -> Tensor:
        return self.graph.bitwise_and(self, other)

    def __or__(self, other: Any) -> Tensor:
        return self.graph.bitwise_or(self, other)

    def __xor__(self, other: Any) -> Tensor:
        return self.graph.bitwise_xor(self, other)

    def __lshift__(self, other: Any) -> Tensor:
        return self.graph.shift_left(self, other)

    def __rshift__(self, other: Any) -> Tensor:
        return self.graph.shift_right(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return self.graph.pow(other, self)

    def __rand__(self, other: Any) -> Tensor:
        return self.graph.bitwise_and(other, self)

    def __ror__(self, other: Any) -> Tensor:
        return self.graph.bitwise_or(other, self)

    def __rxor__(self, other: Any) -> Tensor:
        return self.graph.bitwise_xor(other, self)

    def __rlshift__(self, other: Any) -> Tensor:
        return self.graph.shift_left(other, self)

    def __rrshift__(self, other: Any) -> Tensor:
        return self.graph.shift_right(other, self)

    def __rmatmul__(self, other: Any) -> Tensor:
        return self.graph.matmul(other, self)

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]
        return self.graph.equal(self, other)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return self.graph.not_equal(self, other)

    def __lt__(self, other: Any) -> Tensor:
        return self.graph.less(self, other)

    def __le__(self, other: Any) -> Tensor:
        return self.graph.less_equal(self, other)

    def __gt__(self, other: Any) -> Tensor:
        return self.graph.greater(self, other)

    def __ge__(self, other: Any) -> Tensor:
        return self.graph.greater_equal(self, other)

    def __neg__(self) -> Tensor:
        return self.graph.neg(self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.graph.matmul(self, other)

    def __getitem__(self, index: Any) -> Tensor:
        return self.graph.slice(self, index)


class StateHandle(Tensor):
    """A state, as `Graph.state` returns it: `value` is its newest version, also after later writes."""

    @property
    def value(self) -> Value:
        return self.graph._newest.get(self._value, self._value)


def current_value(argument: Any) -> Any:
    """Replace each StateHandle in an argument, also inside a list, tuple or mapping, by the value that it has now.

    So a builder method cannot return a handle, and cannot read a newer value after it has written the state.
    """
    if isinstance(argument, StateHandle):
        return Tensor(argument.graph, argument.value, argument.type)
    if isinstance(argument, Mapping):
        return {name: current_value(item) if isinstance(item, StateHandle) else item for name, item in argument.items()}
    if isinstance(argument, list | tuple):
        items = [current_value(item) if isinstance(item, StateHandle) else item for item in argument]
        return items if isinstance(argument, list) else tuple(items)
    return argument
