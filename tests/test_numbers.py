"""Numbers that break kernels: saturation, NaN, infinities, rows at the ends of the range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from tests import harness


def one(name: str, *values: float, **attributes: Any) -> list[float]:
    g = Graph()
    g.set_outputs({"y": getattr(g, name)(g.input("x", (len(values),)), **attributes)})
    return [float(v) for v in harness.run(compile_graph(g), {"x": np.array(values, np.float32)})["y"]]


def test_saturation() -> None:
    assert one("tanh", 1000, -1000) == [1, -1]
    gelu = one("gelu", -13.24, -50, 20.6, approximate="tanh")
    assert gelu[:2] == [0, 0]
    assert gelu[2] == np.float32(20.6)
    assert one("gelu", -50, 20.6) == [0, np.float32(20.6)]
    assert one("sigmoid", 200, -200) == [1, 0]
    assert abs(one("silu", -200)[0]) < 1e-37
    assert one("softplus", 200) == [200]
    assert one("exp", -200, 89) == [0, np.inf]


NAN_VISIBLE = [
    "relu",
    "exp",
    "tanh",
    "sigmoid",
    "gelu",
    "silu",
    "softplus",
    "elu",
    "leaky_relu",
    "hard_sigmoid",
    "sign",
    "abs",
]


@pytest.mark.parametrize("name", NAN_VISIBLE)
def test_nan_stays_visible(name: str) -> None:
    got = one(name, np.nan, 1.0, -np.nan)
    assert np.isnan(got[0])
    assert np.isnan(got[2])
    assert not np.isnan(got[1])


def test_nan_in_pairs() -> None:
    g = Graph()
    a, b = g.input("a", (4,)), g.input("b", (4,))
    g.set_outputs({"max": g.maximum(a, b), "min": g.minimum(a, b), "clip": g.clip(a, 0.0, 1.0)})
    feeds = {"a": np.array([np.nan, 1, np.nan, 2], np.float32), "b": np.array([1, np.nan, np.nan, 3], np.float32)}
    got = harness.check(g, feeds)
    assert np.isnan(got["max"]).tolist() == [True, True, True, False]


def test_softmax_of_infinities() -> None:
    x = np.array([[-np.inf] * 3, [-np.inf, 0, -np.inf], [np.nan, 0, 1], [3e38, -3e38, 0], [-3.4e38] * 3], np.float32)
    for repeat in (1, 40):  # one thread a row, one workgroup a row
        g = Graph()
        wide = np.repeat(x, repeat, axis=1)
        g.set_outputs({"y": g.softmax(g.input("x", wide.shape))})
        got = harness.check(g, {"x": wide})["y"]
        assert (got[0] == 0).all()
        assert np.isnan(got[2]).all()


def test_reductions_of_nan_and_infinities() -> None:
    for width in (4, 300):
        x = np.zeros((5, width), np.float32)
        x[0, 1], x[1, :], x[2, -1], x[3, 0] = np.nan, -np.inf, np.inf, -np.inf
        g = Graph()
        v = g.input("x", x.shape)
        g.set_outputs({"max": g.max(v, 1), "min": g.min(v, 1), "sum": g.sum(v, 1)})
        got = harness.check(g, {"x": x})
        assert np.isnan(got["max"][0])
        assert got["max"][1] == -np.inf


def test_integers_wrap() -> None:
    for dtype in (np.int32, np.uint32):
        g = Graph()
        name = "i32" if dtype is np.int32 else "u32"
        a, b = g.input("a", (4,), name), g.input("b", (4,), name)
        g.set_outputs({"add": a + b, "mul": a * b, "sub": a - b, "sum": g.sum(a), "div": a // b, "mod": a % b})
        limits = np.iinfo(dtype)
        feeds = {
            "a": np.array([limits.max, limits.min, limits.max, 5], dtype),
            "b": np.array([limits.max, 2, 1, 0], dtype),
        }
        harness.check(g, feeds)


def test_rows_at_the_ends_of_the_range() -> None:
    """Every row has numbers of one size alone, so that no large neighbour hides an error."""
    scales = [1e-37, 1e-30, 1e-20, 1e-10, 1e-5, 1e-3, 1, 30, 80]
    x = np.stack([s * np.linspace(-1, 1, 65) for s in scales]).astype(np.float32)
    g = Graph()
    v = g.input("x", x.shape)
    names = ["exp", "expm1", "tanh", "sigmoid", "silu", "gelu", "softplus", "elu", "erf", "sin", "cos", "relu"]
    g.set_outputs({name: getattr(g, name)(v) for name in names} | {"gelu_tanh": g.gelu(v, "tanh")})
    harness.check(g, {"x": x})


def test_log_near_one_and_at_the_ends() -> None:
    near = 1 + np.linspace(-1e-3, 1e-3, 129)
    ends = np.geomspace(1.2e-38, 3e38, 129)
    g = Graph()
    v = g.input("x", (2, 129))
    g.set_outputs({"log": g.log(v), "sqrt": g.sqrt(v), "rsqrt": g.rsqrt(v), "recip": g.recip(v)})
    harness.check(g, {"x": np.stack([near, ends]).astype(np.float32)})
