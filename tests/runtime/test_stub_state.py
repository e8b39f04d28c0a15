"""States: zero at start, kept across calls, and positions that the host mirrors and never lets pass a limit."""

from typing import Any

import numpy as np
import pytest

from runtime_stub import ModelRunner

from .runners import STEP, Decode, Kinds

X = [1, 2, 3, 4]


@pytest.fixture
def decode(gpu: Any) -> Decode:
    return Decode(gpu)


def position(runner: Decode) -> tuple[int, int]:
    """Where the GPU and where the host believes the position to be."""
    return int(runner.get_state("position")), int(runner._positions[runner.b_position])


def test_states_start_at_zero_even_in_used_memory(gpu: Any) -> None:
    class Dirty(Decode):
        def allocate(self, buffer: Any) -> Any:
            made = super().allocate(buffer)
            self.device.queue.write_buffer(made, 0, b"\x07" * made.size)
            return made

    runner = Dirty(gpu)
    assert runner.get_state("position") == 0 and runner.get_state("rows").tolist() == [0, 0]


def test_the_mirror_follows_the_gpu(decode: Decode) -> None:
    for calls in (1, 2):
        decode.decode(outputs=(), x=X)
        assert position(decode) == (3 * calls, 3 * calls)
        assert decode.get_state("rows").tolist() == [calls, calls]


def test_an_advance_past_the_limit_raises_and_changes_nothing(decode: Decode) -> None:
    decode.decode(x=X)
    decode.decode(x=X)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"decode.*'position'.*at 6, 3 more.*limit 8"):
            decode.decode(x=X)
    assert position(decode) == (6, 6) and decode.get_state("rows").tolist() == [2, 2]


def test_the_limit_itself_may_be_reached(decode: Decode) -> None:
    decode.set_state("position", 5)
    decode.decode(x=X)
    assert position(decode) == (8, 8)


def test_an_advance_by_an_input(decode: Decode) -> None:
    assert decode.prefill(n=5)["position"].tolist() == [5]
    assert position(decode) == (5, 5)
    assert decode.prefill(n=np.uint32(0))["position"].tolist() == [5]
    with pytest.raises(RuntimeError, match=r"at 5, 4 more.*limit 8"):
        decode.prefill(n=4)
    with pytest.raises(RuntimeError, match="4294967295 more"):
        decode.prefill(n=4294967295)
    decode.prefill(n=3)
    assert position(decode) == (8, 8)


def test_two_advances_of_one_state_add_up(gpu: Any) -> None:
    class Twice(Decode):
        def buffers(self) -> None:
            super().buffers()
            self.advance("decode", self.b_position, 2, limit=8)

        def encode_decode(self, encoder: Any) -> None:
            encoder.dispatch(self.pipeline(STEP, N=1, STEP=5), self.g_step_0, 1)

    runner = Twice(gpu)
    runner.decode(x=X)
    assert position(runner) == (5, 5)
    runner.set_state("position", 4)
    with pytest.raises(RuntimeError, match="at 7, 2 more"):
        runner.decode(x=X)
    assert position(runner) == (4, 4)


def test_the_largest_row_counts(decode: Decode) -> None:
    decode.set_state("rows", [7, 100])
    with pytest.raises(RuntimeError, match=r"'rows'.*at 100, 1 more"):
        decode.decode(x=X)
    assert position(decode) == (0, 0), "the position is advanced before the rows are checked, and must not move"


def test_set_state_and_reset_move_the_mirror(decode: Decode) -> None:
    decode.set_state("position", np.array(6))
    assert position(decode) == (6, 6)
    with pytest.raises(RuntimeError, match="at 6"):
        decode.decode(x=X)
    decode.reset()
    assert position(decode) == (0, 0)
    decode.decode(x=X)
    assert position(decode) == (3, 3)


