"""Compiled programs that train: every target, what stays as it is, what is kept, what is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, GraphError, Tensor, Training, compile_graph
from meganeura_aot.reference import evaluate
from tests import harness
from tests.whole_models import MODELS, Model

Array = np.ndarray[Any, Any]


def start(model: Model, training: Training, **options: Any) -> Any:
    """A runner with the model's weights."""
    more = {key: options.pop(key) for key in ("on_nan", "checked") if key in options}
    runner = harness.load(compile_graph(model.build(), train=training, **options), **more)
    runner.load_weights(model.weights())
    for state, shape in model.states.items():
        runner.set_state(state, np.ones(shape))
    return runner


def losses_of(model: Model, steps: int = 3, **options: Any) -> list[float]:
    with start(model, Training("adam", lr=3e-3), **options) as runner:
        losses = [runner.train_step(**model.batch(step)) for step in range(steps)]
        runner.assert_tails()
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_targets_and_modules_agree(name: str) -> None:
    expected = losses_of(MODELS[name])
    assert expected[0] != expected[1]
    others: list[dict[str, Any]] = [
        {"target": "native"},
        {"target": "cpu"},
        {"optimize": False},
        {"checked": True},
    ]
    for options in others:
        np.testing.assert_allclose(losses_of(MODELS[name], **options), expected, rtol=1e-4, err_msg=str(options))


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_bit_identical(name: str) -> None:
    """Two runs of three steps, every weight."""
    results = []
    for _ in range(2):
        with start(MODELS[name], Training("adamw", lr=3e-3, clip_norm=1.0)) as runner:
            for step in range(3):
                runner.train_step(**MODELS[name].batch(step))
            results.append(runner.weights())
    harness.assert_same(results[0], results[1], "in a second run")


def test_accumulated_gradients_are_those_of_the_sum() -> None:
    model = MODELS["mlp"]
    with start(model, Training("sgd", lr=0.1)) as runner:
        first = runner.accumulate(**model.batch(0))
        alone = runner.gradients()
        runner.accumulate(**model.batch(1))
        both = runner.gradients()
        runner.apply()
        after = runner.weights()
        assert runner.accumulate(**model.batch(0)) != first
    with start(model, Training("sgd", lr=0.1)) as runner:
        runner.accumulate(**model.batch(1))
        for name, gradient in runner.gradients().items():
            np.testing.assert_array_equal(both[name], alone[name] + gradient)
            np.testing.assert_allclose(after[name], model.weights()[name] - 0.1 * both[name], rtol=1e-6, atol=1e-7)


def adapter(g: Graph) -> Tensor:
    """A frozen base and an adapter that starts at zero."""
    x = g.input("x", (8, 6))
    base = g.matmul_bt(x, g.parameter("base", (4, 6), trainable=False))
    down, up = g.parameter("down", (2, 6)), g.parameter("up", (4, 2))
    return g.mse_loss(g.tanh(base + g.matmul_bt(g.matmul_bt(x, down), up)), g.input("y", (8, 4)))


def test_adapters_alone_train() -> None:
    """No NaN, a falling loss, and the base stays bit by bit."""
    g = Graph()
    g.set_outputs({"loss": adapter(g)})
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((8, 6)), "y": rng.standard_normal((8, 4))}
    base = rng.standard_normal((4, 6)).astype(np.float32)
    start = {"base": base, "down": rng.standard_normal((2, 6)), "up": np.zeros((4, 2), np.float32)}
    with harness.load(compile_graph(g, train=Training("adam", lr=0.05))) as runner:
        runner.load_weights(start)
        losses = [runner.train_step(**batch) for _ in range(40)]
        assert np.isfinite(losses).all()
        assert losses[-1] < 0.7 * losses[0]
        np.testing.assert_array_equal(runner.weights()["base"].view(np.uint32), base.view(np.uint32))
        assert set(runner.gradients()) == {"down", "up"}


def swiglu(rows: int) -> Graph:
    """Weights that inference would like to join: gate and up."""
    g = Graph()
    x = g.input("x", (rows, 8))
    h = g.swiglu(g.matmul_bt(x, g.parameter("gate", (6, 8))), g.matmul_bt(x, g.parameter("up", (6, 8))))
    g.set_outputs({"y": h, "loss": g.mean(h * h)})
    return g


