"""What builder methods make of their arguments: NumPy's values as Python's, and numbers that 32 bits do not hold refused.

Generated from tests/builder_calls.py: every argument of every method.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, Tensor, Training, compile_graph
from meganeura_aot.arguments import Indices, Labels
from meganeura_aot.op import LARGEST_F32
from meganeura_aot.ops.state.leaf import Input, Parameter, State
from meganeura_aot.training import DEFAULTS
from tests import harness
from tests.builder_calls import CALLS, Array, StateOf, call, methods, signature, tensors_of

Place = tuple[Any, ...]  # keys and indices that lead to a value among the arguments of a call
LOCATED = re.compile(r"\(built at \S+/tests/\w+\.py:\d+\)")
GIVEN = [name for name, arguments in CALLS.items() if arguments]
TAKE_TENSORS = [name for name in GIVEN if name not in ("constant", "lift", "set_outputs")]

HOSTILE = [1e39, -1e39, math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 2**31 - 1, 2**31, -(2**31), 2**32, 2**63]
HOSTILE += [-1, 0, True, "3", None, (), np.float32(0.5), np.float64(1e39), np.int64(1), np.uint64(2**63)]


def places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value among the arguments of a call, sequences also as a whole."""
    yield place, value
    if isinstance(value, dict | tuple):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*place, key))


def replaced(value: Any, place: Place, new: Any) -> Any:
    """The arguments with another value at one place."""
    if not place:
        return new
    items = value.items() if isinstance(value, dict) else enumerate(value)
    done = {key: replaced(item, place[1:], new) if key == place[0] else item for key, item in items}
    return done if isinstance(value, dict) else tuple(done.values())


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The arguments with every array and every state changed."""
    if isinstance(value, dict):
        return {key: changed(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(changed(item, change) for item in value)
    return change(value) if isinstance(value, np.ndarray | StateOf) else value


def graph_of(name: str, tensor: Callable[[Graph, Array], Any], place: Place | None = None, new: Any = None) -> Graph:
    """The graph of one call. tensor: what stands for an array. new: what takes the place of the value at `place`."""
    g = Graph()
    states = {s: g.state(s.name, s.shape, s.dtype) for _, s in places(CALLS[name]) if isinstance(s, StateOf)}

    def change(value: Any) -> Any:
        if isinstance(value, StateOf):
            return states[value]
        return value if name == "constant" else tensor(g, value)

    arguments = changed(CALLS[name], change)
    result = call(g, name, arguments if place is None else replaced(arguments, place, new))
    if not g._outputs:
        g.set_outputs(tensors_of(result))
    return g


def text(name: str, tensor: Callable[[Graph, Array], Any], place: Place | None = None, new: Any = None) -> str:
    return graph_of(name, tensor, place, new).build().text()


def as_it_is(g: Graph, array: Array) -> Array:
    return array


def as_input(g: Graph, array: Array) -> Tensor:
    dtype = {"f": "f32", "u": "u32", "i": "i32"}[array.dtype.kind]
    return g.input(f"x{len(g._nodes)}", array.shape, dtype)


def test_every_method_and_every_argument_has_a_row() -> None:
    assert set(CALLS) == set(methods()), "tests/builder_calls.py has one call of every public method of Graph"
    for name, arguments in CALLS.items():
        assert set(arguments) == set(signature(name).parameters), name


# ---- NumPy's values


@pytest.mark.parametrize("name", TAKE_TENSORS)
def test_arrays_stand_for_tensors(name: str) -> None:
    assert text(name, as_it_is) == text(name, Graph.constant)


@pytest.mark.parametrize("name", TAKE_TENSORS)
def test_an_array_stands_beside_tensors(name: str) -> None:
    for place, array in places(CALLS[name]):
        if isinstance(array, np.ndarray):
            ir = graph_of(name, as_input, place, array).build()
            constants = [node.op.array() for node in ir.nodes if node.op.name == "constant"]  # type: ignore[attr-defined]
            assert any(np.array_equal(c, array) and c.dtype == array.dtype for c in constants), place


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("name", TAKE_TENSORS)
def test_indices_of_any_integers(name: str, kind: type[Any]) -> None:
    hints = get_type_hints(getattr(Graph, name), include_extras=True)
    for parameter, array in CALLS[name].items():
        kinds = {hints.get(parameter), *get_args(hints.get(parameter))}
        if isinstance(array, np.ndarray) and kinds & {Indices, Labels}:
            assert text(name, as_it_is, (parameter,), array.astype(kind)) == text(name, as_it_is)


@pytest.mark.parametrize("name", GIVEN)
def test_numbers_of_numpy(name: str) -> None:
    plain = text(name, Graph.constant)
    for place, value in places(CALLS[name]):
        if isinstance(value, bool):
            others: list[Any] = [np.bool_(value)]
        elif isinstance(value, int):
            others = [np.int64(value), np.uint8(value), np.array(value)]
        elif isinstance(value, float):
            others = [np.float64(value), np.float32(value)]
        elif isinstance(value, tuple) and np.asarray(changed(value, str)).dtype.kind == "i":
            others = [np.array(value), np.array(value, np.int32), [*value]]
        else:
            continue
        for other in others:
            assert text(name, Graph.constant, place, other) == plain, (place, other)


def test_integers_beside_floats_are_floats() -> None:
    g = Graph()
    x = g.input("x", (2, 2))
    whole = np.array([[1, 2], [3, 4]])
    g.set_outputs({"left": g.matmul(whole, x), "right": g.matmul(x, whole), "operator": x @ whole})  # type: ignore[arg-type]
    got = harness.check(g, {"x": np.array([[1, 1], [0, 2]], np.float32)})
    np.testing.assert_array_equal(got["right"], [[4, 6], [6, 8]])
    np.testing.assert_array_equal(got["operator"], got["right"])


def test_integers_of_more_than_64_bits() -> None:
    """f32 holds them, rounded; 32 bits do not."""
    g = Graph()
    g.set_outputs([g.input("x", (2,)) * 10**20 - 2**100])
    harness.check(g, {"x": np.array([1e11, -3], np.float32)})
    for build in (lambda: g.constant(10**20), lambda: g.input("ids", (2,), "i32") + -(2**70)):
        with pytest.raises(GraphError, match=r"constant \(built at .*: expected integers in the range of i32, got"):
            build()


def test_parts_from_any_iterable() -> None:
    texts = set()
    for collect in (list, iter, lambda parts: dict(enumerate(parts)).values()):
        g = Graph()
        state = g.state("s", (2,))
        joined = g.concat(collect([state, g.input("x", (2,))]))
        g.assign(state, state + 1)
        g.set_outputs([joined])
        texts.add(g.build().text())
    assert len(texts) == 1
    with pytest.raises(GraphError, match="tensor: expected indices.* use split"):
        g.concat(state)


def test_labels_of_pytorch() -> None:
    """-100 is the row that does not count."""
    texts = []
    for labels in (np.array([1, -100, 3]), np.array([1, 2**32 - 100, 3], np.uint32)):
        g = Graph()
        g.set_outputs([g.cross_entropy_loss(g.input("logits", (3, 4)), labels)])  # type: ignore[arg-type]
        texts.append(g.build().text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("wrong", [np.array([0.5]), np.array([-1]), np.array([True]), np.array([2**32])])
def test_indices_are_integers_of_32_bits(wrong: Array) -> None:
    g = Graph()
    with pytest.raises(GraphError, match=LOCATED):
        g.gather(g.input("x", (3,)), wrong)  # type: ignore[arg-type]


# ---- numbers that do not fit


@pytest.mark.parametrize("name", GIVEN)
def test_hostile_numbers(name: str) -> None:
    """Each is refused at the user's line, or the graph compiles, and does what the reference says."""
    seen = {text(name, as_input)}
    for place, value in places(CALLS[name]):
        if place == ("inputs",) or not isinstance(value, int | float | tuple):
            continue
        for hostile in HOSTILE:
            result = attempt(name, place, hostile)
            if isinstance(result, GraphError):
                assert LOCATED.search(str(result)), (place, hostile, result)
            elif (made := result.build().text()) not in seen:
                seen.add(made)
                compiles_and_agrees(name, result)


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("kind", DEFAULTS)
def test_hostile_numbers_of_training(kind: str, hostile: Any) -> None:
    for name in (*DEFAULTS[kind], "clip_norm", "lr_mult.w"):
        try:
            held = Training(kind, **{name: (0.5, hostile) if name == "betas" else hostile}).numbers[name]
        except GraphError:
            continue
        assert np.isfinite(np.asarray(held, np.float32)).all(), (name, hostile)


