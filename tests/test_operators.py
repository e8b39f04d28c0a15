"""Generated from the registry: every operator, every sample."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from meganeura_aot import lowering
from meganeura_aot.graph import GraphIR, Node, Value
from meganeura_aot.op import OPS, Sample
from meganeura_aot.ops.pointwise.op import Pointwise
from meganeura_aot.ops.state.leaf import Input, Parameter, State
from meganeura_aot.passes import prune
from meganeura_aot.target import TARGETS, find_target
from tests import harness
from tests.draws import draw
from tests.tolerance import BOUNDS, RTOL, SMALLEST_NORMAL

CASES = [
    pytest.param(sample, id=f"{name}-{index}")
    for name, op in sorted(OPS.items())
    for index, sample in enumerate(op.samples())
]
FIRST_CASES = [case for case in CASES if case.id.endswith("-0")]
NO_SAMPLES = {
    "input",
    "parameter",
    "state",
    "moment",
    "gradient",
    "constant",
    "assign",
    "advance",
    "advance_counter",
    "cache_write",
}  # leaves and states: test_states.py


def graph_of(sample: Sample) -> GraphIR:
    """The operator over inputs x0, x1, ..., each output of it an output.

    Indices are parameters: the runner refuses inputs out of range, and the kernel is to be tested with them. What the
    operator writes in place are states.
    """
    indices, op = sample.op.index_limits(*sample.inputs), sample.op
    written = op.writes[: len(op.inferred(*sample.inputs))]
    leaves = [State if i in written else Parameter if i in indices else Input for i in range(len(sample.inputs))]
    nodes = [Node(leaf(f"x{i}", t), (), (t,)) for i, (leaf, t) in enumerate(zip(leaves, sample.inputs, strict=True))]
    values = tuple(Value(i) for i in range(len(nodes)))
    types = sample.op.inferred(*sample.inputs)
    nodes.append(Node(sample.op, values, types))
    outputs = tuple((f"y{port}", Value(len(nodes) - 1, port)) for port in range(len(types)))
    return GraphIR(tuple(nodes), outputs)


def feeds_of(sample: Sample, request: pytest.FixtureRequest) -> dict[str, Any]:
    rng = np.random.default_rng(zlib.crc32(request.node.name.encode()))
    recipes = zip(sample.draws(), sample.inputs, strict=True)
    return {f"x{i}": draw(recipe, type_, rng) for i, (recipe, type_) in enumerate(recipes)}


def test_every_operator_has_samples() -> None:
    assert {name for name, op in OPS.items() if not op.samples()} == NO_SAMPLES


@pytest.mark.parametrize("sample", CASES)
def test_kernel(sample: Sample, request: pytest.FixtureRequest) -> None:
    """infer == reference shapes, and kernel == reference, with canaries, NaN scratch, checked and trusted."""
    feeds = feeds_of(sample, request)
    arrays = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in feeds.values()]
    result = sample.op.reference(*arrays)
    shapes = [np.shape(array) for array in (result if isinstance(result, tuple) else (result,))]
    assert shapes == [type_.shape for type_ in sample.op.inferred(*sample.inputs)]
    graph = graph_of(sample)
    slack = None
    if isinstance(sample.op, Pointwise) and "special" in sample.draws():
        # their sizes are so unlike that each is held to itself, not to the largest of its row
        results = harness.evaluate(graph, feeds)
        slack = {name: RTOL * np.abs(np.nan_to_num(ref)) + SMALLEST_NORMAL for name, ref in results.items()}
    harness.check(graph, feeds, slack=slack)


def test_every_tolerance_is_a_line_of_the_rule() -> None:
    """And sums and contractions say what they add up: without it they would be held to the pointwise line."""
    assert {op.tolerance for op in OPS.values()} <= {"exact", "pointwise", "norm", "loss", "contraction", "sum"}
    adds = {name for name, op in OPS.items() if op.tolerance in ("contraction", "sum")}
    assert adds <= BOUNDS.keys()


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "webgpu"])
@pytest.mark.parametrize("sample", [c for c in CASES if c.id.startswith("matmul") or c.id.endswith("-0")])
def test_kernel_of_other_targets(sample: Sample, target: str, request: pytest.FixtureRequest) -> None:
    harness.check(graph_of(sample), feeds_of(sample, request), target=target, twins=target == "cpu")


@pytest.mark.parametrize("sample", CASES)
def test_kernel_on_a_folded_grid(
    sample: Sample, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one workgroup or of three, as if that were the limit: what is over in the last row, kernels guard."""

    def fold(groups: int, limit: int) -> tuple[int, int, int]:
        across = 1 if groups < 4 else 3
        return (across, -(-groups // across), 1)

    monkeypatch.setattr(lowering, "fold_grid", fold)
    graph, feeds = graph_of(sample), feeds_of(sample, request)
    got = harness.run(harness.compile_graph(graph), feeds)
    monkeypatch.undo()
    harness.assert_same(got, harness.run(harness.compile_graph(graph), feeds), "on a folded grid")


@pytest.mark.parametrize("sample", FIRST_CASES)
def test_replays_are_bit_identical(sample: Sample, request: pytest.FixtureRequest) -> None:
    program = harness.compile_graph(graph_of(sample))
    runner = harness.load(program)
    feeds = feeds_of(sample, request)
    first = runner.run(**harness.feeds_of(runner, feeds))
    for _ in range(19):  # from the same states
        harness.assert_same(first, runner.run(**harness.feeds_of(runner, feeds)), "in a replay")


def test_prune_keeps_what_is_declared() -> None:
    sample = OPS["relu"].samples()[0]
    graph = graph_of(sample)
    unused = GraphIR((*graph.nodes, *graph.nodes[-1:]), graph.outputs)
    assert prune(unused, find_target("webgpu")) == graph
