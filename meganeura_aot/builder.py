"""Graph: what users write. Every method checks its arguments, appends one node, and returns a Tensor."""

from __future__ import annotations

import functools
import keyword
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .arguments import Word, converted
from .builder_attention import AttentionOperators
from .builder_conv import ImageOperators
from .builder_gather import GatherOperators
from .builder_norm import NormOperators
from .errors import GraphError
from .graph import Advance, DType, GraphIR, Node, TensorType, Value
from .op import Op
from .ops.state.leaf import Constant, Input, Leaf, Parameter, State
from .ops.state.op import AdvancePosition, Assign
from .program import Init
from .target import RAISABLE
from .tensor import Number, StateHandle, Tensor, current_value

# arguments of a Runner's methods, and what names no tensor in a file
RESERVED = frozenset({"self", "lr", "outputs", "__metadata__"})
NO_WORDS = frozenset({"build", "from_ir", "at", "finish"})  # public methods of Graph that make no node
PACKAGE = str(Path(__file__).resolve().parent) + os.sep
LARGEST_U32 = 2**32 - 1
LARGEST_TENSOR = RAISABLE["max-storage-buffer-binding-size"]


def located(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a builder method: convert its arguments, and let its errors name the user's line.

    A handle of a state becomes the value that the state has at the call; arguments.py converts the rest. An error is a
    GraphError with the user's file and line, also where Python itself refuses a value.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            now = {name: current_value(argument) for name, argument in kwargs.items()}
            given = converted(method, *map(current_value, args), **now)
            return method(*given.args, **given.kwargs)
        except (GraphError, ArithmeticError, AttributeError, TypeError, ValueError) as error:
            text = str(error) if isinstance(error, GraphError) else f"{method.__name__}: {error}"
            where = "" if "(built at " in text else f" (built at {user_location()})"
            raise GraphError(text + where) from (None if isinstance(error, GraphError) else error)

    return call


def locate_errors(cls: type[Graph]) -> type[Graph]:
    """Every public method, `located`."""
    for name in dir(cls):
        if not name.startswith("_") and name not in NO_WORDS and callable(getattr(cls, name)):
            setattr(cls, name, located(getattr(cls, name)))
    return cls


@locate_errors
class Graph(GatherOperators, NormOperators, AttentionOperators, ImageOperators):
    """A graph under construction. Shapes are static; () is a scalar; row-major; batch first."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._outputs: tuple[tuple[str, Value], ...] | None = None  # None until set_outputs
        self._names: dict[str, str] = {}
        self._newest: dict[Value, Value] = {}  # leaf of a written state: its version after the last write
        self._advances: list[Advance] = []
        self._location = ""  # of what is built, in place of a line of the user's

    # leaves

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "f32",
        *,
        minimum: Word | None = None,
        maximum: Word | None = None,
    ) -> Tensor:
        """A tensor given at every call, as the argument `name`.

        minimum, maximum: inclusive bounds of an integer input. The runner raises ValueError for a number outside of them,
        before it writes anything. It does not check the numbers of an input that is given as a GPU buffer. Inputs that are
        used as indices or as the step of `advance` always have an upper bound.
        """
        if not is_name(name):
            raise self._error(f"input {name!r}", "a Python identifier as its name", repr(name))
        type_ = self._type(f"input {name!r}", shape, dtype)
        leaf = Input(name, type_, minimum, maximum)
        if minimum is not None or maximum is not None:
            self._check_bounds(leaf)
        return self._leaf(leaf)

    def parameter(
        self, name: str, shape: Sequence[int], dtype: str = "f32", init: Init = None, trainable: bool = True
    ) -> Tensor:
        """A weight. init: None, "zeros", "ones", ("uniform", a) for [-a, a), ("normal", s) for deviation s; the
        last two are of floats.

        dtype: "f32", "i32", "u32", or "f16" for f32 numbers that are stored as halves and read as f32.
        """
        if not _is_init(init):
            expected = 'init "zeros", "ones", ("uniform", a) or ("normal", s) with finite a, s >= 0'
            raise self._error(f"parameter {name!r}", expected, repr(init))
        storage = dtype if dtype == "f16" else ""
        if isinstance(init, tuple):
            if dtype in ("i32", "u32"):
                raise self._error(
                    f"parameter {name!r}", f'init "zeros" or "ones" where the dtype is {dtype}', repr(init)
                )
            init = (init[0], float(init[1]))
            self._check_stored(f"parameter {name!r}", init[1], storage or "f32")
        type_ = self._type(f"parameter {name!r}", shape, "f32" if storage else dtype)
        return self._leaf(Parameter(name, type_, init, trainable, storage))

    def state(self, name: str, shape: Sequence[int], dtype: str = "f32", init: float = 0) -> Tensor:
        """A tensor that lives on the GPU across calls. `assign`, `advance`, `cache_write` write it.

        The result is a handle: each use of it reads the newest value. The result of any other method keeps the value that
        it had at the call, also where the method changes nothing, as `s[:]` does.
        dtype: "f32", "i32", "u32", or "f16" for a cache of f32 numbers that are stored as halves. init: the number that
        every element has at the start and after `reset`, such as 1 for a running variance.
        """
        storage = dtype if dtype == "f16" else ""
        type_ = self._type(f"state {name!r}", shape, "f32" if storage else dtype)
        self._check_stored(f"state {name!r}", init, dtype)
        return self._handle(self._leaf(State(name, type_, storage, float(init))).value)

    def constant(self, array: Any, dtype: str | None = None) -> Tensor:
        """Numbers known now. Floats become f32, bool and integers i32 (u32 for unsigned), unless dtype says."""
        is_long = isinstance(array, int) and not -(2**63) <= array < 2**64  # NumPy has no integer for it
        data = np.asarray(float(array) if is_long else array)
        if data.dtype.kind not in "biuf":
            raise self._error("constant", "numbers", f"an array of {data.dtype}")
        default = DType.I32 if is_long else {"f": DType.F32, "u": DType.U32}.get(data.dtype.kind, DType.I32)
        chosen = default if dtype is None else self._dtype("constant", dtype)
        if chosen.is_integer and data.size:
            limits = np.iinfo(chosen.numpy)
            low, high = data.min(), data.max()
            if data.dtype.kind == "f" or low < limits.min or high > limits.max:
                raise self._error("constant", f"integers in the range of {chosen}", f"{low} to {high}")
        with np.errstate(over="ignore"):
            stored = data.astype(chosen.numpy)
        lost = np.isfinite(data) & ~np.isfinite(stored)
        if lost.any():
            raise self._error("constant", f"numbers that {chosen} holds", str(data[lost][0]))
        return self._append(Constant.of(stored, chosen))

    # states

    def assign(self, state: Tensor, value: Tensor | Number) -> Tensor:
        """Write `value` into a state, and return the new value; each later use of the state's handle reads it."""
        leaf = self._assignable("assign", state)
        if self._storage(leaf):
            raise self._error(
                f"assign to state {self._label(leaf)!r}", "a state not stored as f16", "a cache of halves"
            )
        return self._write(leaf, Assign(), [self.lift(value, like=state)])

    def advance(self, state: Tensor, n: Tensor | Word, limit: Word) -> Tensor:
        """Move a u32 position state by n (an int >= 0, or a scalar u32 input), and return the new position.

        The runner raises before it writes anything: RuntimeError where the position would pass `limit`, and ValueError
        where an input n is more than the number of rows that `cache_write` writes at this position in the same graph.
        Where n - 1 is used as an index, declare the input with minimum=1.
        """
        leaf = self._state_leaf("advance", state)
        label = self._label(leaf)
        if state.dtype is not DType.U32:
            raise self._error(f"advance of state {label!r}", "dtype u32", str(state.dtype))
        if leaf in self._newest and not any(a.state == label for a in self._advances):
            raise self._error(f"advance of state {label!r}", "a state that `assign` does not write", "an assigned one")
        if limit < 0:
            raise self._error(f"advance of state {label!r}", f"a limit from 0 to {LARGEST_U32}", repr(limit))
        if isinstance(n, Tensor):
            self._check_owner("advance", n)
            op = self._nodes[n.value.node].op
            if not isinstance(op, Input) or n.shape != () or n.dtype is not DType.U32:
                raise self._error(f"advance of state {label!r}", "a scalar u32 input as the step", str(n))
            self._advances.append(Advance(label, op.label, limit))
            return self._write(leaf, AdvancePosition(), [n])
        if n < 0:
            raise self._error(f"advance of state {label!r}", f"a step from 0 to {LARGEST_U32}", repr(n))
        self._advances.append(Advance(label, n, limit))
        return self._write(leaf, AdvancePosition(n), [])

    # outputs

    def set_outputs(self, outputs: Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        """Name what a call returns: a dict, or a list whose outputs are output_0, output_1, ...

        A graph that writes a state, such as one that fills caches, may have no outputs.
        """
        if not isinstance(outputs, Mapping):
            if not isinstance(outputs, Sequence):
                raise self._error("set_outputs", "a list or a dict of tensors", type(outputs).__name__)
            outputs = {f"output_{index}": tensor for index, tensor in enumerate(outputs)}
        if not outputs and not self._newest:
            raise self._error("set_outputs", "one output or more where no state is written", "none")
        for name, tensor in outputs.items():
            if not isinstance(name, str) or not name or not name.isprintable():
                raise self._error("set_outputs", "printable text as the name of an output", repr(name))
            if name in RESERVED:
                raise self._error(f"output {name!r}", f"a name other than {', '.join(sorted(RESERVED))}", repr(name))
            self._check_owner(f"output {name!r}", tensor)
        self._outputs = tuple((name, tensor.value) for name, tensor in outputs.items())

    def build(self) -> GraphIR:
        """The frozen graph. Raises GraphError where `set_outputs` was not called."""
        if self._outputs is None:
            raise GraphError("graph: expected outputs, got none; call set_outputs")
        return GraphIR(tuple(self._nodes), self._outputs, tuple(self._advances)).verify()

    # what rewrites graphs, and importers, go on from and end with

    @classmethod
    def from_ir(cls, graph: GraphIR) -> Graph:
        """A builder that goes on where a graph ended."""
        g = cls()
        g._nodes, g._outputs, g._advances = list(graph.nodes), graph.outputs, list(graph.advances)
        g._names = {node.op.label: node.location for node in graph.nodes if isinstance(node.op, Leaf)}
        return g

    @contextmanager
    def at(self, location: str) -> Iterator[None]:
        """What is built within names `location` as the place where it was built, in place of a line of the user's."""
        before, self._location = self._location, location
        try:
            yield
        finally:
            self._location = before

    def finish(self, gradients: Mapping[str, Tensor] | None = None) -> GraphIR:
        """The frozen graph, which need not have outputs, with the gradients of parameters by name."""
        named = tuple((name, tensor.value) for name, tensor in (gradients or {}).items())
        return GraphIR(tuple(self._nodes), self._outputs or (), tuple(self._advances), named).verify()

    # how nodes are made

    def apply(self, op: Op, *inputs: Tensor | Number) -> Tensor:
        """Append a node of one output."""
        first = next((x for x in inputs if isinstance(x, Tensor)), None)
        return self._append(op, *(self.lift(x, like=first) for x in inputs))

    def apply_many(self, op: Op, *inputs: Tensor | Number) -> tuple[Tensor, ...]:
        """Append a node of several outputs."""
        node = self.apply(op, *inputs).value.node
        return tuple(Tensor(self, Value(node, port), type_) for port, type_ in enumerate(self._nodes[node].types))

    def lift(self, x: Any, like: Tensor | None = None) -> Tensor:
        """A Tensor of this graph: x itself, or numbers as a constant of the dtype of `like`."""
        if isinstance(x, Tensor):
            self._check_owner("operand", x)
            return x
        if isinstance(x, int | float | np.ndarray | np.generic):
            if like is not None and like.dtype.is_integer and np.asarray(x).dtype.kind == "f":
                got = f"{x} of f32" if np.ndim(x) == 0 else f"f32{list(np.shape(x))}"
                raise self._error("operand", f"integers, as the tensor beside it is {like.type}", f"{got}: cast one")
            return self.constant(x, None if like is None else like.dtype)
        raise self._error("operand", "a tensor of this graph, or numbers", f"{type(x).__name__}")

    def _append(self, op: Op, *inputs: Tensor) -> Tensor:
        types = op.inferred(*(tensor.type for tensor in inputs))
        for type_ in types:
            if type_.nbytes > LARGEST_TENSOR:
                raise self._error(op.name, f"a tensor of at most {LARGEST_TENSOR} bytes", str(type_))
        values = tuple(tensor.value for tensor in inputs)
        self._nodes.append(Node(op, values, types, self._location or user_location()))
        return Tensor(self, Value(len(self._nodes) - 1), types[0])

    def _leaf(self, op: Input | Parameter | State) -> Tensor:
        subject = f"{op.name} {op.label!r}"
        if not isinstance(op.label, str) or not op.label or not op.label.isprintable():
            raise self._error(subject, "printable text as its name", repr(op.label))
        if op.label in RESERVED:
            raise self._error(subject, f"a name other than {', '.join(sorted(RESERVED))}", repr(op.label))
        if op.label in self._names:
            raise self._error(subject, "a name used once", f"the name of the one built at {self._names[op.label]}")
        self._names[op.label] = user_location()
        return self._append(op)

    def _write(self, leaf: Value, op: Op, operands: list[Tensor]) -> Tensor:
        written = self._append(op, self._handle(leaf), *operands)
        self._newest[leaf] = written.value
        return written

    def _handle(self, leaf: Value) -> StateHandle:
        return StateHandle(self, leaf, self._nodes[leaf.node].types[0])

    def _state_leaf(self, action: str, tensor: Tensor) -> Value:
        """The leaf of a state. The tensor is its handle, or one of its versions."""
        if not isinstance(tensor, Tensor):
            raise self._error(action, "a state", type(tensor).__name__)
        self._check_owner(action, tensor)
        value = tensor.value
        while self._nodes[value.node].op.writes:
            value = self._nodes[value.node].inputs[self._nodes[value.node].op.writes[value.port]]
        if not isinstance(self._nodes[value.node].op, State):
            raise self._error(action, "a state", f"the {self._nodes[value.node].op.name} {tensor}")
        return value

    def _assignable(self, action: str, state: Tensor) -> Value:
        """The leaf of a state that other operators than `advance` may write."""
        leaf = self._state_leaf(action, state)
        label = self._label(leaf)
        if any(advance.state == label for advance in self._advances):
            raise self._error(f"{action} to state {label!r}", "a state that `advance` does not move", "a position")
        return leaf

    def _storage(self, leaf: Value) -> str:
        op = self._nodes[leaf.node].op
        return op.storage if isinstance(op, State) else ""

    def _label(self, leaf: Value) -> str:
        op = self._nodes[leaf.node].op
        assert isinstance(op, State)
        return op.label

    # checks

    def _check_owner(self, subject: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            raise self._error(subject, "a tensor of this graph", type(tensor).__name__)
        if tensor.graph is not self:
            raise self._error(subject, "a tensor of this graph", "one of another graph")

    def _check_bounds(self, leaf: Input) -> None:
        subject, dtype = f"bounds of input {leaf.label!r}", leaf.type.dtype
        if not dtype.is_integer:
            raise self._error(subject, "an input of i32 or u32", f"one of {dtype}")
        low, high = leaf.bounds()
        limits = np.iinfo(dtype.numpy)
        if not limits.min <= low <= high <= limits.max:
            expected = f"integers from {limits.min} to {limits.max}, the minimum first"
            raise self._error(subject, expected, f"{leaf.minimum!r} and {leaf.maximum!r}")

    def _type(self, subject: str, shape: Sequence[int], dtype: str) -> TensorType:
        if any(size < 0 for size in shape):
            raise self._error(subject, "a shape of integers >= 0", repr(shape))
        return TensorType(tuple(shape), self._dtype(subject, dtype))

    def _dtype(self, subject: str, dtype: str) -> DType:
        if dtype not in list(DType):
            raise self._error(subject, f"a dtype among {', '.join(DType)}", repr(dtype))
        return DType(dtype)

    def _check_stored(self, subject: str, init: float, dtype: str) -> None:
        """Raise GraphError where a parameter or state of this dtype cannot hold its start value."""
        if dtype in ("i32", "u32"):
            limits = np.iinfo(DType(dtype).numpy)
            if not (float(init).is_integer() and limits.min <= init <= limits.max):
                raise self._error(subject, f"an integer that {dtype} holds as init", repr(init))
            return
        with np.errstate(over="ignore"):
            held = np.isfinite(np.float16(init) if dtype == "f16" else np.float32(init))
        if not held:
            raise self._error(subject, f"a number that {dtype} holds as init", repr(init))

    def _error(self, subject: str, expected: str, got: str) -> GraphError:
        return GraphError(f"{subject} (built at {user_location()}): expected {expected}, got {got}")


def is_name(name: object) -> bool:
    """A Python identifier that stays itself as a keyword argument and an attribute."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        return False
    return unicodedata.normalize("NFKC", name) == name


def _is_init(init: Any) -> bool:
    if init is None or isinstance(init, str):
        return init in (None, "zeros", "ones")
    if not isinstance(init, tuple) or len(init) != 2 or init[0] not in ("uniform", "normal"):
        return False
    return _is_finite(init[1]) and init[1] >= 0


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)


def user_location() -> str:
    """file:line of the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
