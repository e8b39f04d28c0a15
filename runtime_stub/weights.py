"""What a model declares and is given: buffers, constants, tensors, the weights of a safetensors file."""

import base64
import json
import math
import os
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

DTYPES: Any = {"f32": np.dtype("<f4"), "i32": np.dtype("<i4"), "u32": np.dtype("<u4"), "f16": np.dtype("<f2")}
BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # NumPy has no such type: these are upper halves of float32 numbers
FILE_DTYPES: dict[str, Any] = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": BFLOAT16, "BOOL": "?"} | {
    f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)
}


class WeightError(ValueError):
    """A weight file that cannot be read, or weights that do not fit the model."""


class Buffer:
    """A declared buffer or output, of nbytes or a few more than its shape needs; a device that allocates sets `gpu`."""

    def __init__(self, kind: str, name: str, shape: tuple[int, ...], dtype: str, nbytes: int, data: Any = None) -> None:
        self.kind, self.name, self.shape, self.dtype, self.nbytes = kind, name, shape, dtype, nbytes
        # a parameter's init, a constant's values, an input's bounds, the buffer an output is read from
        self.data = data
        self.gpu: Any = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def array(self, data: Any) -> Any:
        """What these bytes say, without those behind the last element."""
        return np.frombuffer(data, DTYPES[self.dtype], math.prod(self.shape)).reshape(self.shape)


class Names(dict[str, Any]):
    """Buffers or entries by name; asking for an unknown one is a ValueError that lists them."""

    def __getitem__(self, name: str) -> Any:
        if not isinstance(name, str) or name not in self:
            raise ValueError(f"unknown name {name!r}: expected one of {', '.join(self) or 'none'}")
        return super().__getitem__(name)

    def types(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (buffer.shape, buffer.dtype) for name, buffer in self.items()}


def unpack(text: str) -> bytes:
    """A large constant: base85 of zlib, wrapped."""
    return zlib.decompress(base64.b85decode("".join(text.split())))


def to_tensor(value: Any, like: Any, mixed: bool = True) -> Any:
    """The value as an array of this shape and dtype, or ValueError; integers become floats only where mixed."""
    array, dtype = np.asarray(value), DTYPES[like.dtype]
    wide = array.dtype == BFLOAT16 or array.dtype.name == "bfloat16"
    text = f"expected {like}, got {'bfloat16' if wide else array.dtype.name}{list(array.shape)}"
    kinds = "biu" if dtype.kind != "f" else "biuf" if mixed else "f"
    if array.shape != like.shape or ("f" if wide else array.dtype.kind) not in kinds:
        raise ValueError(text)
    if wide:
        array = (array.view("<u2").astype("<u4") << 16).view("<f4")
    if dtype.kind != "f" and array.size:
        low, high, info = int(array.min()), int(array.max()), np.iinfo(dtype)
        if low < info.min or high > info.max:
            raise ValueError(f"{text} from {low} to {high}")
    with np.errstate(all="ignore"):  # what the dtype cannot hold becomes inf
        return array.astype(dtype, order="C", copy=False)


def check_bounds(array: Any, bounds: tuple[int, int] | None) -> None:
    """ValueError where a number is less than the first of the bounds, or more than the second."""
    if bounds is None:
        return
    low, high = bounds
    wrong = array[(array < low) | (array > high)]
    if wrong.size:
        raise ValueError(f"expected numbers from {low} to {high}, got {wrong[0]}")


def match_tensors(given: Mapping[str, Any], buffers: Names, strict: bool = True) -> dict[Buffer, Any]:
    """An array for each buffer, or one WeightError about all that is missing, misshapen or, where strict, unknown."""
    arrays, problems = {}, [f"{name}: not a tensor of this model" for name in given if strict and name not in buffers]
    for name, b in buffers.items():
        try:
            arrays[b] = to_tensor(given[name], b, mixed=False)
        except KeyError:
            problems.append(f"{name}: missing, expected {b}")
        except (TypeError, ValueError) as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise WeightError("\n  ".join(["the weights do not fit the model:", *problems]))
    return arrays


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name appears twice in the header")
    return dict(pairs)


def read_safetensors(path: str | os.PathLike[str], metadata: Any = None) -> dict[str, Any]:
    """Arrays by name, mapped from a file that is not trusted: whatever is wrong with it is a WeightError."""
    arrays, name = {}, "the header"
    try:
        data = np.memmap(path, np.uint8, "r")
        start = end = 8 + int.from_bytes(data[:8].tobytes(), "little")
        if end > min(data.size, 100_000_000) or data[8:9].tobytes() != b"{":
            raise ValueError(f"{end - 8} bytes in a file of {data.size}, beginning with {data[8:9].tobytes()!r}")
        header = json.loads(data[8:end].tobytes().decode(), object_pairs_hook=unique_names)
        ({} if metadata is None else metadata).update(header.pop("__metadata__", {}).items())
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            (begin, stop), dtype, shape = entry["data_offsets"], FILE_DTYPES[entry["dtype"]], entry["shape"]
            if any(type(n) is not int or n < 0 for n in [begin, stop] + shape) or start + begin != end:
                raise ValueError(f"impossible, overlapping or after a hole: {str(entry)[:200]}")
            raw, end = data[end : start + stop], start + stop
            if end > data.size:
                raise ValueError(f"the file is truncated: {data.size} bytes where {end} are needed")
            arrays[name] = raw.view(dtype).reshape(shape)  # checks the number of bytes
        if end != data.size:
            raise ValueError(f"ends at byte {end} of {data.size}")
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise WeightError(f"{path}: not a sound safetensors file: {name}: {type(error).__name__}: {error}") from error
    return arrays
