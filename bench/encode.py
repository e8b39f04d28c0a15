"""What one dispatch costs the host: native functions beside wgpu-py's public classes. python bench/encode.py"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from meganeura_aot import Graph, compile_graph

DISPATCHES = 200


def build() -> Graph:
    """A chain of alternating kernels, so that every dispatch sets its pipeline."""
    g = Graph()
    x = g.input("x", (256,))
    for _ in range(DISPATCHES // 2):
        x = g.sin(g.cos(x))
    g.set_outputs({"y": x})
    return g


class PublicEncoder:
    """The three calls of WebGPU."""

    def __init__(self, compute_pass: Any) -> None:
        self.compute_pass = compute_pass

    def dispatch(self, pipeline: Any, group: Any, x: int, y: int, z: int) -> None:
        self.compute_pass.set_pipeline(pipeline.gpu)
        self.compute_pass.set_bind_group(0, group.gpu)
        self.compute_pass.dispatch_workgroups(x, y, z)


def microseconds(runner: Any, encode: Callable[[Any], None], repeat: int = 100) -> float:
    """The median time to encode one dispatch."""
    times = []
    for _ in range(repeat):
        commands = runner.device.create_command_encoder()
        compute_pass = commands.begin_compute_pass()
        start = time.perf_counter()
        encode(compute_pass)
        times.append((time.perf_counter() - start) / DISPATCHES * 1e6)
        compute_pass.end()
        runner.device.queue.submit([commands.finish()])
    return float(np.median(times))


def main() -> None:
    runner = compile_graph(build(), name="encode").load()
    runner.run(x=np.linspace(-1, 1, 256, dtype=np.float32))
    native = type(runner).encode_run.__globals__["Encoder"]
    fast = microseconds(runner, lambda compute_pass: runner.encode_run(native(compute_pass, {})))
    public = microseconds(runner, lambda compute_pass: runner.encode_run(PublicEncoder(compute_pass)))
    info = runner.device.adapter.info
    print(
        f"encode one dispatch on {info['device']}: {fast:.2f} us native, {public:.2f} us public, {public / fast:.1f} x"
    )


if __name__ == "__main__":
    main()
