"""What users pass to a builder method becomes what its signature names: tensors, ints, floats, flags, tuples of ints.

NumPy's arrays, numbers and booleans stand for Python's everywhere. The annotation of a parameter says what it takes, and
the body of the method gets that and nothing else.
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

Indices = Annotated[Tensor, "integers become u32"]
Labels = Annotated[Tensor, "integers become u32, modulo 2^32: -100 is PyTorch's label of a row that does not count"]
Scores = Annotated[Tensor, "added to scores: arrays of the integers 0 and 1 are no numbers, but say what is seen"]
Word = Annotated[int, "32 bits, with a sign or without"]
Axes = int | Sequence[int] | None
Sizes = int | Sequence[int]

NUMBERS = (int, float, np.ndarray, np.generic)  # what `Graph.constant` takes in place of a tensor
Kinds = frozenset[Any]  # the alternatives of an annotation


class Unfit(Exception):
    """A value that a kind does not take; the text says what it takes."""


# kinds of numbers


def integer(value: Any) -> int:
    whole = _integer(value)
    if abs(whole) > LARGEST_INT:
        raise Unfit(f"an integer from {-LARGEST_INT} to {LARGEST_INT}")
    return whole


def word(value: Any) -> int:
    whole = _integer(value)
    if not -(2**31) <= whole < 2**32:
        raise Unfit(f"an integer from {-(2**31)} to {2**32 - 1}")
    return whole


def number(value: Any) -> float:
    if not isinstance(value, NUMBERS) or np.ndim(value) or _kind(value) not in "iufO":
        raise Unfit("a number")
    exact = value if isinstance(value, int) else float(value)
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
    try:
        if not _is_flag(value):
            return operator.index(value)
    except TypeError:
        pass
    raise Unfit("an integer")


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


# kinds of tensors


def tensor(graph: Graph, value: Any, like: Tensor | None) -> Tensor:
    """Numbers get the dtype of the tensor beside them; booleans stay what `constant` makes of them, and never add up."""
    if isinstance(value, Tensor):
        return graph.lift(value)
    return graph.lift(value, None if _kind(value) == "b" else like)


def indices(graph: Graph, value: Any, like: Tensor | None) -> Tensor:
    if isinstance(value, Tensor):
        return graph.lift(value)
    if _kind(value) not in "iu":
        raise Unfit("integers")
    return graph.constant(value, "u32")


def labels(graph: Graph, value: Any, like: Tensor | None) -> Tensor:
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


# the arguments of a call


@dataclass(frozen=True)
class Taken:
    """What a parameter takes, by its annotation. What nothing converts stays as it is: the method checks that itself."""

    none: bool
    text: bool
    convert: Callable[[Any], Any] | None
    tensor: Callable[..., Tensor] | None

    @staticmethod
    def by(hint: Any) -> Taken:
        kinds = frozenset(get_args(hint)) if get_origin(hint) in (Union, UnionType) else frozenset({hint})
        convert = CONVERTERS.get(kinds - {NoneType, str, *TENSORS})
        # an operand gets the dtype of the others: `Graph.apply` lifts it
        of_tensor = None if float in kinds else next((TENSORS[kind] for kind in kinds if kind in TENSORS), None)
        return Taken(NoneType in kinds, str in kinds, convert, of_tensor)

    def take(self, graph: Graph, value: Any, like: Tensor | None) -> Any:
        if (value is None and self.none) or (self.text and isinstance(value, str)):
            return value
        if self.convert and not (self.tensor and (isinstance(value, Tensor) or np.ndim(value))):
            return self.convert(value)
        if self.tensor is None:
            return value
        if not isinstance(value, (Tensor, *NUMBERS)):
            raise Unfit("a tensor of this graph, or numbers,")
        return self.tensor(graph, value, like)


@functools.cache
def declared(method: Callable[..., Any]) -> tuple[inspect.Signature, Mapping[str, Taken]]:
    """The signature of a method, and what is converted of its parameters."""
    hints = get_type_hints(method, include_extras=True)
    taken = {name: Taken.by(hint) for name, hint in hints.items() if name != "return"}
    return inspect.signature(method), {name: kind for name, kind in taken.items() if kind.convert or kind.tensor}


def converted(method: Callable[..., Any], graph: Graph, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """The arguments of a call, the graph first, as those that the body of `method` is written for."""
    signature, taken = declared(method)
    try:
        call = signature.bind(graph, *args, **kwargs)
    except TypeError as error:
        names = ", ".join(list(signature.parameters)[1:])
        raise GraphError(f"{method.__name__}: {error}; its arguments are {names}") from None
    given = {name: value for name, value in call.arguments.items() if name in taken}
    beside = (value for name, value in given.items() if taken[name].tensor is tensor)
    like = next((value for value in beside if isinstance(value, Tensor)), None)
    for name, value in given.items():
        try:
            call.arguments[name] = taken[name].take(graph, value, like)
        except Unfit as unfit:
            raise GraphError(f"{method.__name__}: expected {unfit} as {name}, got {shown(value)}") from None
    return call


def shown(value: Any) -> str:
    return f"an array {value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)
