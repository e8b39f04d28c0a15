"""What `train=` adds to a program: its graphs, its plan, its text, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from bench import smollm2
from meganeura_aot import Graph, GraphError, Program, Training, compile_graph
from meganeura_aot.memory import lower_bound
from meganeura_aot.reference import evaluate
from tests.whole_models import MODELS

Array = np.ndarray[Any, Any]


def classifier(bias: bool = True) -> Graph:
    g = Graph()
    x, y = g.input("x", (8, 6)), g.input("y", (8, 3))
    h = g.relu(g.matmul_bt(x, g.parameter("body.weight", (5, 6))))
    out = g.matmul_bt(h, g.parameter("head.weight", (3, 5)))
    if bias:
        out = g.bias_add(out, g.parameter("head.bias", (3,)))
    g.set_outputs({"y": out, "loss": g.mse_loss(out, y)})
    return g


def trained(training: Training, graph: Any = None) -> Program:
    return compile_graph(graph or classifier(), train=training)


# ---- the plan


def kinds(program: Program) -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for buffer in program.plan.buffers.values():
        table.setdefault(buffer.kind, []).append(buffer.label)
    return table


def test_entries_and_buffers() -> None:
    program = trained(Training("adam"))
    assert [entry.name for entry in program.plan.entries] == ["run", "accumulate", "apply"]
    assert [output.name for output in program.plan.entries[0].outputs] == ["y", "loss"]
    assert [output.name for output in program.plan.entries[1].outputs] == ["loss"]
    table = kinds(program)
    names = ["body.weight", "head.weight", "head.bias"]
    assert table["parameter"] == names
    assert sorted(table["gradient"]) == sorted(f"grad.{name}" for name in names)
    assert sorted(table["moment"]) == sorted(f"{m}.{name}" for m in ("exp_avg", "exp_avg_sq") for name in names)


@pytest.mark.parametrize(
    ("training", "moments"),
    [
        (Training("sgd"), 0),
        (Training("sgd", momentum=0.9), 1),
        (Training("sgd", momentum=0.9, nesterov=True), 1),
        (Training("adam"), 2),
        (Training("adamw", weight_decay=0.1), 2),
    ],
)
def test_moments(training: Training, moments: int) -> None:
    assert len(kinds(trained(training)).get("moment", [])) == moments * 3


def test_frozen_parameters_cost_nothing() -> None:
    """No gradient, no moment, no dispatch that writes them, and no product for them."""
    all_of_it, some = trained(Training("adam")), trained(Training("adam", freeze=["body.*"]))
    table = kinds(some)
    assert not any("body" in label for kind in ("gradient", "moment") for label in table[kind])
    assert "body.weight" not in {name for d in some.plan.dispatches() for name in d.writes()}
    products = [sum("matmul" in d.name for d in p.plan.entries[1].dispatches) for p in (all_of_it, some)]
    assert products == [5, 3]  # forward 2; backward body.weight, head.weight and what is between them, or head.weight


def test_a_parameter_without_a_path_is_not_updated() -> None:
    g = Graph()
    g.parameter("unused", (4,))
    g.set_outputs([g.sum(g.parameter("w", (3,)))])
    program = trained(Training("sgd"), g)
    assert kinds(program)["gradient"] == ["grad.w"]
    assert "1 of 2 parameters" in program.text


def test_gradients_that_are_one_value_have_a_buffer_each() -> None:
    g = Graph()
    a, b = g.parameter("a", (3,)), g.parameter("b", (3,))
    total = a + b
    g.set_outputs({"loss": g.sum(total * total)})
    program = trained(Training("sgd"), g)
    assert sorted(kinds(program)["gradient"]) == ["grad.a", "grad.b"]


def test_the_loss_is_output_loss_else_the_first() -> None:
    g = Graph()
    w = g.parameter("w", (3,))
    g.set_outputs([g.sum(w), g.sum(w * w)])
    feeds = {"w": np.array([1.0, 2.0, 3.0])}
    assert evaluate(trained(Training("sgd"), g).differentiated["accumulate"], feeds)["loss"] == 6


def test_the_entry_train_is_trained_and_shares_weights() -> None:
    program = trained(Training("sgd"), {"predict": classifier(), "train": classifier()})
    assert [entry.name for entry in program.plan.entries] == ["predict", "train", "accumulate", "apply"]
    written = {name for d in program.plan.entries[3].dispatches for name in d.writes()}
    read = {name for d in program.plan.entries[0].dispatches for name in d.reads()}
    assert {"body.weight", "head.weight", "head.bias"} == written
    assert written <= read


def test_at_most_8_bindings() -> None:
    plan = trained(Training("adam", clip_norm=1.0)).plan
    assert max(len(d.bindings) for d in plan.dispatches()) <= 8


def test_states_of_the_trained_entry_are_written_once_a_step() -> None:
    g = Graph()
    count = g.state("count", (), "u32")
    g.advance(count, 1, limit=100)
    g.set_outputs({"loss": g.sum(g.parameter("w", (2,)))})
    program = trained(Training("sgd"), g)
    assert [len(entry.advances) for entry in program.plan.entries] == [1, 1, 0]


# ---- the meaning: the graphs of a step against NumPy's


def test_a_step_of_the_graphs() -> None:
    program = trained(Training("adam", clip_norm=0.05, **{"lr_mult.head": 0.5, "wd_mult.head.bias": 0.0}))
    rng = np.random.default_rng(0)
    shapes = {"x": (8, 6), "y": (8, 3), "body.weight": (5, 6), "head.weight": (3, 5), "head.bias": (3,)}
    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    step = evaluate(program.differentiated["accumulate"], feeds)
    gradients = {name: step[f"grad.{name}"] for name in list(shapes)[2:]}
    assert program.plan.training is not None
    groups = program.plan.training.groups
    assert groups == {"numbers": ("", ""), "numbers_1": ("head", ""), "numbers_2": ("head", "head.bias")}
    lr = {"body.weight": 0.1, "head.weight": 0.05, "head.bias": 0.05}
    numbers = {name: np.array([lr["head.bias"] if p[0] else 0.1, 0.9, 0.1, 0.999, 0.001, 1e-8, 0, 0.1, 0.001])
               for name, p in groups.items()}  # fmt: skip
    moments = {f"{m}.{name}": np.zeros(g.shape) for m in ("exp_avg", "exp_avg_sq") for name, g in gradients.items()}
    after = evaluate(
        program.differentiated["apply"], {**feeds, **step, **moments, **numbers, "clip_norm": np.array(0.05)}
    )
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
    assert norm > 0.05
    for name, gradient in gradients.items():
        clipped = gradient * 0.05 / (norm + 1e-6)
        np.testing.assert_allclose(after[f"exp_avg.{name}"], 0.1 * clipped, rtol=1e-9)
        expected = feeds[name] - lr[name] * clipped / (np.abs(clipped) + 1e-8)
        np.testing.assert_allclose(after[name], expected, rtol=1e-6)


def test_the_longest_prefix_counts() -> None:
    plan = trained(Training("sgd", **{"lr_mult.head": 0.5, "lr_mult.head.b": 0.0, "lr_mult.h": 2.0})).plan
    assert plan.training is not None
    assert list(plan.training.groups.values()) == [("", ""), ("head", ""), ("head.b", "")]


# ---- memory


def test_no_square_of_the_vocabulary_or_of_the_tokens() -> None:
    """A Llama block with 49152 words. 251 tokens, for no other size is a multiple of that prime's square."""
    vocabulary, tokens = 49152, 251
    program = compile_graph(smollm2.build(tokens, layers=1, vocabulary=vocabulary), train=Training("adam"))
    for buffer in (*program.unshared.buffers.values(), *program.plan.buffers.values()):
        assert buffer.type.size <= vocabulary * smollm2.WIDTH, buffer
        assert buffer.type.size % tokens**2 or not buffer.type.size, buffer
    assert program.report.scratch_bytes <= 1.3 * lower_bound(program.unshared)


