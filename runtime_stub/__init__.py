"""What every emitted runner carries: ordinary importable code that the compiler copies whole into runner.py."""

from .cli import main
from .core import ModelRunner
from .weights import WeightError, unpack

__all__ = ["ModelRunner", "WeightError", "main", "unpack"]
