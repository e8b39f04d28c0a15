"""Random training models against the reference: python -m tests.fuzz.training --seed 0 --count 300 --jobs 4

Of each model: the gradients against the reference of the differentiated graph, those against finite differences of the loss, two
updates against the reference of the update, and a second run against the first, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meganeura_aot import Program, Training, compile_graph
from meganeura_aot.graph import DType, GraphIR, Value
from meganeura_aot.ops.layout.op import StopGradient
from meganeura_aot.ops.state.leaf import Input, Moment, State, gradient_label
from meganeura_aot.program import ACCUMULATE, APPLY
from meganeura_aot.reference import evaluate
from runtime_stub.optimizer import adam_numbers, sgd_numbers
from tests import harness
from tests.fuzz.command import Outcome, main
from tests.fuzz.drawer import Drawer, World, draw_array
from tests.fuzz.graphs import Case, Tally, draw_words, smaller
from tests.fuzz.noise import RUNS, Noisy
from tests.fuzz.trace import Array, Ref
from tests.gradients import FD_RTOL, VAGUE, slope_along

STEPS = 2
DIRECTIONS = 2
BEND_STEP = 1e-3  # along a direction whose elements are about 1
ATTENTION = 0.3  # of the models begin with grouped heads, causal, masked and capped: the widest variety of kernels
OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"kind": "sgd", "lr": 0.1},
    {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"kind": "adam", "lr": 0.01},
    {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1},
)


@dataclass(frozen=True)
class Model(Case):
    """A case with the one entry `run`, whose output `loss` is trained."""

    optimizer: Mapping[str, Any]

    def compile(self, target: str) -> Program:
        graphs = {entry: trace.graph() for entry, trace in self.entries.items()}
        return compile_graph(graphs, target=target, optimize=self.optimize, train=Training(**self.optimizer))

    def __str__(self) -> str:
        return f"{super().__str__()}; Training(**{self.optimizer})"


def draw_model(seed: int) -> Model:
    """The model of a seed."""
    d = Drawer((seed, 7), World(), training=True)
    if d.chance(ATTENTION):
        draw_words(d, 1, ["attended_with_everything"])
    draw_words(d, d.r.randint(2, 7))
    d.trace.outputs = {"loss": draw_loss(d)}
    optimizer = dict(d.r.choice(OPTIMIZERS)) | ({"clip_norm": 0.5} if d.chance(0.4) else {})
    calls = ["run"] * STEPS
    return Model(seed, {"run": d.trace}, {"run": d.inputs}, d.world, calls, d.chance(0.85), optimizer)


def draw_loss(d: Drawer) -> Ref:
    """All that nothing uses, each element with a weight of its own, in one sum; a gain makes sure that something trains."""
    used = {ref for call in d.trace.calls for ref in call.operands}
    last = [ref for ref in d.pool if ref not in used and d.type(ref).dtype is DType.F32 and d.type(ref).size]
    gain = d.named("parameter", "w", ((), "f32"), {}, d.type(d.one("constant", 1.0)), "positive")
    total = d.one("mul", gain, gain)
    for ref in last:
        weighted = d.one("mul", ref, d.input(d.dims(ref)))
        total = d.one("add", total, d.one(d.r.choice(["mean", "sum"]), weighted))
    return d.one("mul", total, gain)


# ---- the check


def check(model: Model, target: str, checked: bool, notes: dict[str, int]) -> Tally:
    """Two steps of training and a second run of them."""
    program, tally = model.compile(target), Tally()
    steps = run_steps(program, model, checked)
    compare_steps(program, model, steps, tally)
    if not tally.problems:
        compare_slopes(program.differentiated[ACCUMULATE], model, steps[0], tally, notes)
    for index, (one, two) in enumerate(zip(steps, run_steps(program, model, checked), strict=True)):
        for name, array in one.flat().items():
            if array.tobytes() != two.flat()[name].tobytes():
                tally.problems.append(f"a second run: step {index}: {name} is not the same twice")
    return tally


@dataclass(frozen=True)
class Step:
    """What the runner held before a step, and what it gave."""

    weights: Mapping[str, Array]
    states: Mapping[str, Array]
    loss: Array
    gradients: Mapping[str, Array]
    states_after: Mapping[str, Array]
    weights_after: Mapping[str, Array]

    def flat(self) -> dict[str, Array]:
        named = {f"the gradient of {name}": array for name, array in self.gradients.items()}
        return {"loss": self.loss} | named | {f"parameter {name}": a for name, a in self.weights_after.items()}


def run_steps(program: Program, model: Model, checked: bool) -> list[Step]:
    runner = harness.load(program, checked=checked)
    try:
        runner.load_weights(model.weights())
        for label, array in starts_of(program, model).items():
            runner.set_state(label, array)
        steps = []
        for index in range(STEPS):
            weights, states = runner.weights(), states_of(runner)
            loss = np.float32(runner.accumulate(**model.feeds(index)))
            gradients, after = runner.gradients(), states_of(runner)
            runner.apply()
            steps.append(Step(weights, states, np.asarray(loss), gradients, after, runner.weights()))
        runner.assert_tails()
    finally:
        runner.close()
    return steps


def states_of(runner: Any) -> dict[str, Array]:
    return {label: runner.get_state(label) for label in runner.states}


def starts_of(program: Program, model: Model) -> dict[str, Array]:
    """Of the model's states, and of the random numbers that dropout draws."""
    rng = np.random.default_rng([model.seed, 4])
    leaves = [node.op for node in program.differentiated[ACCUMULATE].nodes if isinstance(node.op, State)]
    drawn = {op.label: draw_array("key", op.type, rng) for op in leaves if op.label not in model.leaves("state")}
    return drawn | model.starts()


