"""How much faster than one output a thread: python bench/naive.py [--size 512] [--target cpu]

Both kernels run in one process, on the same data, checked before they are timed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from bench.matmul import build
from meganeura_aot import compile_graph

NAIVE = """
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

override SIZE: u32;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let i = group.x * 256 + lane;
    if (i >= SIZE * SIZE) {
        return;
    }
    var sum = 0.0;
    for (var k = 0u; k < SIZE; k++) {
        sum += a[i / SIZE * SIZE + k] * b[k * SIZE + i % SIZE];
    }
    out[i] = sum;
}
"""


def seconds(runner: Any, feeds: dict[str, Any], repeat: int) -> float:
    """The median time of a call that reads one number back, so that the work is done when it returns."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        runner.run(outputs=("c",), **feeds)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    size, rng = options.size, np.random.default_rng(0)
    feeds = {name: rng.normal(size=(size, size)).astype(np.float32) for name in ("a", "b")}
    expected = feeds["a"].astype(np.float64) @ feeds["b"]
    program = compile_graph(build(size, size, size), name="matmul", target=options.target)

    tuned = program.load()

    class Naive(type(tuned)):  # type: ignore[misc]
        """The same runner with the other kernel."""

        def pipelines(self) -> None:
            self.p_naive = self.pipeline(NAIVE, SIZE=size)

        def bind_groups(self) -> None:
            self.g_naive = self.bind(self.p_naive, self.b_a, self.b_b, self.b_c)

        def encode_run(self, encoder: Any) -> None:
            encoder.dispatch(self.p_naive, self.g_naive, -(-size * size // 256), 1, 1)

    naive = Naive()
    results = {}
    for name, runner in (("naive", naive), (f"target {options.target}", tuned)):
        np.testing.assert_allclose(runner.run(**feeds)["c"], expected, atol=2e-6 * size**0.5 * size)
        results[name] = seconds(runner, feeds, options.repeat)
    adapter = tuned.device.adapter.info
    print(f"{size}^3 f32 on {adapter['device']} ({adapter['backend_type']})")
    for name, duration in results.items():
        print(f"{name:12} {duration * 1e3:9.2f} ms  {2 * size**3 / duration / 1e9:9.2f} GFLOP/s")
    print(f"ratio {results['naive'] / results[f'target {options.target}']:.1f}")


if __name__ == "__main__":
    main()
