"""Which kernel multiplies two matrices: a pure function of shape and target.

C[batch, M, N] = op(A) op(B). Three templates share one interface (shaders/matmul/interface.wgsl.j2):

    matmul        tiles in workgroup memory; for GPUs
    matmul_dot    lanes split each sum of A B^T; for a few rows or columns of C, and for software adapters
    matmul_outer  blocks in registers only; for a few rows of C with B untransposed, and for software adapters

A caller renders `kernel.template` with `kernel.variant` and these variables of its own:

    trans_a, trans_b   A is stored [.., M, K], or [.., K, M] with trans_a; B [.., K, N], or [.., N, K] with trans_b
    batch_overrides    names of further `override NAME: u32` constants
    a_batch, b_batch   WGSL expressions: the matrix inside A and B, from the variable `batch`
    extras             objects with `name` and `dtype` (a WGSL type): read-only arrays bound after a and b, before out
    epilogue, result   WGSL statements and the expression to store, from `sum`, `batch`, `row`, `col` and the extras;
                       [] and "sum" for the plain product. They run once for each element of C, never out of range

Overrides: M, N, K, those of `kernel.constants` and of batch_overrides. Launch `kernel.groups` workgroups, folded or not.
A and B may be bound as arrays of vec2 or vec4; `variant` says so, and their sizes are multiples of it then.
Names taken in the module: a b out M N K GROUPS TILE_B finish load_a load_b term_a term_b outer store store_row tile
partial main. With K = 0 nothing is read of A and B, and C is the epilogue of 0; where C is empty, `groups` is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Variant = dict[str, int | bool]


@dataclass(frozen=True)
class MatMulKernel:
    """A template, the structure it is rendered with, and its launch.

    label is short text for comments and reports, such as "tile 128x128x8".
    """

    template: str
    variant: Mapping[str, int | bool]
    constants: Mapping[str, int]
    groups: int
    label: str


@dataclass(frozen=True)
class Tile:
    """Sizes of the tiled kernel.

    m, n, k        rows and columns of C a workgroup, and terms a step
    thread_m, _n   rows and columns of C a thread
    slices         parts of the threads that divide the terms of a step: more threads for few tiles
    lanes_n        columns of threads in each 32 of them; 0: row after row
    unroll         terms written out in one round of the inner loop: faster, but longer and slower to compile
    part           nest two loops, the inner one of so many rounds, for drivers to unroll it; 0: one loop
    """

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int
    slices: int = 1
    lanes_n: int = 0
    unroll: int = 1
    part: int = 0

    @property
    def threads(self) -> int:
        return self.m // self.thread_m * (self.n // self.thread_n) * self.slices


LARGE = Tile(128, 128, 8, 16, 8, lanes_n=4, unroll=8)
LARGE_AT = Tile(128, 128, 16, 8, 8, lanes_n=8, unroll=8)  # where both operands are contiguous along C
MIDDLE = Tile(64, 64, 32, 8, 4, part=16)
SMALL = Tile(32, 32, 64, 4, 4, slices=2, unroll=32)
FEW = Tile(16, 32, 64, 4, 4, slices=8, unroll=8)
QUICK = Tile(32, 32, 16, 4, 4)

# llvmpipe runs so many threads as one vector.
CPU_LANES = 8

# Below so many multiplications a kernel that compiles quickly is as good as any.
LITTLE_WORK = 1 << 18


def choose_kernel(m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool, target: str) -> MatMulKernel:
    """The kernel for C[batch, m, n], sums of k terms, on a target "webgpu", "native" or "cpu"."""
    if 0 in (m, n, k, batch):
        return _outer(m, n, k, batch, trans_a, trans_b, 1, 4, lanes=8 if target == "cpu" else 64)
    if target == "cpu":
        return _cpu(m, n, k, batch, trans_a, trans_b)
    if k >= 64 and min(m, n) <= 8 and _along_terms(m, n, trans_a, trans_b):
        return _few_dot(m, n, k, batch)
    if m <= 4:
        return _few_outer(m, n, k, batch, trans_a, trans_b)
    return _tiled(m, n, k, batch, trans_a, trans_b, _tile(m, n, k, batch, trans_a, trans_b))


def _along_terms(m: int, n: int, trans_a: bool, trans_b: bool) -> bool:
    """Whether both operands are contiguous along the terms of the sums."""
    return (not trans_a or m == 1) and (trans_b or n == 1)


def _blocks(m: int, n: int, batch: int, rows: int, cols: int) -> int:
    """Blocks of rows x cols that cover every matrix of C."""
    return -(-m // rows) * -(-n // cols) * batch


def _tile(m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool) -> Tile:
    """The largest tile of which there are enough to keep a large GPU (132 multiprocessors) busy."""
    if m * n * k * batch < LITTLE_WORK:
        return QUICK
    vectors = (m if trans_a else k) % 4 == 0 and (k if trans_b else n) % 4 == 0
    if vectors and k >= 256 and _blocks(m, n, batch, 128, 128) >= 256:
        return LARGE_AT if trans_a and not trans_b else LARGE
    if _blocks(m, n, batch, 64, 64) >= 160:
        return MIDDLE
    if k >= 256 and _blocks(m, n, batch, 32, 32) < 66:
        return FEW
    return SMALL


def _tiled(m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool, tile: Tile) -> MatMulKernel:
    variant: Variant = {
        "tile_m": tile.m,
        "tile_n": tile.n,
        "tile_k": tile.k,
        "thread_m": tile.thread_m,
        "thread_n": tile.thread_n,
        "slices": tile.slices,
        "lanes_n": tile.lanes_n,
        "unroll": tile.unroll,
        "part": tile.part,
        "threads": tile.threads,
        "shared": max(tile.k * (tile.m + tile.n) // 4, tile.slices // 2 * tile.m * tile.n // 4),
        "edge_m": m % tile.m != 0,
        "edge_n": n % tile.n != 0,
        "edge_k": k % tile.k != 0,
    }
    for name, size, contiguous, dim in (("a", tile.m, trans_a, m), ("b", tile.n, not trans_b, n)):
        # Vectors run along the rows (columns) of C where these are contiguous, else along the terms: as many
        # terms as one thread stages for four rows in each step.
        terms = 1 if contiguous else min(4, size * tile.k // 4 // tile.threads)
        vec = 4 if contiguous else terms
        variant[f"{name}_terms"] = terms
        variant[f"{name}_spread"] = min(8, size // 4, tile.k // tile.slices // terms * max(1, 8 * terms // tile.k))
        variant[f"{name}_vec"] = vec if (dim if contiguous else k) % vec == 0 else 1
    groups = _blocks(m, n, batch, tile.m, tile.n)
    return MatMulKernel("matmul", variant, {"GROUPS": groups}, groups, f"tile {tile.m}x{tile.n}x{tile.k}")


def _few_dot(m: int, n: int, k: int, batch: int) -> MatMulKernel:
    """A few rows or columns of C: what counts is to stream the larger operand at full speed."""
    if m == 1:
        if k < 1024:
            return _dot(m, n, k, batch, 1, 1, lanes=16, teams=8)
        return _dot(m, n, k, batch, 1, 1, lanes=32, teams=1)
    if n <= 8:
        return _dot(m, n, k, batch, 1 if n == 1 else min(m, 4), n, lanes=32, teams=1)
    return _dot(m, n, k, batch, m, 4, lanes=32, teams=2)


def _few_outer(m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool) -> MatMulKernel:
    """A few rows of C with B contiguous along them: slices of a workgroup divide the terms."""
    if k < 64:
        return _outer(m, n, k, batch, trans_a, trans_b, m, 4, lanes=64)
    lanes = 16 if n > 8192 else 4
    return _outer(m, n, k, batch, trans_a, trans_b, m, 4, lanes, slices=256 // lanes)


def _cpu(m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool) -> MatMulKernel:
    """The cheapest block by a cost model that was fitted to measurements on llvmpipe.

    Larger blocks reuse more of what they load, but take up to half a second to compile: only much work deserves them.
    """
    work = m * n * k * batch
    largest = 64 if work < 1 << 22 else 128 if work < 1 << 25 else 256
    dot = k >= 64 and _along_terms(m, n, trans_a, trans_b)
    sizes = (16, 8, 4, 2, 1)

    def cost(block: tuple[int, int]) -> int:
        rows, cols = block
        if dot:
            return _blocks(m, n, batch, rows, cols) * (7 + 2 * (rows + cols) + rows * cols)
        return _blocks(m, n, batch, rows, CPU_LANES * cols) * (16 + 24 * rows + 15 * cols + rows * cols)

    blocks = [
        (rows, cols)
        for rows in sizes
        for cols in (sizes if dot else (16, 8, 4))
        if rows * cols <= largest and rows <= m and (not dot or cols <= n)
    ]
    rows, cols = min(blocks, key=cost)
    if dot:
        return _dot(m, n, k, batch, rows, cols, lanes=CPU_LANES, teams=1)
    return _outer(m, n, k, batch, trans_a, trans_b, rows, cols, lanes=CPU_LANES)


def _outer(
    m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool, rows: int, cols: int, lanes: int, slices: int = 1
) -> MatMulKernel:
    """Blocks of rows x cols a thread; rows is at most m, cols a multiple of four."""
    variant: Variant = {
        "rows": rows,
        "cols": cols,
        "lanes": lanes,
        "slices": slices,
        "unroll": _unroll(k, slices, (8, 4, 3, 2)) if slices > 1 else 1,
        "a_vec": 1,
        "b_vec": 4 if not trans_b and n % 4 == 0 and k > 0 else 1,  # an empty buffer holds no vec4
        "edge_m": m % rows != 0,
        "edge_n": n % (cols * lanes) != 0,
    }
    groups = _blocks(m, n, batch, rows, cols * lanes)
    return MatMulKernel("matmul_outer", variant, {"GROUPS": groups}, groups, f"outer {rows}x{cols}")


def _dot(m: int, n: int, k: int, batch: int, rows: int, cols: int, lanes: int, teams: int) -> MatMulKernel:
    """Blocks of rows x cols a team of lanes; rows is at most m, cols at most n."""
    vec = 4 if k % 4 == 0 else 1
    variant: Variant = {
        "rows": rows,
        "cols": cols,
        "lanes": lanes,
        "teams": teams,
        "unroll": _unroll(k // vec, lanes, (4, 3, 2)) if rows * cols == 1 else 1,
        "a_vec": vec,
        "b_vec": vec,
        "edge_m": m % rows != 0,
        "edge_n": n % (cols * teams) != 0,
    }
    groups = _blocks(m, n, batch, rows, cols * teams)
    return MatMulKernel("matmul_dot", variant, {"GROUPS": groups}, groups, f"dot {rows}x{cols}")


def _unroll(length: int, stride: int, candidates: tuple[int, ...]) -> int:
    """How many loads to issue at once, so that they wait together: a divisor of the rounds, which needs no guard."""
    rounds = length // stride
    if length % stride or not rounds:
        return 1
    return next((c for c in candidates if rounds % c == 0), 1)