def test_inference_uses_the_trained_weights() -> None:
    """In every entry, after every step; also after weights were loaded."""
    program = compile_graph({"train": swiglu(4), "predict": swiglu(3)}, train=Training("sgd", lr=0.5))
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((6, 8)).astype(np.float32) for name in ("gate", "up")}
    x = rng.standard_normal((4, 8)).astype(np.float32)
    with harness.load(program) as runner:
        runner.load_weights(weights)
        for _ in range(3):
            runner.train_step(x=x)
            now = runner.weights()
            assert all(np.abs(now[name] - weights[name]).max() > 1e-3 for name in weights)
            for entry, rows in (("predict", 3), ("train", 4)):
                expected = evaluate(program.sources[entry], {**now, "x": x[:rows]})["y"]
                np.testing.assert_allclose(runner.call(entry, {"x": x[:rows]})["y"], expected, rtol=1e-5, atol=1e-6)
        runner.load_weights(weights)
        expected = evaluate(program.sources["predict"], {**weights, "x": x[:3]})["y"]
        np.testing.assert_allclose(runner.predict(x=x[:3])["y"], expected, rtol=1e-5, atol=1e-6)


def with_everything() -> Graph:
    """Dropout, running statistics, a position: all kinds of states."""
    g = Graph()
    x = g.dropout(g.input("x", (16, 6)), 0.25)
    h = g.matmul_bt(x, g.parameter("w", (5, 6)))
    h = g.batch_norm(h, g.state("mean", (5,)), g.state("var", (5,)), training=True)
    g.advance(g.state("seen", (), "u32"), 16, limit=200)
    g.set_outputs({"loss": g.mse_loss(g.tanh(h), g.input("y", (16, 5)))})
    return g


def data(step: int) -> dict[str, Array]:
    rng = np.random.default_rng(step)
    return {"x": rng.standard_normal((16, 6)), "y": rng.standard_normal((16, 5))}


def test_a_resumed_training_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    program = compile_graph(with_everything(), train=Training("adamw", lr=0.01, clip_norm=1.0))
    weights = {"w": np.random.default_rng(9).standard_normal((5, 6)).astype(np.float32)}
    with harness.load(program) as runner:
        runner.load_weights(weights)
        losses = [runner.train_step(**data(step)) for step in range(6)]
        expected = runner.weights(), {name: runner.get_state(name) for name in runner.states}
    with harness.load(program) as runner:
        runner.load_weights(weights)
        for step in range(3):
            runner.train_step(**data(step))
        runner.save_checkpoint(tmp_path / "c.safetensors")
    with harness.load(program) as runner:
        runner.load_checkpoint(tmp_path / "c.safetensors")
        assert [runner.train_step(**data(step)) for step in range(3, 6)] == losses[3:]
        harness.assert_same(runner.weights(), expected[0], "resumed")
        harness.assert_same({name: runner.get_state(name) for name in runner.states}, expected[1], "resumed")
        assert runner.get_state("seen") == 96
        for step in range(6, 12):
            runner.train_step(**data(step))
        with pytest.raises(RuntimeError, match="state 'seen' is at 192, 16 more would pass its limit 200"):
            runner.train_step(**data(12))
        assert runner.step == 12


def test_a_step_that_is_not_finite_is_undone() -> None:
    program = compile_graph(with_everything(), train=Training("adam", lr=0.01))
    weights = {"w": np.random.default_rng(9).standard_normal((5, 6)).astype(np.float32)}
    broken = data(1)
    broken["y"][3, 2] = np.inf
    with harness.load(program, on_nan="raise") as runner:
        runner.load_weights(weights)
        runner.train_step(**data(0))
        before = runner.weights(), {name: runner.get_state(name) for name in runner.states}
        with pytest.raises(RuntimeError, match=r"step 2 .*input 'y'.*mse_loss") as error:
            runner.train_step(**broken)
        assert "accumulate" in str(error.value)
        harness.assert_same(runner.weights(), before[0], "undone")
        harness.assert_same({name: runner.get_state(name) for name in runner.states}, before[1], "undone")
        good = runner.train_step(**data(1))
    with harness.load(program) as runner:
        runner.load_weights(weights)
        assert [runner.train_step(**data(step)) for step in range(2)][1] == good


def test_numbers_change_without_compiling() -> None:
    model = MODELS["mlp"]
    with start(model, Training("sgd", lr=0.1, **{"lr_mult.fc1": 2.0})) as runner:
        runner.accumulate(**model.batch(0))
        gradients = runner.gradients()
        runner.optimizer["lr_mult.fc1"] = 0.0
        runner.optimizer["weight_decay"] = 0.5
        runner.apply(lr=0.2)
        for name, weight in model.weights().items():
            rate = 0.0 if name.startswith("fc1") else 0.2
            expected = weight - rate * (gradients[name] + 0.5 * weight)
            np.testing.assert_allclose(runner.weights()[name], expected, rtol=1e-5, atol=1e-6)


