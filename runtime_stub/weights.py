"""What a model declares and is given: buffers, constants, tensors."""

import base64
import math
import os
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

DTYPES: Any = {"f32": np.dtype("<f4"), "i32": np.dtype("<i4"), "u32": np.dtype("<u4"), "f16": np.dtype("<f2")}
BFLOAT16 = np.dtype([("bfloat16", "<u2")])  # NumPy has no such type: these are upper halves of float32 numbers
SHARD = re.compile(r"(.*)-\d+-of-0*([2-9]|[1-9]\d+)\.safetensors")


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


class Unreadable(NamedTuple):
    """Stands in place of an array for a tensor of a file whose dtype models and NumPy lack."""

    dtype: str
    shape: tuple[int, ...]


def to_array(value: Any) -> tuple[Any, str]:
    """The value as a NumPy array, and the name of its dtype. PyTorch's tensors come without gradient from any device."""
    if isinstance(value, Unreadable):
        raise TypeError(f"{value.dtype}{list(value.shape)} cannot be read: convert it to F32, F16 or BF16 first")
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        name = str(value.dtype).rpartition(".")[2]
        plain = value.detach().cpu()
        if name.startswith(("bfloat", "float8")):  # NumPy has none of them, float32 has all their values
            plain = plain.float()
        return np.asarray(plain.numpy()), name
    array = np.asarray(value)
    if array.dtype == BFLOAT16 or array.dtype.name == "bfloat16":
        return (array.view("<u2").astype("<u4") << 16).view("<f4"), "bfloat16"
    return array, array.dtype.name


def to_tensor(value: Any, like: Any, mixed: bool = True) -> Any:
    """The value as an array of this shape and dtype, or ValueError; integers become floats only where mixed."""
    try:
        array, name = to_array(value)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"expected {like}, got {type(value).__name__}: {error}") from error
    dtype = DTYPES[like.dtype]
    text = f"expected {like}, got {name}{list(array.shape)}"
    if array.shape != like.shape:
        raise ValueError(text)
    kinds = "biu"
    if dtype.kind == "f":
        kinds = "biuf" if mixed else "f"
    if array.dtype.kind not in kinds:
        raise ValueError(f"{text}: convert it first")
    if dtype.kind != "f" and array.size:
        low, high, info = int(array.min()), int(array.max()), np.iinfo(dtype)
        if low < info.min or high > info.max:
            raise ValueError(f"{text} from {low} to {high}")
    with np.errstate(all="ignore"):  # what the dtype cannot hold becomes inf
        return array.astype(dtype, order="C", copy=False)


def check_bounds(array: Any, bounds: tuple[int, int] | None) -> None:
    """Raise ValueError where a number is less than the first of the bounds, or more than the second."""
    if bounds is None:
        return
    low, high = bounds
    wrong = array[(array < low) | (array > high)]
    if wrong.size:
        raise ValueError(f"expected numbers from {low} to {high}, got {wrong[0]}")


def match_tensors(
    given: Mapping[str, Any], buffers: Names, strict: bool = True, source: Any = None
) -> dict[Buffer, Any]:
    """An array for each buffer, or one WeightError about all that is missing, misshapen or, where strict, unknown.

    source: the path or mapping that gave them. If it is one of several files, the message hints at their index.
    """
    arrays, problems = {}, [f"{name}: not a tensor of this model" for name in given if strict and name not in buffers]
    missing = [f"{name}: missing, expected {b}" for name, b in buffers.items() if name not in given]
    problems += missing
    for name, b in buffers.items():
        if name not in given:
            continue
        try:
            arrays[b] = to_tensor(given[name], b, mixed=False)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    if missing:
        problems += hints_about(source)
    if problems:
        raise WeightError("\n  ".join(["the weights do not fit the model:", *problems]))
    return arrays


def hints_about(source: Any) -> list[str]:
    """A hint to give the index, if the source has the name of one of several files."""
    if not isinstance(source, str | os.PathLike):
        return []
    file = os.path.basename(source)
    found = SHARD.fullmatch(os.fsdecode(file))
    if not found:
        return []
    index = f"{found[1]}.safetensors.index.json"
    return [
        f"{found[0]} looks like one of {found[2]} files: give {index}, which names all of them and lies beside them"
    ]
