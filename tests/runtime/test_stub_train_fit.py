"""The loop over epochs: order, schedules, early stopping, what it prints, and interruptions."""

import io
import itertools
import re
import sys
from typing import Any

import numpy as np
import pytest

from runtime_stub import DataLoader
from runtime_stub.fit import Epoch

from .test_stub_train import bits, start
from .trainers import Adam, Line, Stateful, batches


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---- DataLoader


def numbers(loader: DataLoader) -> list[list[int]]:
    return [batch["i"].tolist() for batch in loader]


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    arrays = {"i": np.arange(20), "x": np.arange(40.0).reshape(20, 2)}
    first, again, other = DataLoader(arrays, 4), DataLoader({"i": arrays["i"]}, 4), DataLoader(arrays, 4, seed=1)
    one, two = numbers(first), numbers(first)
    assert one != two and sorted(itertools.chain(*one)) == sorted(itertools.chain(*two)) == list(range(20))
    assert numbers(other) not in (one, two)
    again.epoch = 1
    assert numbers(again) == two and again.epoch == 2
    again.epoch = 0
    assert numbers(again) == one
    for batch in first:
        assert list(batch) == ["i", "x"] and np.array_equal(batch["x"][:, 0], 2 * batch["i"])


def test_an_epoch_that_is_left_early_counts_as_one() -> None:
    arrays = {"i": np.arange(20)}
    whole, left = DataLoader(arrays, 4), DataLoader(arrays, 4)
    numbers(whole)
    next(iter(left))
    assert numbers(left) == numbers(whole)