def compare_steps(program: Program, model: Model, steps: list[Step], tally: Tally) -> None:
    """Every pass, and every update."""
    ways: list[Any] = [evaluate, *map(Noisy, RUNS)]
    kept: list[dict[str, Array]] = [{} for _ in ways]
    for index, step in enumerate(steps):
        compare_pass(program.differentiated[ACCUMULATE], model.feeds(index), index, step, ways, tally)
        kept = compare_update(program, model, index, step, ways, kept, tally)


def compare_pass(
    graph: GraphIR, given: Mapping[str, Array], index: int, step: Step, ways: list[Any], tally: Tally
) -> None:
    """The loss, the gradients and the states."""
    feeds: dict[str, Array] = {**given, **step.weights, **step.states}
    with np.errstate(all="ignore"):
        expected, *moved = (way(graph, feeds) for way in ways)
    got = {gradient_label(name): array for name, array in step.gradients.items()}
    got |= {"loss": step.loss} | {label: a for label, a in step.states_after.items() if label in expected}
    for name, array in expected.items():
        tally.compare(f"step {index}: {name}", got[name], array, [run[name] for run in moved])


def compare_update(
    program: Program,
    model: Model,
    index: int,
    step: Step,
    ways: list[Any],
    kept: list[dict[str, Array]],
    tally: Tally,
) -> list[dict[str, Array]]:
    """The parameters, from the gradients that the runner found. kept: what the optimizer keeps, each way; returned anew."""
    graph = program.differentiated[APPLY]
    numbers = dict(program.plan.training.numbers) if program.plan.training else {}
    rest = {name: a for name, a in numbers.items() if name not in ("lr", "clip_norm", "nesterov")}
    adam = model.optimizer["kind"] != "sgd"
    given = adam_numbers(numbers["lr"], index + 1, **rest) if adam else sgd_numbers(numbers["lr"], **rest)
    feeds: dict[str, Any] = {"numbers": given, "clip_norm": np.float32(numbers.get("clip_norm", 0)), **step.weights}
    feeds |= {gradient_label(name): array for name, array in step.gradients.items()}
    for node in graph.nodes:
        if isinstance(node.op, Moment):  # zero at the start
            feeds[node.op.label] = np.zeros(node.types[0].shape)
    expected, *moved = results = [way(graph, feeds | before) for way, before in zip(ways, kept, strict=True)]
    for name, array in step.weights_after.items():
        others = [run[name] for run in moved] if name in expected else []
        ref = expected.get(name, step.weights[name].astype(np.float64))
        tally.compare(f"step {index}: update of {name}", array, ref, others)
    return [{name: array for name, array in run.items() if name not in step.weights} for run in results]


