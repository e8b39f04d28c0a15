"""Random inference graphs against the reference: python -m tests.fuzz.graphs --seed 0 --count 1000 --jobs 4"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from meganeura_aot import Graph, compile_graph
from meganeura_aot.reference import evaluate
from tests import harness
from tests.fuzz import words_image, words_layout, words_state
from tests.fuzz.command import Outcome, main
from tests.fuzz.drawer import Drawer, Leaf, Rejected, World, draw_array
from tests.fuzz.noise import RUNS, Noisy, compare
from tests.fuzz.trace import Array, Trace
from tests.fuzz.words import WORDS

LIBRARY = (words_image, words_layout, words_state)  # imported for the words that they register
KINDS = ("the built graph", "a second run", "finite differences")  # of failures, beside wrong numbers and exceptions
TRIES = 60  # to make a failure smaller
# numbers that a state starts with, by what writes it
STARTS = {"position": "below 50", "key": "key", "variance": "positive"}


@dataclass(frozen=True)
class Case:
    """A program and how it is called. inputs: of every entry; calls: entries, one after the other."""

    seed: int
    entries: Mapping[str, Trace]
    inputs: Mapping[str, Mapping[str, Leaf]]
    world: World
    calls: Sequence[str]
    optimize: bool

    def __str__(self) -> str:
        texts = [f"# entry {entry}\n{trace}" for entry, trace in self.entries.items()]
        return "\n".join([*texts, f"# calls: {', '.join(self.calls)}; optimize={self.optimize}"])

    def words(self) -> set[str]:
        return {call.method for trace in self.entries.values() for call in trace.calls}

    def leaves(self, method: str) -> dict[str, Leaf]:
        """Parameters or states of all entries that have some use for them."""
        used = {call.label for trace in self.entries.values() for call in trace.leaves(method)}
        return {label: leaf for label, leaf in self.world.leaves.items() if label in used}

    def weights(self) -> dict[str, Array]:
        rng = np.random.default_rng([self.seed, 1])
        return {label: draw_array(leaf.recipe, leaf.type, rng) for label, leaf in self.leaves("parameter").items()}

    def starts(self) -> dict[str, Array]:
        """What the states hold at first: what the model says, or other numbers."""
        rng = np.random.default_rng([self.seed, 2])
        table = {}
        for label, leaf in self.leaves("state").items():
            start = np.full(leaf.type.shape, leaf.named.get("init", 0), leaf.type.dtype.numpy)
            drawn = draw_array(STARTS.get(leaf.recipe, "normal"), leaf.type, rng)
            table[label] = drawn if rng.random() < 0.6 or leaf.recipe == "key" else start
        return table

    def feeds(self, index: int) -> dict[str, Array]:
        rng = np.random.default_rng([self.seed, 3, index])
        entry = self.calls[index]
        feeds = {label: draw_array(leaf.recipe, leaf.type, rng) for label, leaf in self.inputs[entry].items()}
        used = {call.label for call in self.entries[entry].leaves("input")}
        return {label: array for label, array in feeds.items() if label in used}


def draw_case(seed: int) -> Case:
    """The program of a seed."""
    head = Drawer((seed,), World())
    names = ("one", "two") if head.chance(0.15) else ("run",)
    traces, inputs = {}, {}
    for index, name in enumerate(names):
        d = Drawer((seed, index), head.world)
        draw_words(d, d.r.randint(3, 14))
        choose_outputs(d)
        traces[name], inputs[name] = d.trace, d.inputs
    calls = [head.r.choice(names) for _ in range(head.r.choice([1, 2, 3]))]
    return Case(seed, traces, inputs, head.world, [*names, *calls], optimize=head.chance(0.85))


def draw_words(d: Drawer, count: int, names: Sequence[str] = ()) -> None:
    """Draw `count` words, of these names or of all. A draw that is rejected adds nothing."""
    names = list(names or WORDS)
    weights = [WORDS[name].training if d.training else WORDS[name].weight for name in names]
    for name in d.r.choices(names, weights, k=count):
        try:
            WORDS[name].draw(d)
        except Rejected:
            continue


def choose_outputs(d: Drawer) -> None:
    """Choose as outputs values that nothing uses, and some of the others."""
    used = {ref for call in d.trace.calls for ref in call.operands}
    last = [ref for ref in d.pool if ref not in used and ref not in d.values.handles]
    some = [ref for ref in d.pool if ref in used and d.chance(0.12)]
    chosen = d.r.sample(last, min(len(last), 10)) + d.r.sample(some, min(len(some), 3))
    if not chosen:
        chosen = [d.one("add", d.f32(), 1.0)]
    d.trace.outputs = {f"y{index}": ref for index, ref in enumerate(dict.fromkeys(chosen))}


# ---- the check


@dataclass
class Tally:
    """What a check found."""

    elements: int = 0
    compared: int = 0
    outputs: int = 0
    problems: list[str] = field(default_factory=list)

    def compare(self, name: str, got: Array, ref: Array, moved: Sequence[Array]) -> None:
        result = compare(name, got, ref, moved)
        self.outputs += 1
        self.elements += result.elements
        self.compared += result.compared
        if result.wrong:
            self.problems.append(result.wrong)


def check(case: Case, target: str, checked: bool) -> Tally:
    """Compile, run every call, compare its outputs and in the end the states."""
    graphs: dict[str, Graph] = {entry: trace.graph() for entry, trace in case.entries.items()}
    program = compile_graph(graphs, target=target, optimize=case.optimize)
    tally = Tally()
    weights, starts = case.weights(), case.starts()
    runner = harness.load(program, checked=checked)
    try:
        if weights:
            runner.load_weights(weights)
        for label, array in starts.items():
            runner.set_state(label, array)
        ways: list[Any] = [evaluate, *map(Noisy, RUNS)]
        states = [widened(starts, case) for _ in ways]
        for index, entry in enumerate(case.calls):
            feeds = case.feeds(index)
            with np.errstate(all="ignore"):
                made = [
                    case.entries[entry].evaluate(feeds | weights, before, way)
                    for before, way in zip(states, ways, strict=True)
                ]
            subject = f"call {index} {entry}"
            built = evaluate(program.sources[entry], feeds | weights | states[0])
            states = [after for _, after in made]
            expected, *moved = (outputs for outputs, _ in made)
            for name in expected.keys() | built.keys():
                ref, *others = ((outputs | after)[name] for outputs, after in made)
                if compare(name, built[name], ref, others).wrong:
                    tally.problems.append(f"the built graph: {subject}: {name} means something else than its calls")
                    return tally
            got = runner.call(entry, feeds)
            for name, array in expected.items():
                tally.compare(f"{subject}: {name}", got[name], array, [outputs[name] for outputs in moved])
        for label in starts:
            ref, *others = (after[label] for after in states)
            tally.compare(f"state {label}", runner.get_state(label), ref, others)
        runner.assert_tails()
    finally:
        runner.close()
    return tally


def widened(starts: Mapping[str, Array], case: Case) -> dict[str, Array]:
    """The states as operators see them."""
    table = {}
    for label, array in starts.items():
        half = "f16" in case.world.leaves[label].arguments
        array = array.astype(np.float16) if half else array
        table[label] = array.astype(np.float64) if array.dtype.kind == "f" else array
    return table


def problems_of(case: Case, target: str, checked: bool) -> tuple[Tally, list[str]]:
    """The tally, and what is wrong: an exception is a problem too."""
    try:
        tally = check(case, target, checked)
    except Exception as error:
        return Tally(), [f"{type(error).__name__}: {error}"]
    return tally, tally.problems


C = TypeVar("C", bound=Case)
ProblemsOf = Callable[[Case, str, bool], tuple[Tally, list[str]]]


def smaller(case: C, target: str, checked: bool, problem: str, problems_of: ProblemsOf) -> C:
    """A case with fewer outputs and calls that still fails in the same way."""
    tries, kind = TRIES, kind_of(problem)

    def fails(candidate: C) -> bool:
        nonlocal tries
        tries -= 1
        _, problems = problems_of(candidate, target, checked)
        return tries >= 0 and bool(problems) and kind_of(problems[0]) == kind

    for entry, trace in case.entries.items():
        for name in list(trace.outputs):
            kept = {n: ref for n, ref in case.entries[entry].outputs.items() if n != name}
            candidate = with_trace(case, entry, replace(case.entries[entry], outputs=kept))
            if kept and fails(candidate):
                case = candidate
        for call in reversed(trace.calls):
            less = case.entries[entry].without(call.number)
            candidate = with_trace(case, entry, less) if less else case
            if less and (call.method in ("input", "parameter", "constant") or fails(candidate)):
                case = candidate
    return case


def with_trace(case: C, entry: str, trace: Trace) -> C:
    return replace(case, entries={**case.entries, entry: trace})


def kind_of(problem: str) -> str:
    """Wrong numbers, the name of an exception, or another kind of failure that the text begins with."""
    start = problem.split(":")[0]
    return start if start in KINDS or start.isidentifier() else "wrong numbers"


def try_seed(seed: int, target: str, checked: bool) -> Outcome:
    """What the command line and the tests run."""
    case = draw_case(seed)
    tally, problems = problems_of(case, target, checked)
    text = ""
    if problems:
        case = smaller(case, target, checked, problems[0], problems_of)
        text = f"{case}\n{chr(10).join(problems_of(case, target, checked)[1])}"
    return Outcome(seed, case.words(), tally.outputs, tally.elements, tally.compared, problems, text)


if __name__ == "__main__":
    main("graphs", try_seed, lambda seed: str(draw_case(seed)))
