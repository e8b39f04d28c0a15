"""A value that was read from a state keeps what it was when the state is written, whichever method read it.

Every public method of Graph has a row here. The values are compared with those of the same read in a graph that writes
nothing, for the reference would follow the builder into an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, Tensor, compile_graph
from meganeura_aot.builder import NO_WORDS
from meganeura_aot.graph import GraphIR, Value
from meganeura_aot.op import OPS
from meganeura_aot.ops.state.leaf import Input, State
from meganeura_aot.reference import evaluate
from tests import harness

Array = np.ndarray[Any, Any]
Read = Callable[[Graph, Any], Any]

# how the state is declared, and what it holds at first: numbers that f16 holds too
STATES: dict[str, tuple[tuple[int, ...], str, Array]] = {
    "cache": ((1, 4, 4), "f32", np.arange(1, 17, dtype=np.float32).reshape(1, 4, 4) / 16),
    "halves": ((1, 4, 4), "f16", np.arange(1, 17, dtype=np.float32).reshape(1, 4, 4) / 16),
    "vector": ((4,), "f32", np.array([1, 2, 3, 4], np.float32) / 4),
    "counter": ((4,), "u32", np.array([0, 1, 2, 3], np.uint32)),
}
FLOATS, ANY = "cache vector", "cache halves vector counter"


def write_by_assign(g: Graph, s: Tensor) -> None:
    g.assign(s, g.cast(g.input("x", s.shape), s.dtype))


def write_by_cache_write(g: Graph, s: Tensor) -> None:
    g.cache_write(s, g.input("rows", (1, 2, 4)), g.constant(1, "u32"))


def write_by_advance(g: Graph, s: Tensor) -> None:
    g.advance(s, 2, limit=100)


def write_by_draw(g: Graph, s: Tensor) -> None:
    g.random_bits((8,), s)


def write_by_batch_norm(g: Graph, s: Tensor) -> None:
    g.batch_norm(g.input("batch", (5, 4)), s, g.state("variance", (4,), init=1), training=True)


WRITES: dict[str, tuple[str, Callable[[Graph, Tensor], None]]] = {
    "assign": ("cache vector counter", write_by_assign),
    "cache_write": ("cache halves", write_by_cache_write),
    "advance": ("counter", write_by_advance),
    "draw": ("counter", write_by_draw),
    "batch_norm": ("vector", write_by_batch_norm),
}

# methods whose result does not depend on a tensor that they are given
WITHOUT_A_ROW = {*NO_WORDS, "constant", "input", "parameter", "set_outputs", "state"}

OF_ONE_TENSOR = """
abs ceil clip cos elu erf exp expm1 floor gelu hard_sigmoid hard_swish leaky_relu log log1p log_softmax neg recip relu
round rsqrt sigmoid sign silu sin softmax softplus sqrt stop_gradient tanh rms_norm layer_norm argmax argmin mean
"""
OF_TWO_TENSORS = "add bce_loss div l1_loss matmul matmul_at matmul_bt mse_loss pow silu_grad swiglu swiglu_grad_up"
OF_TWO_INTEGERS = """
bitwise_and bitwise_or bitwise_xor equal floor_div greater greater_equal less less_equal maximum minimum mod mul
not_equal shift_left shift_right sub
"""
OF_Q_K_V = "attention causal_attention cross_attention full_attention multi_head_attn sliding_window_attention"
OF_A_CONVOLUTION = "conv conv1d conv2d conv_transpose conv_transpose1d conv_transpose2d"


def of_one(name: str) -> Read:
    return lambda g, s: getattr(g, name)(s)


def of_two(name: str) -> Read:
    return lambda g, s: getattr(g, name)(s, s)


def of_no_axes(name: str) -> Read:
    return lambda g, s: getattr(g, name)(s, ())


def of_qkv(name: str) -> Read:
    more = {"window": 2} if name == "sliding_window_attention" else {}
    return lambda g, s: getattr(g, name)(s, s, s, 1, **more)


def of_convolution(name: str) -> Read:
    return lambda g, s: getattr(g, name)(s, np_one(g, (4, 4, 1)))


def np_one(g: Graph, shape: tuple[int, ...]) -> Tensor:
    return g.constant(np.ones(shape, np.float32))


def position(g: Graph) -> Tensor:
    return g.constant(1, "u32")


# For each method: the states that it can read, and how. Where a call can leave its argument as it is, it does.
READS: dict[str, tuple[tuple[str, Read], ...]] = {
    **{name: (("cache", of_one(name)),) for name in OF_ONE_TENSOR.split()},
    **{name: (("cache", of_two(name)),) for name in OF_TWO_TENSORS.split()},
    **{name: (("counter", of_two(name)),) for name in OF_TWO_INTEGERS.split()},
    **{name: (("cache", of_qkv(name)),) for name in OF_Q_K_V.split()},
    **{name: (("cache", of_convolution(name)),) for name in OF_A_CONVOLUTION.split()},
    # layout
    "reshape": ((ANY, lambda g, s: g.reshape(s, s.shape)), (ANY, lambda g, s: g.reshape(s, (2, -1)))),
    "slice": (
        (ANY, lambda g, s: s[:]),
        (ANY, lambda g, s: s[...]),
        (ANY, lambda g, s: s[: s.shape[0]]),
        (ANY, lambda g, s: s[None]),
        ("cache halves", lambda g, s: s[0]),
        (ANY, lambda g, s: g.slice(x=s, index=slice(None))),
    ),
    "split": ((ANY, lambda g, s: g.split(s, s.shape[0])[0]), (ANY, lambda g, s: g.split(s, [1] * s.shape[0])[-1])),
    "concat": ((ANY, lambda g, s: g.concat([s])), (ANY, lambda g, s: g.concat((s, s)))),
    "expand": ((ANY, lambda g, s: g.expand(s, s.shape)), ("vector", lambda g, s: g.expand(s, (3, 4)))),
    "permute": ((ANY, lambda g, s: g.permute(s, range(s.rank))),),
    "transpose": ((ANY, lambda g, s: g.transpose(s, range(s.rank))), ("cache halves", lambda g, s: g.transpose(s))),
    "pad": ((FLOATS, lambda g, s: g.pad(s, [(0, 0)] * s.rank)),),
    "upsample": (("cache", lambda g, s: g.upsample(s, 1)),),
    "upsample_2x": (("cache", lambda g, s: g.upsample_2x(s)),),
    "sum_to": ((FLOATS, lambda g, s: g.sum_to(s, s.shape)),),
    "expand_axes": ((ANY, lambda g, s: g.expand_axes(s, s.shape, ())),),
    # pointwise
    "lift": ((ANY, lambda g, s: g.lift(s)),),
    "cast": ((ANY, lambda g, s: g.cast(s, s.dtype)), ("counter", lambda g, s: g.cast(s, "f32"))),
    "clip": (
        (ANY, lambda g, s: g.clip(s)),
        ("cache", lambda g, s: g.clip(s, 0.25)),
        ("cache", lambda g, s: g.clip(s, high=0.5)),
    ),
    "where": (("cache", lambda g, s: g.where(s, s, s)),),
    "swiglu_concat": (("cache", lambda g, s: g.swiglu_concat(s)),),
    "swiglu_grad_gate": (("cache", lambda g, s: g.swiglu_grad_gate(s, s, s)),),
    "bias_add": (("vector", lambda g, s: g.bias_add(s, s)),),
    "dropout": ((FLOATS, lambda g, s: g.dropout(s, 0.0)), ("cache", lambda g, s: g.dropout(s, 0.5))),
    # reductions and norms
    **{name: ((FLOATS, of_one(name)), (FLOATS, of_no_axes(name))) for name in ("sum", "max", "min")},
    "group_norm": (("cache", lambda g, s: g.group_norm(s, 2)),),
    "batch_norm": (
        ("cache", lambda g, s: g.batch_norm(s, np_one(g, (4,)), np_one(g, (4,)))),
        ("vector", lambda g, s: g.batch_norm(np_one(g, (2, 4)), s, s, s, s)),
    ),
    "cross_entropy_loss": (("cache", lambda g, s: g.cross_entropy_loss(s, s)),),
    "max_pool": (("cache", lambda g, s: g.max_pool(s, 1)),),
    "avg_pool": (("cache", lambda g, s: g.avg_pool(s, 1)),),
    "global_avg_pool": (("cache", lambda g, s: g.global_avg_pool(s)),),
    "global_max_pool": (("cache", lambda g, s: g.global_max_pool(s)),),
    # indices and positions
    "embedding": (("counter", lambda g, s: g.embedding(s, np_one(g, (5, 2)))),),
    "gather": (("cache", lambda g, s: g.gather(s, g.constant([0], "u32"))),),
    "gather_elements": (("counter", lambda g, s: g.gather_elements(s, s)),),
    "scatter_add": (("vector", lambda g, s: g.scatter_add(g.constant([2], "u32"), s[None], 3)),),
    "one_hot": (("counter", lambda g, s: g.one_hot(s, 5)),),
    "top_k": (("cache", lambda g, s: g.top_k(s, 4)[0]), ("cache", lambda g, s: g.top_k(s, 1)[1])),
    "rope": (("cache", lambda g, s: g.rope(s, head_dim=4)),),
    "attention_with_lse": (("cache", lambda g, s: g.attention_with_lse(s, s, s, 1)[1]),),
    "cached_attention": (
        ("cache halves", lambda g, s: g.cached_attention(np_one(g, (1, 2, 4)), s, s, position(g), 1)),
    ),
    # writers: what they return is a value like any other
    "assign": ((FLOATS, lambda g, s: g.assign(s, s * 2.0)), (FLOATS, lambda g, s: g.assign(g.assign(s, s * 2.0), s))),
    "cache_write": (("cache halves", lambda g, s: g.cache_write(s, np_one(g, (1, 1, 4)), position(g))),),
    "advance": (("counter", lambda g, s: g.advance(s, 3, limit=100)),),
    "random_bits": (("counter", lambda g, s: g.random_bits((8,), s)),),
    "random_uniform": (("counter", lambda g, s: g.random_uniform((8,), s)),),
    "random_normal": (("counter", lambda g, s: g.random_normal((8,), s)),),
    # any operator
    "apply": ((ANY, lambda g, s: g.apply(OPS["reshape"](s.shape), s)),),
    "apply_many": (("cache", lambda g, s: g.apply_many(OPS["top_k"](4), s)[0]),),
}


def public_methods() -> set[str]:
    return {name for name in dir(Graph) if not name.startswith("_") and callable(getattr(Graph, name))}


def test_every_public_method_has_a_row() -> None:
    assert public_methods() == READS.keys() | WITHOUT_A_ROW
    assert not READS.keys() & WITHOUT_A_ROW


# The builder refuses these beside `advance`: nothing else may write a position.
NOT_BESIDE_ADVANCE = {"draw", "random_bits", "random_uniform", "random_normal", "assign"}


def cases() -> Iterator[Any]:
    """For each method, each state that it can read, and each writer of this state: the state, the read and the write."""
    for method, reads in READS.items():
        for number, (kinds, read) in enumerate(reads):
            for kind, (writer, (written, write)) in itertools.product(kinds.split(), WRITES.items()):
                names = {method, writer}
                if "advance" in names and names & NOT_BESIDE_ADVANCE:
                    continue
                if kind in written.split():
                    yield pytest.param(kind, read, write, id=f"{method}-{number}-{kind}-{writer}")


def graph_of(kind: str, read: Read, write: Callable[[Graph, Tensor], None] | None) -> Graph:
    """Outputs: what is read before the write, a view of it made after the write, and the state at the end."""
    shape, dtype, _ = STATES[kind]
    g = Graph()
    s = g.state("s", shape, dtype)
    old = read(g, s)
    if write is not None:
        write(g, s)
    late = g.reshape(old, (*old.shape, 1))
    g.set_outputs({"old": old, "late": late, "new": s})
    return g


def inputs_of(graph: GraphIR, call: int) -> dict[str, Array]:
    rng = np.random.default_rng(call)
    types = {node.op.label: node.types[0] for node in graph.nodes if isinstance(node.op, Input)}
    return {name: rng.integers(1, 50, type_.shape).astype(np.float32) for name, type_ in types.items()}


@pytest.mark.parametrize(("kind", "read", "write"), list(cases()))
def test_read_then_write(kind: str, read: Read, write: Callable[[Graph, Tensor], None]) -> None:
    alone, both = graph_of(kind, read, None).build(), graph_of(kind, read, write)
    whole = both.build()
    held: dict[str, Array] = {"s": STATES[kind][2], "variance": np.ones(4, np.float32)}
    runners = [
        load(both, optimize, held) for optimize in (True, False) if in_the_state(whole, dict(whole.outputs)["old"])
    ]
    for call in range(2):
        inputs = inputs_of(whole, call)
        old = evaluate(alone, held)["old"]
        results = evaluate(whole, held | inputs)
        np.testing.assert_array_equal(results["old"], old)
        np.testing.assert_array_equal(results["late"].reshape(old.shape), old)
        np.testing.assert_array_equal(results["new"], results["s"])
        assert not np.array_equal(results["s"], held["s"])
        for runner in runners:
            got = runner.run(**inputs)
            np.testing.assert_array_equal(got["old"], old.astype(got["old"].dtype))
            np.testing.assert_array_equal(got["late"].reshape(old.shape), got["old"])
            np.testing.assert_array_equal(got["new"], runner.get_state("s"))
            np.testing.assert_allclose(got["new"], results["new"], rtol=1e-6 if kind != "halves" else 1e-3)
        held |= {name: array for name, array in results.items() if name in held}
        for runner in runners:
            held |= {name: runner.get_state(name) for name in runner.states}


def load(graph: Graph, optimize: bool, held: Mapping[str, Array]) -> Any:
    runner = harness.load(compile_graph(graph, optimize=optimize))
    for name in runner.states:
        runner.set_state(name, held[name].astype(runner.get_state(name).dtype))
    return runner


def in_the_state(graph: GraphIR, value: Value) -> bool:
    """Whether a value is a version of a state, or a view of one: only its buffer can then be overwritten."""
    node = graph.nodes[value.node]
    while node.op.is_view or node.op.writes:
        value = node.inputs[0]
        node = graph.nodes[value.node]
    return isinstance(node.op, State)


def test_a_draw_from_a_value_of_a_state_moves_the_state_on() -> None:
    g = Graph()
    s = g.state("s", (4,), "u32")
    version = s[:]
    first, second = g.random_bits((4,), version), g.random_bits((4,), version)
    g.set_outputs({"first": first, "second": second})
    results = evaluate(g.build(), {"s": STATES["counter"][2]})
    assert not np.array_equal(results["first"], results["second"])


def test_batch_norm_adds_the_bias_that_it_was_given() -> None:
    """Also where the bias is the very state that it writes."""
    g = Graph()
    s = g.state("s", (4,))
    g.set_outputs({"y": g.batch_norm(g.input("x", (2, 4)), s, g.state("v", (4,)), b=s, training=True)})
    x = np.array([[-1, -1, -1, -1], [1, 1, 1, 1]], np.float32)
    got = harness.check(g, {"x": x, "s": np.array([10, 20, 30, 40], np.float32), "v": np.ones(4, np.float32)})
    np.testing.assert_allclose(got["y"].mean(0), [10, 20, 30, 40], rtol=1e-6)


def test_an_output_is_what_its_handle_was() -> None:
    for outputs in (lambda s: {"y": s}, lambda s: [s], lambda s: (s,)):
        g = Graph()
        s = g.state("s", (2,))
        g.set_outputs(outputs(s))
        g.assign(s, s + 1.0)
        program = compile_graph(g)
        runner = harness.load(program)
        for call in range(2):
            (got,) = runner.run().values()
            np.testing.assert_array_equal(got, [call, call])
