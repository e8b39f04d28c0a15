"""One training step of a SmolLM2-135M-shaped model beside PyTorch's, in one run: python bench/train_step.py [--layers N]

Random weights of the real shapes, 128 tokens, Adam, f32. First the losses of five steps are compared; then both are timed,
each after two seconds of load, by the wall clock over steps in a row, each reading its loss back as train_step does. GPU
time is by timestamps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import smollm2
from meganeura_aot import Training, compile_graph

Array = np.ndarray[Any, Any]
LR = 1e-4


def torch_model(torch: Any, weights: dict[str, Array], layers: int) -> Callable[[Any, Any], Any]:
    """(ids, labels) -> the loss and its parameters, eager, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = {name: torch.nn.Parameter(torch.from_numpy(a).to(device)) for name, a in weights.items()}
    f, heads, kv_heads = torch.nn.functional, smollm2.HEADS, smollm2.KV_HEADS
    half = smollm2.WIDTH // heads // 2

    def norm(name: str, x: Any) -> Any:
        return f.rms_norm(x, (smollm2.WIDTH,), p[f"{name}.weight"], 1e-5)

    def rope(x: Any) -> Any:
        turns = torch.arange(x.shape[-2], device=device)[:, None] * smollm2.ROPE_BASE ** (
            -torch.arange(half, device=device) / half
        )
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * turns.cos() - b * turns.sin(), a * turns.sin() + b * turns.cos()], -1)

    def layer(h: Any, name: str) -> Any:
        n = norm(f"{name}.input_layernorm", h)
        q, k, v = (
            (n @ p[f"{name}.self_attn.{which}_proj.weight"].T).reshape(len(h), count, 2 * half).transpose(0, 1)
            for which, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (rope(k), v))
        o = f.scaled_dot_product_attention(rope(q)[None], k[None], v[None], is_causal=True)[0]
        h = h + o.transpose(0, 1).reshape(h.shape) @ p[f"{name}.self_attn.o_proj.weight"].T
        n = norm(f"{name}.post_attention_layernorm", h)
        gate, up = (n @ p[f"{name}.mlp.{which}_proj.weight"].T for which in ("gate", "up"))
        return h + (f.silu(gate) * up) @ p[f"{name}.mlp.down_proj.weight"].T

    update = torch.optim.Adam(list(p.values()), LR)

    def step(ids: Any, labels: Any) -> float:
        update.zero_grad()
        h = p["model.embed_tokens.weight"][ids]
        for index in range(layers):
            h = layer(h, f"model.layers.{index}")
        logits = norm("model.norm", h) @ p["model.embed_tokens.weight"].T
        loss = f.cross_entropy(logits, labels)
        loss.backward()
        update.step()
        return float(loss.detach())

    return lambda ids, labels: step(*(torch.from_numpy(a.astype(np.int64)).to(device) for a in (ids, labels)))


def median_time(step: Callable[[], float], count: int) -> float:
    """Milliseconds a step, after two seconds of load."""
    began = time.perf_counter()
    while time.perf_counter() - began < 2:
        step()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=smollm2.LAYERS)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=smollm2.VOCABULARY)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--profile", action="store_true", help="print the GPU time of each dispatch too")
    args = parser.parse_args()
    start = time.perf_counter()
    graph = smollm2.build(args.tokens, args.layers, args.vocabulary)
    program = compile_graph(graph, name="smollm2_train", train=Training("adam", lr=LR))
    text = program.text
    print(f"compiled in {time.perf_counter() - start:.1f} s: {len(text)} characters, {program.report.rows()}")
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, args.vocabulary, args.tokens).astype(np.uint32) for name in ("ids", "labels")}
    start = time.perf_counter()
    with program.load() as runner:
        runner.init_weights(seed=0)
        weights = runner.weights()
        first = runner.train_step(**batch)
        print(f"on {runner.device.adapter.summary}: started, first step after {time.perf_counter() - start:.1f} s")
        ours = [first, *(runner.train_step(**batch) for _ in range(4))]
        theirs = None
        try:
            import torch

            theirs = torch_model(torch, weights, args.layers)
            expected = [theirs(**batch) for _ in range(5)]
            print("losses:", *(f"{a:.5f}" for a in ours), "PyTorch:", *(f"{a:.5f}" for a in expected))
            np.testing.assert_allclose(ours, expected, rtol=1e-3)
        except ImportError:
            print("losses:", *(f"{a:.5f}" for a in ours), "(no PyTorch here)")
        mine = median_time(lambda: runner.train_step(**batch), args.count)
        print(f"ours: {mine:.2f} ms a step")
        if theirs:
            other = median_time(lambda: theirs(**batch), args.count)
            print(f"PyTorch {torch.__version__}, eager, f32, Adam: {other:.2f} ms a step; ratio {other / mine:.2f}")
        if args.profile:
            profile(runner, batch)


def profile(runner: Any, batch: dict[str, Array]) -> None:
    """Print the GPU time of the two halves of a step, then of each dispatch."""
    time_runs = type(runner).train_step.__globals__["time_runs"]
    numbers = runner._update_numbers(None)
    update = {name: numbers[b] for name, b in runner.entries["apply"].feeds.items()}
    for entry, inputs in (("accumulate", batch), ("apply", update)):
        for each in (False, True):
            time_runs(runner, entry, inputs, 20, each)


if __name__ == "__main__":
    main()
