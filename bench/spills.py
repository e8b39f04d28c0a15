"""Which kernels need more registers than an NVIDIA GPU has: python -m bench.spills [jobs]

A value that does not fit the 255 registers of a thread is kept in memory (spilled). That is slow, and one driver computed
an address from the wrong register in such code. The driver writes its machine code into a cache on disk; nvdisasm, of the
CUDA toolkit or of Triton, turns it into text. Needs an NVIDIA GPU, nvdisasm and the package zstandard. Exits with 1 where
a kernel spills.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from meganeura_aot import Causal, Full, Window, compile_graph
from meganeura_aot.graph import GraphIR, TensorType
from meganeura_aot.op import OPS, Op, Sample
from meganeura_aot.ops.attention.gradient import AttentionGradKV, AttentionGradQ
from meganeura_aot.ops.attention.op import Attention
from tests.test_operators import graph_of

CACHE = "__GL_SHADER_DISK_CACHE_PATH"
BLOB = b"NVDANVVMNVuc"  # begins the code of a pipeline
COMPRESSED = b"\x28\xb5\x2f\xfd"  # begins a zstandard frame
HEAD_DIMS = (1, 3, 5, 7, 8, 13, 16, 20, 24, *range(28, 34), 40, 47, 48, 63, 64, 72, 80, 96, 97, 128, 160, 255, 256)


class Code(NamedTuple):
    """The machine code of one pipeline: place in the cache, registers, instructions, accesses to a stack in memory."""

    place: int
    registers: int
    instructions: int
    stack: int

    @property
    def spills(self) -> bool:
        return self.stack > 0 and self.registers > 200  # with fewer registers the stack is an array that is indexed


def main() -> int:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else max(1, (os.cpu_count() or 2) - 2)
    kernels = list(distinct_kernels())
    codes = sorted(compiled(kernels, jobs), key=lambda pair: -pair[1].registers)
    print(f"{len(kernels)} kernels, {len(codes)} pipelines in the driver's cache")
    print(f"the most registers of one that does not spill: {next(c.registers for _, c in codes if not c.spills)}")
    spilling = [(name, code) for name, code in codes if code.spills]
    for name, code in spilling:
        print(f"spills: {name}: {code}")
    print(f"{len(spilling)} kernels spill")
    return 1 if spilling or len(codes) < len(kernels) else 0


def compiled(kernels: list[tuple[str, str, dict[str, Any]]], jobs: int) -> list[tuple[str, Code]]:
    """The name and the machine code of each kernel, compiled by the driver in `jobs` processes."""
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for job in range(jobs):
            cache = Path(folder, str(job))
            cache.mkdir()
            (cache / "kernels.json").write_text(json.dumps(kernels[job::jobs]))
            settings = {**os.environ, CACHE: str(cache), "__GL_SHADER_DISK_CACHE_SIZE": str(2**32)}
            workers.append(subprocess.Popen([sys.executable, "-m", "bench.spills", "--worker", cache], env=settings))
        statuses = [worker.wait() for worker in workers]
        if any(statuses):
            raise SystemExit("a worker failed")
        found = [pair for job in range(jobs) for pair in json.loads(Path(folder, str(job), "found.json").read_text())]
    return [(name, Code(*code)) for name, code in found]


def distinct_kernels() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, text and override constants of each kernel: of every sample of every operator, and of the attention cases."""
    seen = set()
    for name, target, graph in graphs():
        for dispatch in compile_graph(graph, target=target).plan.dispatches():
            key = (dispatch.kernel.text, dispatch.constants)
            if key not in seen:
                seen.add(key)
                yield f"{name} for {target}: {dispatch.label}", dispatch.kernel.text, dict(dispatch.constants)


def graphs() -> Iterator[tuple[str, str, GraphIR]]:
    for target in ("webgpu", "cpu"):
        for name, op in sorted(OPS.items()):
            for index, sample in enumerate(op.samples()):
                yield f"{name}-{index}", target, graph_of(sample)
    for op, inputs in attention_cases():
        yield f"{op} of {inputs[0]}", "webgpu", graph_of(Sample(op, inputs))


