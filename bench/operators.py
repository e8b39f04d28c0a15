"""GPU time of single operators at one large size: python bench/operators.py [NAME ...] [--small]

Each graph has one operator; data are random and stay on the device; a second of load comes before the timing. Bytes are
each input read once and each output written once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from meganeura_aot import Graph, Tensor, compile_graph
from meganeura_aot.reference import evaluate

TERA = 1e12
COPY_RATE = 4.3  # TB/s: what the H200 copies

Build = Callable[[Graph, int], Tensor]


def unary(name: str) -> Build:
    return lambda g, s: getattr(g, name)(g.input("x", (s << 16,)))


def rows(name: str, weights: int = 0) -> Build:
    def build(g: Graph, s: int) -> Tensor:
        shape = (16 * s, 4096)
        return getattr(g, name)(g.input("x", shape), *(g.input(f"w{i}", (4096,)) for i in range(weights)))

    return build


def group_norm(g: Graph, s: int) -> Tensor:
    x = g.input("x", (max(1, s // 128), 256, 128, 128))
    return g.group_norm(x, 32, g.input("w", (256,)), g.input("b", (256,)))


def embedding(g: Graph, s: int) -> Tensor:
    return g.embedding(g.input("ids", (64 * s,), "u32"), g.input("table", (32768, 1024)))


def conv(g: Graph, s: int) -> Tensor:
    return g.conv(g.input("x", (max(1, s // 128), 64, 56, 56)), g.input("w", (64, 64, 3, 3)), padding=1)


def attention(g: Graph, s: int) -> Tensor:
    q, k, v = (g.input(n, (2 * s, 16 * 64)) for n in "qkv")
    return g.causal_attention(q, k, v, heads=16)


# name -> (graph at a scale of 1024 for the full size, floating-point operations at that scale or 0 for memory-bound work)
OPERATORS: dict[str, tuple[Build, Callable[[int], float] | None]] = {
    "relu": (unary("relu"), None),
    "exp": (unary("exp"), None),
    "gelu": (unary("gelu"), None),
    "tanh": (unary("tanh"), None),
    "add": (lambda g, s: g.input("a", (s << 16,)) + g.input("b", (s << 16,)), None),
    "bias_add": (lambda g, s: g.bias_add(g.input("x", (16 * s, 4096)), g.input("b", (4096,))), None),
    "transpose": (lambda g, s: g.transpose(g.input("x", (8 * s, 8192))), None),
    "softmax": (rows("softmax"), None),
    "log_softmax": (rows("log_softmax"), None),
    "rms_norm": (rows("rms_norm", 1), None),
    "layer_norm": (rows("layer_norm", 2), None),
    "group_norm": (group_norm, None),
    "embedding": (embedding, None),
    "sum": (lambda g, s: g.sum(g.input("x", (16 * s, 4096)), 1), None),
    "sum0": (lambda g, s: g.sum(g.input("x", (16 * s, 4096)), 0), None),
    "argmax": (lambda g, s: g.cast(g.argmax(g.input("x", (s // 16 + 1, 49152))), "f32"), None),
    "conv": (conv, lambda s: 2.0 * max(1, s // 128) * 64 * 64 * 9 * 56 * 56),
    "attention": (attention, lambda s: 4.0 * (2 * s) ** 2 * 64 * 16 / 2),
}


def feeds_of(graph: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    feeds = {}
    for node in graph.nodes:
        if node.op.name == "input":
            type_ = node.types[0]
            floats = type_.dtype == "f32"
            feeds[node.op.label] = (
                rng.standard_normal(type_.shape, np.float32)
                if floats
                else rng.integers(0, 32768, type_.shape, np.uint32)
            )
    return feeds


def gpu_ms(runner: Any, feeds: dict[str, Any], count: int = 20) -> float:
    """Median GPU time of a run, by timestamps."""
    import wgpu

    device = runner.device
    queries = device.create_query_set(type="timestamp", count=2)
    usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
    ticks = device.create_buffer(size=256, usage=usage)
    runner.run(outputs=(), **feeds)
    encoder_class = type(runner).run.__globals__["Encoder"]
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < 1 or len(times) < count:
        commands = device.create_command_encoder()
        stamps = {"query_set": queries, "beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}
        compute_pass = commands.begin_compute_pass(timestamp_writes=stamps)
        runner.encode_run(encoder_class(compute_pass, {}))
        compute_pass.end()
        commands.resolve_query_set(queries, 0, 2, ticks, 0)
        device.queue.submit([commands.finish()])
        first, last = np.frombuffer(device.queue.read_buffer(ticks, 0, 16), np.uint64)
        times.append(float(last - first) * 1e-6)
    return float(np.median(times[-count:]))


def measure(name: str, scale: int) -> str:
    build, operations = OPERATORS[name]
    small = Graph()
    small.set_outputs({"y": build(small, 16)})
    feeds = feeds_of(small.build())
    got = compile_graph(small, target="webgpu").load().run(**feeds)["y"]
    expected = evaluate(small.build(), feeds)["y"]
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * float(np.abs(expected).max()))
    g = Graph()
    g.set_outputs({"y": build(g, scale)})
    graph = g.build()
    program = compile_graph(graph)
    milliseconds = gpu_ms(program.load(), feeds_of(graph))
    nbytes = sum(t.nbytes for node in graph.nodes if node.op.name == "input" for t in node.types)
    if name == "embedding":  # of the table only the rows looked up
        nbytes = 2 * graph.type_of(graph.outputs[0][1]).nbytes
    else:
        nbytes += graph.type_of(graph.outputs[0][1]).nbytes
    rate = nbytes / milliseconds * 1e3 / TERA
    if operations is not None:
        return f"{name:12} {milliseconds:9.4f} ms  {operations(scale) / milliseconds * 1e3 / TERA:7.2f} TFLOP/s"
    return f"{name:12} {milliseconds:9.4f} ms  {rate:7.3f} TB/s  {100 * rate / COPY_RATE:5.1f} % of {COPY_RATE}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(OPERATORS))
    parser.add_argument("--small", action="store_true", help="a size for software adapters")
    options = parser.parse_args()
    for name in options.names or OPERATORS:
        print(measure(name, 32 if options.small else 1024), flush=True)


if __name__ == "__main__":
    main()
