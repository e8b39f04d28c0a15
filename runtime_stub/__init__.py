"""What every emitted runner carries: ordinary importable code that the compiler copies whole into runner.py."""

from .cli import main
from .core import ModelRunner
from .fit import DataLoader
from .train import TrainingRunner
from .weights import WeightError, unpack

__all__ = ["DataLoader", "ModelRunner", "TrainingRunner", "WeightError", "main", "unpack"]