def test_batches_are_whole_and_in_order_where_nothing_is_shuffled() -> None:
    loader = DataLoader({"i": list(range(11))}, np.int64(3), shuffle=False)
    assert len(loader) == 3 and isinstance(len(loader), int)
    assert numbers(loader) == numbers(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len(numbers(DataLoader({"i": np.arange(11)}, 3))) == 3
    assert numbers(DataLoader({"i": np.arange(3)}, 3, shuffle=False)) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("arrays", "size", "seed", "message"),
    [
        ({"a": np.zeros(4), "b": np.zeros((5, 2))}, 2, 0, r"equal first dimensions, got shapes .*\(4,\).*\(5, 2\)"),
        ({"a": np.zeros(4), "b": 1.0}, 2, 0, "equal first dimensions, got shapes"),
        ({"a": 1.0}, 1, 0, "equal first dimensions, got shapes"),
        ({}, 1, 0, "equal first dimensions, got shapes {}"),
        ({"a": np.zeros(4)}, 5, 0, "at least one batch of 5, got 4 rows"),
        ({"a": np.zeros(0)}, 1, 0, "at least one batch of 1, got 0 rows"),
        ({"a": np.zeros(4)}, 0, 0, "batch_size of DataLoader: expected an integer of at least 1, got 0"),
        ({"a": np.zeros(4)}, 2.0, 0, "batch_size of DataLoader: expected an integer of at least 1, got 2.0"),
        ({"a": np.zeros(4)}, True, 0, "batch_size of DataLoader: expected .* got True"),
        ({"a": np.zeros(4)}, 2, -1, "seed of DataLoader: expected an integer of at least 0, got -1"),
        ({"a": np.zeros(4)}, 2, None, "seed of DataLoader: expected an integer of at least 0, got None"),
    ],
)
def test_arrays_that_give_no_batches(arrays: Any, size: Any, seed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataLoader(arrays, size, seed=seed)


# ---- fit


def loader(seed: int = 0) -> DataLoader:
    """Points of a line, four a batch."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((26, 3)).astype("f4")
    return DataLoader({"x": x, "t": x * [1, 2, 3] + 0.5}, 4)


def test_it_is_train_step_over_the_batches(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fitted, stepped = start(Adam, gpu), start(Adam, gpu)
    seen: list[tuple[int, float]] = []
    history = fitted.fit(loader(), epochs=3, log_every=0, on_step=lambda step, loss: seen.append((step, loss)))
    data = loader()
    losses = [[stepped.train_step(**batch) for batch in data] for _ in range(3)]
    assert bits(fitted.weights()) == bits(stepped.weights()) and fitted.step == 18
    assert seen == list(enumerate(itertools.chain(*losses), start=1))
    for number, (epoch, expected) in enumerate(zip(history, losses, strict=True), start=1):
        assert isinstance(epoch, Epoch) and epoch[:3] == (number, 6, pytest.approx(np.mean(expected)))
        assert epoch.validation is None and 0 < epoch.seconds < 60
    assert history[-1].loss < history[0].loss / 2
    assert capsys.readouterr() == ("", "")


def test_lr_is_a_number_or_a_function_of_the_updates_so_far(gpu: Any) -> None:
    fitted, stepped = start(Line, gpu), start(Line, gpu)
    asked: list[int] = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.1 / (1 + step)

    given = batches(3)
    for runner in (fitted, stepped):
        runner.train_step(**given[0])
    fitted.fit(given, epochs=2, lr=schedule, log_every=0)
    fitted.fit(given, lr=0.25, log_every=0)
    for step, batch in enumerate(given * 2, start=1):
        stepped.train_step(0.1 / (1 + step), **batch)
    for batch in given:
        stepped.train_step(0.25, **batch)
    assert asked == [1, 2, 3, 4, 5, 6] and bits(fitted.weights()) == bits(stepped.weights())
    with pytest.raises(ValueError, match="lr of line"):
        fitted.fit(given, lr=lambda step: -1)


def test_validation_by_batches_is_the_mean_loss_of_the_forward_entry(gpu: Any) -> None:
    runner, held_out = start(Line, gpu), batches(3, seed=9)
    (epoch,) = runner.fit(batches(2), validation=held_out, log_every=0)
    expected = np.mean([runner.run(outputs=("loss",), **batch)["loss"] for batch in held_out])
    assert epoch.validation == pytest.approx(expected, rel=1e-6)
    assert runner.step == 2, "validation does not train"


def test_the_entry_called_train_is_validated_where_there_are_several(gpu: Any) -> None:
    class Several(Line):
        def buffers(self) -> None:
            super().buffers()
            self.b_one = self.constant("one", (1,), [7.0], nbytes=4)
            self.output("train", "value", self.b_one, (1,))
            self.output("train", "other", self.b_loss, ())

        def encode_train(self, encoder: Any) -> None: ...

    class Unclear(Line):
        def encode_other(self, encoder: Any) -> None: ...

    runner = start(Several, gpu)
    assert runner._only is None
    assert runner.fit(batches(1), validation=[{}], log_every=0)[0].validation == 7, "the first output, with no `loss`"
    with pytest.raises(
        ValueError, match="validation of fit: expected a function of the runner where there are several"
    ):
        start(Unclear, gpu).fit(batches(1), validation=batches(1), log_every=0)


def test_early_stopping(gpu: Any) -> None:
    runner = start(Line, gpu)
    values = iter([3.0, 2.0, float("nan"), 2.0, 1.0, 5.0, 4.0, 3.0, 0.0])
    history = runner.fit(batches(1), epochs=9, validation=lambda r: next(values), patience=3, log_every=0)
    assert [epoch.validation for epoch in history][4:] == [1, 5, 4, 3] and len(history) == 8
    values = iter([2.0, float("nan"), 2.5, float("nan"), 0.0])
    assert len(runner.fit(batches(1), epochs=5, validation=lambda r: next(values), patience=3, log_every=0)) == 4
    history = runner.fit(batches(1), epochs=9, lr=0, patience=2, log_every=0)
    assert len(history) == 3, "the training loss counts where nothing is validated"
    assert runner.fit(batches(1), epochs=0) == []


@pytest.mark.parametrize("validated", [False, True])
def test_plain_lines(gpu: Any, capsys: pytest.CaptureFixture[str], validated: bool) -> None:
    runner = start(Line, gpu)
    runner.fit(batches(4), epochs=2, log_every=3, validation=(lambda r: 0.25) if validated else None)
    out, err = capsys.readouterr()
    number = r"[\d.e+-]+"
    step = rf"epoch \d/2, step \d/4, {number} steps/s, loss {number}, \d+:\d\d:\d\d left"
    tail = ", validation 0.25" if validated else ""
    end = rf"epoch \d/2: 4 steps, loss {number}{tail}, {number} s"
    assert out == "" and re.fullmatch(f"{step}\n{end}\n{step}\n{end}\n", err), err
    assert [line[:20] for line in err.splitlines() if "left" in line] == [
        "epoch 1/2, step 3/4,",
        "epoch 2/2, step 2/4,",
    ]


def test_one_line_on_a_terminal(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, terminal = start(Line, gpu), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "50")
    runner.fit(batches(4), epochs=2, log_every=1)
    lines = terminal.getvalue().split("\n")
    assert len(lines) == 3 and lines[2] == "" and all(line.count("\r") == 5 for line in lines[:2])
    for shown in "\r".join(lines).split("\r")[1:-1]:
        assert len(shown) in (0, 49), "as wide as the terminal but one, so that nothing wraps and nothing is left over"
    assert lines[0].split("\r")[-1].startswith("epoch 1/2: 4 steps, loss ")


def test_data_of_unknown_length_has_no_time_left(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    history = start(Line, gpu).fit(iter(batches(3)), log_every=2)
    assert history[0].steps == 3
    assert re.match(r"epoch 1/1, step 2, [\d.]+ steps/s, loss [\d.]+\nepoch 1/1: 3 steps", capsys.readouterr().err)


def test_no_stderr_and_no_loss_of_it(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert len(start(Line, gpu).fit(batches(2), log_every=1)) == 1


def test_data_that_does_not_serve(gpu: Any) -> None:
    runner = start(Line, gpu)
    before = bits(runner.weights())
    for given, more, message in (
        (iter(batches(2)), {"epochs": 2}, "data of fit: expected a list or DataLoader for 2 epochs, got list_iterator"),
        ([], {}, "data of fit: expected batches for epoch 1, got none"),
        (batches(2), {"epochs": 2, "validation": iter(batches(1))}, "validation of fit: expected a list or DataLoader"),
        ([1], {}, "data of fit: expected mappings of inputs, got int"),
        (batches(1), {"epochs": -1}, "epochs of fit: expected an integer of at least 0, got -1"),
        (batches(1), {"epochs": 1.5}, "epochs of fit: expected an integer"),
        (batches(1), {"patience": 0}, "patience of fit: expected an integer of at least 1, got 0"),
        (batches(1), {"log_every": -1}, "log_every of fit: expected an integer of at least 0, got -1"),
        ([{"x": 1}], {}, r"inputs of train_step: expected \['x', 't'\], got \['x'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.fit(given, **more)
    assert bits(runner.weights()) == before and runner.step == 0
    with pytest.raises(ValueError, match="validation of fit: expected batches, got none"):
        runner.fit(batches(1), validation=[], log_every=0)


def test_an_interruption_leaves_a_sound_runner(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, plain, terminal = start(Stateful, gpu), start(Stateful, gpu), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    given = batches(5)

    def on_step(step: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.fit(given, log_every=1, on_step=on_step)
    assert terminal.getvalue().endswith("\n"), "the shell's prompt gets a line of its own"
    assert runner.step == 3 and runner.get_state("seen") == 3
    runner.fit(given[3:], log_every=0)
    plain.fit(given, log_every=0)
    assert bits(runner.weights()) == bits(plain.weights())
