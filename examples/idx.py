"""Reads IDX files, the format of MNIST, plain or gzipped: `images = read_idx("train-images-idx3-ubyte.gz") / 255`."""

import gzip
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | os.PathLike[str]) -> np.ndarray[Any, Any]:
    """The array in the file; raises ValueError where it is not a whole IDX file."""
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, ValueError) as error:
            raise ValueError(f"{path}: not a sound gzip file: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in DTYPES:
        raise ValueError(f"{path}: expected an IDX file, which begins with 0 0 type rank, got {data[:4]!r}")
    rank, dtype = data[3], np.dtype(DTYPES[data[2]])
    start = 4 + 4 * rank
    shape = tuple(int(n) for n in np.frombuffer(data[4:start], ">u4")) if len(data) >= start else None
    if shape is None or len(data) - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{path}: expected {shape} of {dtype}, got {len(data)} bytes")
    return np.frombuffer(data, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