def compare_slopes(graph: GraphIR, model: Model, step: Step, tally: Tally, notes: dict[str, int]) -> None:
    """The gradients of the reference against finite differences of the loss along random directions."""
    rng = np.random.default_rng([model.seed, 5])
    feeds: dict[str, Array] = {**model.feeds(0), **step.weights, **step.states}
    stopped = tuple(
        (f"stopped.{i}", Value(i)) for i, node in enumerate(graph.nodes) if isinstance(node.op, StopGradient)
    )
    loss, results = forward(graph), evaluate(replace(graph, outputs=stopped), feeds)
    feeds |= {name: results[name] for name, _ in stopped}
    gradients = {name: results[gradient_label(name)] for name, _ in graph.gradients}
    for _ in range(DIRECTIONS):
        direction = {name: np.asarray(rng.standard_normal(array.shape)) for name, array in gradients.items()}

        def terms(h: float, direction: dict[str, Array] = direction) -> Array:
            moved = {name: step.weights[name] + h * along for name, along in direction.items()}
            return evaluate(loss, feeds | moved)["loss"].reshape(1)

        with np.errstate(all="ignore"):
            slope = slope_along(terms)
        products = np.concatenate([(gradients[name] * along).ravel() for name, along in direction.items()])
        size = max(float(np.abs(products).sum()), slope.size)
        kink = bends(terms, size, slope.rounding) or not slope.error <= VAGUE * size + slope.rounding
        note = "directions at a kink" if kink else "directions"
        notes[note] = notes.get(note, 0) + 1
        if not kink and not abs(products.sum() - slope.value) <= FD_RTOL * size + 2 * slope.error + slope.rounding:
            tally.problems.append(f"finite differences: {slope}, the gradients say {products.sum()}")


def bends(terms: Callable[[float], Array], size: float, rounding: float) -> bool:
    """Whether the slopes to both sides differ at the point itself, as those of a clip by its own input.

    Central differences take their mean there, with any step. Of a smooth loss the two slopes differ by a share of the step.
    """

    def difference(step: float) -> float:
        return float(np.abs(terms(step) + terms(-step) - 2 * terms(0.0)).sum()) / step

    large, small = difference(BEND_STEP), difference(BEND_STEP / 2)
    return small > 0.75 * large and small > VAGUE * size + rounding


def forward(graph: GraphIR) -> GraphIR:
    """The part of a differentiated graph that computes the loss; what stop_gradient gives is an input, which stays."""
    value = dict(graph.outputs)["loss"]
    nodes = list(graph.nodes[: value.node + 1])
    for index, node in enumerate(nodes):
        if isinstance(node.op, StopGradient):
            nodes[index] = replace(node, op=Input(f"stopped.{index}", node.types[0]), inputs=())
    return GraphIR(tuple(nodes), (("loss", value),))


def problems_of(
    model: Case, target: str, checked: bool, notes: dict[str, int] | None = None
) -> tuple[Tally, list[str]]:
    """The tally, and what is wrong: an exception is a problem too."""
    assert isinstance(model, Model)
    try:
        tally = check(model, target, checked, {} if notes is None else notes)
    except Exception as error:
        return Tally(), [f"{type(error).__name__}: {error}"]
    return tally, tally.problems


def try_seed(seed: int, target: str, checked: bool) -> Outcome:
    """What the command line and the tests run."""
    model, notes = draw_model(seed), dict[str, int]()
    tally, problems = problems_of(model, target, checked, notes)
    text = ""
    if problems:
        model = smaller(model, target, checked, problems[0], problems_of)
        text = f"{model}\n{chr(10).join(problems_of(model, target, checked)[1])}"
    return Outcome(seed, model.words(), tally.outputs, tally.elements, tally.compared, problems, text, notes)


if __name__ == "__main__":
    main("training", try_seed, lambda seed: str(draw_model(seed)))
