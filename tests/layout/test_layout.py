"""Transposes through tiles, and the copies and pointwise kernels that take four elements a thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from meganeura_aot.ops.pointwise.op import LARGE
from tests import harness

Array = np.ndarray[Any, Any]

TILES = [(16, 16), (31, 33), (32, 32), (33, 31), (64, 17), (1, 100), (100, 1), (15, 200), (65, 129), (1000, 40)]


def numbered(*shape: int) -> Array:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("shape", TILES, ids=str)
def test_transposes_around_every_edge(shape: tuple[int, int]) -> None:
    g = Graph()
    x, y = g.input("x", shape), g.input("y", (2, 3, *shape))
    last, outer = g.transpose(y), g.transpose(y, (1, 0, 3, 2))
    g.set_outputs({"plain": g.transpose(x), "last": last, "outer": outer, "front": g.transpose(y, (2, 3, 0, 1))})
    harness.check(g, {"x": numbered(*shape), "y": numbered(2, 3, *shape)})


def test_what_goes_through_tiles() -> None:
    """Two long axes that change places, however many axes make them up; not short ones, nor copies of whole rows."""
    axes = {"nchw": (0, 3, 1, 2), "nhwc": (0, 2, 3, 1), "all": (2, 3, 0, 1), "last": (1, 0, 3, 2)}
    for name, order in (axes | {"heads": (0, 2, 1, 3), "reversed": (3, 2, 1, 0), "same": (0, 1, 2, 3)}).items():
        g = Graph()
        g.set_outputs({"y": g.transpose(g.input("x", (4, 24, 16, 32)), order)})
        (dispatch,) = compile_graph(g).plan.dispatches()
        assert dispatch.label == ("transpose_tiles" if name in axes else "strided_copy")
        harness.check(g, {"x": numbered(4, 24, 16, 32)}, twins=False)
    g = Graph()
    g.set_outputs({"y": g.transpose(g.input("x", (15, 1000)))})
    assert [dispatch.label for dispatch in compile_graph(g).plan.dispatches()] == ["strided_copy"]


def test_more_than_65535_tiles() -> None:
    x = numbered(70_000, 16, 16)
    g = Graph()
    g.set_outputs({"y": g.transpose(g.input("x", x.shape))})
    np.testing.assert_array_equal(harness.run(compile_graph(g), {"x": x})["y"], x.transpose(0, 2, 1))


@pytest.mark.parametrize("size", [LARGE - 1, LARGE, LARGE + 1, LARGE + 255, LARGE + 769, LARGE + 1023])
def test_four_elements_a_thread(size: int) -> None:
    """Around the size from which it is so, with every kind of last workgroup."""
    x = numbered(size)
    g = Graph()
    value = g.input("x", (size,))
    g.set_outputs({"double": value + value, "reversed": value[::-1], "ends": g.concat([value[:5], value[5:]])})
    got = harness.check(g, {"x": x}, twins=False)
    np.testing.assert_array_equal(got["ends"], x)


def test_four_elements_a_thread_that_broadcast() -> None:
    g = Graph()
    a, b, c = g.input("a", (3, 1, 701, 1)), g.input("b", (1, 5, 1, 103)), g.input("c", (5, 701, 1))
    g.set_outputs(
        {
            "y": a * b + c,
            "expanded": g.expand(b, (3, 5, 701, 103)),
            "hot": g.one_hot(g.input("i", (1100,), "u32"), 1001),
        }
    )
    ids = np.random.default_rng(0).integers(0, 1001, 1100).astype(np.uint32)
    harness.check(g, {"a": numbered(3, 1, 701, 1), "b": numbered(1, 5, 1, 103), "c": numbered(5, 701, 1), "i": ids})
