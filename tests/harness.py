"""Run a compiled program in this process: one device and one pipeline cache, canaries behind every buffer.

Every buffer is longer than declared and bound whole; its tail, unlike any other's, must come back unchanged. Scratch and outputs start as
NaN. The Model section is the emitted one; only black is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import wgpu

import runtime_stub
from meganeura_aot import Graph, Program, compile_graph
from meganeura_aot.emit import Header, declared_constants, emit_model
from meganeura_aot.graph import GraphIR
from meganeura_aot.names import choose_names
from meganeura_aot.ops.state.leaf import Leaf, Parameter
from meganeura_aot.reference import evaluate
from runtime_stub.core import Buffer, ModelRunner, Pipeline
from runtime_stub.doctor import choose_adapter, request_device
from tests.tolerance import assert_within, bound, pointwise_bound

Array = np.ndarray[Any, Any]

TAIL = 64  # floats behind every buffer
PIPELINES: dict[tuple[str, tuple[tuple[str, float], ...], bool], Pipeline] = {}


@functools.cache
def shared_device() -> Any:
    """The adapter that a runner would choose, with WebGPU's default limits and every optional feature it has."""
    return request_device(choose_adapter(None), CanaryRunner)


class CanaryRunner(ModelRunner):
    """A runner whose buffers have tails, whose scratch starts as NaN, and whose pipelines are shared by all tests."""

    fill: float = 1e30
    length: int = TAIL
    tails: dict[Buffer, Array]
    optional_features = ("subgroup", "shader-f16")

    def allocate(self, buffer: Buffer) -> Any:
        tails: dict[Buffer, Array] = self.__dict__.setdefault("tails", {})
        words = max(1, buffer.nbytes // 4)
        # other numbers, or other NaNs, behind every buffer, so that a copy from one tail to another shows
        bits = np.full(self.length, self.fill, np.float32).view(np.uint32) + np.uint32(len(tails) * TAIL)
        tails[buffer] = (bits + np.arange(self.length, dtype=np.uint32)).view(np.float32)
        content = np.concatenate(
            [np.full(words, 0 if buffer.kind in ("state", "moment") else np.nan, np.float32), tails[buffer]]
        )
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.UNIFORM
        usage |= wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        gpu = self.device.create_buffer(label=buffer.name, size=content.nbytes, usage=usage)
        self.device.queue.write_buffer(gpu, 0, content)
        return gpu

    def create_pipeline(self, code: str, **constants: float) -> Pipeline:
        key = (code, tuple(constants.items()), self.checked)
        if key not in PIPELINES:
            PIPELINES[key] = super().create_pipeline(code, **constants)
        return PIPELINES[key]

    def assert_tails(self) -> None:
        """Every byte behind every buffer is what it was."""
        for buffer, expected in self.tails.items():
            words = max(1, buffer.nbytes // 4)
            if not self.length:
                return
            tail = np.frombuffer(self.device.queue.read_buffer(buffer.gpu, words * 4), np.uint32)
            message = f"written behind the end of {buffer.name}"
            np.testing.assert_array_equal(tail, expected.view(np.uint32), err_msg=message)


OPERATORS_RUN: set[str] = set()  # names of the operators of every program loaded by this process


def load(program: Program, *, fill: float = 1e30, checked: bool = False, **more: Any) -> Any:
    """A CanaryRunner of the program's emitted Model section; `more` goes to its constructor."""
    graphs = (*program.whole.values(), *program.graphs.values())
    OPERATORS_RUN.update(node.op.name for graph in graphs for node in graph.nodes)
    names = choose_names(program.plan)
    settings = {"fill": fill, "length": 0 if checked else TAIL}  # without tails the sizes are those of a real runner
    base = "TrainingRunner" if program.plan.training else "ModelRunner"
    bases = (CanaryRunner, getattr(runtime_stub, base))
    text = emit_model(program.plan, Header("test", "test", "0"), names)
    namespace: dict[str, Any] = {
        base: type("Canary", bases, settings),
        "unpack": runtime_stub.unpack,
        **{name: wgsl for wgsl, name in names.shaders.items()},
        **declared_constants(program.plan),
    }
    exec(text, namespace)
    return namespace["Runner"](device=shared_device(), checked=checked, **more)


def feeds_of(runner: Any, feeds: Mapping[str, Array], entry: str = "run") -> dict[str, Array]:
    """Give the runner its parameters and states; what is left are the inputs of the entry."""
    weights = {name: feeds[name] for name in runner.parameters}
    if weights:
        runner.load_weights(weights)
    for name in runner.states:
        if name in feeds:
            runner.set_state(name, feeds[name])
    return {name: feeds[name] for name in runner.entries[entry].inputs}


def run(program: Program, feeds: Mapping[str, Array], *, fill: float = 1e30, checked: bool = False) -> dict[str, Array]:
    """One call of the entry `run`, canaries checked."""
    runner = load(program, fill=fill, checked=checked)
    results = runner.run(**feeds_of(runner, feeds))
    runner.assert_tails()
    return results


def check(
    graph: Graph | GraphIR,
    feeds: Mapping[str, Array],
    *,
    target: str = "webgpu",
    optimize: bool = True,
    twins: bool = True,
    slack: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """Compile, run, and compare every output with the reference under the tolerance rule.

    twins: also run checked and without tails, and with NaN as the canary. slack: allowed errors by output, where the rule of the last
    operator is not enough (what comes before it adds its own error).
    """
    program = compile_graph(graph, target=target, optimize=optimize)
    ir = program.sources["run"]
    expected = evaluate(ir, feeds)
    got = run(program, feeds)
    checked = run(program, feeds, checked=True) if twins else {}
    for name, value in ir.outputs:
        allowed = slack[name] if slack and name in slack else allowed_error(ir, value, feeds, expected[name])
        assert_within(got[name], expected[name], allowed, name)
        if twins:
            assert_within(checked[name], expected[name], allowed, f"{name} checked")
    if twins:
        assert_same(got, run(program, feeds, fill=np.nan), "with another canary")
    return got


def allowed_error(ir: GraphIR, value: Any, feeds: Mapping[str, Array], ref: Array) -> Array:
    """The rule of the operator that computes `value` from leaves and views of them; the pointwise rule otherwise."""
    node = ir.nodes[value.node]
    arrays = [exact(ir, v, feeds) for v in node.inputs]
    return pointwise_bound(ref) if any(array is None for array in arrays) else bound(node.op, arrays, ref, value.port)


def exact(ir: GraphIR, value: Any, feeds: Mapping[str, Array]) -> Any:
    """A leaf, or a view of one, as the reference sees it; None for what is computed, which has an error of its own."""
    node = ir.nodes[value.node]
    if isinstance(node.op, Leaf):
        array = feeds[node.op.label]
        if isinstance(node.op, Parameter) and node.op.storage == "f16":
            array = array.astype(np.float16)
        return array.astype(np.float64) if array.dtype.kind == "f" else array
    if node.op.is_leaf:
        return node.op.reference()
    source = exact(ir, node.inputs[0], feeds) if node.op.is_view else None
    return None if source is None else node.op.reference(source)


def assert_same(one: Mapping[str, Array], two: Mapping[str, Array], what: str) -> None:
    """Bit-identical results."""
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array.view(np.uint32), two[name].view(np.uint32), err_msg=f"{name} {what}")
