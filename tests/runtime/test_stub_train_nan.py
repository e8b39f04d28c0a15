"""Steps that are not finite: taken as they are, or undone, with the first dispatch to blame named."""

import re
from typing import Any

import numpy as np
import pytest

from .test_stub_train import bits, start
from .trainers import ERROR, Line, Stateful, batches

BATCH = batches(1)[0]
LARGE = np.full((4, 3), 1e28, np.float32)


def with_number(value: float, name: str = "x", place: tuple[int, int] = (3, 2)) -> dict[str, Any]:
    array = BATCH[name].copy()
    array[place] = value
    return BATCH | {name: array}


# What makes a step not finite, what the error says before the dispatch, and what it says of it.
CASES = {
    "a NaN input": (with_number(np.nan), "got loss nan; not finite before it: input 'x'; ", "error_0"),
    "a NaN for the state": (
        with_number(np.nan, place=(0, 1)),
        "got loss nan; not finite before it: input 'x'; ",
        "track_0",
    ),
    "an infinite input": (with_number(-np.inf, "t"), "got loss inf; not finite before it: input 't'; ", "error_0"),
    "a loss that overflows": (with_number(1e30, "t"), "got loss inf; ", "loss_0"),
    "a gradient that overflows": ({"x": LARGE, "t": np.zeros((4, 3))}, "got loss ", "grad_w_0"),
}


def snapshot(runner: Any) -> tuple[Any, ...]:
    states = {name: runner.get_state(name).tobytes() for name in runner.states}
    positions = {b.name: int(array) for b, array in runner._positions.items()}
    moments = [runner._download(b).tobytes() for b in runner._of("moment")]
    return bits(runner.weights()), states, positions, moments, runner.step, dict(runner.optimizer)


class Weak(Stateful):
    """weak: w is so small that LARGE * w is not, and the mean is not in the way."""

    def bind_groups(self) -> None:
        super().bind_groups()
        self.b_zero = self._make("constant", self.b_mean)
        self.upload(self.b_zero, np.zeros(3, np.float32))
        given = self.b_accumulate_x, self.b_w, self.b_b, self.b_zero, self.b_accumulate_t, self.b_error  # type: ignore[attr-defined]
        self.g_error_0 = self.bind(self.p_error_0, *given)


@pytest.mark.parametrize("method", ["train_step", "accumulate"])
@pytest.mark.parametrize("pending", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_step_that_is_not_finite_is_undone(gpu: Any, case: str, pending: int, method: str) -> None:
    given, before, dispatch = CASES[case]
    runner = start(Weak, gpu, on_nan="raise")
    runner.load_weights({"w": np.full(3, 1e-15, "f4"), "head.b": np.zeros(3, "f4")})
    runner.optimizer["lr"] = 1e-17
    runner.train_step(**BATCH)
    for _ in range(pending):
        runner.accumulate(**BATCH)
    there = snapshot(runner)
    gradients = bits(runner.gradients()) if pending else None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="^step 2 of line is undone: expected a finite loss") as caught:
            getattr(runner, method)(**given)
        text = str(caught.value)
        assert before in text and re.search(f"not finite is ({dispatch}), which wrote", text), text
        assert snapshot(runner) == there
        if pending:
            assert bits(runner.gradients()) == gradients
        else:
            with pytest.raises(RuntimeError, match="gradients of line"):
                runner.gradients()
    twin = start(Weak, gpu)
    twin.load_weights({"w": np.full(3, 1e-15, "f4"), "head.b": np.zeros(3, "f4")})
    twin.optimizer["lr"] = 1e-17
    twin.train_step(**BATCH)
    for _ in range(pending):
        twin.accumulate(**BATCH)
    for r in (runner, twin):
        r.train_step(**BATCH)
    assert snapshot(runner) == snapshot(twin), "it goes on as if nothing had been"


def test_what_was_written_is_counted(gpu: Any) -> None:
    runner = start(Line, gpu, on_nan="raise")
    with pytest.raises(
        RuntimeError, match=r"is error_0, which wrote 1 such numbers of error f32\[12\], the first at 11$"
    ):
        runner.train_step(**with_number(np.nan))
    grad = start(Line, gpu, on_nan="raise")
    grad.load_weights({"w": np.full(3, 1e-15, "f4"), "head.b": np.zeros(3, "f4")})
    with pytest.raises(RuntimeError, match=r"is grad_w_0, which wrote 3 such numbers of w f32\[3\], the first at 0$"):
        grad.train_step(x=LARGE, t=np.zeros((4, 3)))


