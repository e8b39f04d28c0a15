"""One device for all tests of the runtime, requested with WebGPU's default limits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime_stub import doctor
from runtime_stub.core import ModelRunner


@pytest.fixture(scope="session")
def gpu() -> Iterator[Any]:
    device = doctor.request_device(doctor.choose_adapter(None), ModelRunner)
    yield device
    device.destroy()


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[Any]]:
    """spy(owner, name) is the list of arguments that the function of this name will have been called with."""

    def spy(owner: Any, name: str) -> list[Any]:
        calls: list[Any] = []
        real = getattr(owner, name)

        def record(*arguments: Any, **more: Any) -> Any:
            calls.append(arguments)
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, record)
        return calls

    return spy
