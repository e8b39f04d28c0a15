"""Weights from files: safetensors, one or several with an index. No file is trusted."""

import json
import math
import os
import stat
from collections.abc import Mapping
from typing import Any

import numpy as np

from .weights import BFLOAT16, Unreadable, WeightError

FILE_DTYPES: dict[str, Any] = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": BFLOAT16, "BOOL": "?"} | {
    f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)
}
# Dtypes of safetensors that models and NumPy lack: bits of one element.
UNREADABLE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64} | dict.fromkeys(
    ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
)
# More than any sound file needs; a hostile header of this size is read in a second, and takes less than a gigabyte.
MAX_HEADER_BYTES = 30_000_000
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 64  # of NumPy; the product of a million numbers takes minutes
TORCH_REMEDY = "give what torch.load(path, weights_only=True) returns, or write that with safetensors.torch.save_file"
PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
# Files of other kinds: their first bytes, bytes near the beginning, and what the message says they are, with the remedy.
OTHER_FILES = (
    (b"PK\x03\x04", b"/data.pkl", f"a file of PyTorch: {TORCH_REMEDY}"),
    (b"PK\x03\x04", b".npy", "an .npz file of NumPy: give what numpy.load(path) returns"),
    (b"PK\x03\x04", b"", "a zip archive: unpack it"),
    (PICKLES, b"", f"a pickle, as older files of PyTorch are: {TORCH_REMEDY}"),
    (b"\x93NUMPY", b"", "an .npy file of NumPy, one array: give a mapping, {name: numpy.load(path)}"),
    (b"GGUF", b"", "a GGUF file: convert it to safetensors"),
    (b"\x89HDF", b"", "an HDF5 file, such as Keras writes: give a mapping of its arrays by name"),
    (b"version ", b"git-lfs", "a pointer of Git LFS: fetch the file itself with `git lfs pull`"),
    (b"\x1f\x8b", b"", "compressed by gzip: unpack it"),
    (b"<", b"html", "a web page: fetch the file itself"),
    (b"{", b"", "JSON: the index of several safetensors files needs a name that ends with .json"),
)


def read_weights(source: Any) -> Mapping[str, Any]:
    """Arrays by name, from a mapping, a safetensors file, or an index.json and the safetensors files that it names.

    Raises WeightError and OSError.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        remedy = "such as module.state_dict() or dict(module.named_parameters())"
        raise WeightError(f"expected a path, or arrays by name, {remedy}; got {type(source).__name__}")
    return read_index(source) if os.fsdecode(source).endswith(".json") else read_safetensors(source)


def read_index(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Arrays by name, each from the file that the index names for it. The files are in the folder of the index.

    Raises WeightError and OSError.
    """
    data = map_file(path)
    try:
        if data.size > MAX_HEADER_BYTES:
            raise ValueError(f"expected at most {MAX_HEADER_BYTES} bytes, got {data.size}")
        places = json.loads(data.tobytes().decode(), object_pairs_hook=unique_names)["weight_map"]
        shards = sorted(set(places.values()))
        for shard in shards:
            if os.path.basename(shard) != shard or "\\" in shard:
                raise ValueError(f"expected a file beside it, got {shard[:200]!r}")
            if shard.endswith(".json"):
                raise ValueError(f"expected a safetensors file, got {shard[:200]!r}, an index")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        expected = 'expected {"weight_map": {tensor: file}}'
        raise WeightError(f"{path}: not a sound index: {expected}: {type(error).__name__}: {error}") from error
    folder = os.path.dirname(path)
    if absent := [shard for shard in shards if not os.path.exists(os.path.join(folder, shard))]:
        raise WeightError(f"{path}: expected these files beside it: {', '.join(absent)}")
    files = {shard: read_safetensors(os.path.join(folder, shard)) for shard in shards}
    if lost := [f"{name}: not in {shard}" for name, shard in places.items() if name not in files[shard]]:
        raise WeightError("\n  ".join([f"{path}: the files lack tensors that it names:", *lost]))
    return {name: files[shard][name] for name, shard in places.items()}


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON as a dict. Python would keep the last of two values of one name; this raises ValueError."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name appears twice in the header")
    return dict(pairs)


