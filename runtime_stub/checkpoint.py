"""Files of weights and checkpoints."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from .files import replacing
from .weights import DTYPES, Buffer


def write_safetensors(path: Any, buffers: Mapping[str, Buffer], read: Callable[[Buffer], Any], metadata: Any) -> None:
    """Each buffer as `read` gives it, one at a time, the widest dtypes first, so that all are aligned."""
    end, header = 0, {"__metadata__": metadata} if metadata else {}
    order = sorted(buffers, key=lambda name: (-DTYPES[buffers[name].dtype].itemsize, name))
    for name in order:
        b, begin = buffers[name], end
        end += math.prod(b.shape) * DTYPES[b.dtype].itemsize
        header[name] = {"dtype": b.dtype.upper(), "shape": list(b.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(read(buffers[name]).tobytes())
