"""Transposed convolutions: the adjoint of convolutions; each residue of the stride is a phase with taps of its own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from meganeura_aot.op import Sample
from meganeura_aot.ops.conv import schedule as conv_kernel
from meganeura_aot.ops.conv.op import Conv, ConvTranspose
from meganeura_aot.ops.conv.schedule import transposed_axes
from tests import harness
from tests.test_operators import feeds_of, graph_of
from tests.tolerance import conv_bound

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (5, 1), (5, 2)])
def test_transpose_is_the_adjoint(kernel: int, padding: int, stride: int) -> None:
    """<conv(x), y> = <x, conv_transpose(y)> in float64, and the kernels agree with the reference."""
    rng = np.random.default_rng(kernel * 10 + padding)
    x, w = rng.normal(size=(2, 4, 7, 55)), rng.normal(size=(9, 4, kernel, kernel))
    forward = Conv((stride,) * 2, (padding,) * 4)
    y = rng.normal(size=forward.product(x, w).shape)
    rest = tuple((n + 2 * padding - kernel) % stride for n in x.shape[2:])
    backward = ConvTranspose((stride,) * 2, (padding,) * 4, rest)
    back = backward.product(y, w)
    assert back.shape == x.shape
    np.testing.assert_allclose((forward.product(x, w) * y).sum(), (back * x).sum(), rtol=1e-9)
    g = Graph()
    dy, weight = g.input("dy", y.shape), g.parameter("w", w.shape)
    g.set_outputs({"dx": g.conv_transpose(dy, weight, None, stride, padding, rest)})
    harness.check(g, {"dy": y.astype(np.float32), "w": w.astype(np.float32)}, twins=kernel == 3)


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
def test_transpose_has_an_epilogue(target: str) -> None:
    g = Graph()
    x, w = g.input("x", (2, 5, 4, 3)), g.parameter("w", (5, 12, 3, 2))
    y = g.conv_transpose(x, w, g.parameter("b", (12,)), stride=2, padding=(1, 0), output_padding=(1, 0))
    g.set_outputs({"y": g.tanh(y) + g.input("skip", y.shape)})
    feeds = {"x": normal(2, 5, 4, 3), "w": normal(5, 12, 3, 2), "b": normal(12), "skip": normal(*y.shape)}
    op = ConvTranspose((2, 2), (1, 0, 1, 0), (1, 0))
    bound = conv_bound(op, feeds["x"].astype(float), feeds["w"].astype(float))
    harness.check(g, feeds, slack={"y": bound + 1e-5}, target=target)
    assert {d.label for d in compile_graph(g).plan.dispatches()} == {"conv_transpose_add_tanh_add"}


def test_residues_cover_the_output_once() -> None:
    for size, kernel, stride, dilation, before, after in itertools.product(
        (1, 4), (1, 3), (1, 2, 4), (1, 2), (0, 1), (0, 1)
    ):
        out = (size - 1) * stride + (kernel - 1) * dilation + 1 - before - after
        if out < 1:
            continue
        seen = np.zeros(out, int)
        met = np.zeros(out, int)
        for axis in transposed_axes(size, out, kernel, stride, dilation, before):
            for position in range(axis.positions):
                at = axis.first_out + position * axis.every_out
                seen[at] += 1
                inputs = [position * axis.stride + t * axis.step + axis.origin for t in range(axis.taps)]
                met[at] += sum(0 <= i < size for i in inputs)
                assert axis.leaves_input or all(0 <= i < size for i in inputs)
        expected = [
            sum((o + before - t * dilation) in range(0, size * stride, stride) for t in range(kernel))
            for o in range(out)
        ]
        np.testing.assert_array_equal(seen, 1)
        np.testing.assert_array_equal(met, expected)


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
def test_a_stride_of_the_kernel_size(target: str) -> None:
    """Windows that do not overlap: every output has one tap; and gaps between windows are 0, the bias alone."""
    for kernel, stride in ((4, 4), (2, 3)):
        g = Graph()
        x, w = g.input("x", (2, 3, 2, 3)), g.parameter("w", (3, 5, kernel, kernel))
        y = g.conv_transpose(x, w, g.parameter("b", (5,)), stride)
        g.set_outputs({"y": y})
        feeds = {"x": normal(2, 3, 2, 3), "w": normal(3, 5, kernel, kernel), "b": normal(5)}
        bound = conv_bound(ConvTranspose((stride,) * 2), feeds["x"].astype(float), feeds["w"].astype(float))
        got = harness.check(g, feeds, slack={"y": bound + 1e-6}, target=target)["y"]
        if stride > kernel:
            np.testing.assert_array_equal(got[0, :, 2, 2], feeds["b"])


def labels(x: tuple[int, ...], w: tuple[int, ...], check: bool = True, **attributes: Any) -> list[str]:
    """Of the dispatches of a transposed convolution, which is checked."""
    g = Graph()
    g.set_outputs({"y": g.conv_transpose(g.input("x", x), g.parameter("w", w), **attributes)})
    if check:
        harness.check(g, {"x": normal(*x), "w": normal(*w, seed=1)})
    return [d.label for d in compile_graph(g).plan.dispatches()]


def test_phases_share_a_launch_unless_one_fills_a_gpu() -> None:
    """Few positions: one launch, in parts of the sums where they are long; many positions: a launch a phase."""
    in_parts = ["conv_transpose_parts", "sum_parts"]
    assert labels((2, 12, 4, 5), (12, 20, 3, 3), stride=2) == ["conv_transpose"]
    assert labels((2, 300, 4, 5), (300, 20, 3, 3), stride=2, padding=1) == in_parts
    assert labels((2, 300, 3, 3), (300, 20, 2, 1), stride=3, padding=(1, 0)) == in_parts
    assert labels((1, 300, 9), (300, 33, 3), stride=4, dilation=2) == in_parts
    assert labels((1, 600, 5), (600, 66, 3), stride=2, groups=2) == in_parts
    assert labels((1, 2, 129, 129), (2, 9, 3, 3), stride=2) == ["conv_transpose"] * 4
    # the first phase has just enough workgroups, and the others, with fewer, still write only what is theirs
    assert labels((1, 128, 127, 127), (128, 9, 3, 3), check=False, stride=2) == ["conv_transpose"] * 4


@pytest.mark.parametrize("sample", [pytest.param(s, id=str(i)) for i, s in enumerate(ConvTranspose.samples())])
def test_a_launch_a_phase(sample: Sample, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What large outputs do, on small ones."""
    graph, feeds = graph_of(sample), feeds_of(sample, request)
    monkeypatch.setattr(conv_kernel, "ENOUGH_GROUPS", 1)
    harness.check(graph, feeds)
    out = sample.op.inferred(*sample.inputs)[0].shape[2:]
    assert isinstance(sample.op, ConvTranspose)
    phases = np.prod([min(pair) for pair in zip(sample.op.stride, out, strict=True)])
    assert len(list(compile_graph(graph).plan.dispatches())) in (0, phases)
