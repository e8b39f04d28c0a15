"""The loop over epochs and batches: data in an order that can be repeated, progress, early stopping."""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import numpy as np


def check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")


class DataLoader:
    """Batches of arrays with equal first dimensions; what fills no batch is left out, for a runner's shapes are static.

    Each iteration is an epoch, the first one number `epoch`: its order depends on that number and the seed only.
    """

    def __init__(self, arrays: Mapping[str, Any], batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.batch_size, self.shuffle, self.seed, self.epoch = batch_size, shuffle, seed, 0
        shapes = {name: array.shape for name, array in self.arrays.items()}
        counts = {shape[:1] for shape in shapes.values()}
        if len(counts) != 1 or () in counts:
            raise ValueError(f"arrays of DataLoader: expected equal first dimensions, got shapes {shapes}")
        ((self.count,),) = counts
        check_integer("batch_size of DataLoader", batch_size, 1)
        check_integer("seed of DataLoader", seed, 0)
        if self.count < batch_size:
            raise ValueError(
                f"arrays of DataLoader: expected at least one batch of {batch_size}, got {self.count} rows"
            )

    def __len__(self) -> int:
        return int(self.count // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        size, order = self.batch_size, np.arange(self.count)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(self.count)
        self.epoch += 1
        rows = (order[i * size : (i + 1) * size] for i in range(len(self)))
        return ({name: array[part] for name, array in self.arrays.items()} for part in rows)


class Epoch(NamedTuple):
    """One epoch of fit: its number from 1, updates, mean loss, what validation gave, seconds with validation."""

    epoch: int
    steps: int
    loss: float
    validation: float | None
    seconds: float


class Progress:
    """On stderr: one line again and again on a terminal, a line each time elsewhere."""

    def __init__(self, every: int, epochs: int, steps: int | None) -> None:
        self.every, self.epochs, self.steps = every if sys.stderr else 0, epochs, steps
        self.terminal = bool(self.every) and sys.stderr.isatty()
        self.start, self.count, self.open = time.perf_counter(), 0, False

    def step(self, epoch: int, number: int, loss: float) -> None:
        self.count += 1
        if not self.every or self.count % self.every:
            return
        rate = self.count / max(1e-9, time.perf_counter() - self.start)
        total, left = (f"/{self.steps}", "") if self.steps else ("", "")
        if self.steps:
            minutes, seconds = divmod(round((self.epochs * self.steps - self.count) / rate), 60)
            left = f", {minutes // 60}:{minutes % 60:02}:{seconds:02} left"
        text = f"epoch {epoch}/{self.epochs}, step {number}{total}, {rate:.1f} steps/s, loss {loss:.6g}{left}"
        self.show(text, end="" if self.terminal else "\n")
        self.open = self.terminal

    def epoch(self, done: Epoch) -> None:
        if self.every:
            validated = "" if done.validation is None else f", validation {done.validation:.6g}"
            text = f"epoch {done.epoch}/{self.epochs}: {done.steps} steps, loss {done.loss:.6g}{validated}"
            self.show(f"{text}, {done.seconds:.1f} s", end="\n")
            self.open = False

    def show(self, text: str, end: str) -> None:
        if self.terminal:  # a longer line would wrap, and \r not lead back to its start
            width = shutil.get_terminal_size().columns - 1
            text = "\r" + text[:width].ljust(width)
        try:
            print(text, end=end, file=sys.stderr, flush=True)
        except OSError:  # nobody reads it any more: training goes on
            self.every = 0

    def stop(self, since: int) -> None:
        if self.every:
            self.show(f"stopped: nothing better in {since} epochs", end="\n")

    def close(self) -> None:
        if self.open and self.every:
            print(file=sys.stderr, flush=True)


def fit_model(
    runner: Any,
    data: Iterable[Mapping[str, Any]],
    epochs: int = 1,
    lr: float | Callable[[int], float] | None = None,
    validation: Iterable[Mapping[str, Any]] | Callable[[Any], float] | None = None,
    patience: int | None = None,
    log_every: int = 50,
    on_step: Callable[[int, float], object] | None = None,
) -> list[Epoch]:
    """train_step() over each batch of data, which is iterated once an epoch.

    lr: a number, or a function of the number of updates so far. validation, after each epoch: batches for the mean
    loss of the forward entry, or a function of the runner; less is better. patience: stop after so many epochs
    without a better validation, or loss where there is none. log_every: steps between reports, 0 for silence.
    on_step is called with `step` and the loss after each update.
    """
    check_integer("epochs of fit", epochs, 0)
    check_integer("patience of fit", 1 if patience is None else patience, 1)
    check_integer("log_every of fit", log_every, 0)
    for name, given in (("data", data), ("validation", validation)):
        if epochs > 1 and not callable(given) and isinstance(given, Iterator):
            kind = f"{type(given).__name__}, which is empty after the first one"
            raise ValueError(f"{name} of fit: expected a list or DataLoader for {epochs} epochs, got {kind}")
    history, best, since = list[Epoch](), math.inf, 0
    progress = Progress(log_every, epochs, len(data) if isinstance(data, Sized) else None)
    try:
        for number in range(1, epochs + 1):
            start, losses = time.perf_counter(), list[float]()
            for batch in data:
                if not isinstance(batch, Mapping):
                    raise ValueError(f"data of fit: expected mappings of inputs, got {type(batch).__name__}")
                loss = runner.train_step(lr(runner.step) if callable(lr) else lr, **batch)
                losses.append(loss)
                progress.step(number, len(losses), loss)
                if on_step:
                    on_step(runner.step, loss)
            if not losses:
                raise ValueError(f"data of fit: expected batches for epoch {number}, got none")
            mean, value = float(np.mean(losses)), None if validation is None else validate(runner, validation)
            history.append(Epoch(number, len(losses), mean, value, time.perf_counter() - start))
            progress.epoch(history[-1])
            measure = mean if value is None else value
            best, since = (measure, 0) if measure < best else (best, since + 1)
            if patience is not None and since >= patience:
                progress.stop(since)
                break
    finally:
        progress.close()
    return history


def validate(runner: Any, validation: Any) -> float:
    """What the function gives, or the mean loss of the forward entry over the batches."""
    if callable(validation):
        return float(validation(runner))
    entry = "train" if "train" in runner.entries else runner._only
    if entry is None:
        raise ValueError(
            "validation of fit: expected a function of the runner where there are several entries, got data"
        )
    if written := sorted(b.name for b in runner.entries[entry].written if b.kind == "state"):
        raise ValueError(
            f"validation of fit: expected a function of the runner where {entry} writes states ({', '.join(written)}), got data"
        )
    results = list(runner.entries[entry].results)
    loss = "loss" if "loss" in results else results[0]
    losses = [runner.call(entry, batch, outputs=(loss,))[loss].item() for batch in validation]
    if not losses:
        raise ValueError("validation of fit: expected batches, got none")
    return float(np.mean(losses))
