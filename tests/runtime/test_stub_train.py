"""Training steps: their values, accumulated gradients, and what a step costs."""

from typing import Any

import numpy as np
import pytest

from runtime_stub import TrainingRunner, main
from runtime_stub.train import adam_numbers, sgd_numbers
from runtime_stub.weights import Buffer

from .trainers import Adam, AdamW, Line, Momentum, Oracle, Stateful, batches

KINDS = [Line, Momentum, Adam, AdamW]


def start(kind: type[TrainingRunner], gpu: Any, **more: Any) -> Any:
    runner = kind(gpu, **more)
    runner.init_weights(5)
    return runner


def same(got: dict[str, Any], expected: dict[str, Any], rtol: float = 2e-5) -> None:
    assert list(got) == list(expected)
    for name, array in got.items():
        np.testing.assert_allclose(array, expected[name], rtol=rtol, atol=1e-6, err_msg=name)


def bits(arrays: dict[str, Any]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


# ---- values


@pytest.mark.parametrize("on_nan", ["ignore", "raise"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_numpy(gpu: Any, kind: type[TrainingRunner], on_nan: str) -> None:
    runner = start(kind, gpu, on_nan=on_nan)
    oracle = Oracle(runner)
    for number, batch in enumerate(batches(8), start=1):
        loss, gradients = oracle.gradients(**batch)
        lr = 0.3 if number == 4 else None
        got = runner.train_step(lr, **batch)
        assert isinstance(got, float) and got == pytest.approx(loss, rel=1e-5)
        same(runner.gradients(), gradients)
        oracle.update(gradients, lr)
        same(runner.weights(), oracle.p)
        assert runner.step == number


@pytest.mark.parametrize("on_nan", ["ignore", "raise"])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulate_and_apply_are_a_step(gpu: Any, kind: type[TrainingRunner], on_nan: str) -> None:
    parts, whole = start(kind, gpu, on_nan=on_nan), start(kind, gpu, on_nan=on_nan)
    for batch in batches(4):
        assert parts.accumulate(**batch) == whole.train_step(**batch)
        parts.apply()
        assert bits(parts.weights()) == bits(whole.weights()) and parts.step == whole.step


@pytest.mark.parametrize("on_nan", ["ignore", "raise"])
@pytest.mark.parametrize("last", ["accumulate", "train_step"])
def test_gradients_add_up(gpu: Any, last: str, on_nan: str) -> None:
    """As repeated .backward(); a train_step adds its own to what waits."""
    runner = start(Adam, gpu, on_nan=on_nan)
    oracle = Oracle(runner)
    for turn in range(3):
        sums = {"w": np.zeros(3), "head.b": np.zeros(3)}
        *first, final = batches(4, seed=turn)
        for batch in first:
            loss, gradients = oracle.gradients(**batch)
            sums = {name: total + gradients[name] for name, total in sums.items()}
            assert runner.accumulate(**batch) == pytest.approx(loss, rel=1e-5)
            same(runner.gradients(), sums)
        sums = {name: total + oracle.gradients(**final)[1][name] for name, total in sums.items()}
        getattr(runner, last)(**final)
        if last == "accumulate":
            assert runner.step == turn
            runner.apply()
        assert runner.step == turn + 1
        same(runner.gradients(), sums)
        oracle.update(sums)
        same(runner.weights(), oracle.p)


def test_sums_of_gradients_are_exact(gpu: Any) -> None:
    runner = start(Line, gpu)
    first, second = batches(2)
    runner.accumulate(**first)
    one = runner.gradients()
    runner.accumulate(**second)
    both = runner.gradients()
    runner.apply(lr=0)
    runner.accumulate(**second)
    for name, array in runner.gradients().items():
        assert (one[name] + array).tobytes() == both[name].tobytes()


def test_sums_of_large_gradients(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many groups, folded, with an edge in the last one."""
    real = TrainingRunner._each

    def fold_at_seven(*arguments: Any) -> tuple[Any, ...]:
        pipeline, group, x, _ = real(*arguments)
        return pipeline, group, 7, -(-x // 7)

    class Large(TrainingRunner):
        optimizer_defaults = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0}

        def buffers(self) -> None:
            self.b_g = self.gradient("g", (300_001,), nbytes=1_200_016)
            self.b_loss = self.buffer("loss", nbytes=4)
            self.output("accumulate", "loss", self.b_loss, ())

        def encode_accumulate(self, encoder: Any) -> None: ...
        def encode_apply(self, encoder: Any) -> None: ...

    monkeypatch.setattr(Large, "_each", fold_at_seven)
    runner = Large(gpu, on_nan="raise")
    array = np.random.default_rng(0).standard_normal(300_004).astype("f4")
    gpu.queue.write_buffer(runner.b_g.gpu, 0, array)
    runner.accumulate()
    runner.accumulate()  # nothing overwrites the gradient, so that it doubles
    assert runner.gradients()["g"].tobytes() == (2 * array[:-3]).tobytes()
    tail = np.frombuffer(gpu.queue.read_buffer(runner.b_g.gpu, 300_001 * 4), np.float32)
    assert tail.tobytes() == array[-3:].tobytes(), "what lies behind the last element is not touched"
    for value in (np.inf, -np.inf, np.nan, -1.7e38):
        gpu.queue.write_buffer(runner.b_g.gpu, 300_000 * 4, np.array([value], "f4"))
        if np.isfinite(value):
            runner.accumulate()
            continue
        with pytest.raises(RuntimeError, match="not finite"):
            runner.accumulate()


@pytest.mark.parametrize("count", [1, 1024, 1025, 65535 * 1024, 65535 * 1024 + 1, 2**30])
def test_grids_fold(gpu: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    runner = Line(gpu)
    monkeypatch.setattr(runner, "pipeline", lambda *_, **__: None)
    monkeypatch.setattr(runner, "bind", lambda *_: None)
    _, _, x, y = runner._each("", Buffer("gradient", "g", (count,), "f32", 4 * count))
    assert max(x, y) <= 65535 and x * y * 1024 >= count > (x - 1) * y * 1024


@pytest.mark.parametrize("step", [1, 2, 1000, 10**7])
def test_numbers_are_rounded_once(step: int) -> None:
    numbers = adam_numbers(1e-3, step, (0.9, 0.999), 1e-8, 0.1)
    b1, b2 = np.longdouble("0.9"), np.longdouble("0.999")
    exact = [1e-3, b1, 1 - b1, b2, 1 - b2, 1e-8, 0.1, 1 - b1**step, 1 - b2**step]
    assert numbers.dtype == np.float32 and numbers.tolist() == np.array(exact, np.longdouble).astype("f4").tolist()
    assert sgd_numbers(0.1, 0.9, 1e-4).tolist() == np.array([0.1, 0.9, 1e-4], "f4").tolist()


def test_groups_have_their_own_lr_and_weight_decay(gpu: Any) -> None:
    runner = start(Adam, gpu)
    runner.optimizer["lr_mult.head"], runner.optimizer["wd_mult.head"] = 0.25, 3
    runner.train_step(lr=0.5, **batches(1)[0])
    read = [np.frombuffer(gpu.queue.read_buffer(b.gpu), "f4") for b in (runner.b_numbers, runner.b_numbers_1)]
    assert read[0].tobytes() == adam_numbers(0.5, 1, (0.9, 0.99), 1e-6, 0.02).tobytes()
    assert read[1].tobytes() == adam_numbers(0.125, 1, (0.9, 0.99), 1e-6, 0.06).tobytes()


def test_clip_norm_is_an_input_where_it_is_compiled_in(gpu: Any) -> None:
    class Clipped(Line):
        optimizer_defaults = Line.optimizer_defaults | {"clip_norm": 2.0}

        def buffers(self) -> None:
            super().buffers()
            self.b_clip = self.input("apply", "clip_norm", (), nbytes=4)

    runner = start(Clipped, gpu)
    for value in (2.0, 0.1):
        runner.optimizer["clip_norm"] = value
        runner.train_step(**batches(1)[0])
        assert np.frombuffer(gpu.queue.read_buffer(runner.b_clip.gpu), "f4") == np.float32(value)


# ---- what a step costs


@pytest.mark.parametrize("on_nan", ["ignore", "raise"])
def test_a_step_is_one_submit_and_one_small_read_back(
    gpu: Any, spy: Any, monkeypatch: pytest.MonkeyPatch, on_nan: str
) -> None:
    runner = start(Stateful, gpu, on_nan=on_nan)
    maps, submits = spy(runner._staging, "map_sync"), list[Any]()
    real, mapped = gpu.queue.submit, runner._staging.map_sync

    def submit(commands: Any) -> None:
        submits.append(commands)
        real(commands)

    def map_sync(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(gpu.queue, "submit", real)  # what wgpu itself submits does not count
            mapped(*arguments)

    monkeypatch.setattr(gpu.queue, "submit", submit)
    monkeypatch.setattr(runner._staging, "map_sync", map_sync)
    for number, batch in enumerate(batches(3), start=1):
        runner.train_step(**batch)
        assert len(submits) == number * (2 if on_nan == "raise" else 1)
        assert len(maps) == number and maps[-1][1:] == (0, 8 if on_nan == "raise" else 4)
    runner.accumulate(**batch)
    runner.accumulate(**batch)
    assert len(maps) == 5
    submits.clear()
    runner.apply()
    assert len(submits) == 1 and len(maps) == 5


@pytest.mark.parametrize("on_nan", ["ignore", "raise"])
def test_nothing_is_created_after_start_up(gpu: Any, monkeypatch: pytest.MonkeyPatch, on_nan: str) -> None:
    runner = start(Stateful, gpu, on_nan=on_nan)
    with monkeypatch.context() as patch:
        for name in ("create_buffer", "create_bind_group", "create_compute_pipeline", "create_shader_module"):
            patch.setattr(runner.device, name, None)
        for batch in batches(3):
            runner.train_step(**batch)
        runner.accumulate(**batch)
        runner.apply()
        runner.accumulate(**batch)
    runner.accumulate(**batch)
    runner.apply()
    for name in ("create_buffer", "create_bind_group", "create_compute_pipeline", "create_shader_module"):
        monkeypatch.setattr(runner.device, name, None)
    for _ in range(3):
        runner.accumulate(**batch)
    runner.train_step(**batch)


def test_twins_are_allocated_when_gradients_first_add_up(gpu: Any, spy: Any) -> None:
    runner = start(Line, gpu)
    made = spy(runner, "allocate")
    runner.train_step(**batches(1)[0])
    runner.accumulate(**batches(1)[0])
    assert not made
    runner.accumulate(**batches(1)[0])
    assert [arguments[0].name for arguments in made] == ["twin of w", "twin of head.b"]
    runner.close()


def test_replays_are_bit_identical(gpu: Any) -> None:
    results = set()
    for _ in range(3):
        runner = start(Stateful, gpu)
        losses = [runner.train_step(**batch) for batch in batches(10)]
        results.add((*losses, *bits(runner.weights()).values()))
    assert len(results) == 1


# ---- the same by the name of the entry


@pytest.mark.parametrize("on_nan", ["ignore", "raise"])
def test_call_does_what_the_method_does(gpu: Any, on_nan: str) -> None:
    """In every order of steps: what is pending, the number of updates, learning rates and states included."""
    by_method, by_name = start(Stateful, gpu, on_nan=on_nan), start(Stateful, gpu, on_nan=on_nan)
    given = iter(batches(12))
    for entry in ("train_step", "accumulate", "accumulate", "train_step", "accumulate", "apply", "train_step"):
        batch = {} if entry == "apply" else next(given)
        loss = getattr(by_method, entry)(**batch)
        result = by_name.call(entry, batch)
        assert result == ({} if entry == "apply" else {"loss": np.float32(loss)})
        assert all(array.dtype == np.float32 and array.shape == () for array in result.values())
        assert by_name.step == by_method.step and by_name._pending == by_method._pending
        assert bits(by_name.weights()) == bits(by_method.weights())
        assert bits(by_name.gradients()) == bits(by_method.gradients())
        assert by_name.get_state("seen") == by_method.get_state("seen") == by_name._positions[by_name.b_seen]
    assert by_name.step == 4


@pytest.mark.parametrize("entry", ["train_step", "accumulate"])
def test_call_with_lr_0_moves_nothing(gpu: Any, entry: str) -> None:
    runner = start(Momentum, gpu)
    runner.optimizer["lr"] = 0
    before = bits(runner.weights())
    assert runner.call(entry, batches(1)[0], outputs=()) == {}
    if entry == "accumulate":
        runner.call("apply", {})
    assert bits(runner.weights()) == before and runner.step == 1


def test_call_undoes_a_step_that_is_not_finite(gpu: Any) -> None:
    runner = start(Stateful, gpu, on_nan="raise")
    before = bits(runner.weights())
    with pytest.raises(RuntimeError, match="step 1 of line is undone"):
        runner.call("train_step", batches(1)[0] | {"x": np.full((4, 3), np.nan)})
    assert bits(runner.weights()) == before and runner.step == 0 and runner.get_state("seen") == 0


def test_what_a_step_refuses_changes_nothing(gpu: Any) -> None:
    runner = start(Adam, gpu)
    before, batch = bits(runner.weights()), batches(1)[0]
    with pytest.raises(RuntimeError, match=r"apply of line: expected accumulate\(\) before it"):
        runner.call("apply", {})
    runner.accumulate(**batch)
    assert runner.entries["apply"].inputs == {}
    with pytest.raises(ValueError, match=r"inputs of apply: expected none, .*optimizer.*got \['numbers'\]"):
        runner.call("apply", {"numbers": np.ones(9)})
    for entry in ("train_step", "accumulate"):
        with pytest.raises(ValueError, match="unknown name 'error': expected one of loss"):
            runner.call(entry, batch, outputs=("error",))
        with pytest.raises(ValueError, match=f"inputs of {entry}"):
            runner.call(entry, {"x": batch["x"]})
    assert bits(runner.weights()) == before and runner.step == 0


def test_a_step_as_a_script(
    gpu: Any, tmp_path: Any, spy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runner, batch = start(Line, gpu), batches(1)[0]
    runner.save_weights("w.safetensors")
    for name, array in batch.items():
        np.save(f"{name}.npy", array)
    done = spy(TrainingRunner, "_done")
    given = ["--weights", "w.safetensors", "--input", "x=x.npy", "--input", "t=t.npy"]
    main(Line, ["--entry", "train_step", *given])
    assert [updated for *_, updated in done] == [True]
    assert capsys.readouterr().out.startswith(f"loss: float32[], {np.float32(runner.train_step(**batch))}")
    with pytest.raises(SystemExit, match=r"apply of line: expected accumulate\(\) before it"):
        main(Line, ["--entry", "apply", "--weights", "w.safetensors"])


@pytest.mark.parametrize("entry", ["run", "accumulate", "apply", "train_step"])
def test_bench_says_that_it_changes_the_weights(capsys: pytest.CaptureFixture[str], entry: str) -> None:
    main(Momentum, ["--entry", entry, "--bench", "2"])
    out = capsys.readouterr().out
    assert "wall" in out
    assert ("have changed the weights" in out) == (entry in ("apply", "train_step"))
