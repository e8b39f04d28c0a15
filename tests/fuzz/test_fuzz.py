"""Random programs in pytest: the first seeds of both generators, in chunks that workers share; see docs/testing.md."""

from __future__ import annotations

import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from meganeura_aot.builder import NO_WORDS
from meganeura_aot.reference import evaluate
from tests.fuzz import graphs, training
from tests.fuzz.command import LEAST_SHARE, Counts, TrySeed, attempt
from tests.fuzz.drawer import World
from tests.fuzz.noise import RUNS, Noisy, compare
from tests.fuzz.trace import Trace

# public methods of Graph that make no node, or that the generators use in other ways
NOT_DRAWN = {*NO_WORDS, "apply", "apply_many", "lift", "set_outputs"}


def run_seeds(try_seed: TrySeed, first: int, count: int) -> None:
    counts, texts = Counts(), []
    for seed in range(first, first + count):
        outcome = attempt(try_seed, seed, "webgpu", False)
        counts.add(outcome)
        if outcome.problems:
            texts.append(f"seed {seed}: {outcome.problems[0]}\n{outcome.text}")
    assert not texts, "\n".join(texts)
    assert counts.share >= LEAST_SHARE, counts


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_graphs(first: int) -> None:
    run_seeds(graphs.try_seed, first, 20)


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(0, 40, 5))
def test_training(first: int) -> None:
    run_seeds(training.try_seed, first, 5)


# ---- the generators themselves


def test_every_builder_method_is_drawn() -> None:
    public = {name for name in dir(Graph) if not name.startswith("_") and callable(getattr(Graph, name))}
    drawn: set[str] = set()
    for seed in range(1000):
        drawn |= graphs.draw_case(seed).words()
        if drawn >= public - NOT_DRAWN:
            return
    assert not public - NOT_DRAWN - drawn


def test_a_seed_gives_one_program() -> None:
    for seed in range(20):
        assert str(graphs.draw_case(seed)) == str(graphs.draw_case(seed))
        assert str(training.draw_model(seed)) == str(training.draw_model(seed))


def test_old_values_of_states_are_drawn() -> None:
    """Programs in which a value was read from a state by a step that changes nothing, before a write, are frequent."""
    count = 0
    for seed in range(200):
        for trace in graphs.draw_case(seed).entries.values():
            states = {call.results[0] for call in trace.leaves("state")}
            steps = [call for call in trace.calls if states & {*call.operands}]
            reads = [c for c in steps if c.types == tuple(trace.type_of(ref) for ref in c.operands) and not c.writes()]
            count += any(
                w.writes() and {*w.operands} & {*r.operands} for r in reads for w in steps if w.number > r.number
            )
    assert count >= 20


def trace_of_old_value() -> Trace:
    """s is 5; old = s; s = x"""
    trace = Trace()
    for method, arguments in (("state", ("s", (2,))), ("input", ("x", (2,)))):
        trace.calls.append(trace.make(method, *arguments))
    s, x = (call.results[0] for call in trace.calls)
    trace.calls.append(trace.make("mul", s, 1.0))
    trace.calls.append(trace.make("assign", s, x))
    trace.outputs = {"old": trace.calls[2].results[0], "new": s}
    return trace


@pytest.mark.parametrize("way", [evaluate, *map(Noisy, RUNS)])
def test_a_trace_is_evaluated_in_order(way: object) -> None:
    feeds, states = {"x": np.array([1.0, 2.0])}, {"s": np.array([5.0, 5.0])}
    outputs, after = trace_of_old_value().evaluate(feeds, states, way)  # type: ignore[arg-type]
    np.testing.assert_allclose(outputs["old"], [5, 5], rtol=1e-4)
    np.testing.assert_array_equal(outputs["new"], [1, 2])
    np.testing.assert_array_equal(after["s"], [1, 2])


def test_what_is_wrong_is_found() -> None:
    """A relative error of 1e-3, a NaN, an infinity and an integer that is off by one are wrong; a near tie is left out."""
    ref = np.linspace(1.0, 2.0, 8)
    moved = [ref * (1 + 1e-5), ref * (1 - 1e-5)]
    assert not compare("y", ref.astype(np.float32), ref, moved).wrong
    for index, value in ((3, ref[3] * 1.001), (0, np.nan), (7, np.inf)):
        got = ref.astype(np.float32)
        got[index] = value
        assert f"at ({index},)" in compare("y", got, ref, moved).wrong
    whole = np.arange(4, dtype=np.uint32)
    assert "at (2,)" in compare("y", np.array([0, 1, 3, 3], np.uint32), whole, [whole]).wrong
    chaotic = compare("y", np.array([0, 1, 3, 3], np.uint32), whole, [np.array([0, 1, 7, 3], np.uint32)])
    assert (chaotic.compared, chaotic.wrong) == (3, "")


def test_a_failure_is_made_smaller() -> None:
    """Of three outputs, the one by matmul fails: it and its inputs stay."""

    def fails(candidate: graphs.Case, target: str, checked: bool) -> tuple[graphs.Tally, list[str]]:
        trace = candidate.entries["run"]
        wrong = [ref for ref in trace.outputs.values() if trace.call_of(ref).method == "matmul"]
        return graphs.Tally(), ["wrong"] * len(wrong)

    trace = Trace()
    for method, arguments in (("input", ("x", (2, 2))), ("input", ("y", (2, 2)))):
        trace.calls.append(trace.make(method, *arguments))
    x, y = (call.results[0] for call in trace.calls)
    for method in ("add", "matmul", "mul"):
        trace.calls.append(trace.make(method, x, y))
    trace.outputs = {f"y{i}": call.results[0] for i, call in enumerate(trace.calls[2:])}
    case = graphs.Case(0, {"run": trace}, {}, World(), ["run"], optimize=True)
    small = graphs.smaller(case, "webgpu", False, "wrong", fails)
    assert small.words() == {"input", "matmul"}
    compile_graph({entry: t.graph() for entry, t in small.entries.items()})
