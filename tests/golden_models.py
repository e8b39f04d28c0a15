"""What golden files are made of: the example models, and one small graph a pass."""

from __future__ import annotations

from meganeura_aot import Graph, Tensor
from meganeura_aot.ops.resample_grad import SliceGrad

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


def parts(g: Graph) -> None:
    """Joined: three parts of a last axis, in any order. Not joined: parts that leave a gap, or that overlap."""

    def part(name: str, start: int, size: int) -> Tensor:
        return g.apply(SliceGrad((2, 9), (0, start), (1, 1)), g.input(name, (2, size)))

    g.set_outputs(
        {
            "filled": part("b", 4, 3) + part("a", 0, 4) + part("c", 7, 2),
            "gap": part("d", 0, 4) + part("e", 5, 4),
            "overlap": part("f", 0, 5) + part("h", 4, 4),
        }
    )


PASS_EXAMPLES = {"prune": unused, "join_slices": parts, "fuse_epilogue": epilogues}
