"""What golden files are made of: the example models, and one small graph a pass."""

from __future__ import annotations

from meganeura_aot import Graph

RUNNERS = ("batched_matmul", "digits_mlp", "pointwise", "softmax_reduce")


def unused(g: Graph) -> None:
    x = g.input("x", (4,))
    g.input("not_used", (2,))
    g.exp(x)
    g.set_outputs({"y": g.relu(x)})


def epilogues(g: Graph) -> None:
    """Fused: bias, relu, residual. Not fused: a product that is an output, one that is used twice."""
    x, w = g.input("x", (4, 8)), g.parameter("w", (8, 8))
    y = g.relu(g.bias_add(g.matmul_bt(x, w), g.parameter("b", (8,)))) + x
    shown = g.matmul(y, w)
    twice = g.matmul_at(y, y)
    g.set_outputs({"shown": shown, "relu": g.relu(shown), "twice": twice * twice})


PASS_EXAMPLES = {"prune": unused, "fuse_epilogue": epilogues}