def test_parameters_and_states_are_named_first(gpu: Any) -> None:
    runner = start(Stateful, gpu, on_nan="raise")
    runner.load_weights({"w": np.array([1, np.inf, 1], "f4"), "head.b": np.array([0, 0, np.nan], "f4")})
    runner.set_state("mean", [0, np.nan, 0])
    message = r"not finite before it: parameter 'w', parameter 'head.b', state 'mean'; the first .* is error_0"
    with pytest.raises(RuntimeError, match=message):
        runner.train_step(**BATCH)
    assert np.isnan(runner.get_state("mean")).tolist() == [False, True, False] and runner.get_state("seen") == 0


def test_gradients_whose_sum_overflows(gpu: Any) -> None:
    runner = start(Line, gpu, on_nan="raise")
    runner.load_weights({"w": np.full(3, 1e-15, "f4"), "head.b": np.zeros(3, "f4")})
    given = {"x": np.full((4, 3), 1e25, "f4"), "t": np.full((4, 3), -8e12, "f4")}
    for _ in range(6):
        runner.accumulate(**given)
    before = bits(runner.gradients())
    with pytest.raises(RuntimeError, match="the sum with the gradients accumulated before is not finite"):
        runner.accumulate(**given)
    assert bits(runner.gradients()) == before
    runner.apply(lr=0)


def test_what_larger_tensors_left_is_not_blamed(gpu: Any) -> None:
    """error and loss share memory, as the memory of the step before: the NaN of the last element is of another step."""

    class Shared(Line):
        def buffers(self) -> None:
            super().buffers()
            self.b_wide = self.buffer("wide", nbytes=4800)

        def bind_groups(self) -> None:
            super().bind_groups()
            x, t = self.b_accumulate_x, self.b_accumulate_t  # type: ignore[attr-defined]
            self.g_error_0 = self.bind(self.p_error_0, x, self.b_w, self.b_b, self.b_mean, t, self.b_wide)
            self.g_loss_0 = self.bind(self.p_loss_0, self.b_wide, self.b_loss)

    runner = start(Shared, gpu, on_nan="raise")
    gpu.queue.write_buffer(runner.b_wide.gpu, 48, np.full(100, np.nan, "f4"))
    with pytest.raises(RuntimeError, match="is loss_0, which wrote"):
        runner.train_step(**with_number(1e30, "t"))


def test_integers_that_look_like_nan_are_not_blamed(gpu: Any) -> None:
    class Masks(Line):
        def pipelines(self) -> None:
            super().pipelines()
            self.p_mask_0 = self.pipeline(
                "@group(0) @binding(0) var<storage, read_write> mask: array<vec2<u32>>;\n"
                "@compute @workgroup_size(1) fn main() { mask[0] = vec2<u32>(0xffffffffu, 0x7f800000u); }"
            )

        def bind_groups(self) -> None:
            super().bind_groups()
            self.b_mask = self._make("scratch", self.b_error)
            self.g_mask_0 = self.bind(self.p_mask_0, self.b_mask)

        def encode_accumulate(self, encoder: Any) -> None:
            encoder.dispatch(self.p_mask_0, self.g_mask_0, 1)
            super().encode_accumulate(encoder)

    runner = start(Masks, gpu, on_nan="raise")
    runner.train_step(**BATCH)
    with pytest.raises(RuntimeError, match="is error_0, which wrote"):
        runner.train_step(**with_number(np.nan))


def test_halves_are_looked_at_as_halves(gpu: Any) -> None:
    """An f32 that is infinite as two halves is none of theirs, and the other way round."""
    one = np.array([0x7C00_3C00], "<u4")  # halves 1 and inf; finite as f32
    assert np.isfinite(one.view("<f4")).all() and np.isinf(one.view("<f2")).any()

    class Halves(Line):
        half = "vec2<f16>"

        def pipelines(self) -> None:
            super().pipelines()
            code = (
                "@group(0) @binding(0) var<storage, read_write> y: array<u32>;\n"
                "@compute @workgroup_size(1) fn main() { y[0] = 0x7c003c00u; }"
            )
            self.p_half_0 = self.pipeline(code)._replace(code=code.replace("array<u32>", f"array<{self.half}>"))

        def bind_groups(self) -> None:
            super().bind_groups()
            self.b_half = self._make("scratch", self.b_loss)
            self.g_half_0 = self.bind(self.p_half_0, self.b_half)

        def encode_accumulate(self, encoder: Any) -> None:
            encoder.dispatch(self.p_half_0, self.g_half_0, 1)
            super().encode_accumulate(encoder)

    class Wholes(Halves):
        half = "f32"

    for kind, name in ((Halves, "half_0"), (Wholes, "error_0")):
        with pytest.raises(RuntimeError, match=f"is {name}, which wrote"):
            start(kind, gpu, on_nan="raise").train_step(**with_number(np.nan))


