"""What a graph refuses, and how it says so: subject, the user's file:line, expected, got."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meganeura_aot
from meganeura_aot import Graph, GraphError, Tensor, compile_graph
from tests import harness

OTHER = Graph().input("other", (3,))

MISTAKES: dict[str, tuple[Callable[[Graph, Tensor], Any], str]] = {
    "shapes": (
        lambda g, x: x + g.input("y", (4,)),
        r"add: expected shapes that broadcast together, got \[2, 3\] and \[4\]",
    ),
    "matmul": (lambda g, x: x @ x, "matmul: expected inner sizes that agree, got 3 and 2"),
    "matmul scalar": (lambda g, x: x @ g.constant(1.0), "matmul: expected rank 1 or more"),
    "dtypes": (lambda g, x: x + g.input("i", (3,), "i32"), "add: expected inputs of one dtype, got f32 and i32"),
    "float only": (lambda g, x: g.exp(g.input("i", (3,), "i32")), "exp: expected f32, got i32"),
    "integer only": (lambda g, x: x % 2.0, "mod: expected i32 or u32, got f32"),
    "unsigned neg": (lambda g, x: -g.input("u", (3,), "u32"), "neg: expected f32 or i32, got u32"),
    "fraction as integer": (
        lambda g, x: g.input("i", (3,), "i32") * 0.5,
        r"operand .*: expected integers, as the tensor beside it is i32\[3\], got 0.5 of f32",
    ),
    "integer too large": (
        lambda g, x: g.input("u", (3,), "u32") + 2**32,
        "constant .*: expected integers in the range of u32",
    ),
    "duplicate name": (
        lambda g, x: g.parameter("x", (3,)),
        r"parameter 'x' .*: expected a name used once, got the name of",
    ),
    "reserved input": (
        lambda g, x: g.input("outputs", (3,)),
        "expected a name other than __metadata__, lr, outputs, self",
    ),
    "reserved output": (
        lambda g, x: g.set_outputs({"lr": x}),
        "expected a name other than __metadata__, lr, outputs, self",
    ),
    "input no identifier": (lambda g, x: g.input("a.b", (3,)), "expected a Python identifier"),
    "negative size": (
        lambda g, x: g.input("y", (3, -1)),
        r"input 'y' .*: expected a shape of integers >= 0, got \(3, -1\)",
    ),
    "float size": (lambda g, x: g.input("y", (3.0,)), r"input: expected a sequence, each an integer, as shape, got \(3.0,\)"),  # type: ignore[arg-type]
    "int as shape": (lambda g, x: g.input("y", 3), "input: expected a sequence of integers as shape, got 3"),  # type: ignore[arg-type]
    "dtype": (lambda g, x: g.input("y", (3,), "f64"), "expected a dtype among f32, i32, u32, got 'f64'"),
    "init": (lambda g, x: g.parameter("p", (3,), init="xavier"), "expected init"),
    "foreign": (lambda g, x: x + OTHER, "expected a tensor of this graph, got one of another graph"),
    "foreign output": (lambda g, x: g.set_outputs([OTHER]), "output 'output_0' .*: expected a tensor of this graph"),
    "no tensor": (lambda g, x: x + "text", "expected a tensor of this graph, or numbers, got str"),
    "no outputs": (lambda g, x: g.set_outputs([]), "expected one output or more"),
    "outputs alone": (lambda g, x: g.set_outputs(x), "expected a list or a dict of tensors"),  # type: ignore[arg-type]
    "text constant": (lambda g, x: g.constant(["a"]), "constant .*: expected numbers"),
    "complex constant": (lambda g, x: g.constant([1j]), "constant .*: expected numbers"),
    "axis": (lambda g, x: g.softmax(x, axis=2), r"axis: expected one of f32\[2, 3\] \(-2 to 1\), got 2"),
    "axes twice": (lambda g, x: g.sum(x, [0, -2]), "axes: expected distinct axes"),
    "max of nothing": (lambda g, x: g.max(g.input("e", (0, 3)), 0), "max: nothing to reduce"),
    "reshape": (lambda g, x: g.reshape(x, (4,)), "reshape: expected 6 elements"),
    "reshape twice -1": (lambda g, x: g.reshape(x, (-1, -1)), "reshape: "),
    "permutation": (lambda g, x: g.transpose(x, [0, 0]), "permute: expected a permutation"),
    "index": (lambda g, x: x[2], r"slice: axis 0 of f32\[2, 3\]: expected an integer in \[-2, 2\) or a slice, got 2"),
    "too many indices": (lambda g, x: x[0, 0, 0], "slice: expected at most 2 indices"),
    "index by array": (lambda g, x: x[np.array([0])], "slice: axis 0"),
    "concat": (lambda g, x: g.concat([x, g.input("y", (2, 4))], 0), "concat: expected shapes equal but for axis 0"),
    "concat nothing": (lambda g, x: g.concat([]), "concat: expected one tensor or more"),
    "split": (lambda g, x: g.split(x, [1, 1], axis=1), "split: expected sizes that add up to 3"),
    "expand": (lambda g, x: g.expand(x, (3, 3)), "expand: expected shapes that broadcast"),
    "assign to no state": (lambda g, x: g.assign(x, x), "assign .*: expected a state, got the input"),
    "assign shape": (lambda g, x: g.assign(g.state("s", (3,)), x), "assign: expected f32"),
    "advance float": (lambda g, x: g.advance(g.state("p", (), "u32"), 1.5, 3), "advance: expected an integer as n, got 1.5"),  # type: ignore[arg-type]
    "truth": (lambda g, x: bool(x), "no truth value"),
    "step over u32": (
        lambda g, x: g.advance(g.state("p", (), "u32"), 2**40, 3),
        "expected an integer from -2147483648 to 4294967295 as n",
    ),
    "limit over u32": (
        lambda g, x: g.advance(g.state("p", (), "u32"), 1, 2**40),
        "expected an integer from -2147483648 to 4294967295 as limit",
    ),
    "init not finite": (lambda g, x: g.parameter("p", (3,), init=("uniform", float("inf"))), "expected init"),
    "init of integers": (
        lambda g, x: g.parameter("p", (3,), "u32", init=("normal", 3.0)),
        'expected init "zeros" or "ones" where the dtype is u32',
    ),
    "init of text": (lambda g, x: g.parameter("p", (3,), init=("normal", "x")), "expected init"),  # type: ignore[arg-type]
    "attribute not finite": (
        lambda g, x: g.leaky_relu(x, float("inf")),
        "leaky_relu: expected a finite number that f32 holds as alpha, got inf",
    ),
    "attribute over f32": (
        lambda g, x: g.elu(x, 1e39),
        r"elu: expected a finite number that f32 holds as alpha, got 1e\+39",
    ),
    "tensor too large": (lambda g, x: g.input("y", (1 << 30,)), "input .*: expected a tensor of at most"),
    "product too large": (lambda g, x: g.expand(x[:, :1], (2, 1 << 30)), "expand .*: expected a tensor of at most"),
    "shape None": (lambda g, x: g.input("y", None), "expected a sequence of integers as shape, got None"),  # type: ignore[arg-type]
    "ragged constant": (lambda g, x: g.constant([[1, 2], [3]]), "constant: "),
    "step 0": (lambda g, x: x[::0], "slice: "),
    "fractional slice": (lambda g, x: x[1.5:2], "slice: "),
    "int as new shape": (lambda g, x: g.reshape(x, 6), "reshape: expected a sequence of integers"),  # type: ignore[arg-type]
    "fractional new shape": (lambda g, x: g.reshape(x, (2.7, 3.1)), "reshape: expected a sequence, each an integer, as shape"),  # type: ignore[arg-type]
    "bool as axis": (lambda g, x: g.softmax(x, True), "softmax: expected an integer as axis, got True"),
    "number as tensor": (lambda g, x: g.softmax(3.0), "axis: expected one of"),  # type: ignore[arg-type]
    "list as bias": (lambda g, x: g.bias_add(x, [1, 2, 3]), "bias_add: "),  # type: ignore[arg-type]
    "output not printable": (lambda g, x: g.set_outputs({"a\0b": x}), "expected printable text"),
    "input not NFKC": (lambda g, x: g.input("\ufb01", (3,)), "expected a Python identifier"),
    "argument of another method": (
        lambda g, x: g.avg_pool(g.input("image", (1, 1, 4, 4)), 2, dilation=2),  # type: ignore[call-arg]
        "^avg_pool: got an unexpected keyword argument 'dilation'; its arguments are x, kernel, stride, padding, ceil_mode",
    ),
    "scaling of a configuration": (
        lambda g, x: g.rope(x, head_dim=2, scaling={"rope_type": "llama3"}),  # type: ignore[arg-type]
        r"rope: expected one of rope_scaling \(Linear, Llama3, Yarn, ...\).* as scaling, got {'rope_type': 'llama3'}",
    ),
    "reflect": (
        lambda g, x: g.pad(x, [(0, 0), (1, 3)], mode="reflect"),
        r"pad: axis 1 of f32\[2, 3\]: expected widths from 0 to 2 for mode reflect, got \(1, 3\)",
    ),
    "edge": (
        lambda g, x: g.pad(x, [(-1, 0), (0, 0)], mode="edge"),
        r"pad: axis 0 of f32\[2, 3\]: expected widths from 0 to 2147483647 for mode edge, got \(-1, 0\)",
    ),
    "cut too much": (
        lambda g, x: g.pad(x, [(-1, -2), (0, 0)]),
        r"pad: axis 0 of f32\[2, 3\]: expected widths that cut off at most 2 elements, got \(-1, -2\)",
    ),
    "where": (
        lambda g, x: g.where(x, 1.0, g.constant(np.array([True, False, True]))),
        r"expected integers, as the tensor beside it is i32\[3\], got 1.0 of f32: cast one",
    ),
    "f16 init": (
        lambda g, x: g.state("s", (3,), "f16", init=1e6),
        "state 's' .*: expected a number that f16 holds as init",
    ),
    "f16 deviation": (
        lambda g, x: g.parameter("w", (3,), "f16", ("normal", 1e6)),
        "parameter 'w' .*: expected a number that f16",
    ),
    "deviation over f32": (
        lambda g, x: g.parameter("w", (3,), init=("normal", 1e39)),
        "expected a number that f32 holds as init",
    ),
    "negative u32 init": (
        lambda g, x: g.state("s", (3,), "u32", init=-1),
        "expected an integer that u32 holds as init, got -1",
    ),
    "number over f32": (lambda g, x: x * 1e39, r"constant .*: expected numbers that f32 holds, got 1e\+39"),
    "array over f32": (
        lambda g, x: g.constant(np.array([1.0, -1e39])),
        r"constant .*: expected numbers that f32 holds, got -1e\+39",
    ),
    "statistics over f32": (
        lambda g, x: g.batch_norm(x, g.state("m", (3,)), g.state("v", (3,)), training=True, momentum=3e38),
        "running_average: expected a finite .* that f32 holds",
    ),
    "positions over i32": (
        lambda g, x: g.conv(g.input("s", (1, 1, 4)), g.input("k", (1, 1, 1)), stride=2**30, padding=2**30),
        "conv: expected at most 2147483647 positions on axis 2, padded, got 2147483652",
    ),
    "positions of a pool": (
        lambda g, x: g.max_pool(g.input("s", (1, 1, 4)), 2**31 - 1, padding=2**30, dilation=2),
        "max_pool: expected at most 2147483647 positions on axis 2, padded, got 2147483652",
    ),
    "transposed positions": (
        lambda g, x: g.conv_transpose(g.input("s", (1, 1, 4)), g.input("k", (1, 1, 1)), stride=2**30, padding=2**30),
        "conv_transpose: expected at most 2147483647 positions on axis 2",
    ),
    "negative expand": (lambda g, x: g.expand(x, (-1, 2, 3)), "expand: "),
    "gelu": (lambda g, x: g.gelu(x, "fast"), "gelu: expected approximate"),
    "bias": (lambda g, x: g.bias_add(x, g.input("b", (2,))), r"bias_add: expected a bias of shape \[3\]"),
    "cast": (lambda g, x: g.cast(x, "f16"), "cast: expected dtype"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str) -> None:
    mistake, message = MISTAKES[name]
    g = Graph()
    x = g.input("x", (2, 3))
    with pytest.raises(GraphError, match=message) as caught:
        mistake(g, x)
    assert name == "truth" or re.search(r"\(built at \S+test_builder\.py:\d+\)", str(caught.value))


def test_error_names_the_line() -> None:
    g = Graph()
    x = g.input("x", (2, 3))
    with pytest.raises(GraphError, match=r"test_builder\.py:\d+"):
        g.relu(x) @ x


def test_a_refused_call_leaves_the_graph_as_it_was() -> None:
    g = Graph()
    x = g.input("x", (2, 3))
    for mistake, _ in MISTAKES.values():
        with pytest.raises(GraphError):
            mistake(g, x)
    g.set_outputs([x * 2.0])
    assert "output output_0" in g.build().text()


def test_outputs_are_required() -> None:
    g = Graph()
    g.input("x", (2,))
    with pytest.raises(GraphError, match="expected outputs"):
        compile_graph(g)


def test_constant_over_a_mebibyte() -> None:
    g = Graph()
    big = g.constant(np.ones((1 << 18) + 1, np.float32))
    g.set_outputs([big * g.input("x", (1,))])
    with pytest.raises(GraphError, match=r"test_builder\.py:\d+.*make it a parameter"):
        compile_graph(g)


BITS = [0.95, -0.95, 1e-45, 3.4028235e38, -3.4028235e38, 0.1, -0.0, 0.0, np.inf, -np.inf, np.nan, 1.1754944e-38, 1e10]


@pytest.mark.parametrize("value", BITS, ids=str)
@pytest.mark.parametrize("count", [1, 3, 70])
def test_constant_bits(value: float, count: int) -> None:
    """As a number in the text, as literals in a buffer, and packed: the same bits on the GPU."""
    g = Graph()
    array = np.full(count, value, np.float32)
    constant = g.constant(array)
    g.set_outputs({"plain": constant, "moved": g.reshape(g.concat([constant, constant]), (2, count))})
    got = harness.run(compile_graph(g), {})
    np.testing.assert_array_equal(got["plain"].view(np.uint32), array.view(np.uint32))
    np.testing.assert_array_equal(got["moved"].view(np.uint32), np.stack([array, array]).view(np.uint32))


@pytest.mark.parametrize("value", BITS, ids=str)
def test_constant_operand(value: float) -> None:
    g = Graph()
    x = g.input("x", (5,))
    g.set_outputs({"minus": x - value, "times": value * x, "filled": g.where(x, g.constant(np.float32(value)), 0.0)})
    harness.check(g, {"x": np.array([0, -1, 1, 0.5, 2], np.float32)}, twins=False)


def test_constant_of_several_nan_patterns() -> None:
    bits = np.array([0x7FC00001, 0xFFC00000, 0x7F800001], np.uint32)
    g = Graph()
    g.set_outputs({"y": g.constant(bits.view(np.float32))})
    np.testing.assert_array_equal(harness.run(compile_graph(g), {})["y"].view(np.uint32), bits)


@pytest.mark.parametrize(("dtype", "values"), [("i32", [-(2**31), 2**31 - 1, 0, -1]), ("u32", [0, 2**32 - 1, 7])])
def test_integer_constants(dtype: str, values: list[int]) -> None:
    for value in values:
        g = Graph()
        x = g.input("x", (3,), dtype)
        g.set_outputs({"plus": x + value, "list": g.constant([value] * 2, dtype), "compare": g.less(x, value)})
        harness.check(g, {"x": np.array([0, 1, 5], dtype={"i32": np.int32, "u32": np.uint32}[dtype])}, twins=False)


def test_sugar() -> None:
    """Operators of Python, numbers on both sides, indexing as in NumPy."""
    g = Graph()
    x = g.input("x", (4, 6))
    i = g.input("i", (4, 6), "i32")
    g.set_outputs(
        {
            "float": (1 - x) * 2 / (x * x + 1) - -x,
            "power": (x * x + 0.5) ** 1.5,
            "integer": ((i // 3) % 5 & 7 | 1 ^ 2) << 1 >> 1,
            "row": x[1],
            "column": x[:, -1],
            "steps": x[::-2, 1:5:2],
            "added": x[None, ..., 0],
            "empty": x[2:2],
            "split": g.concat(g.split(x, 4, axis=1)[::-1], axis=1),
            "clip": g.clip(x, -0.5, 0.5),
            "low": g.clip(x, low=0.25),
            "where": g.where(x > 0.0, x, -1.0),
            "compare": (x == x) + (x != x) * 2.0 + (x <= 0.0) * 4.0 + (x >= 0.0) * 8.0,
            "reflected": (7 & i) + (1 | i) - (3 ^ i) + (1 << (i & 3)),
            "axes": g.sum(x, np.int64(1), keepdims=True),
            "left": np.ones((2, 4), np.float32) @ x,
            "count": g.sum(g.where(g.greater(x, 0.0), 1.0, 0.0)),
        }
    )
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(4, 6)).astype(np.float32), "i": rng.integers(-50, 50, (4, 6), dtype=np.int32)}
    got = harness.run(compile_graph(g), feeds)
    a, n = feeds["x"], feeds["i"]
    np.testing.assert_allclose(got["float"], (1 - a) * 2 / (a * a + 1) + a, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["power"], (a * a + 0.5) ** 1.5, rtol=1e-5)
    np.testing.assert_array_equal(got["integer"], ((n // 3) % 5 & 7 | 1 ^ 2) << 1 >> 1)
    for name, expected in {
        "row": a[1],
        "column": a[:, -1],
        "steps": a[::-2, 1:5:2],
        "added": a[None, ..., 0],
        "empty": a[2:2],
        "split": np.concatenate([a[:, 4:], a[:, :4]], axis=1),
        "clip": a.clip(-0.5, 0.5),
        "low": a.clip(0.25),
        "where": np.where(a > 0, a, -1),
        "compare": 1 + (a <= 0) * 4.0 + (a >= 0) * 8.0,
        "reflected": (7 & n) + (1 | n) - (3 ^ n) + (1 << (n & 3)),
        "count": np.float32((a > 0).sum()),
    }.items():
        np.testing.assert_array_equal(got[name], expected, err_msg=name)
    np.testing.assert_allclose(got["axes"], a.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(got["left"], np.ones((2, 4)) @ a, rtol=1e-5)


def test_lines_of_a_neighbouring_folder(tmp_path: Path) -> None:
    """A folder whose name begins like the package's is the user's."""
    path = Path(meganeura_aot.__file__).parent.as_posix() + "_models/model.py"
    code = compile(
        "from meganeura_aot import Graph\ng = Graph()\ng.input('x', (2,)) + g.input('y', (3,))\n", path, "exec"
    )
    with pytest.raises(GraphError, match=re.escape(f"{path}:3")):
        exec(code, {})


def test_name_of_the_model() -> None:
    g = Graph()
    g.set_outputs([g.input("x", (2,)) * 2.0])
    for name in ("a\0", "", 5):
        with pytest.raises(GraphError, match="name of the model"):
            compile_graph(g, name=name)  # type: ignore[arg-type]