def map_file(path: str | os.PathLike[str]) -> Any:
    """The bytes of a file. Raises OSError, and WeightError for a pipe or a device, which could block for ever."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise WeightError(
            f"{path}: not a regular file but a pipe or a device, and weights are mapped: copy it to a file"
        )
    return np.asarray(np.memmap(path, np.uint8, "r")) if found.st_size else np.zeros(0, np.uint8)


def read_safetensors(path: str | os.PathLike[str], metadata: Any = None) -> dict[str, Any]:
    """Arrays by name, mapped from a file that is not trusted: every fault of it is a WeightError.

    A tensor of a dtype that models and NumPy lack is an Unreadable. metadata: a dict that gets the file's metadata.
    """
    data = map_file(path)
    arrays = dict[str, Any]()
    name = "the header"  # of what is being read, for the message
    try:
        header, start = read_header(data)
        about = dict(header.pop("__metadata__", {}).items())
        if metadata is not None:
            metadata.update(about)
        if len(header) > MAX_TENSORS:
            raise ValueError(f"expected at most {MAX_TENSORS} tensors, got {len(header)}")
        end = start
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = entry["data_offsets"]
            shape = entry["shape"]
            if any(type(n) is not int or n < 0 for n in [begin, stop] + shape) or start + begin != end:
                raise ValueError(f"impossible, overlapping or after a hole: {str(entry)[:200]}")
            raw = data[end : start + stop]
            end = start + stop
            if end > data.size:
                raise ValueError(f"the file is truncated: {data.size} bytes where {end} are needed")
            arrays[name] = as_declared(raw, entry["dtype"], shape)
        if end != data.size:
            raise ValueError(f"ends at byte {end} of {data.size}")
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        problem = other_kind(data) or f"{name[:200]}: {type(error).__name__}: {error}"
        raise WeightError(f"{path}: not a sound safetensors file: {problem}") from error
    return arrays


def read_header(data: Any) -> tuple[dict[str, Any], int]:
    """The JSON object at the beginning of a safetensors file, and the place behind it. Raises ValueError."""
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    begins = data[8:9].tobytes()
    if end > data.size or begins != b"{":
        raise ValueError(f"{end - 8} bytes in a file of {data.size}, beginning with {begins!r}: expected {{")
    if end > MAX_HEADER_BYTES:
        raise ValueError(f"{end - 8} bytes in a file of {data.size}: expected at most {MAX_HEADER_BYTES}")
    header: dict[str, Any] = json.loads(data[8:end].tobytes().decode(), object_pairs_hook=unique_names)
    return header, end


def as_declared(raw: Any, dtype: str, shape: list[int]) -> Any:
    """Bytes of a file as an array, or as Unreadable. Raises where dtype and shape need another number of bytes."""
    if dtype in FILE_DTYPES:
        return raw.view(FILE_DTYPES[dtype]).reshape(shape)
    if dtype not in UNREADABLE_BITS:
        raise ValueError(f"unknown dtype {dtype[:200]!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"expected at most {MAX_DIMENSIONS} dimensions, got {len(shape)}")
    if math.prod(shape) * UNREADABLE_BITS[dtype] != 8 * raw.size:
        raise ValueError(f"{raw.size} bytes do not hold {dtype}{shape}")
    return Unreadable(dtype, tuple(shape))


def other_kind(data: Any) -> str | None:
    """The kind of a file that is not sound safetensors, with the remedy, or None where its beginning does not tell."""
    beginning = data[:1024].tobytes()
    if beginning[4:9] == b"\0\0\0\0{":  # the length of a header below 4 GB, then the header: damaged safetensors
        return None
    for first, near, what in OTHER_FILES:
        if beginning.startswith(first) and near in beginning:
            return f"it is {what}"
    return None
