"""The gradient of attention at every awkward size, and where it must be nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Causal, Full, Graph, Window, compile_graph
from meganeura_aot.autodiff import differentiate
from meganeura_aot.errors import GradientError
from meganeura_aot.ops.attention import schedule as attention_kernel
from meganeura_aot.ops.attention.op import Mask
from meganeura_aot.ops.state.leaf import Leaf
from meganeura_aot.reference import evaluate
from tests import harness
from tests.gradients import assert_finite_differences, assert_kernels, gradients_of

Array = np.ndarray[Any, Any]

HEAD_DIMS = [8, 40, 64, 72, 80, 96, 160, 256]


def loss_of(
    s: int, t: int, heads: tuple[int, int], hd: int, mask: Mask, batch: tuple[int, ...] = (), **options: Any
) -> Graph:
    """0.7 * sum(w * attention(q, k, v)) of parameters q, k and v."""
    g = Graph()
    q, k, v = (
        g.parameter(n, (*batch, r, h * hd)) for n, r, h in (("q", s, heads[0]), *((x, t, heads[1]) for x in "kv"))
    )
    y = g.attention(q, k, v, *heads, hd, mask, **options)
    g.set_outputs({"loss": 0.7 * g.sum(g.input("w", y.shape) * y)})
    return g


def feeds_of(g: Graph, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    leaves = [(node.op.label, node.types[0]) for node in g.build().nodes if isinstance(node.op, Leaf)]
    return {label: rng.normal(size=type_.shape).astype(type_.dtype.numpy) for label, type_ in leaves}


def check(*sizes: Any, **options: Any) -> None:
    g = loss_of(*sizes, **options)
    assert_kernels(g.build(), feeds_of(g))


# kernels


@pytest.mark.parametrize("hd", [*HEAD_DIMS, 1, 6, 33, 250])
def test_large_tiles_of_every_width(hd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "ENOUGH_GROUPS", 1)
    monkeypatch.setattr(attention_kernel, "WANTED_GROUPS", 1)
    check(97, 97, (2, 1), hd, (Causal(), Window(50), Full())[hd // 8 % 3])


@pytest.mark.parametrize("hd", [*HEAD_DIMS, 33])
def test_split_sums_of_every_width(hd: int) -> None:
    check(97, 97, (2, 1), hd, (Full(), Causal(), Window(50))[hd // 8 % 3])


@pytest.mark.parametrize(
    ("length", "heads"),
    [
        (1, (15, 5)),
        (31, (9, 3)),
        (32, (5, 1)),
        (33, (15, 5)),
        (33, (7, 7)),
        (128, (9, 3)),
        (129, (5, 1)),
        (129, (7, 7)),
    ],
)
def test_heads_and_lengths(length: int, heads: tuple[int, int]) -> None:
    check(length, length, heads, 16, Causal())


@pytest.mark.parametrize(("s", "t"), [(1, 129), (129, 1), (33, 70), (70, 33)])
@pytest.mark.parametrize("mask", [Full(), Causal(20), Causal(-20), Window(9, 20), Window(9, -20)], ids=str)
def test_cross_lengths(s: int, t: int, mask: Mask) -> None:
    check(s, t, (4, 2), 8, mask, (2,))


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 2**30])
def test_windows(window: int) -> None:
    check(70, 70, (2, 1), 8, Window(window))


@pytest.mark.parametrize("offset", [2**30, -(2**30)])
@pytest.mark.parametrize("kind", [Causal, lambda offset: Window(2**30, offset), lambda offset: Window(3, offset)])
def test_far_offsets(offset: int, kind: Any) -> None:
    check(5, 9, (2, 1), 8, kind(offset))


# meaning


@pytest.mark.parametrize("mask", [Causal(-33), Window(3, 60), Window(2, -40)], ids=str)
def test_queries_that_see_nothing(mask: Mask) -> None:
    g = loss_of(33, 33, (4, 2), 8, mask)
    for name, gradient in harness.run(compile_graph(gradients_of(g.build())), feeds_of(g)).items():
        np.testing.assert_array_equal(gradient, 0, err_msg=name)


def test_rows_hidden_by_a_mask() -> None:
    bias = np.zeros((17, 20), np.float32)
    bias[[0, 5, 16]] = -np.inf
    g = Graph()
    q, k, v = (g.parameter(name, (n, 16)) for name, n in (("q", 17), ("k", 20), ("v", 20)))
    y = g.attention(q, k, v, 2, attn_mask=g.input("bias", bias.shape))
    g.set_outputs({"loss": g.sum(g.input("w", y.shape) * y)})
    got = harness.run(compile_graph(gradients_of(g.build())), feeds_of(g) | {"bias": bias})
    assert not np.any(got["grad.q"][[0, 5, 16]])
    assert np.all(np.abs(got["grad.q"][1]) > 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_hidden_has_no_influence(bad: float) -> None:
    """A padded key, and a query whose output nothing uses, may hold anything; neighbours in their tiles see others."""
    g = loss_of(40, 40, (4, 2), 8, Causal(-1))  # no query sees the last key, and the first query sees none
    program, feeds = compile_graph(gradients_of(g.build())), feeds_of(g)
    clean = harness.run(program, feeds)
    for name, row in (("k", 39), ("v", 39), ("q", 0), ("w", 0)):
        feeds[name][row] = bad
    for name, gradient in harness.run(program, feeds).items():  # hidden pairs are skipped then: rounded otherwise
        atol = 1e-6 * float(np.abs(clean[name]).max())
        np.testing.assert_allclose(gradient, clean[name], rtol=1e-5, atol=atol, err_msg=name)


def test_a_nan_that_is_seen_stays_visible() -> None:
    g = loss_of(40, 40, (2, 1), 8, Window(4))
    feeds = feeds_of(g)
    feeds["v"][20, 3] = np.nan
    wanted = gradients_of(g.build())
    expected = evaluate(wanted, feeds)
    for name, gradient in harness.run(compile_graph(wanted), feeds).items():
        np.testing.assert_array_equal(np.isnan(gradient), np.isnan(expected[name]), err_msg=name)


def test_a_nan_of_the_mask_stays_visible_beside_what_is_hidden() -> None:
    """NaNs that nobody sees make the kernels skip hidden pairs; one whose score is NaN is not hidden."""
    bias = np.zeros((40, 40), np.float32)
    bias[:, 0] = bias[0] = bias[5] = -np.inf
    bias[5, 20] = np.nan
    g = Graph()
    q, k, v = (g.parameter(name, (40, 16)) for name in "qkv")
    y = g.attention(q, k, v, 2, attn_mask=g.input("bias", bias.shape))
    g.set_outputs({"loss": g.sum(g.input("w", y.shape) * y)})
    feeds = feeds_of(g) | {"bias": bias}
    for name in "qkvw":
        feeds[name][0] = np.nan
    wanted = gradients_of(g.build())
    expected = evaluate(wanted, feeds)
    assert np.all(np.isnan(expected["grad.q"][5]))
    for name, gradient in harness.run(compile_graph(wanted), feeds).items():
        np.testing.assert_array_equal(np.isnan(gradient), np.isnan(expected[name]), err_msg=name)


def test_rope_then_attention() -> None:
    g = Graph()
    q, k, v = g.parameter("q", (2, 33, 64)), g.parameter("k", (2, 33, 32)), g.parameter("v", (2, 33, 32))
    y = g.causal_attention(g.rope(q, head_dim=16, offset=3), g.rope(k, head_dim=16, offset=3), v, 4, 2)
    g.set_outputs({"loss": g.sum(g.input("w", y.shape) * y)})
    assert_finite_differences(g.build(), feeds_of(g))
    assert_kernels(g.build(), feeds_of(g))


def test_one_parameter_as_queries_keys_and_values() -> None:
    g = Graph()
    x = g.parameter("x", (2, 19, 24))
    g.set_outputs({"loss": g.sum(g.input("w", x.shape) * g.causal_attention(x, x, x, 3))})
    assert_finite_differences(g.build(), feeds_of(g))
    assert_kernels(g.build(), feeds_of(g))


@pytest.mark.parametrize("shape", [(3, 9, 20), (1, 9, 1), (2, 1, 1, 20), (3, 1, 1), ()])
def test_a_mask_that_is_trained(shape: tuple[int, ...]) -> None:
    g = Graph()
    q, k, v = (g.parameter(name, (2, n, 24)) for name, n in (("q", 9), ("k", 20), ("v", 20)))
    y = g.attention(q, k, v, 3, mask=Causal(10), attn_mask=g.parameter("bias", shape), soft_cap=2.0)
    g.set_outputs({"loss": g.sum(g.input("w", y.shape) * y)})
    if shape[-1:] == (20,):
        assert_finite_differences(g.build(), feeds_of(g))
    else:  # what is added to every score changes nothing
        found = evaluate(gradients_of(g.build()), {name: a.astype(float) for name, a in feeds_of(g).items()})
        assert np.abs(found["grad.bias"]).max() < 1e-13
    assert_kernels(g.build(), feeds_of(g))


def test_only_the_log_sum_exp_in_the_loss() -> None:
    g = Graph()
    q, k, v = (g.parameter(name, (11, 24)) for name in "qkv")
    lse = g.attention_with_lse(q, k, v, 3, mask=Causal())[1]
    g.set_outputs({"loss": g.sum(g.input("w", lse.shape) * lse)})
    found = assert_finite_differences(g.build(), feeds_of(g))
    assert not np.any(found["grad.v"])
    assert_kernels(g.build(), feeds_of(g))


# the program


def templates(g: Graph) -> list[str]:
    return [dispatch.template for dispatch in compile_graph(gradients_of(g.build())).plan.dispatches()]


def test_the_forward_pass_runs_once() -> None:
    """And nothing computes the gradient of an input or of a mask that is one."""
    g = loss_of(40, 40, (2, 1), 64, Causal())
    assert sum(name.startswith("attention") and "grad" not in name for name in templates(g)) == 1
    g = Graph()
    q, k, v = g.parameter("q", (40, 64)), g.input("k", (40, 64)), g.input("v", (40, 64))
    g.set_outputs({"loss": g.sum(g.attention(q, k, v, 2, attn_mask=g.input("bias", (40, 40))))})
    grads = [d.label for d in compile_graph(gradients_of(g.build())).plan.dispatches() if "grad" in d.template]
    assert grads == ["attention_grad_rows", "attention_grad_q_32"]


@pytest.mark.parametrize("name", ["k", "v"])
def test_one_of_two_gradients_alone(name: str) -> None:
    g = Graph()
    leaf = {n: (g.parameter if n == name else g.input)(n, (33, 16)) for n in "qkv"}
    y = g.causal_attention(leaf["q"], leaf["k"], leaf["v"], 2)
    g.set_outputs({"loss": g.sum(g.input("w", y.shape) * y)})
    assert_kernels(g.build(), feeds_of(g))


def test_scratch_does_not_grow_with_queries_times_keys() -> None:
    sizes = []
    for n in (2048, 4096):
        plan = compile_graph(gradients_of(loss_of(n, n, (8, 2), 64, Causal()).build())).plan
        sizes.append(sum(buffer.nbytes for buffer in plan.buffers.values() if buffer.kind == "scratch"))
    assert sizes[1] <= 2.1 * sizes[0]


def test_replays_are_bit_identical() -> None:
    g = loss_of(70, 70, (6, 2), 16, Window(30))
    runner = harness.load(compile_graph(gradients_of(g.build())))
    inputs = harness.feeds_of(runner, feeds_of(g))
    first = runner.run(**inputs)
    for _ in range(19):
        harness.assert_same(first, runner.run(**inputs), "in a replay")


def test_no_gradient_through_a_cache() -> None:
    g = Graph()
    caches = [g.state(name, (1, 8, 16)) for name in "kv"]
    position = g.input("position", (), "u32")
    y = g.cached_attention(g.parameter("q", (1, 1, 16)), *caches, position, 2)
    g.set_outputs({"loss": g.sum(y)})
    with pytest.raises(GradientError, match="a cache"):
        differentiate(g.build(), "loss")


@pytest.mark.parametrize("head_dim", [1, 7, 8, 31, 64])
def test_a_query_that_sees_one_key_has_no_gradient(head_dim: int) -> None:
    """A softmax over one key is 1 whatever the score is: 0 to the bit, not what rounding leaves."""
    g = loss_of(1, 1, (3, 1), head_dim, Causal(), batch=(3,), soft_cap=5.0)
    found = harness.run(compile_graph(gradients_of(g.build())), feeds_of(g))
    assert not found["grad.q"].any()
    assert not found["grad.k"].any()
    assert found["grad.v"].any()


@pytest.mark.parametrize("head_dim", [1, 5, 16, 30, 31, 32, 64, 128, 256])
@pytest.mark.parametrize("batch", [1, 64])
def test_the_gradient_of_keys_keeps_few_numbers_a_thread(head_dim: int, batch: int) -> None:
    """Two numbers a pair and two sums a row fit the registers of a GPU's thread; what does not fit is slow, and an NVIDIA
    driver computed where to write it by a register that held something else."""
    choice = attention_kernel.choose_gradient(attention_kernel.Sizes(batch, 300, 300, 8, 2, head_dim), "kv").variant
    assert choice["rows"] * choice["keys"] <= 16
    assert choice["rows"] * choice["cols"] <= 8
