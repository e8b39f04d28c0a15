"""What golden files are made of: the example models, and one small graph a pass."""

from __future__ import annotations

from meganeura_aot import Graph, Tensor, Training
from meganeura_aot.ops.layout.gradient import SliceGrad

RUNNERS = ("batched_matmul", "digits_mlp", "pointwise", "softmax_reduce")
TRAINERS = {"digits_train": Training("adam", lr=3e-3)}


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


def identities(g: Graph) -> None:
    """Removed: dropout, stop_gradient, an expansion and reshapes of nothing. Kept: a reshape."""
    x = g.input("x", (4, 1))
    kept = g.reshape(g.dropout(g.stop_gradient(x), 0.5), (2, 2))
    g.set_outputs({"y": g.relu(kept), "x": g.stop_gradient(x), "same": g.exp(g.expand(x, (4, 1)))})


def expansions(g: Graph) -> None:
    """Fused: what is spread over x, a reshape of one element in between. Not fused: what alone makes the shape."""
    x, row, one = g.input("x", (4, 8)), g.input("row", (8,)), g.input("one", ())
    spread = g.reshape(g.expand(one, (2, 16)), (4, 8))
    first, last = g.expand(row, (4, 8)), g.expand(g.reshape(row, (8, 1)), (8, 4))
    g.set_outputs({"y": x * first + spread, "alone": g.exp(first), "by": x * g.reshape(last, (4, 8))})


def constants(g: Graph) -> None:
    """Folded: numbers, x * 1. Not folded: what overflows, 1 that makes the shape, x + 0."""
    x, one = g.input("x", (4,)), g.constant(1.0)
    third = g.reshape(g.exp(one * 0.5) / 3.0, (1,))
    infinite = g.exp(g.constant(1000.0)) * 0.0
    g.set_outputs({"y": x * third * (one * one), "z": x * infinite, "wide": x * g.constant([[1.0]]), "sum": x + 0.0})


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


def twins(g: Graph) -> None:
    """One with its log-sum-exp: attention on the same q, k and v, whichever is first. Not the one on other keys."""
    q, k, v = g.input("q", (4, 8)), g.input("k", (6, 8)), g.input("v", (6, 8))
    plain, other = g.attention(q, k, v, 2), g.attention(q, v, v, 2)
    full, lse = g.attention_with_lse(q, k, v, 2)
    g.set_outputs({"sum": plain + full + g.attention(q, k, v, 2), "other": other, "lse": lse})


def scatters(g: Graph) -> None:
    """Onto the product: the rows of a table that is used twice. Not onto an input, nor onto what is read elsewhere."""
    ids, src = g.input("ids", (5,), "u32"), g.input("src", (5, 4))
    product = g.matmul(g.input("a", (7, 3)), g.input("b", (3, 4)))
    twice = g.matmul(g.input("c", (7, 3)), g.input("d", (3, 4)))
    sums = [g.scatter_add(ids, src, 7) for _ in range(3)]
    g.set_outputs({"onto": sums[0] + product, "input": g.input("x", (7, 4)) + sums[1], "read": twice + sums[2] * twice})


PASS_EXAMPLES = {
    "remove_identities": identities,
    "prune": unused,
    "share_twins": twins,
    "join_slices": parts,
    "fuse_expand": expansions,
    "fold_constants": constants,
    "fuse_scatter": scatters,
    "fuse_epilogue": epilogues,
}
