"""Training runners around their steps: what is refused without a change, resets, threads, interruptions."""

import concurrent.futures
from typing import Any

import pytest

from .test_stub_train import bits, start
from .trainers import Adam, Line, Stateful, batches

# ---- what is refused


def test_a_refused_step_changes_nothing(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = start(Stateful, gpu)
    batch = batches(1)[0]
    runner.train_step(**batch)
    before = bits(runner.weights()), runner.step, runner.get_state("seen")
    monkeypatch.setattr(runner, "upload", None)
    for lr, given, message in (
        (None, {"x": batch["x"]}, r"inputs of train_step: expected \['x', 't'\], got \['x'\]"),
        (None, batch | {"t": 1}, r"input 't' of train_step: expected f32\[4, 3\], got int64\[\]"),
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
    with pytest.raises(RuntimeError, match="train_step: state 'seen' is at 100, 1 more would pass its limit 100"):
        runner.train_step(**batches(1)[0])
    assert runner.get_state("seen") == 100 and bits(runner.weights()) == before and runner.step == 1


# ---- the runner around it


def test_the_forward_entry_stays_the_only_one(gpu: Any) -> None:
    runner = start(Line, gpu)
    assert list(runner.entries) == ["run", "accumulate", "apply", "train_step"]
    assert runner.inputs == {"x": ((4, 3), "f32"), "t": ((4, 3), "f32")} and list(runner.outputs) == ["error", "loss"]
    batch = batches(1)[0]
    assert runner.run(outputs=("loss",), **batch)["loss"] == pytest.approx(runner.train_step(**batch), rel=1e-6)
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
