"""Attention at every awkward size, and caches: decoding must equal the whole sequence at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Causal, Full, Graph, GraphError, Window, compile_graph
from meganeura_aot.ops.attention import schedule as attention_kernel
from meganeura_aot.ops.attention.cache import CacheWrite
from meganeura_aot.ops.attention.op import Attention, Mask
from tests import harness
from tests.tolerance import assert_within, attention_bound

Array = np.ndarray[Any, Any]

HEAD_DIMS = [4, 8, 16, 32, 40, 48, 64, 72, 80, 96, 128, 160, 256]
HEADS = [(9, 3), (15, 5), (5, 1), (7, 7)]
LENGTHS = [1, 7, 8, 9, 31, 32, 33, 128, 129, 1000]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def check(s: int, t: int, heads: tuple[int, int], hd: int, mask: Mask, target: str = "webgpu", **options: Any) -> None:
    """One attention of normal numbers against the reference."""
    g = Graph()
    q, k, v = g.input("q", (s, heads[0] * hd)), g.input("k", (t, heads[1] * hd)), g.input("v", (t, heads[1] * hd))
    g.set_outputs({"y": g.attention(q, k, v, *heads, hd, mask, **options)})
    feeds = {name: normal(*x.shape, seed=i) for i, (name, x) in enumerate((("q", q), ("k", k), ("v", v)))}
    harness.check(g, feeds, target=target, twins=False)


# kernels


@pytest.mark.parametrize("hd", [*HEAD_DIMS, 1, 6, 33, 88, 184, 250])
def test_large_tiles_of_every_width(hd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "ENOUGH_GROUPS", 1)
    monkeypatch.setattr(attention_kernel, "WANTED_GROUPS", 1)
    check(97, 97, (2, 1), hd, (Causal(), Window(50), Full())[hd // 8 % 3])


@pytest.mark.parametrize("hd", [*HEAD_DIMS, 1, 6, 33, 88, 184, 250])
def test_split_keys_of_every_width(hd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "WORTH_SPLITTING", 1)
    check(40, 290, (2, 1), hd, (Causal(250), Window(150, 250), Full())[hd // 8 % 3])


@pytest.mark.parametrize("hd", [*HEAD_DIMS, 1, 6, 33, 250])
def test_rows_for_software_adapters(hd: int) -> None:
    check(41, 41, (2, 1), hd, (Causal(), Window(9), Full())[hd // 8 % 3], "cpu")


@pytest.mark.parametrize("hd", [*HEAD_DIMS, 1, 6, 33, 250])
def test_few_queries_of_every_width(hd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row a workgroup, then four."""
    check(1, 33, (6, 2), hd, Causal(32))
    monkeypatch.setattr(attention_kernel, "ENOUGH_GROUPS", 1)
    check(5, 129, (6, 2), hd, Window(100, 124))


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("s", [1, 9, 33])
def test_cross_lengths(s: int, t: int) -> None:
    check(s, t, HEADS[(s + t) % 4], 8, Full())


@pytest.mark.parametrize("window", [1, 2, 31, 64, 65, 1000])
def test_windows(window: int) -> None:
    check(65, 65, (3, 1), 16, Window(window))


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
def test_more_heads_than_a_grid_is_wide(target: str) -> None:
    g = Graph()
    x = g.input("x", (66_000, 9, 4))
    g.set_outputs({"y": g.causal_attention(x, x, x, 1)})
    harness.check(g, {"x": normal(66_000, 9, 4)}, target=target, twins=False)


