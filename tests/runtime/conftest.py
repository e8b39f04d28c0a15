"""One device for all tests of the runtime, requested with WebGPU's default limits."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime_stub import doctor
from runtime_stub.core import ModelRunner

from .runners import Two


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


@pytest.fixture
def two(gpu: Any) -> Two:
    return Two(gpu)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a safetensors file of (name, dtype, shape, bytes), or of any header and data."""

    def write(tensors: Any = (), *, header: Any = None, data: bytes = b"", length: int | None = None) -> Path:
        entries: dict[str, Any] = {}
        for name, dtype, shape, raw in tensors:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
        text = header if isinstance(header, bytes) else json.dumps(entries if header is None else header).encode()
        path = tmp_path / "w.safetensors"
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
        return path

    return write
