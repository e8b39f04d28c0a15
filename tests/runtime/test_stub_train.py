"""Training steps: their values, accumulated gradients, what a step costs, and what is refused without a change."""

import concurrent.futures
from typing import Any

import numpy as np
import pytest

from runtime_stub import TrainingRunner
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


def test_the_compiler_s_own_numbers_are_the_same() -> None:
    from meganeura_aot.ops import optimizer

    if not hasattr(optimizer, "adam_numbers"):
        pytest.skip("the compiler takes the stub's")
    for step in (1, 7, 5000):
        given = (0.01, step, (0.8, 0.95), 1e-7, 0.3)
        assert adam_numbers(*given).tobytes() == optimizer.adam_numbers(*given).tobytes()
    assert sgd_numbers(0.1, 0.9, 1e-4).tobytes() == optimizer.sgd_numbers(0.1, 0.9, 1e-4).tobytes()


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


# ---- what is refused


def test_a_refused_step_changes_nothing(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = start(Stateful, gpu)
    batch = batches(1)[0]
    runner.train_step(**batch)
    before = bits(runner.weights()), runner.step, runner.get_state("seen")
    monkeypatch.setattr(runner, "upload", None)
    for lr, given, message in (
        (None, {"x": batch["x"]}, r"inputs of accumulate: expected \['x', 't'\], got \['x'\]"),
        (None, batch | {"t": 1}, r"input 't' of accumulate: expected f32\[4, 3\], got int64\[\]"),
        (float("nan"), batch, "lr of line: expected a finite f32 number of at least 0, got nan"),
        (-1e-3, batch, "lr of line: expected .* got -0.001"),
        (True, batch, "lr of line: expected .* got True"),
        ("0.1", batch, "lr of line: expected .* got '0.1'"),
        (1e39, batch, r"lr of line: expected .* got 1e\+39"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.train_step(lr, **given)
    assert (bits(runner.weights()), runner.step, runner.get_state("seen")) == before


def test_apply_needs_gradients(gpu: Any) -> None:
    runner = start(Line, gpu)
    message = r"apply of line: expected accumulate\(\) before it, got no gradients"
    for use in (lambda: None, lambda: runner.train_step(**batches(1)[0])):
        use()
        with pytest.raises(RuntimeError, match=message):
            runner.apply()
    runner.accumulate(**batches(1)[0])
    with pytest.raises(ValueError, match="lr of line"):
        runner.apply(lr=-1)
    runner.apply()
    with pytest.raises(RuntimeError, match=message):
        runner.apply()
    assert runner.step == 2


def test_gradients_need_a_step(gpu: Any) -> None:
    runner = start(Line, gpu)
    with pytest.raises(RuntimeError, match=r"gradients of line: expected train_step\(\) or accumulate\(\) before"):
        runner.gradients()
    runner.accumulate(**batches(1)[0])
    first = runner.gradients()
    runner.apply()
    assert bits(runner.gradients()) == bits(first), "they live until the next step"
    first["w"][:] = 7
    assert runner.gradients()["w"].max() != 7


def test_weights_must_be_there(gpu: Any) -> None:
    runner = Line(gpu)
    batch = batches(1)[0]
    for use in (runner.weights, lambda: runner.train_step(**batch), lambda: runner.accumulate(**batch)):
        with pytest.raises(RuntimeError, match="line is without weights: w, head.b"):
            use()


def test_a_position_at_its_limit_stops_a_step(gpu: Any) -> None:
    runner = start(Stateful, gpu)
    runner.set_state("seen", 99)
    runner.train_step(**batches(1)[0])
    before = bits(runner.weights())
    with pytest.raises(RuntimeError, match="accumulate: state 'seen' is at 100, 1 more would pass its limit 100"):
        runner.train_step(**batches(1)[0])
    assert runner.get_state("seen") == 100 and bits(runner.weights()) == before and runner.step == 1


# ---- the runner around it


def test_the_forward_entry_stays_the_only_one(gpu: Any) -> None:
    runner = start(Line, gpu)
    assert list(runner.entries) == ["run", "accumulate", "apply"]
    assert runner.inputs == {"x": ((4, 3), "f32"), "t": ((4, 3), "f32")} and list(runner.outputs) == ["error", "loss"]
    batch = batches(1)[0]
    assert runner.run(("loss",), **batch)["loss"] == pytest.approx(runner.train_step(**batch), rel=1e-6)
    assert runner.states == {} and list(runner.parameters) == ["w", "head.b"]
    with pytest.raises(AttributeError):
        runner.step = 5
    with pytest.raises(AttributeError):
        runner.optimizer = {}


def test_moments_start_at_zero_and_survive_reset(gpu: Any) -> None:
    class Dirty(Adam):
        def allocate(self, buffer: Any) -> Any:
            made = super().allocate(buffer)
            self.device.queue.write_buffer(made, 0, b"\x3f" * made.size)  # 0.747 as f32
            return made

    dirty, clean, reset = start(Dirty, gpu, on_nan="raise"), start(Adam, gpu), start(Stateful, gpu)
    for batch in batches(3):
        dirty.train_step(**batch)
        clean.train_step(**batch)
        reset.train_step(**batch)
    assert bits(dirty.weights()) == bits(clean.weights())
    moments = [reset._download(b) for b in reset._of("moment")]
    reset.reset()
    assert reset.get_state("seen") == 0 and all(array.any() for array in moments)
    for b, array in zip(reset._of("moment"), moments, strict=True):
        assert reset._download(b).tobytes() == array.tobytes()


def test_a_host_program_s_buffers_are_inputs(gpu: Any) -> None:
    own, foreign = start(Line, gpu, on_nan="raise"), start(Line, gpu, on_nan="raise")
    usage = own.wgpu.BufferUsage
    for batch in batches(3):
        given = {name: gpu.create_buffer_with_data(data=array, usage=usage.STORAGE) for name, array in batch.items()}
        assert own.train_step(**batch) == foreign.train_step(**given)
    assert bits(own.weights()) == bits(foreign.weights())


def test_a_closed_runner_says_so(gpu: Any, tmp_path: Any) -> None:
    runner = start(Line, gpu)
    runner.accumulate(**batches(1)[0])
    runner.accumulate(**batches(1)[0])
    runner.close()
    for use in (
        lambda: runner.train_step(**batches(1)[0]),
        lambda: runner.accumulate(**batches(1)[0]),
        runner.apply,
        runner.gradients,
        runner.weights,
        lambda: runner.save_weights(tmp_path / "w"),
        lambda: runner.save_checkpoint(tmp_path / "c"),
        lambda: runner.load_checkpoint(tmp_path / "c"),
    ):
        with pytest.raises(RuntimeError, match="^line is closed$"):
            use()


def test_one_runner_in_many_threads(gpu: Any) -> None:
    """Steps wait for one another: with lr 0 each gives its batch's own loss, and none is lost."""
    runner = start(Line, gpu)
    given = batches(4)
    expected = [runner.train_step(lr=0, **batch) for batch in given]

    def work(thread: int) -> list[float]:
        return [runner.train_step(lr=0, **given[thread]) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for loss, got in zip(expected, pool.map(work, range(4)), strict=True):
            assert got == [loss] * 20
    assert runner.step == 84


@pytest.mark.parametrize("on_nan", ["ignore", "raise"])
@pytest.mark.parametrize("pending", [False, True])
def test_an_interrupted_step_leaves_a_sound_runner(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, on_nan: str, pending: bool
) -> None:
    """While the loss is awaited: the step is done, or, where it is still to be judged, undone."""
    runner, plain = start(Stateful, gpu, on_nan=on_nan), start(Stateful, gpu)
    given = batches(5)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if pending:
        runner.accumulate(**given[4])
        runner.accumulate(**given[4])
    with monkeypatch.context() as patch:
        patch.setattr(runner._staging, "map_sync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.train_step(**given[0])
    undone = on_nan == "raise"
    assert runner.step == (0 if undone else 1)
    assert runner.get_state("seen") == runner._positions[runner.b_seen] == (not undone) + 2 * pending
    if pending:
        plain.accumulate(**given[4])
        plain.accumulate(**given[4])
    for r, rest in ((runner, given[0 if undone else 1 :]), (plain, given)):
        for batch in rest:
            r.train_step(**batch)
    assert bits(runner.weights()) == bits(plain.weights()) and runner.step == plain.step == 5


@pytest.mark.parametrize("on_nan", ["ignore", "raise"])
def test_a_step_that_fails_before_submission_changes_nothing(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, on_nan: str
) -> None:
    runner = start(Stateful, gpu, on_nan=on_nan)
    given = batches(3)
    runner.train_step(**given[0])
    runner.accumulate(**given[1])
    before = bits(runner.weights()), bits(runner.gradients()), runner.get_state("mean").tolist()
    for broken in ("upload", "encode_accumulate"):
        with monkeypatch.context() as patch:
            patch.setattr(runner, broken, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                runner.train_step(**given[2])
    assert (bits(runner.weights()), bits(runner.gradients()), runner.get_state("mean").tolist()) == before
    assert runner.step == 1 and runner.get_state("seen") == runner._positions[runner.b_seen] == 2


def test_an_unknown_mode_is_refused(gpu: Any) -> None:
    for mode in ("stop", None, True):
        with pytest.raises(ValueError, match="on_nan of line: expected 'ignore' or 'raise', got"):
            Line(gpu, on_nan=mode)  # type: ignore[arg-type]