def test_a_replay_uses_the_host_program_s_buffers_and_writes_to_inputs_are_repeated(gpu: Any) -> None:
    class Scaling(Line):
        """scaling: the pass writes its own input t."""

        def pipelines(self) -> None:
            super().pipelines()
            self.p_shift_0 = self.pipeline(
                "@group(0) @binding(0) var<storage, read_write> t: array<f32>;\n"
                "@compute @workgroup_size(12) fn main(@builtin(local_invocation_index) i: u32) { t[i] *= 1e10; }"
            )

        def bind_groups(self) -> None:
            super().bind_groups()
            self.g_shift_0 = self.bind(self.p_shift_0, self.b_accumulate_t)  # type: ignore[attr-defined]

        def encode_accumulate(self, encoder: Any) -> None:
            encoder.dispatch(self.p_shift_0, self.g_shift_0, 1)
            super().encode_accumulate(encoder)

    runner = start(Scaling, gpu, on_nan="raise")
    usage = runner.wgpu.BufferUsage.STORAGE
    fine = gpu.create_buffer_with_data(data=BATCH["x"], usage=usage)
    with pytest.raises(RuntimeError, match="got loss inf; the first .* is loss_0"):  # twice would be shift_0
        runner.train_step(x=fine, t=np.full((4, 3), 1e20, "f4"))
    bad = gpu.create_buffer_with_data(data=with_number(np.nan)["x"], usage=usage)
    with pytest.raises(RuntimeError, match="got loss nan; the first .* is error_0"):
        runner.train_step(x=bad, t=np.ones((4, 3)))
    bad = gpu.create_buffer_with_data(data=with_number(np.nan)["x"], usage=usage | runner.wgpu.BufferUsage.COPY_SRC)
    with pytest.raises(RuntimeError, match="not finite before it: input 'x'; the first .* is error_0"):
        runner.train_step(x=bad, t=np.ones((4, 3)))


@pytest.mark.parametrize("when", ["update", "replay"])
def test_an_interruption_while_a_step_is_judged_undoes_it(gpu: Any, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    runner = start(Stateful, gpu, on_nan="raise")
    runner.train_step(**BATCH)
    runner.accumulate(**BATCH)
    there, gradients = snapshot(runner), bits(runner.gradients())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "encode_apply" if when == "update" else "_find_culprit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.train_step(**(BATCH if when == "update" else with_number(np.nan)))
    assert snapshot(runner) == there and bits(runner.gradients()) == gradients
    runner.train_step(**BATCH)
    assert runner.step == 2 and runner.get_state("seen") == 3


def test_an_update_that_is_done_is_not_undone(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, plain = start(Stateful, gpu, on_nan="raise"), start(Stateful, gpu)

    def finish_late(*arguments: Any) -> Any:  # between the submit of the update and the return of train_step
        updating = not arguments[3]  # nothing is read back
        outcome = perform(*arguments)
        if updating:
            raise KeyboardInterrupt
        return outcome

    perform = runner._perform
    monkeypatch.setattr(runner, "_perform", finish_late)
    with pytest.raises(KeyboardInterrupt):
        runner.train_step(**BATCH)
    plain.train_step(**BATCH)
    assert snapshot(runner) == snapshot(plain)


def test_without_the_guard_numbers_are_taken_as_they_are(gpu: Any) -> None:
    runner = start(Stateful, gpu)
    assert np.isnan(runner.train_step(**with_number(np.nan)))
    assert np.isnan(runner.weights()["w"][2]) and np.isfinite(runner.weights()["w"][:2]).all()
    assert np.isnan(runner.gradients()["w"][2]) and runner.step == 1 and runner.get_state("seen") == 1


def test_only_states_that_the_pass_writes_are_backed_up(gpu: Any) -> None:
    runner = start(Stateful, gpu, on_nan="raise")
    assert {b.name for b in runner._backups} == {"seen", "mean"}
    assert not start(Stateful, gpu)._backups and not start(Line, gpu, on_nan="raise")._backups
    assert ERROR in {pipeline.code for pipeline, *_ in runner.entries["accumulate"].work}
