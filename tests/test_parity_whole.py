"""Whether the comparison with PyTorch leaves an operator out."""

from __future__ import annotations

from pathlib import Path

import pytest

from meganeura_aot.op import OPS
from tests import harness

pytestmark = pytest.mark.parity

# What PyTorch has no counterpart of: the tests named here compare with published algorithms or NumPy.
NOT_IN_PYTORCH = {
    "advance": "tests/state/test_states.py",
    "advance_counter": "tests/random/test_random.py",
    "assign": "tests/state/test_states.py",
    "cache_write": "tests/attention/test_attention.py",
    "random_bits": "tests/random/test_random.py",
    "random_dropout": "tests/random/test_dropout.py",
    "random_normal": "tests/random/test_random.py",
    "random_uniform": "tests/random/test_random.py",
    "state": "tests/state/test_states.py",
}


def test_every_operator_was_compared(request: pytest.FixtureRequest) -> None:
    """Of a whole run of the comparison: this file comes last."""
    files = {item.path.name for item in request.session.items}
    if not {path.name for path in Path(__file__).parent.rglob("test_parity*.py")} <= files:
        return
    assert OPS.keys() - harness.OPERATORS_RUN - NOT_IN_PYTORCH.keys() == set()
