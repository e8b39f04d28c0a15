"""Weights and checkpoints as files: exact, whole or not at all, and never a reason for half a change."""

import concurrent.futures
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime_stub import TrainingRunner, WeightError, train
from runtime_stub.weight_files import read_safetensors

from .test_stub_train import bits, start
from .test_stub_train_nan import snapshot
from .trainers import Adam, AdamW, Line, Momentum, Stateful, batches


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def rewrite(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


# ---- going on from a checkpoint


@pytest.mark.parametrize("on_nan", ["ignore", "raise"])
@pytest.mark.parametrize("kind", [Line, Momentum, Adam, AdamW, Stateful])
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(
    gpu: Any, tmp_path: Path, kind: type[TrainingRunner], on_nan: str
) -> None:
    whole, first = start(kind, gpu, on_nan=on_nan), start(kind, gpu, on_nan=on_nan)
    given = batches(9)
    for batch in given[:4]:
        whole.train_step(**batch)
        first.train_step(**batch)
    whole.optimizer["lr"] = first.optimizer["lr"] = 0.07
    first.save_checkpoint(tmp_path / "c.safetensors")
    second = kind(gpu, on_nan=on_nan)
    second.load_checkpoint(tmp_path / "c.safetensors")
    assert snapshot(second) == snapshot(whole) and second.step == 4
    for batch in given[4:]:
        assert second.train_step(**batch) == whole.train_step(**batch)
    assert snapshot(second) == snapshot(whole) and second.optimizer["lr"] == 0.07


def test_loading_goes_back_in_the_same_runner(gpu: Any, tmp_path: Path) -> None:
    runner = start(Stateful, gpu)
    given = batches(6)
    for batch in given[:3]:
        runner.train_step(**batch)
    runner.save_checkpoint(tmp_path / "c")
    there = snapshot(runner)
    losses = [runner.train_step(**batch) for batch in given[3:]]
    runner.accumulate(**given[0])
    runner.optimizer["eps"] = 0.5
    runner.load_checkpoint(str(tmp_path / "c"))
    assert snapshot(runner) == there
    with pytest.raises(RuntimeError, match="got no gradients"):
        runner.apply()
    with pytest.raises(RuntimeError, match="gradients of line"):
        runner.gradients()
    assert [runner.train_step(**batch) for batch in given[3:]] == losses


def test_a_checkpoint_between_accumulate_and_apply_is_refused(gpu: Any, tmp_path: Path) -> None:
    runner = start(Adam, gpu)
    runner.accumulate(**batches(1)[0])
    with pytest.raises(RuntimeError, match=r"save_checkpoint of line: expected apply\(\) before it, got pending"):
        runner.save_checkpoint(tmp_path / "c")
    assert not list(tmp_path.iterdir())
    runner.save_weights(tmp_path / "w")
    runner.apply()
    runner.save_checkpoint(tmp_path / "c")


def test_files_without_weights_are_refused(gpu: Any, tmp_path: Path) -> None:
    for save in (Line(gpu).save_weights, Line(gpu).save_checkpoint):
        with pytest.raises(RuntimeError, match="line is without weights: w, head.b"):
            save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


# ---- the format


def test_what_is_in_a_checkpoint(gpu: Any, tmp_path: Path) -> None:
    runner = start(Stateful, gpu)
    runner.train_step(**batches(1)[0])
    path = tmp_path / "c.safetensors"
    runner.save_checkpoint(path)
    header, data = parts(path)
    notes = header.pop("__metadata__")
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0 and len(data) == 4 * (6 * 3 + 3 + 2 + 1)
    moments = [f"optimizer.{kind}.{name}" for kind in "mv" for name in ("head.b", "w")]
    assert list(header) == sorted([*moments, "w", "head.b", "state.seen", "state.mean", "state.other"])
    assert notes.pop("numbers") == json.dumps(dict(runner.optimizer))
    assert notes == {"checkpoint": "1", "step": "1", "optimizer": "adam", "model": "line"}
    arrays = read_safetensors(path)
    assert arrays["state.seen"].dtype == np.uint32 and arrays["state.seen"] == 1
    assert arrays["w"].tobytes() == runner.weights()["w"].tobytes()
    first = path.read_bytes()
    runner.save_checkpoint(path)
    assert path.read_bytes() == first


@pytest.mark.parametrize("length", range(8))
def test_data_starts_at_a_multiple_of_eight(gpu: Any, tmp_path: Path, length: int) -> None:
    runner = start(Line, gpu)
    train.write_safetensors(tmp_path / "w", runner._named("parameter"), runner._download, {"note": "x" * length})
    header, data = parts(tmp_path / "w")
    assert (tmp_path / "w").stat().st_size % 8 == len(data) % 8 and header["__metadata__"] == {"note": "x" * length}
    assert read_safetensors(tmp_path / "w")["w"].tobytes() == runner.weights()["w"].tobytes()


def test_the_library_reads_what_is_written(gpu: Any, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    runner = start(Stateful, gpu)
    runner.save_checkpoint(tmp_path / "c")
    runner.save_weights(tmp_path / "w")
    with safetensors.safe_open(tmp_path / "c", "np") as file:
        assert file.metadata()["step"] == "0" and file.get_tensor("state.seen").shape == ()
    with safetensors.safe_open(tmp_path / "w", "np") as file:
        assert file.metadata() is None and set(file.keys()) == {"w", "head.b", "mean"}
        assert np.array_equal(file.get_tensor("w"), runner.weights()["w"])


class Mixed(Line):
    """mixed: parameters that are not trained, of every dtype and of odd sizes."""

    def buffers(self) -> None:
        super().buffers()
        self.b_half = self.parameter("a.half", (3,), "f16", nbytes=8, init=("normal", 1.0))
        self.b_one = self.parameter("größe", (), "i32", nbytes=4, init="ones")
        self.b_none = self.parameter("none", (0, 2), nbytes=4, init="zeros")


def test_weights_of_every_dtype(gpu: Any, tmp_path: Path) -> None:
    runner, other = start(Mixed, gpu), Mixed(gpu)
    runner.save_weights(tmp_path / "w")
    header, data = parts(tmp_path / "w")
    assert {name: entry["dtype"] for name, entry in header.items()} == {
        "größe": "I32",
        "head.b": "F32",
        "none": "F32",
        "w": "F32",
        "a.half": "F16",
    }
    assert len(data) == 4 + 12 + 12 + 6 and list(header)[-1] == "a.half", "the widest first: all are aligned"
    other.load_weights(tmp_path / "w")
    assert bits(other.weights()) == bits(runner.weights()) and other.weights()["a.half"].dtype == np.float16
    other.save_weights(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "w").read_bytes()
    runner.save_checkpoint(tmp_path / "c")
    third = Mixed(gpu)
    third.load_checkpoint(tmp_path / "c")
    assert bits(third.weights()) == bits(runner.weights())


# ---- all or nothing


class Full(Exception):
    """The disk is full."""


@pytest.mark.parametrize("there", [True, False])
def test_a_failed_read_leaves_the_old_file(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Of the third buffer. What else can fail is in test_stub_files.py."""
    runner, path = start(Stateful, gpu), tmp_path / "c"
    if there:
        runner.save_checkpoint(path)
    before = path.read_bytes() if there else None
    runner.train_step(**batches(1)[0])
    real = runner._download

    def fail_at_the_third(buffer: Any) -> Any:
        calls.append(buffer)
        if len(calls) == 3:
            raise Full
        return real(buffer)

    for save in (runner.save_checkpoint, runner.save_weights):
        calls = list[Any]()
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_download", fail_at_the_third)
            with pytest.raises(Full):
                save(path)
        assert [p.name for p in tmp_path.iterdir()] == (["c"] if there else [])
        assert not there or path.read_bytes() == before
    runner.save_checkpoint(path)
    assert parts(path)[0]["__metadata__"]["step"] == "1"


def test_two_runners_save_under_one_name(gpu: Any, tmp_path: Path) -> None:
    runners = [start(Line, gpu) for _ in range(3)]
    for number, runner in enumerate(runners):
        for batch in batches(number):
            runner.train_step(**batch)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda runner: [runner.save_checkpoint(tmp_path / "c") for _ in range(20)], runners))
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    again = Line(gpu)
    again.load_checkpoint(tmp_path / "c")
    assert snapshot(again) in [snapshot(runner) for runner in runners]


# ---- what does not fit


def test_files_that_are_no_checkpoint_of_this_runner(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, path, good = start(Stateful, gpu), tmp_path / "bad", tmp_path / "good"
    runner.train_step(**batches(1)[0])
    runner.save_checkpoint(good)
    header, data = parts(good)
    notes = header["__metadata__"]
    numbers = dict(runner.optimizer)

    def noted(**more: Any) -> dict[str, Any]:
        return header | {"__metadata__": {name: v for name, v in (notes | more).items() if v is not None}}

    def numbered(**more: Any) -> dict[str, Any]:
        return noted(numbers=json.dumps({name: v for name, v in (numbers | more).items() if v is not None}))

    renamed = {{"w": "v", "state.seen": "seen"}.get(name, name): entry for name, entry in header.items()}
    reshaped = header | {"w": header["w"] | {"shape": [1, 3]}, "state.mean": header["state.mean"] | {"shape": [3, 1]}}
    retyped = header | {"state.seen": header["state.seen"] | {"dtype": "F32"}}
    cases = [
        (renamed, ["v: not a tensor", "seen: not a tensor", "w: missing, expected f32[3]", "state.seen: missing"]),
        (reshaped, ["w: expected f32[3], got float32[1, 3]", "state.mean: expected f32[3], got float32[3, 1]"]),
        (retyped, ["state.seen: expected u32[], got float32[]"]),
        (noted(checkpoint=None), ["not a checkpoint for line: checkpoint: expected '1', got None"]),
        (noted(checkpoint="2"), ["checkpoint: expected '1', got '2'"]),
        (noted(optimizer="adamw"), ["optimizer: expected 'adam', got 'adamw'"]),
        *(
            (noted(step=step), ["step: expected a number, got"])
            for step in (None, "-1", "1.5", "nan", "", "9" * 5000, [1])
        ),
        *((noted(numbers=text), []) for text in (None, "", "{", 5, "NaN", "[" * 100_000)),
        (noted(numbers="[1]"), ["optimizer numbers: expected lr, betas"]),
        (noted(numbers="5"), ["optimizer numbers: expected lr, betas"]),
        (noted(numbers="null"), ["optimizer numbers: expected lr, betas"]),
        (numbered(eps=None), ["optimizer numbers: expected lr, betas, eps", "got lr, betas, weight_decay"]),
        (numbered(clip_norm=1), ["optimizer numbers: expected", "clip_norm"]),
        (numbered(lr=-1), ["lr: expected a finite f32 number of at least 0, got -1"]),
        (numbered(lr="1"), ["lr: expected", "got '1'"]),
        (numbered(betas=[0.9]), ["betas: expected two numbers, got [0.9]"]),
        (noted(numbers=notes["numbers"].replace("0.02", "NaN")), ["weight_decay: expected", "got nan"]),
    ]
    there = snapshot(runner)
    runner.accumulate(**batches(1)[0])
    state = snapshot(runner), bits(runner.gradients())
    monkeypatch.setattr(runner, "upload", None)
    for changed, messages in cases:
        rewrite(path, changed, data)
        with pytest.raises(WeightError) as caught:
            runner.load_checkpoint(path)
        assert all(text in str(caught.value) for text in [str(path), *messages]), caught.value
        assert (snapshot(runner), bits(runner.gradients())) == state
    monkeypatch.undo()
    runner.load_checkpoint(good)
    assert snapshot(runner) == there


def test_weights_are_no_checkpoint_and_a_checkpoint_no_weights(gpu: Any, tmp_path: Path) -> None:
    runner = start(Adam, gpu)
    runner.save_weights(tmp_path / "w")
    runner.save_checkpoint(tmp_path / "c")
    with pytest.raises(WeightError, match="not a checkpoint for line: checkpoint: expected '1', got None"):
        runner.load_checkpoint(tmp_path / "w")
    with pytest.raises(WeightError, match="optimizer.m.w: not a tensor of this model"):
        runner.load_weights(tmp_path / "c")
    other = Line(gpu)
    other.load_weights(tmp_path / "c", strict=False)
    assert bits(other.weights()) == bits(runner.weights())
    with pytest.raises(OSError, match="nothing"):
        runner.load_checkpoint(tmp_path / "nothing")


def test_momentum_of_a_checkpoint_must_be_the_compiled_kind(gpu: Any, tmp_path: Path) -> None:
    class Same(Momentum):
        """The same tensors, but momentum is compiled as 0."""

        optimizer_defaults = Line.optimizer_defaults

    start(Momentum, gpu).save_checkpoint(tmp_path / "c")
    with pytest.raises(WeightError, match="c: momentum: expected 0, got 0.9: the update was compiled without"):
        Same(gpu).load_checkpoint(tmp_path / "c")


def test_damaged_files_change_nothing(gpu: Any, tmp_path: Path) -> None:
    runner, path = start(Stateful, gpu), tmp_path / "c"
    runner.save_checkpoint(path)
    whole, rng = np.frombuffer(path.read_bytes(), np.uint8), np.random.default_rng(0)
    runner.train_step(**batches(1)[0])
    there, length = snapshot(runner), int.from_bytes(whole[:8].tobytes(), "little")
    for size in rng.integers(0, len(whole), 40):
        path.write_bytes(whole[:size].tobytes())
        with pytest.raises(WeightError, match=str(path)):
            runner.load_checkpoint(path)
    assert snapshot(runner) == there
    refused = 0
    for _ in range(200):
        damaged = whole.copy()
        damaged[rng.integers(0, length, 3)] = rng.integers(0, 256, 3)
        path.write_bytes(damaged.tobytes())
        try:
            runner.load_checkpoint(path)
        except WeightError:
            refused += 1
    assert refused > 150


def test_an_interrupted_load_does_not_run(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = start(Adam, gpu)
    runner.train_step(**batches(1)[0])
    runner.save_checkpoint(tmp_path / "c")
    calls: list[int] = []

    def upload(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*arguments)

    real = runner.upload
    monkeypatch.setattr(runner, "upload", upload)
    with pytest.raises(KeyboardInterrupt):
        runner.load_checkpoint(tmp_path / "c")
    with pytest.raises(RuntimeError, match="line is without weights"):
        runner.train_step(**batches(1)[0])
    runner.load_checkpoint(tmp_path / "c")
    runner.train_step(**batches(1)[0])
    assert runner.step == 2


def test_names_that_meet_in_a_checkpoint_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meeting(Stateful):
        def buffers(self) -> None:
            super().buffers()
            self.b_odd = self.parameter("state.mean", (1,), nbytes=4)

    with pytest.raises(ValueError, match="line: expected different names in a checkpoint, got .*'state.mean'"):
        Meeting.describe()