def attempt(name: str, place: Place, hostile: Any) -> Graph | GraphError:
    try:
        return graph_of(name, as_input, place, hostile)
    except GraphError as error:
        return error


def compiles_and_agrees(name: str, graph: Graph) -> None:
    """Its WGSL and overrides are numbers; without states and parameters it also runs as the reference does."""
    program = compile_graph(graph)
    for dispatch in program.plan.dispatches():
        assert not re.search(r"\b(inf|nan)f?\b", re.sub(r"//.*", "", dispatch.kernel.text))
        for key, value in dispatch.constants:
            fits = -(2**31) <= value < 2**32 if isinstance(value, int) else abs(value) <= LARGEST_F32
            assert fits, (key, value)
    nodes = graph.build().nodes
    inputs = [node.op.label for node in nodes if isinstance(node.op, Input)]
    arrays = [array for _, array in places(CALLS[name]) if isinstance(array, np.ndarray)]
    if len(inputs) != len(arrays) or any(isinstance(node.op, State | Parameter) for node in nodes):
        return
    feeds = dict(zip(inputs, arrays, strict=True))
    for buffer in program.plan.buffers.values():
        if buffer.kind == "input" and buffer.bounds and feeds[buffer.label].max() > buffer.bounds[1]:
            return  # the runner refuses these feeds
    harness.check(graph, feeds, twins=False)
