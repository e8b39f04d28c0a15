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


def twins(g: Graph) -> None:
    """One with its log-sum-exp: attention on the same q, k and v, whichever is first. Not the one on other keys."""
    q, k, v = g.input("q", (4, 8)), g.input("k", (6, 8)), g.input("v", (6, 8))
    plain, other = g.attention(q, k, v, 2), g.attention(q, v, v, 2)
    full, lse = g.attention_with_lse(q, k, v, 2)
    g.set_outputs({"sum": plain + full + g.attention(q, k, v, 2), "other": other, "lse": lse})


PASS_EXAMPLES = {"prune": unused, "share_twins": twins, "fuse_epilogue": epilogues}