def attention_cases() -> Iterator[tuple[Op, tuple[TensorType, ...]]]:
    """Attention and its gradients over head sizes, masks, and the small and large tiles."""
    masks = ((Causal(), 5.0, True), (Full(), None, False), (Causal(), None, False), (Window(40), 5.0, True))
    for batch, length, heads, kv_heads in ((3, 7, 3, 1), (2, 130, 6, 3), (4, 512, 16, 8)):
        for head_dim in HEAD_DIMS:
            for mask, soft_cap, additive in masks:
                op = Attention(heads, kv_heads, mask, soft_cap=soft_cap)
                q, kv = (TensorType((batch, length, n * head_dim)) for n in (heads, kv_heads))
                stat = TensorType((batch, heads, length, 2))
                bias = [TensorType((length, length))] if additive else []
                yield op, (q, kv, kv, *bias)
                yield AttentionGradQ(op), (q, q, kv, kv, stat, *bias)
                yield AttentionGradKV(op), (q, q, kv, kv, stat, *bias)


def work(folder: Path) -> None:
    """In a process of its own: make each pipeline, and tell by the growth of the driver's cache which code is whose."""
    from tests.harness import load

    runner = load(compile_graph(graph_of(OPS["relu"].samples()[0])))
    ends = []
    for name, text, constants in json.loads((folder / "kernels.json").read_text()):
        before = len(cached(folder))
        runner.create_pipeline(text, **constants)
        for _ in range(100):  # the driver writes the code a little later
            if (after := len(cached(folder))) > before:
                break
            time.sleep(0.002)
        ends.append((name, after))
    codes = list(disassembled(cached(folder)))
    names = [next((name for name, end in ends if code.place < end), "?") for code in codes]
    (folder / "found.json").write_text(json.dumps(list(zip(names, codes, strict=True))))


def cached(folder: Path) -> bytes:
    return b"".join(Path(name).read_bytes() for name in glob.glob(f"{folder}/**/*.bin", recursive=True))


def disassembled(data: bytes) -> Iterator[Code]:
    """Each pipeline of the cache. Its layout is not documented: the offsets were found in the bytes of known kernels."""
    import zstandard

    place = -1
    while (place := data.find(COMPRESSED, place + 1)) >= 0:
        try:
            blob = zstandard.ZstdDecompressor().decompressobj().decompress(data[place:])
        except zstandard.ZstdError:
            continue
        if not blob.startswith(BLOB):
            continue
        size, start = struct.unpack_from("<II", blob, 12 + 16 * 4)
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(blob[8 + start : 8 + start + size])
            file.flush()
            text = subprocess.run([nvdisasm(), "-b", "SM90", file.name], capture_output=True, text=True, check=True)
        code = re.sub(r"/\*.*?\*/", "", text.stdout)
        stack_pointers = len(re.findall(r"^\s*(?:@!?U?P\d )?\w[\w.]* R1,", code, re.MULTILINE))
        stack = len(re.findall(r"\b(?:STL|LDL)\b", code))
        if stack_pointers <= 1:  # where more instructions write R1, it is no stack pointer
            stack += len(re.findall(r"\b(?:STS|LDS)[.\w]* .*\[R1(?:\+|\])", code))
        yield Code(place, max(map(int, re.findall(r"\bR(\d+)\b", code)), default=0), code.count(";"), stack)


@functools.cache
def nvdisasm() -> str:
    triton = find_spec("triton")
    bundled = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm" if triton and triton.origin else Path()
    found = shutil.which("nvdisasm") or (str(bundled) if bundled.is_file() else None)
    if found is None:
        raise SystemExit("bench.spills needs nvdisasm: install the CUDA toolkit, or the package triton")
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]))
    else:
        sys.exit(main())
