"""Which kernel multiplies two matrices: a pure function of shape and target.

C[batch, M, N] = op(A) op(B). Three templates share one interface (shaders/matmul_interface.wgsl.j2):

    matmul        tiles in workgroup memory, for GPUs
    matmul_outer  a register block a thread, no workgroup memory, for software adapters
    matmul_dot    lanes split the sums; for A B^T on software adapters, and for a few rows of C on GPUs

A caller renders `kernel.template` with `kernel.variant` and these variables of its own:

    trans_a, trans_b   bool; A is stored [.., M, K], or [.., K, M] with trans_a; B [.., K, N], or [.., N, K] with trans_b
    batch_overrides    names of further `override NAME: u32` constants
    a_batch, b_batch   WGSL expressions: the matrix inside A and B, from the variable `batch`
    extras             objects with `name` and `dtype` (a WGSL type): read-only arrays bound after a and b, before out
    epilogue, result   WGSL statements and the expression to store, from `sum`, `batch`, `row`, `col` and the extras;
                       [] and "sum" for the plain product. They run once for each element of C, in range always

Overrides: M, N, K, those of `kernel.constants` and of batch_overrides. Launch `kernel.groups` workgroups, folded or not.
Names taken in the module: a b out M N K GROUPS finish store load_a load_b tile_a tile_b partial main.
With K = 0 nothing is read of A and B, and C is the epilogue of 0; where C is empty, `groups` is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MatMulKernel:
    """A template, the structure it is rendered with, and its launch.

    label is short text for comments and reports, such as "tile 128x128x8".
    """

    template: str
    variant: Mapping[str, int | bool | str]
    constants: Mapping[str, int]
    groups: int
    label: str


@dataclass(frozen=True)
class Tile:
    """Sizes of the tiled kernel: of the tile and one step, of a thread's block, and how many slices share the terms."""

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int
    slices: int = 1

    @property
    def threads(self) -> int:
        return self.m // self.thread_m * (self.n // self.thread_n) * self.slices


# From large to small; the first one that gives the GPU enough workgroups is used, and the last one otherwise.
TILES = (Tile(128, 128, 8, 8, 8), Tile(64, 64, 8, 8, 4), Tile(32, 32, 16, 4, 4, slices=2))
ENOUGH_GROUPS = 256


def choose_kernel(m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool, target: str) -> MatMulKernel:
    """The kernel for C[batch, m, n] with k terms a sum, on a target "webgpu", "native" or "cpu"."""
    if k == 0:
        return _outer(m, n, k, batch, trans_a, trans_b, 1, 4)
    if target == "cpu":
        return _cpu(m, n, k, batch, trans_a, trans_b)
    for tile in TILES:
        if _blocks(m, n, batch, tile.m, tile.n) >= ENOUGH_GROUPS:
            break
    return _tiled(m, n, k, batch, trans_a, trans_b, tile)


def _blocks(m: int, n: int, batch: int, rows: int, cols: int) -> int:
    """Blocks of rows x cols that cover every matrix of C."""
    return -(-m // rows) * -(-n // cols) * batch


def _tiled(m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool, tile: Tile) -> MatMulKernel:
    groups = _blocks(m, n, batch, tile.m, tile.n)
    variant: dict[str, int | bool | str] = {
        "tile_m": tile.m,
        "tile_n": tile.n,
        "tile_k": tile.k,
        "thread_m": tile.thread_m,
        "thread_n": tile.thread_n,
        "slices": tile.slices,
        "threads": tile.threads,
        "a_vec": 4 if trans_a and m % 4 == 0 else 1,
        "b_vec": 4 if not trans_b and n % 4 == 0 else 1,
        "a_pad": 0 if trans_a else 1,
        "b_pad": 1 if trans_b else 0,
        "edge_m": m % tile.m != 0,
        "edge_n": n % tile.n != 0,
        "edge_k": k % tile.k != 0,
        "buffers": 1,
        "unroll": 1,
        "lanes_n": 0,
        "loads": "row",
        "fma": False,
        "swizzle": False,
        "order": 0,
    }
    return MatMulKernel("matmul", variant, {"GROUPS": groups}, groups, f"tile {tile.m}x{tile.n}x{tile.k}")


def _cpu(m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool) -> MatMulKernel:
    """The cheapest block by a cost model that was fitted to measurements on llvmpipe.

    Larger blocks reuse more of what they load, but take up to half a second to compile: only much work deserves them.
    """
    work = m * n * k * batch
    largest = 64 if work < 1 << 22 else 128 if work < 1 << 25 else 256
    dot = (not trans_a or m == 1) and (trans_b or n == 1) and k >= 64
    sizes = (16, 8, 4, 2, 1)

    def cost(block: tuple[int, int]) -> int:
        rows, cols = block
        if dot:
            return _blocks(m, n, batch, rows, cols) * (7 + 2 * (rows + cols) + rows * cols)
        return _blocks(m, n, batch, rows, 8 * cols) * (16 + 24 * rows + 15 * cols + rows * cols)

    blocks = [
        (rows, cols)
        for rows in sizes
        for cols in (sizes if dot else (16, 8, 4))
        if rows * cols <= largest and rows <= max(m, 1) and (not dot or cols <= max(n, 1))
    ]
    rows, cols = min(blocks, key=cost)
    if dot:
        return _dot(m, n, k, batch, rows, cols, lanes=8, teams=1)
    return _outer(m, n, k, batch, trans_a, trans_b, rows, cols)


def _outer(
    m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool, rows: int, cols: int, lanes: int = 8
) -> MatMulKernel:
    groups = _blocks(m, n, batch, rows, cols * lanes)
    variant: dict[str, int | bool | str] = {
        "rows": rows,
        "cols": cols,
        "lanes": lanes,
        "a_vec": 1,
        "b_vec": 4 if not trans_b and n % 4 == 0 else 1,
        "edge_m": m % rows != 0,
        "edge_n": n % (cols * lanes) != 0,
    }
    return MatMulKernel("matmul_outer", variant, {"GROUPS": groups}, groups, f"outer {rows}x{cols}")


def _dot(m: int, n: int, k: int, batch: int, rows: int, cols: int, lanes: int, teams: int) -> MatMulKernel:
    groups = _blocks(m, n, batch, rows, cols * teams)
    vec = 4 if k % 4 == 0 else 1
    variant: dict[str, int | bool | str] = {
        "rows": rows,
        "cols": cols,
        "lanes": lanes,
        "teams": teams,
        "a_vec": vec,
        "b_vec": vec,
        "edge_m": m % rows != 0,
        "edge_n": n % (cols * teams) != 0,
    }
    return MatMulKernel("matmul_dot", variant, {"GROUPS": groups}, groups, f"dot {rows}x{cols}")
