"""One device for all tests of the runtime, requested with WebGPU's default limits."""

from collections.abc import Iterator
from typing import Any

import pytest

from runtime_stub import doctor
from runtime_stub.core import ModelRunner


@pytest.fixture(scope="session")
def gpu() -> Iterator[Any]:
    device = doctor.request_device(doctor.choose_adapter(None), ModelRunner)
    yield device
    device.destroy()