@pytest.mark.parametrize("name", MODELS)
def test_scratch_is_near_its_lower_bound(name: str) -> None:
    report = compile_graph(MODELS[name].build(), train=Training("adam", clip_norm=1.0)).report
    assert report.scratch_bytes <= 1.3 * report.scratch_bound


# ---- the text


def test_header_and_attributes() -> None:
    text = trained(Training("adamw", clip_norm=1.0, **{"lr_mult.head": 0.1})).text
    header = text[: text.index("Needs:")]
    line = " ".join(header[header.index("Training:") :].split())
    assert re.fullmatch(r"Training: adamw of 3 of 3 parameters; lr 0.001, .* clip_norm 1.0, lr_mult.head 0.1", line)
    assert 'optimizer_kind = "adamw"' in text
    assert "numbers = {" in text
    assert "class Runner(TrainingRunner):" in text
    assert "def encode_accumulate(self, encoder):" in text
    assert "    def train_step(self, " in text
    assert text == trained(Training("adamw", clip_norm=1.0, **{"lr_mult.head": 0.1})).text


def test_an_inference_runner_has_no_training() -> None:
    assert "train_step" not in compile_graph(classifier()).text


# ---- what is refused

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "rmsprop"}, "expected one of sgd, adam, adamw, got 'rmsprop'"),
    "unknown": ({"kind": "sgd", "beta": 1}, "sgd takes lr, momentum, weight_decay, .*got 'beta'"),
    "momentum": ({"kind": "adam", "momentum": 0.9}, "adam takes .*got 'momentum'"),
    "betas": ({"kind": "adam", "betas": (0.9, 1.0)}, "expected two betas from 0 up to 1"),
    "beta": ({"kind": "adam", "betas": 0.9}, "expected two betas"),
    "nan": ({"kind": "sgd", "lr": float("nan")}, "finite number >= 0 as lr, got nan"),
    "negative": ({"kind": "sgd", "weight_decay": -1}, "finite number >= 0 as weight_decay, got -1"),
    "text": ({"kind": "sgd", "lr": "big"}, "finite number >= 0 as lr, got 'big'"),
    "clip": ({"kind": "sgd", "clip_norm": 0}, "> 0 as clip_norm, got 0"),
    "nesterov": (
        {"kind": "sgd", "nesterov": True},
        "nesterov only with sgd and a momentum > 0, got True for sgd and momentum 0.0",
    ),
    "adam nesterov": ({"kind": "adam", "nesterov": True}, "nesterov only with sgd"),
    "prefix": ({"kind": "sgd", "lr_mult.": 1.0}, "got 'lr_mult.'"),
    "freeze": ({"kind": "sgd", "freeze": "body.*"}, "a list of patterns as freeze"),
    "no match": ({"kind": "sgd", "freeze": ["tail.*"]}, "freeze 'tail.*': expected a pattern of body.weight"),
    "multiplier": (
        {"kind": "sgd", "lr_mult.tail": 1.0},
        "'lr_mult.tail' to be the start of a trained parameter of body.weight, head.weight, head.bias",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_training_is_named(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(GraphError, match=message):
        trained(Training(**options))


def test_several_entries_and_none_to_train() -> None:
    with pytest.raises(GraphError, match="expected an entry point `train` or one alone, got a, b"):
        trained(Training("sgd"), {"a": classifier(), "b": classifier()})


def test_halves_are_not_trained() -> None:
    g = Graph()
    g.set_outputs([g.sum(g.parameter("half", (4,), "f16") * g.parameter("w", (4,)))])
    with pytest.raises(GraphError, match=r"'half' \(built at .*expected trainable=False, or to be frozen, .*f16"):
        trained(Training("sgd"), g)
    assert kinds(trained(Training("sgd", freeze=["half"]), g))["gradient"] == ["grad.w"]