def normed(rows: int, training: bool) -> Graph:
    g = Graph()
    h = g.matmul_bt(g.input("x", (rows, 6)), g.parameter("w", (5, 6), init=("normal", 0.4)))
    mean, variance = g.state("mean", (5,)), g.state("variance", (5,), init=1)
    h = g.tanh(g.batch_norm(h, mean, variance, training=training))
    g.set_outputs({"loss": g.mse_loss(h, g.input("y", (rows, 5)))} if training else {"h": h})
    return g


def test_running_statistics_travel_with_the_weights(tmp_path: Path) -> None:
    """From the trainer to a runner that only predicts, by save_weights."""
    graphs = {"train": normed(16, training=True), "predict": normed(4, training=False)}
    x = 3 + data(9)["x"][:4]
    with harness.load(compile_graph(graphs, train=Training("adam", lr=0.01))) as runner:
        np.testing.assert_array_equal(runner.get_state("variance"), np.ones(5, np.float32))
        runner.init_weights(0)
        for step in range(5):
            runner.train_step(**data(step) | {"x": 3 + data(step)["x"]})
        expected = runner.predict(x=x)["h"]
        runner.save_weights(tmp_path / "w.safetensors")
        variance = runner.get_state("variance")
        with pytest.raises(
            ValueError, match=r"expected a function of the runner where train writes states \(mean, var"
        ):
            runner.fit([data(0)], validation=[data(1)], log_every=0)
        runner.reset()
        np.testing.assert_array_equal(runner.get_state("variance"), np.ones(5, np.float32))
    with harness.load(compile_graph(normed(4, training=False))) as runner:
        runner.load_weights(tmp_path / "w.safetensors")
        np.testing.assert_array_equal(runner.get_state("variance"), variance)
        np.testing.assert_array_equal(runner.run(x=x)["h"], expected)


def test_new_weights_start_the_optimizer_anew() -> None:
    model = MODELS["mlp"]
    broken = model.batch(0)
    broken["x"] = broken["x"] * np.nan
    with start(model, Training("adam", lr=3e-3)) as runner:
        expected = runner.train_step(**model.batch(0)), runner.train_step(**model.batch(1))
        assert np.isnan(runner.train_step(**broken))
        runner.load_weights(model.weights())
        assert runner.step == 0
        assert (runner.train_step(**model.batch(0)), runner.train_step(**model.batch(1))) == expected


def test_an_interrupt_as_the_work_is_submitted_leaves_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C shows as the native call returns: the step is done, and counted."""
    model = MODELS["mlp"]
    with start(model, Training("adam", lr=3e-3)) as runner:
        expected = [runner.train_step(**model.batch(step)) for step in range(3)]
    with start(model, Training("adam", lr=3e-3)) as runner:
        runner.train_step(**model.batch(0))
        submit = type(runner.device.queue).submit

        def interrupted(queue: Any, work: Any) -> None:
            submit(queue, work)
            raise KeyboardInterrupt

        monkeypatch.setattr(type(runner.device.queue), "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.train_step(**model.batch(1))
        monkeypatch.undo()
        assert runner.step == 2
        assert runner.train_step(**model.batch(2)) == expected[2]


def test_an_old_version_of_a_state_as_a_view_is_kept() -> None:
    """As an output and as the loss: what is written later must not show in it."""
    g = Graph()
    x, state = g.input("x", (4,)), g.state("s", (4,))
    first = g.assign(state, x * g.parameter("w", (4,)))
    g.assign(state, x * 2.0)
    old = g.reshape(first, (2, 2))
    g.set_outputs({"old": old, "y": g.tanh(g.exp(x) + 1.0), "loss": g.reshape(g.sum(first), ())})
    feeds = {"x": np.array([1, 2, 3, 4], np.float32), "w": np.full(4, 3, np.float32), "s": np.zeros(4, np.float32)}
    harness.check(g, feeds)
    with harness.load(compile_graph(g, train=Training("sgd"))) as runner:
        runner.load_weights({"w": feeds["w"]})
        assert runner.train_step(x=feeds["x"]) == 30
        np.testing.assert_array_equal(runner.gradients()["w"], feeds["x"])


@pytest.mark.parametrize("name", ["exp_avg.w", "optimizer.w", "state.w"])
def test_names_that_training_uses_are_refused(name: str) -> None:
    g = Graph()
    g.set_outputs([g.sum(g.parameter("w", (2,))) + g.sum(g.parameter(name, (2,)))])
    with pytest.raises(GraphError, match=name):
        compile_graph(g, train=Training("adam"))