def test_window_is_the_last_keys_with_the_query_itself() -> None:
    """A window of 4 over 8: query 7 sees keys 4 to 7. Equal keys give the mean of the values."""
    g = Graph()
    q, v = g.input("q", (8, 4)), g.input("v", (8, 4))
    g.set_outputs({"y": g.sliding_window_attention(q, q, v, 1, 1, 4, 4)})
    values = np.arange(8, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    got = harness.run(compile_graph(g), {"q": np.zeros((8, 4), np.float32), "v": values})["y"]
    np.testing.assert_allclose(got[:, 0], [0, 0.5, 1, 1.5, 2.5, 3.5, 4.5, 5.5], rtol=1e-6)


def test_heads_of_two_widths_in_one_plan() -> None:
    g = Graph()
    x, y = g.input("x", (20, 128)), g.input("y", (20, 160))
    g.set_outputs({"a": g.full_attention(x, x, x, 2, head_dim=64), "b": g.causal_attention(y, y, y, 2, head_dim=80)})
    harness.check(g, {"x": normal(20, 128), "y": normal(20, 160)})


@pytest.mark.parametrize("queries", [1, 64, 4096])
def test_scratch_does_not_grow_with_the_keys(queries: int) -> None:
    sizes = []
    for keys in (100_000, 400_000):
        g = Graph()
        q, k, v = (g.input(name, (n, 128)) for name, n in (("q", queries), ("k", keys), ("v", keys)))
        g.set_outputs({"y": g.cross_attention(q, k, v, 2)})
        sizes.append(sum(b.nbytes for b in compile_graph(g).plan.buffers.values() if b.kind == "scratch"))
    assert sizes[0] == sizes[1] <= 32 * 4 * queries * 132


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
@pytest.mark.parametrize("s", [3, 40])
def test_what_is_hidden_has_no_influence(s: int, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in key and value 21: rows before it are those of the same tensors without it, the others are NaN."""
    monkeypatch.setattr(attention_kernel, "ENOUGH_GROUPS", 1)  # several rows a workgroup
    g = Graph()
    q, k, v = (g.input(name, (n, 16)) for name, n in (("q", s), ("k", 40), ("v", 40)))
    g.set_outputs({"k": g.causal_attention(q, k, v, 2, offset=20), "v": g.causal_attention(q, v, k, 2, offset=20)})
    feeds = {"q": normal(s, 16), "k": normal(40, 16, seed=1), "v": normal(40, 16, seed=2)}
    program = compile_graph(g, target=target)
    clean = harness.run(program, feeds)
    feeds["k"][21] = np.nan
    got = harness.run(program, feeds)
    for name in got:
        # a tile with a NaN takes another path, which may round otherwise
        np.testing.assert_allclose(got[name][:1], clean[name][:1], rtol=1e-5, atol=1e-6)
        assert np.isnan(got[name][1:]).all()


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
@pytest.mark.parametrize("s", [3, 40])
def test_a_weight_too_small_for_a_number_does_not_hide_a_nan(s: int, target: str) -> None:
    g = Graph()
    q, k, v = (g.input(name, (n, 4)) for name, n in (("q", s), ("k", 40), ("v", 40)))
    g.set_outputs({"y": g.causal_attention(q, k, v, 1, offset=2)})
    feeds = {name: np.ones(x.shape, np.float32) for name, x in (("q", q), ("k", k), ("v", v))}
    feeds["k"][3], feeds["v"][3] = -1e4, np.nan
    got = harness.run(compile_graph(g, target=target), feeds)["y"]
    np.testing.assert_array_equal(got[0], np.ones(4))
    assert np.isnan(got[1:]).all()


# caches


def decoder(
    n: int, *, size: int = 80, hd: int = 8, batch: int | None = None, limit: int | None = None, **options: Any
) -> Graph:
    """n tokens of 4 heads over 2 through caches of `size` rows; one position a batch item."""
    g = Graph()
    lead = () if batch is None else (batch,)
    q, k, v = g.input("q", (*lead, n, 4 * hd)), g.input("k", (*lead, n, 2 * hd)), g.input("v", (*lead, n, 2 * hd))
    caches = [g.state(name, (*lead, size, 2 * hd)) for name in ("k_cache", "v_cache")]
    position = g.state("position", lead, "u32")
    for cache, rows in zip(caches, (k, v), strict=True):
        g.cache_write(cache, rows, position, ring=options.get("ring", False))
    y = g.cached_attention(q, *caches, position, 4, 2, hd, **options)
    g.advance(position, n, limit=limit or size)
    g.set_outputs({"y": y})
    return g


def tokens(feeds: Mapping[str, Array], start: int, n: int) -> dict[str, Array]:
    return {name: x[..., start : start + n, :] for name, x in feeds.items()}


def sequence(length: int, hd: int = 8, batch: tuple[int, ...] = ()) -> dict[str, Array]:
    widths = {"q": 4 * hd, "k": 2 * hd, "v": 2 * hd}
    return {name: normal(*batch, length, width, seed=i) for i, (name, width) in enumerate(widths.items())}


def assert_attention(got: Array, feeds: Mapping[str, Array], mask: Mask) -> None:
    """`got` is attention of the whole sequence at once."""
    op, arrays = Attention(4, 2, mask), [feeds[name].astype(np.float64) for name in "qkv"]
    assert_within(got, op.reference(*arrays), 2 * attention_bound(op, *arrays)[0])


@pytest.mark.parametrize("hd", [8, 6])
def test_decode_token_by_token_equals_the_causal_sequence(hd: int) -> None:
    """From the first row to the last one of the cache."""
    feeds = sequence(80, hd)
    runner = harness.load(compile_graph(decoder(1, hd=hd)))
    got = [runner.run(**tokens(feeds, t, 1))["y"] for t in range(80)]
    assert_attention(np.concatenate(got), feeds, Causal())
    np.testing.assert_array_equal(runner.get_state("k_cache"), feeds["k"])
    runner.assert_tails()


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("target", ["webgpu", "cpu"])
def test_prefill_then_decode(n: int, target: str) -> None:
    feeds = sequence(n + 3)
    runner = harness.load(compile_graph({"prefill": decoder(n), "decode": decoder(1)}, target=target))
    got = [runner.prefill(**tokens(feeds, 0, n))["y"]]
    got += [runner.decode(**tokens(feeds, n + step, 1))["y"] for step in range(3)]
    assert_attention(np.concatenate(got), feeds, Causal())


def test_prefill_in_chunks() -> None:
    feeds = sequence(72)
    runner = harness.load(compile_graph({"chunk": decoder(24), "few": decoder(6)}))
    got = [runner.chunk(**tokens(feeds, start, 24))["y"] for start in (0, 24)]
    got += [runner.few(**tokens(feeds, start, 6))["y"] for start in range(48, 72, 6)]
    assert_attention(np.concatenate(got), feeds, Causal())


def test_a_step_past_the_capacity_raises_before_anything_is_written() -> None:
    feeds = sequence(8)
    runner = harness.load(compile_graph({"three": decoder(3, size=7), "one": decoder(1, size=7)}))
    runner.three(**tokens(feeds, 0, 3))
    runner.three(**tokens(feeds, 3, 3))
    before = {name: runner.get_state(name) for name in runner.states}
    with pytest.raises(RuntimeError, match="position"):
        runner.three(**tokens(feeds, 0, 3))
    for name, array in before.items():
        np.testing.assert_array_equal(runner.get_state(name), array)
    runner.one(**tokens(feeds, 6, 1))
    with pytest.raises(RuntimeError, match="position"):
        runner.one(**tokens(feeds, 7, 1))
    np.testing.assert_array_equal(runner.get_state("v_cache"), feeds["v"][:7])


@pytest.mark.parametrize("window", [1, 5, 8])
def test_window_over_a_whole_cache(window: int) -> None:
    feeds = sequence(30)
    runner = harness.load(compile_graph(decoder(1, window=window)))
    got = [runner.run(**tokens(feeds, t, 1))["y"] for t in range(30)]
    assert_attention(np.concatenate(got), feeds, Window(window))


@pytest.mark.parametrize(("n", "size"), [(1, 5), (1, 8), (4, 8), (9, 20)])
def test_ring_past_its_end(n: int, size: int) -> None:
    """Decoding far past the rows of the ring is attention over a window of the whole sequence."""
    feeds = sequence(5 * 9 * 4)
    runner = harness.load(compile_graph(decoder(n, size=size, limit=1 << 20, window=5, ring=True)))
    got = [runner.run(**tokens(feeds, t, n))["y"] for t in range(0, 180, n)]
    assert_attention(np.concatenate(got), feeds, Window(5))
    runner.assert_tails()


def test_batch_items_stand_at_their_own_positions() -> None:
    """Three items at 0, 5 and 17: each is that item alone."""
    feeds, starts = sequence(30, batch=(3,)), np.array([0, 5, 17], np.uint32)
    runner, alone = harness.load(compile_graph(decoder(1, batch=3))), harness.load(compile_graph(decoder(1)))
    for name in ("k", "v"):
        cache = np.full((3, 80, 16), np.nan, np.float32)  # rows that no one may see
        for item, start in enumerate(starts):
            cache[item, :start] = feeds[name][item, :start]
        runner.set_state(f"{name}_cache", cache)
    runner.set_state("position", starts)
    steps = [
        {name: np.stack([x[i, t + s : t + s + 1] for i, s in enumerate(starts)]) for name, x in feeds.items()}
        for t in range(4)
    ]
    got = np.concatenate([runner.run(**step)["y"] for step in steps], axis=1)
    for item, start in enumerate(starts):
        whole = {name: x[item, : start + 4] for name, x in feeds.items()}
        alone.reset()
        rows = np.concatenate([alone.run(**tokens(whole, t, 1))["y"] for t in range(start + 4)])
        assert_attention(rows, whole, Causal())
        np.testing.assert_allclose(got[item], rows[start:], rtol=1e-5, atol=1e-6)
    runner.assert_tails()


def test_a_batch_item_is_that_item_alone() -> None:
    feeds = {name: normal(3, 33, 32, seed=i) for i, name in enumerate("qkv")}
    results = {}
    for batch in (3, 1):
        g = Graph()
        q, k, v = (g.input(name, (batch, 33, 32)) for name in "qkv")
        g.set_outputs({"y": g.causal_attention(q, k, v, 4)})
        results[batch] = harness.load(compile_graph(g))
    together = results[3].run(**feeds)["y"]
    for item in range(3):
        single = results[1].run(**{name: x[item : item + 1] for name, x in feeds.items()})["y"]
        np.testing.assert_array_equal(together[item], single[0])


def test_replays_of_decoding_are_bit_identical() -> None:
    feeds = sequence(20)
    runner = harness.load(compile_graph({"prefill": decoder(17), "decode": decoder(1)}))
    results = []
    for _ in range(20):
        runner.reset()
        prefill = runner.prefill(**tokens(feeds, 0, 17))["y"]
        results.append({"a": prefill, "b": runner.decode(**tokens(feeds, 17, 1))["y"]})
    for result in results[1:]:
        harness.assert_same(results[0], result, "in a replay")


def test_attention_runs_after_the_writes_it_reads() -> None:
    dispatches = [d.kernel.bindings[-1].name for d in compile_graph(decoder(1)).plan.dispatches()]
    assert dispatches == ["cache", "cache", "out", "state"]


@pytest.mark.parametrize("position", [5, 6, 7, 8, 2**31, 2**32 - 1])
@pytest.mark.parametrize("ring", [False, True])
def test_rows_past_the_end_of_a_cache(position: int, ring: bool) -> None:
    """Three rows from every position around the end: dropped, or around again."""
    g = Graph()
    cache, at = g.state("cache", (2, 7, 5)), g.input("position", (2,), "u32")
    g.set_outputs({"y": g.cache_write(cache, g.input("rows", (2, 3, 5)), at, ring) * 1.0})
    feeds = {"rows": normal(2, 3, 5), "position": np.array([position, 2], np.uint32), "cache": normal(2, 7, 5, seed=1)}
    got = harness.check(g, feeds, twins=position == 6)["y"]
    np.testing.assert_array_equal(got, CacheWrite(ring).reference(feeds["cache"], feeds["rows"], feeds["position"]))


def test_more_rows_than_a_ring_has() -> None:
    for shape in ((3, 4), (1, 3, 4)):
        g = Graph()
        cache, at = g.state("cache", shape), g.input("position", (), "u32")
        g.set_outputs({"y": g.cache_write(cache, g.input("rows", (8, 4)), at, ring=True) * 1.0})
        got = harness.check(g, {"rows": normal(8, 4), "position": np.uint32(4), "cache": np.zeros(shape, np.float32)})
        np.testing.assert_array_equal(got["y"].reshape(3, 4), normal(8, 4)[[5, 6, 7]])


def test_a_single_row() -> None:
    g = Graph()
    cache, at = g.state("cache", (3, 4)), g.input("position", (1,), "u32")
    g.set_outputs({"y": g.cache_write(cache, g.input("row", (4,)), at) * 1.0})
    got = harness.check(
        g, {"row": normal(4), "position": np.array([1], np.uint32), "cache": np.zeros((3, 4), np.float32)}
    )
    np.testing.assert_array_equal(got["y"], np.stack([np.zeros(4), normal(4), np.zeros(4)]))


# what does not fit


WRONG: list[tuple[str, Any]] = [
    ("multiple of kv_heads", lambda g, q, k: g.full_attention(q, k, k, 4, 3)),
    ("multiple of kv_heads", lambda g, q, k: g.full_attention(q, k, k, 0)),
    ("multiple of kv_heads", lambda g, q, k: g.full_attention(q, k, k, 4, 0)),
    ("offset", lambda g, q, k: g.causal_attention(q, k, k, 4, 2, offset=2**31 - 1)),
    ("window of 1", lambda g, q, k: g.sliding_window_attention(q, k, k, 4, 2, window=2**31 - 1)),
    ("heads of 1 to 256", lambda g, q, k: g.full_attention(q, k, k, 3)),
    ("4 heads of 7", lambda g, q, k: g.full_attention(q, k, k, 4, 2, 7)),
    ("as k and v", lambda g, q, k: g.full_attention(q, k, k, 4)),
    ("as k and v", lambda g, q, k: g.full_attention(q, k, g.input("v", (2, 9, 16)), 4, 2)),
    ("rank 2 or all of rank 3", lambda g, q, k: g.full_attention(q, g.input("v", (9, 16)), k, 4, 2)),
    ("window of 1", lambda g, q, k: g.sliding_window_attention(q, k, k, 4, 2)),
    ("broadcasts to", lambda g, q, k: g.full_attention(q, k, k, 4, 2, attn_mask=g.input("m", (3, 1, 1, 1)))),
    ("soft cap", lambda g, q, k: g.full_attention(q, k, k, 4, 2, soft_cap=0.0)),
    ("finite number that f32 holds as scale", lambda g, q, k: g.full_attention(q, k, k, 4, 2, scale=float("inf"))),
    ("position", lambda g, q, k: g.cached_attention(q, k, k, g.input("p", (3,), "u32"), 4, 2)),
    ("ring", lambda g, q, k: g.cached_attention(q, k, k, g.input("p", (), "u32"), 4, 2, window=4, ring=True)),
    ("a state", lambda g, q, k: g.cache_write(k, k, g.input("p", (), "u32"))),
    ("position", lambda g, q, k: g.cache_write(g.state("c", (2, 9, 16)), k, g.input("p", (2,)))),
    ("rows", lambda g, q, k: g.cache_write(g.state("c", (2, 9, 17)), k, g.input("p", (2,), "u32"))),
    ("rows", lambda g, q, k: g.cache_write(g.state("c", (2, 9, 16)), g.input("r", (2, 16)), g.input("p", (), "u32"))),
]


@pytest.mark.parametrize(("message", "build"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_errors(message: str, build: Any) -> None:
    g = Graph()
    with pytest.raises(GraphError, match=message):
        build(g, g.input("q", (2, 6, 32)), g.input("k", (2, 8, 16)))


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
@pytest.mark.parametrize("position", [5, 2**29 - 1, 2**29, 2**30 + 3, 2**31 + 5, 2**32 - 3])
def test_late_positions_of_a_ring(position: int, target: str) -> None:
    """A ring of 7 rows at positions that no i32 holds."""
    g = Graph()
    q, k, v = g.input("q", (2, 32)), g.input("k", (7, 16)), g.input("v", (7, 16))
    p = g.parameter("p", (), "u32")
    g.set_outputs({"y": g.cached_attention(q, k, v, p, 4, 2, window=4, ring=True)})
    feeds = {
        "q": normal(2, 32),
        "k": normal(7, 16, seed=1),
        "v": normal(7, 16, seed=2),
        "p": np.array(position, np.uint32),
    }
    harness.check(g, feeds, target=target)
