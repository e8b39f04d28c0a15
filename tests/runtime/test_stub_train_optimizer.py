"""The optimizer's numbers: a mapping that takes only what an update can use."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from .test_stub_train import start
from .trainers import Adam, Line, Momentum, batches


def test_it_is_a_mapping_and_starts_from_the_compiled_numbers(gpu: Any) -> None:
    runner = start(Adam, gpu)
    assert isinstance(runner.optimizer, Mapping) and dict(runner.optimizer) == Adam.optimizer_defaults
    assert list(runner.optimizer) == list(Adam.optimizer_defaults) and len(runner.optimizer) == 6
    assert runner.optimizer.get("nope") is None and "lr" in runner.optimizer and "'lr': 0.1" in repr(runner.optimizer)
    runner.optimizer["lr"] = 5
    assert runner.optimizer["lr"] == 5.0 and isinstance(runner.optimizer["lr"], float)
    assert Adam(gpu).optimizer["lr"] == Adam.optimizer_defaults["lr"] == 0.1


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "lr_mult.head", "wd_mult.head"])
def test_numbers_are_checked(gpu: Any, name: str) -> None:
    optimizer = Adam(gpu).optimizer
    for value in (0, 2, 0.5, np.float32(0.25), np.int64(3), 3e38):
        optimizer[name] = value
        assert optimizer[name] == value and type(optimizer[name]) is float
    for value in (-1, -1e-9, float("nan"), float("inf"), 1e39, 10**400, True, np.True_, "1", None, [1], 1j, np.ones(1)):
        with pytest.raises(ValueError, match=f"^{name}: expected a finite f32 number of at least 0, got "):
            optimizer[name] = value
    assert optimizer[name] == 3e38


def test_betas_are_two_numbers_below_one(gpu: Any) -> None:
    optimizer = Adam(gpu).optimizer
    optimizer["betas"] = [0, 0.5]
    assert optimizer["betas"] == (0.0, 0.5)
    for value in (0.9, (0.9,), (0.9, 0.9, 0.9), "ab", None, {0.9, 0.99}):
        with pytest.raises(ValueError, match="^betas: expected two numbers, got "):
            optimizer["betas"] = value
    for value in ((0.9, 1), (1.5, 0.9), (0.9, float("nan")), (True, 0.9), ("0.9", 0.9), (-0.1, 0.9)):
        with pytest.raises(ValueError, match=r"^betas\[[01]\]: expected a number from 0 to less than 1, got "):
            optimizer["betas"] = value
    assert optimizer["betas"] == (0.0, 0.5)


def test_unknown_numbers_are_refused_and_the_known_listed(gpu: Any) -> None:
    runner = start(Line, gpu)
    expected = "expected one of lr, momentum, weight_decay, lr_mult.head, wd_mult.head"
    for name in ("learning_rate", "betas", "clip_norm", 5):
        with pytest.raises(ValueError, match=f"^optimizer number {name!r}: {expected}$"):
            runner.optimizer[name] = 1
    with pytest.raises(KeyError):
        runner.optimizer["betas"]


def test_momentum_is_compiled_in_or_not(gpu: Any) -> None:
    with_velocity, without = Momentum(gpu).optimizer, Line(gpu).optimizer
    with_velocity["momentum"] = 0.5
    without["momentum"] = 0
    with pytest.raises(ValueError, match="momentum: expected a number above 0, got 0: .* compiled with a velocity"):
        with_velocity["momentum"] = 0
    with pytest.raises(ValueError, match="momentum: expected 0, got 0.9: the update was compiled without a velocity"):
        without["momentum"] = 0.9
    assert with_velocity["momentum"] == 0.5 and without["momentum"] == 0


def test_clip_norm_is_above_zero(gpu: Any) -> None:
    class Clipped(Line):
        optimizer_defaults = Line.optimizer_defaults | {"clip_norm": 2.0}

    optimizer = Clipped(gpu).optimizer
    optimizer["clip_norm"] = 1e-3
    with pytest.raises(ValueError, match="^clip_norm: expected a number above 0, got 0$"):
        optimizer["clip_norm"] = 0
    assert optimizer["clip_norm"] == 1e-3


def test_several_are_set_together_or_not_at_all(gpu: Any) -> None:
    optimizer = Adam(gpu).optimizer
    optimizer.update({"lr": 0.5, "eps": 1e-3})
    with pytest.raises(ValueError, match="eps"):
        optimizer.update({"lr": 9, "eps": -1})
    assert (optimizer["lr"], optimizer["eps"]) == (0.5, 1e-3)


def test_a_number_counts_from_the_next_update_on(gpu: Any) -> None:
    runner, other = start(Momentum, gpu), start(Momentum, gpu)
    first, second = batches(2)
    for r in (runner, other):
        r.train_step(**first)
    runner.optimizer["lr"] = 0.7
    runner.train_step(**second)
    other.train_step(0.7, **second)
    assert runner.weights()["w"].tobytes() == other.weights()["w"].tobytes()
    assert other.optimizer["lr"] == 0.1, "an lr that is given counts for one step"
    runner.optimizer["lr"] = 0
    before = runner.weights()["w"].tobytes()
    runner.accumulate(**first)
    runner.apply()
    assert runner.weights()["w"].tobytes() == before
