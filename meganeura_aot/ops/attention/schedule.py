"""Which kernel computes attention: a pure function of sizes and target.

    attention          a tile of queries a workgroup, tiles of keys in workgroup memory, for GPUs
    attention_rows     whole queries a thread, for software adapters
    attention_decode   few queries: threads share the keys
    attention_combine  adds the parts where the keys of a query are split over workgroups; alone it writes zeros
    attention_grad     the tiles of the first, for the gradient of q, or for those of k and v

All keep running maxima and sums, so that nothing of size S x T exists. shaders/attention/interface.wgsl.j2 has what they
share: bindings, masks, positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MEMORY = 1023  # vec4s of workgroup memory, beside a flag
FEW_QUERIES = 8  # up to this many the decode kernel is used
ENOUGH_GROUPS = 64  # workgroups that make a larger tile worth its loss of parallelism
WANTED_GROUPS = 512  # workgroups that fill the device: keys are split until there are as many
WORTH_SPLITTING = 8192  # multiply-adds a thread that repay a second dispatch
KEYS_PER_PART = 256  # of the decode kernel, where they are few
LARGEST_SPLIT = 32

# The largest number of pairs of a query and a key that a thread holds. The gradient of k and v needs fewer: it holds two
# numbers a pair and two sums a row. With 32 pairs, or with 4 rows of threads (then each thread loads more at once), it used
# all 255 registers of an NVIDIA thread, and the driver's code for the spilled values was wrong. With 16 pairs and 8 rows of
# threads it uses at most 182. This is faster for short sequences; for long ones of wide heads it takes 5 % more time
# (16 heads of 64 at 2048 keys: 0.79 ms, before 0.75).
PAIRS, PAIRS_OF_KV = 32, 16


@dataclass(frozen=True)
class Sizes:
    """q [batch, queries, heads * head_dim], k and v [batch, keys, kv_heads * head_dim]."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def vec4s(self) -> int:
        """vec4s that hold one row of a head."""
        return -(-self.head_dim // 4)


@dataclass(frozen=True)
class AttentionKernel:
    """A template, the structure it is rendered with, its workgroups, and into how many parts the keys are split."""

    template: str
    variant: Mapping[str, int | bool | str]
    groups: int
    splits: int


def choose_attention(sizes: Sizes, target: str) -> AttentionKernel:
    """The kernel for attention on a target "webgpu", "native" or "cpu"."""
    if sizes.keys == 0:
        return AttentionKernel("attention_combine", {}, 0, 0)
    if sizes.queries <= FEW_QUERIES:
        return _decode(sizes)
    return _rows(sizes) if target == "cpu" else _tiled(sizes)


def _tiled(sizes: Sizes) -> AttentionKernel:
    """Large tiles reuse more of what they load; small ones and split keys keep a short sequence parallel."""
    heads = sizes.batch * sizes.heads
    for rows, lanes_y, cols in ((8, 8, 2), (4, 8, 2), (4, 4, 1)):
        tile = tile_structure(sizes.head_dim, rows, lanes_y, cols)
        groups = heads * -(-sizes.queries // (rows * tile["lanes_y"]))
        if groups >= ENOUGH_GROUPS:
            break
    serial = sizes.keys * rows * tile["cols"] * 8  # multiply-adds a thread
    splits = min(WANTED_GROUPS // groups, serial // WORTH_SPLITTING, LARGEST_SPLIT)
    splits = max(1, min(splits, sizes.keys // (2 * tile["keys"] * tile["lanes_x"])))
    return AttentionKernel("attention", tile, groups * splits, splits)


def choose_gradient(sizes: Sizes, of: str) -> AttentionKernel:
    """The kernel for the gradient of "q", by tiles of queries which keys pass, or of "kv", the reverse.

    What passes is split over workgroups where there are few: the queries of all heads that share a head of k and v.
    """
    own, passing, heads, shared, pairs = sizes.queries, sizes.keys, sizes.heads, 1, PAIRS
    tiles = [(8, 8, 2), (4, 8, 2), (4, 4, 1)]
    if of == "kv":
        own, passing, heads, shared = passing, own, sizes.kv_heads, sizes.heads // sizes.kv_heads
        pairs, tiles = PAIRS_OF_KV, [(4, 8, 2), (4, 8, 1)]
    for rows, lanes_y, cols in tiles:
        tile = tile_structure(sizes.head_dim, rows, lanes_y, cols, pairs)
        groups = sizes.batch * heads * -(-own // (rows * tile["lanes_y"]))
        if groups >= ENOUGH_GROUPS:
            break
    steps = shared * -(-passing // (tile["keys"] * tile["lanes_x"]))
    splits = max(1, min(WANTED_GROUPS // max(groups, 1), steps, LARGEST_SPLIT))
    return AttentionKernel("attention_grad", {**tile, "own": of}, groups * splits, splits)


def tile_structure(head_dim: int, rows: int, lanes_y: int, cols: int, pairs: int = PAIRS) -> dict[str, int]:
    """A workgroup of lanes_y x lanes_x threads, each with `rows` queries and `cols` vec4s of them, and what fits memory.

    pairs: the largest number of scores that a thread holds; keys: the scores of each of its queries. depth: vec4s of Q and K
    staged at once, chunks times; v_keys: rows of V staged at once. lanes_y changes a little to fill subgroups, and is halved
    for wide heads; narrow heads need one vec4 only.
    """
    vec4s = -(-head_dim // 4)
    cols = 1 if vec4s <= 8 else 2 if vec4s > 32 else cols
    lanes_x = max(4, -(-vec4s // cols))
    lanes_x += lanes_x % 2 if lanes_x > 10 else 0  # a prime number of keys could not be staged in equal parts
    threads = 32 * max(1, round(lanes_x * lanes_y / 32))
    y = threads // lanes_x
    wide, q_tile, stride = lanes_x * cols, rows * y, rows * y // 4 | 1
    for keys in (8, 4, 3, 2, 1):
        k_tile = lanes_x * keys
        weights = k_tile * stride
        depth = _depth(vec4s, lanes_x * y, min(8, (MEMORY // (q_tile + k_tile) - 1) | 1))
        v_keys = max((n for n in range(1, k_tile + 1) if k_tile % n == 0 and weights + n * wide <= MEMORY), default=0)
        fits = weights + lanes_x * stride <= MEMORY and depth and v_keys >= min(8, k_tile)
        if rows * keys <= pairs and k_tile <= 64 and fits:
            chunks = -(-vec4s // depth)
            return {
                "rows": rows,
                "keys": keys,
                "cols": cols,
                "lanes_x": lanes_x,
                "lanes_y": y,
                "stride": stride,
                "depth": depth,
                "chunks": chunks,
                "v_keys": v_keys,
                "memory": max((q_tile + k_tile) * (depth | 1), weights + max(v_keys * wide, lanes_x * stride)),
                "padded": vec4s != chunks * depth or vec4s != wide,
            }
    return tile_structure(head_dim, rows, lanes_y // 2, cols, pairs)


def _depth(vec4s: int, threads: int, largest: int) -> int:
    """How many vec4s of each row to stage at once: those past the end, and two a turn for its barriers, are the cost;
    one that does not divide the threads costs a division for each vec4."""

    def cost(n: int) -> tuple[int, int]:
        turns = -(-vec4s // n)
        return turns * (n + 2) + vec4s // 8 * (threads % n != 0), -n

    return min(range(1, min(vec4s, largest) + 1), key=cost, default=0)


def _decode(sizes: Sizes) -> AttentionKernel:
    """Rows are queries and heads that share keys: the keys are read once for all rows of a workgroup."""
    shared = sizes.queries * (sizes.heads // sizes.kv_heads)
    groups = sizes.batch * sizes.kv_heads
    splits = 1
    if sizes.keys > 2 * KEYS_PER_PART:
        splits = max(1, min(LARGEST_SPLIT, -(-sizes.keys // KEYS_PER_PART), WANTED_GROUPS // groups))
    groups *= splits
    rows = next((n for n in (4, 3, 2) if n <= shared and groups * -(-shared // n) >= 2 * ENOUGH_GROUPS), 1)
    lanes = 1 << max(0, (-(-sizes.vec4s // 4) - 1).bit_length())
    a_pass = 256 // lanes
    passes = next(n for n in (1, 2, 4) if n * rows > 2 or n * a_pass >= -(-sizes.keys // splits))
    slices = min(256 // sizes.vec4s, 64)
    variant = {
        "rows": rows,
        "passes": passes,
        "lanes": lanes,
        "loads": -(-sizes.vec4s // lanes),
        "slices": slices,
        "values": -(-passes * a_pass // slices),
        "padded": -(-sizes.vec4s // lanes) * lanes != sizes.vec4s,
    }
    return AttentionKernel("attention_decode", variant, groups * -(-shared // rows), splits)


def _rows(sizes: Sizes) -> AttentionKernel:
    """Two queries a thread and eight keys at a time were the fastest on llvmpipe."""
    groups = sizes.batch * sizes.heads * -(-sizes.queries // 16)
    return AttentionKernel("attention_rows", {"rows": 2, "keys": 8, "padded": False}, groups, 1)
