"""The gradient of a convolution's weights, and which kernel computes it.

For each group of channels a product of matrices: rows are the output channels of the group, columns the weights of one of
them (input channels x taps), and each sum has a term for every position of every image. There are few sums and many terms:
workgroups divide the terms too, and a second dispatch adds up their parts. Two templates:

    conv_grad_weight      tiles in workgroup memory, for GPUs
    conv_grad_weight_dot  threads divide the terms of a few sums: for few channels a group, and for software adapters
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample
from ..matmul.schedule import CPU_LANES
from ..pointwise.op import Array
from ..reduce.op import Fold, reduce_rows
from ..reduce.rows import row_over
from .schedule import TRIVIAL, Tile, forward_axis, grouped, met


@dataclass(frozen=True)
class ConvGradWeight(Op):
    """dw[o, c, t] = sum over n, p of dy[n, o, p] * x[n, c, p * stride + t * dilation - before]; 0 outside of x.

    dy: [N, Co, (oH,) oW]; x: [N, Ci, (H,) W]; dw: [Co, Ci / groups, (kH,) kW]. Of a transposed convolution dy is its
    input, and x the gradient of its output.
    """

    tolerance: ClassVar[str] = "contraction"
    kernel: tuple[int, ...] = (1, 1)
    stride: tuple[int, ...] = (1, 1)
    before: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    def infer(self, dy: TensorType, x: TensorType) -> TensorType:
        attributes = (self.kernel, self.stride, self.before, self.dilation)
        fits = dy.rank == x.rank and x.rank in (3, 4) and all(len(values) == x.rank - 2 for values in attributes)
        if not fits or dy.dtype is not DType.F32 or x.dtype is not DType.F32 or dy.shape[0] != x.shape[0]:
            raise GraphError(f"{self.name}: expected two f32[N, C, (H,) W] of as many images, got {dy} and {x}")
        if self.groups < 1 or dy.shape[1] % self.groups or x.shape[1] % self.groups or 0 in x.shape[2:]:
            raise GraphError(f"{self.name}: expected channels that {self.groups} groups divide, got {dy} and {x}")
        return TensorType((dy.shape[1], x.shape[1] // self.groups, *self.kernel))

    def reference(self, dy: Array, x: Array) -> Array:
        positions = dy.shape[2:]
        numbers = zip(positions, self.stride, self.kernel, self.dilation, self.before, x.shape[2:], strict=True)
        behind = [max((n - 1) * s + (k - 1) * d + 1 - before - size, 0) for n, s, k, d, before, size in numbers]
        padded = grouped(np.pad(x, [(0, 0), (0, 0), *zip(self.before, behind, strict=True)]), self.groups)
        upstream = grouped(dy, self.groups)
        upstream = upstream.reshape(*upstream.shape[:3], math.prod(positions))
        result = np.zeros((*upstream.shape[1:3], padded.shape[2], math.prod(self.kernel)))
        with np.errstate(all="ignore"):
            for index, tap in enumerate(itertools.product(*map(range, self.kernel))):
                values = padded[met(tap, positions, self.dilation, self.stride)]
                values = values.reshape(*padded.shape[:3], math.prod(positions))
                result[..., index] = (upstream @ values.swapaxes(-1, -2)).sum(0)
        return result.reshape(dy.shape[1], padded.shape[2], *self.kernel)

    def lower(self, k: Lowering, dy: Operand, x: Operand, *, out: Operand) -> None:
        if out.size == 0:
            return
        numbers = zip(x.shape[2:], dy.shape[2:], self.kernel, self.stride, self.dilation, self.before, strict=True)
        height, width = ([TRIVIAL] + [forward_axis(*axis) for axis in numbers])[-2:]
        rows, channels = (operand.shape[1] // self.groups for operand in (dy, x))
        columns, positions = channels * math.prod(self.kernel), math.prod(dy.shape[2:])
        choice = choose_kernel(rows, columns, dy.shape[0] * positions, self.groups, k.target.name)
        const = {"CHANNEL_GROUPS": self.groups, "ROWS": rows, "CHANNELS": channels, "COLUMNS": columns}
        const |= {"TERMS": dy.shape[0] * positions, "POSITIONS": positions, "WIDTH": width.positions}
        const |= {"H": height.size, "W": width.size, "GROUPS": choice.groups, **choice.constants}
        for name, axis in (("Y", height), ("X", width)):
            const |= {f"TAPS_{name}": axis.taps, f"STRIDE_{name}": axis.stride}
            const |= {f"STEP_{name}": axis.step, f"ORIGIN_{name}": axis.origin}
        parts = out if choice.parts == 1 else k.scratch(TensorType((choice.parts, out.size)), "parts")
        k.dispatch(
            choice.template,
            variant={
                **choice.variant,
                "parts": choice.parts,
                "guard_y": height.leaves_input,
                "guard_x": width.leaves_input,
                "title": self.name,
            },
            bind={"dy": dy, "x": x, "out": parts},
            const=const,
            groups=choice.groups,
            label=self.name + "_parts" * (choice.parts > 1),
        )
        if choice.parts > 1:
            reduce_rows(k, Fold("sum_parts", "f32", "sum"), {"x": parts}, out, row_over(parts.shape, (0,)))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(
            dy: tuple[int, ...],
            x: tuple[int, ...],
            kernel: tuple[int, ...],
            stride: int | tuple[int, ...] = 1,
            before: int | tuple[int, ...] = 0,
            dilation: int | tuple[int, ...] = 1,
            groups: int = 1,
            draw: str = "normal",
        ) -> Sample:
            def each(size: int | tuple[int, ...]) -> tuple[int, ...]:
                return (size,) * len(kernel) if isinstance(size, int) else size

            op = cls(kernel, each(stride), each(before), each(dilation), groups)
            return Sample(op, (TensorType(dy), TensorType(x)), draw)

        return [
            sample((2, 33, 7, 9), (2, 10, 7, 9), (3, 3), before=1),
            sample((1, 1, 1, 1), (1, 1, 1, 1), (1, 1)),
            sample((2, 12, 5, 7), (2, 9, 9, 7), (3, 2), before=(2, 0), stride=(2, 1), dilation=(1, 2)),
            sample((3, 64, 4, 4), (3, 32, 4, 4), (1, 1)),
            sample((1, 40, 3, 55), (1, 4, 7, 112), (3, 3), stride=2),
            sample((2, 8, 5, 5), (2, 8, 9, 9), (3, 3), stride=2, before=1, groups=8),
            sample((3, 24, 4, 4), (3, 8, 8, 8), (3, 3), stride=2, before=1, groups=8, draw="small"),
            sample((2, 60, 3, 3), (2, 45, 5, 5), (3, 3), groups=3),
            sample((2, 17, 15), (2, 19, 33), (5,), before=4, stride=2),
            sample((2, 6, 40, 40), (2, 5, 40, 40), (1, 1)),
            sample((2, 20, 30, 31), (2, 17, 30, 31), (1, 3), before=(0, 1)),
            sample((1, 130, 2, 2), (1, 15, 4, 4), (3, 3)),
            sample((0, 3, 2, 2), (0, 2, 4, 4), (3, 3)),
            sample((2, 3, 2, 2), (2, 0, 4, 4), (3, 3)),
        ]


@dataclass(frozen=True)
class GradKernel:
    """A template, the structure it is rendered with, its launch, and in how many parts the terms are summed."""

    template: str
    variant: Mapping[str, int | bool]
    constants: Mapping[str, int]
    groups: int
    parts: int


# Tiles, and what an element of the tile costs on a GPU compared with the first one.
TILES = {
    Tile(128, 128, 8, 8, 8): 1.0,
    Tile(64, 128, 8, 8, 8): 1.05,
    Tile(64, 64, 16, 8, 4): 1.25,
    Tile(32, 64, 16, 4, 4): 1.6,
    Tile(32, 32, 16, 4, 4): 1.8,
}
ENOUGH_THREADS = 1 << 16  # that keep a large GPU busy
ENOUGH_LANES = 512  # the same of the vectors of a software adapter
FEW = 8  # with so many rows or columns in a group or fewer, tiles would be mostly empty
SHORTEST_PART = 128  # terms that are worth a workgroup of their own


def choose_kernel(rows: int, columns: int, terms: int, channel_groups: int, target: str) -> GradKernel:
    """The kernel for [rows, terms] @ [terms, columns] in each channel group, on a target "webgpu", "native" or "cpu"."""
    if target == "cpu":
        return _cpu(rows, columns, terms, channel_groups)
    if terms == 0 or min(rows, columns) <= FEW:
        m = min(rows, FEW, max(4, 32 // columns))
        return _dot(rows, columns, terms, channel_groups, m, min(columns, 32 // m, 16), lanes=128)

    def cost(tile: Tile) -> float:
        return _blocks(rows, columns, tile.m, tile.n) * tile.m * tile.n * TILES[tile]

    tile = min(TILES, key=cost)
    variant: dict[str, int | bool] = {
        "tile_m": tile.m,
        "tile_n": tile.n,
        "tile_k": tile.k,
        "thread_m": tile.thread_m,
        "thread_n": tile.thread_n,
        "threads": tile.threads,
        "edge_m": rows % tile.m != 0,
        "edge_n": columns % tile.n != 0,
        "edge_k": terms % tile.k != 0,
    }
    blocks = _blocks(rows, columns, tile.m, tile.n) * channel_groups
    return _in_parts("conv_grad_weight", variant, blocks, terms, tile.k, ENOUGH_THREADS // tile.threads)


def _blocks(rows: int, columns: int, m: int, n: int) -> int:
    return -(-rows // m) * -(-columns // n)


def _in_parts(
    template: str, variant: Mapping[str, int | bool], blocks: int, terms: int, step: int, enough: int
) -> GradKernel:
    """The terms in as many parts, each of whole steps, as give enough workgroups."""
    parts = max(min(-(-enough // blocks), terms // SHORTEST_PART), 1)
    length = -(-terms // parts // step) * step
    parts = max(-(-terms // max(length, 1)), 1)
    constants = {"PART_TERMS": length} if parts > 1 else {}
    return GradKernel(template, variant, constants, blocks * parts, parts)


def _dot(rows: int, columns: int, terms: int, channel_groups: int, m: int, n: int, lanes: int) -> GradKernel:
    variant: dict[str, int | bool] = {
        "rows": m,
        "cols": n,
        "lanes": lanes,
        "edge_m": rows % m != 0,
        "edge_n": columns % n != 0,
    }
    blocks = _blocks(rows, columns, m, n) * channel_groups
    enough = (ENOUGH_THREADS if lanes > CPU_LANES else ENOUGH_LANES) // lanes
    return _in_parts("conv_grad_weight_dot", variant, blocks, terms, lanes, enough)


def _cpu(rows: int, columns: int, terms: int, channel_groups: int) -> GradKernel:
    """The cheapest block: large ones reuse more of what they load, but take longer to compile."""
    work = rows * columns * terms * channel_groups
    largest = 32 if work < 1 << 22 else 64 if work < 1 << 24 else 144
    sizes = (16, 12, 9, 8, 4, 3, 2, 1)
    blocks = [(m, n) for m in sizes for n in sizes if m <= rows and n <= columns and m * n <= largest]

    def cost(block: tuple[int, int]) -> int:
        m, n = block
        return _blocks(rows, columns, m, n) * (20 + 6 * m + 10 * n + m * n)

    return _dot(rows, columns, terms, channel_groups, *min(blocks, key=cost), lanes=CPU_LANES)