def test_set_state_keeps_no_hold_of_the_caller_s_array(decode: Decode) -> None:
    rows = np.array([1, 2], np.uint32)
    decode.set_state("rows", rows)
    rows[:] = 100
    decode.decode(x=X)
    assert decode.get_state("rows").tolist() == [2, 3]


def test_set_state_beyond_the_limit_is_caught_by_the_next_call(decode: Decode) -> None:
    decode.set_state("position", 4294967295)
    with pytest.raises(RuntimeError, match="at 4294967295"):
        decode.decode(x=X)


@pytest.mark.parametrize("broken", ["encode_decode", "upload"])
def test_a_call_that_fails_before_submission_moves_nothing(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("driver")

    decode.decode(x=X)
    with monkeypatch.context() as patch:
        patch.setattr(decode, broken, fail)
        with pytest.raises(OSError, match="driver"):
            decode.decode(x=X)
    assert position(decode) == (3, 3)
    decode.decode(x=X)
    assert position(decode) == (6, 6)


def test_a_refused_submission_moves_nothing(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            decode, "encode_decode", lambda encoder: encoder.dispatch(decode.p_step_0, decode.g_step_0, 70000)
        )
        with pytest.raises(decode.wgpu.GPUError, match="65535"):
            decode.decode(x=X)
    assert position(decode) == (0, 0)


def test_states_are_converted_as_inputs_are(gpu: Any) -> None:
    runner = Kinds(gpu)
    runner.set_state("cache", np.array([[1, 2], [3, 4]]))
    assert runner.get_state("cache").dtype == np.float32 and runner.get_state("cache").tolist() == [[1, 2], [3, 4]]
    for value in ([1, 2, 3, 4], 1, [[1j, 1], [1, 1]]):
        with pytest.raises(ValueError, match=r"expected f32\[2, 2\], got"):
            runner.set_state("cache", value)
    with pytest.raises(ValueError, match="float"):
        Decode(gpu).set_state("position", 1.0)


def test_unknown_states_are_named(decode: Decode) -> None:
    for ask in (decode.get_state, lambda name: decode.set_state(name, 0)):
        with pytest.raises(ValueError, match="'cache'.*position, rows"):
            ask("cache")


def test_reading_a_state_gives_a_fresh_array(decode: Decode) -> None:
    rows = decode.get_state("rows")
    rows[:] = 9
    assert decode.get_state("rows").tolist() == [0, 0]


@pytest.mark.parametrize("nbytes", [0, 4, 16])
def test_a_state_without_elements(gpu: Any, nbytes: int) -> None:
    class Empty(ModelRunner):
        def buffers(self) -> None:
            self.b_s = self.state("s", (0, 3), "u32", nbytes=nbytes)
            self.output("run", "s", self.b_s, (0, 3), "u32")

        def encode_run(self, encoder: Any) -> None:
            pass

    runner = Empty(gpu)
    runner.set_state("s", np.zeros((0, 3), int))
    for array in (runner.get_state("s"), runner.call("run", {})["s"]):
        assert array.shape == (0, 3) and array.dtype == np.uint32


def test_a_state_in_more_bytes_than_it_needs(gpu: Any) -> None:
    class Roomy(ModelRunner):
        def buffers(self) -> None:
            self.b_s = self.state("s", (3,), nbytes=16)
            self.b_half = self.state("half", (3,), "f16", nbytes=8)
            self.output("run", "s", self.b_s, (3,))
            self.output("run", "half", self.b_half, (1, 3), "f16")

        def encode_run(self, encoder: Any) -> None:
            pass

    runner = Roomy(gpu)
    runner.set_state("s", [1, 2, 3])
    runner.set_state("half", [0.1, 2, -70000])
    half = np.array([0.1, 2, -np.inf], np.float16)
    assert runner.get_state("s").tolist() == [1, 2, 3] and np.array_equal(runner.get_state("half"), half)
    out = runner.call("run", {})
    assert out["s"].tolist() == [1, 2, 3] and np.array_equal(out["half"], [half])
