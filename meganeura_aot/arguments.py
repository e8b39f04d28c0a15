"""Converts the arguments of a builder method to the types that its annotations name.

Users may pass arrays, numbers and booleans of NumPy wherever a method takes tensors or values of Python. The annotation of
a parameter decides the conversion, so the body of a method handles one type: tensors, ints, floats, flags, tuples of ints.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from .errors import GraphError
from .op import LARGEST_F32, LARGEST_INT
from .tensor import Tensor

if TYPE_CHECKING:
    from .builder import Graph

# Annotations of builder methods that Python's types do not express.
Indices = Annotated[Tensor, "integers become u32"]
Labels = Annotated[Tensor, "integers become u32, modulo 2^32: -100 is PyTorch's label of a row that does not count"]
Scores = Annotated[Tensor, "added to scores: arrays of the integers 0 and 1 are no numbers, but say what is seen"]
Word = Annotated[int, "32 bits, with a sign or without"]
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]

NUMBERS = (int, float, np.ndarray, np.generic)  # what `Graph.constant` takes in place of a tensor
Kinds = frozenset[Any]  # the alternatives of an annotation


class Unfit(Exception):
    """A value that a parameter does not take. The text stands in the message behind "expected": it says what is taken."""


# Numbers: each function gives a value of Python, or raises Unfit.


def integer(value: Any) -> int:
    """A signed integer of 32 bits, as sizes and axes are in WGSL."""
    whole = _integer(value)
    if abs(whole) > LARGEST_INT:
        raise Unfit(f"an integer from {-LARGEST_INT} to {LARGEST_INT}")
    return whole


def word(value: Any) -> int:
    """An integer that an i32 or a u32 holds."""
    whole = _integer(value)
    if not -(2**31) <= whole < 2**32:
        raise Unfit(f"an integer from {-(2**31)} to {2**32 - 1}")
    return whole


def number(value: Any) -> float:
    """A finite number that f32 holds."""
    is_number = isinstance(value, NUMBERS) and np.ndim(value) == 0 and _kind(value) in "iufO"  # O: an int past 64 bits
    if not is_number:
        raise Unfit("a number")
    exact = value if isinstance(value, int) else float(value)  # float() of a huge int would raise OverflowError
    if not -LARGEST_F32 <= exact <= LARGEST_F32:
        raise Unfit("a finite number that f32 holds")
    return float(exact)


def flag(value: Any) -> bool:
    if not _is_flag(value):
        raise Unfit("True or False")
    return bool(value)


def integers(value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not (isinstance(value, Sequence) or np.ndim(value) == 1):
        raise Unfit("a sequence of integers")
    try:
        return tuple(map(integer, value))
    except Unfit as unfit:
        raise Unfit(f"a sequence, each {unfit},") from None


def pairs(value: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, str) or not (isinstance(value, Sequence) or np.ndim(value) == 2):
        raise Unfit("a sequence of two integers each")
    table = tuple(map(integers, value))
    if any(len(pair) != 2 for pair in table):
        raise Unfit("a sequence of two integers each")
    return table


def integer_or_integers(value: Any) -> int | tuple[int, ...]:
    if isinstance(value, str):
        raise Unfit("an integer or a sequence of integers")
    return integers(value) if isinstance(value, Sequence) or np.ndim(value) else integer(value)


def _integer(value: Any) -> int:
    if _is_flag(value):  # an int to Python, but a mistake here
        raise Unfit("an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise Unfit("an integer") from None


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


CONVERTERS: Mapping[Kinds, Callable[[Any], Any]] = {
    frozenset({int}): integer,
    frozenset({Word}): word,
    frozenset({float}): number,
    frozenset({bool}): flag,
    frozenset({Sequence[int]}): integers,
    frozenset({int, Sequence[int]}): integer_or_integers,
    frozenset({Sequence[tuple[int, int]]}): pairs,
}


# Tensors: each function gives a tensor of the graph. `like` is a tensor among the other arguments, or None.


def tensor(graph: Graph, value: Any, like: Tensor | None) -> Tensor:
    """Numbers get the dtype of `like`. Booleans do not: a mask of f32 that came from them would be added to scores."""
    if isinstance(value, Tensor):
        return graph.lift(value)
    return graph.lift(value, None if _kind(value) == "b" else like)


def indices(graph: Graph, value: Any, like: Tensor | None) -> Tensor:
    """Integers become u32, whatever `like` is."""
    if isinstance(value, Tensor):
        return graph.lift(value)
    if _kind(value) not in "iu":
        raise Unfit("integers")
    return graph.constant(value, "u32")


def labels(graph: Graph, value: Any, like: Tensor | None) -> Tensor:
    """Signed integers become u32 modulo 2^32; floats are the weights of classes."""
    if isinstance(value, Tensor) or _kind(value) != "i":
        return tensor(graph, value, None)
    signed = np.asarray(value, np.int64)
    return graph.constant(np.where(signed < 0, signed + 2**32, signed), "u32")


def scores(graph: Graph, value: Any, like: Tensor | None) -> Tensor:
    """Integers 0 and 1 stay integers, as booleans do: attention refuses them, for they would add up."""
    says_what_is_seen = (
        not isinstance(value, Tensor) and _kind(value) in "iu" and np.any(value) and np.isin(value, (0, 1)).all()
    )
    return tensor(graph, value, None if says_what_is_seen else like)


def _kind(value: Any) -> str:
    return np.asarray(value).dtype.kind


TENSORS: Mapping[Any, Callable[..., Tensor]] = {Tensor: tensor, Indices: indices, Labels: labels, Scores: scores}


# The arguments of a call.


@dataclass(frozen=True)
class Conversion:
    """How the arguments for one parameter are converted. Where neither function is set, the method checks them itself."""

    allows_none: bool
    allows_text: bool
    to_number: Callable[[Any], Any] | None
    to_tensor: Callable[..., Tensor] | None

    @staticmethod
    def of(hint: Any) -> Conversion:
        """The conversion for a parameter with this annotation."""
        kinds = frozenset(get_args(hint)) if get_origin(hint) in (Union, UnionType) else frozenset({hint})
        to_number = CONVERTERS.get(kinds - {NoneType, str, *TENSORS})
        to_tensor = next((TENSORS[kind] for kind in kinds if kind in TENSORS), None)
        if float in kinds:  # a tensor or a float: an operand, to which `Graph.apply` gives the dtype of the others
            to_tensor = None
        return Conversion(NoneType in kinds, str in kinds, to_number, to_tensor)

    def apply(self, graph: Graph, value: Any, like: Tensor | None) -> Any:
        """The converted argument; raises Unfit."""
        if value is None and self.allows_none:
            return None
        if isinstance(value, str) and self.allows_text:
            return value
        takes_both = self.to_number is not None and self.to_tensor is not None
        is_array = takes_both and (isinstance(value, Tensor) or np.ndim(value) > 0)
        if self.to_number is not None and not is_array:
            return self.to_number(value)
        if self.to_tensor is None:
            return value
        if not isinstance(value, (Tensor, *NUMBERS)):
            raise Unfit("a tensor of this graph, or numbers,")
        return self.to_tensor(graph, value, like)


@functools.cache
def conversions_of(method: Callable[..., Any]) -> tuple[inspect.Signature, Mapping[str, Conversion]]:
    """The signature of a method, and the conversions of those parameters that have one."""
    hints = get_type_hints(method, include_extras=True)
    conversions = {name: Conversion.of(hint) for name, hint in hints.items() if name != "return"}
    needed = {name: each for name, each in conversions.items() if each.to_number or each.to_tensor}
    return inspect.signature(method), needed


def converted(method: Callable[..., Any], graph: Graph, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """The arguments of a call of `method` on the graph, each converted to what its parameter names.

    Raises GraphError that names the method, the parameter, what it takes and what came.
    """
    signature, conversions = conversions_of(method)
    try:
        call = signature.bind(graph, *args, **kwargs)
    except TypeError as error:
        names = ", ".join(list(signature.parameters)[1:])
        raise GraphError(f"{method.__name__}: {error}; its arguments are {names}") from None
    given = {name: value for name, value in call.arguments.items() if name in conversions}
    operands = [value for name, value in given.items() if conversions[name].to_tensor is tensor]
    like = next((value for value in operands if isinstance(value, Tensor)), None)
    for name, value in given.items():
        try:
            call.arguments[name] = conversions[name].apply(graph, value, like)
        except Unfit as unfit:
            raise GraphError(f"{method.__name__}: expected {unfit} as {name}, got {shown(value)}") from None
    return call


def shown(value: Any) -> str:
    """A value in an error message; an array by its type, for its numbers may be many."""
    return f"an array {value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)
