"""What a program is beside its graphs: how parameters start, the entries of training, and what a runner that trains knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Init = str | tuple[str, float] | None  # how a parameter starts: see Graph.parameter

ACCUMULATE, APPLY = "accumulate", "apply"  # the entries that training adds: forward and backward, and the update


@dataclass(frozen=True)
class TrainingSpec:
    """What the runner must know to train: the optimizer, its numbers, and how many parameters of all are updated.

    groups: of each input of numbers of the entry `apply`, the prefixes of names whose multipliers of learning rate and
    weight decay are in it, "" for none.
    """

    kind: str
    numbers: Mapping[str, Any]
    groups: Mapping[str, tuple[str, str]]
    trained: int
    parameters: int
