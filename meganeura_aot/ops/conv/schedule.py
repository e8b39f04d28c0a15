"""How a convolution is computed: geometry along each axis, and which kernel runs, a pure function of shape and target.

Every launch is a product of matrices for each group of channels: rows are the output channels of the group, columns the
positions of all images, and each sum has channels * taps terms. Two templates:

    conv          tiles in workgroup memory, for GPUs
    conv_direct   a register block a thread, no workgroup memory: for software adapters, and for few rows on GPUs
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

from ...graph import TensorType
from ...op import Lowering, Operand
from ..pointwise.epilogue import EpilogueOp
from ..pointwise.op import GROUP, Array


@dataclass(frozen=True)
class Axis:
    """One axis of a launch: position p and tap t meet at input p * stride + t * step + origin, outside it is 0.

    The tap is the kernel's element first_tap + t * every_tap, the output is at first_out + p * every_out.
    """

    size: int  # of the input
    positions: int
    stride: int
    taps: int
    step: int
    origin: int
    kernel: int
    out: int
    first_tap: int = 0
    every_tap: int = 1
    first_out: int = 0
    every_out: int = 1
    before: int = 0  # of a transposed convolution: its padding

    @property
    def leaves_input(self) -> bool:
        """Whether some position and tap are outside of the input."""
        ends = [self.origin, self.origin + (self.taps - 1) * self.step]
        return min(ends) < 0 or (self.positions - 1) * self.stride + max(ends) >= self.size


def forward_axis(size: int, out: int, kernel: int, stride: int, dilation: int, before: int) -> Axis:
    """A convolution: output p reads input p * stride + t * dilation - before."""
    return Axis(size, out, stride, kernel, dilation, -before, kernel, out)


TRIVIAL = forward_axis(1, 1, 1, 1, 1, 0)  # stands for y where there is only x


def transposed_axes(size: int, out: int, kernel: int, stride: int, dilation: int, before: int) -> list[Axis]:
    """A transposed convolution: output o = i * stride + t * dilation - before, solved for i.

    Outputs of one residue modulo the stride share their taps and step through the input one by one: one axis each.
    """
    common = math.gcd(stride, dilation)
    axes = []
    for residue in range(min(stride, out)):
        taps = [t for t in range(kernel) if (residue + before - t * dilation) % stride == 0]
        first = taps[0] if taps else 0
        origin = (residue + before - first * dilation) // stride
        positions = -(-(out - residue) // stride)
        step, every = -(dilation // common), stride // common
        axes.append(
            Axis(size, positions, 1, len(taps), step, origin, kernel, out, first, every, residue, stride, before),
        )
    return axes


def grouped(x: Array, groups: int) -> Array:
    """[N, groups, channels of a group, ...]"""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def met(
    tap: Sequence[int], counts: Sequence[int], dilation: Sequence[int], stride: Sequence[int]
) -> tuple[slice | EllipsisType, ...]:
    """The index of what `counts` positions along each axis meet at this tap, in the padded array."""
    numbers = zip(tap, counts, dilation, stride, strict=True)
    return (..., *(slice(t * d, t * d + (n - 1) * s + 1, s) for t, n, d, s in numbers))


@dataclass(frozen=True)
class ConvKernel:
    """A template, the structure it is rendered with, and its launch.

    parts > 1: the sums are computed in so many parts, one after the other in the output, to be added afterwards.
    """

    template: str
    variant: Mapping[str, int | bool]
    constants: Mapping[str, int]
    groups: int
    parts: int = 1


@dataclass(frozen=True)
class Tile:
    """Sizes of the tiled kernel: channels, positions and terms of a tile, and a thread's block."""

    m: int
    n: int
    k: int
    thread_m: int
    thread_n: int

    @property
    def threads(self) -> int:
        return self.m // self.thread_m * (self.n // self.thread_n)


# From large to small: the first one that gives the GPU enough workgroups is used, else the last one with sums in parts.
TILES = (Tile(128, 128, 8, 8, 8), Tile(64, 128, 8, 8, 8), Tile(64, 64, 8, 8, 4))
LOW_TILES = (Tile(32, 128, 16, 4, 8), Tile(32, 64, 16, 4, 4))  # for up to 32 output channels in a group
ENOUGH_GROUPS = 256
FEW_ROWS = 8  # with so many output channels in a group or fewer, tiles would be mostly empty
SHORTEST_PART = 128  # terms that are worth a workgroup of their own


def choose_kernel(
    rows: int, columns: int, terms: int, channel_groups: int, target: str, whole: bool = True
) -> ConvKernel:
    """The kernel for [rows, terms] @ [terms, columns] in each channel group, on a target "webgpu", "native" or "cpu".

    whole: whether this launch computes all of the output, or is one of many.
    """
    if target == "cpu":
        return _cpu(rows, columns, terms, channel_groups, whole)
    direct = _direct(rows, columns, channel_groups, min(rows, FEW_ROWS), 4, lanes=64 if columns > 128 else 32)
    if terms == 0 or (rows <= FEW_ROWS and (terms <= SHORTEST_PART or direct.groups >= ENOUGH_GROUPS)):
        return direct
    tiles = [tile for tile in TILES if tile.m < 2 * rows] if rows > 32 else LOW_TILES
    for tile in tiles:
        if _blocks(rows, columns, channel_groups, tile.m, tile.n) >= ENOUGH_GROUPS:
            return _tiled(rows, columns, terms, channel_groups, tile)
    wanted = -(-ENOUGH_GROUPS // _blocks(rows, columns, channel_groups, tile.m, tile.n))
    parts = max(min(wanted, terms // SHORTEST_PART), 1) if whole else 1
    return _tiled(rows, columns, terms, channel_groups, tile, parts)


def _blocks(rows: int, columns: int, channel_groups: int, m: int, n: int) -> int:
    return -(-rows // m) * -(-columns // n) * channel_groups


def _tiled(rows: int, columns: int, terms: int, channel_groups: int, tile: Tile, parts: int = 1) -> ConvKernel:
    length = -(-terms // parts // tile.k) * tile.k  # terms of a part: whole tiles
    parts = -(-terms // length)
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
        "parts": parts,
    }
    constants = {"PART_TERMS": length} if parts > 1 else {}
    return ConvKernel("conv", variant, constants, _blocks(rows, columns, channel_groups, tile.m, tile.n) * parts, parts)


def _direct(rows: int, columns: int, channel_groups: int, block: int, cols: int, lanes: int) -> ConvKernel:
    variant: dict[str, int | bool] = {
        "rows": block,
        "cols": cols,
        "lanes": lanes,
        "edge_m": rows % block != 0,
        "edge_n": columns % (cols * lanes) != 0,
        "parts": 1,
    }
    return ConvKernel("conv_direct", variant, {}, _blocks(rows, columns, channel_groups, block, cols * lanes))


def _cpu(rows: int, columns: int, terms: int, channel_groups: int, whole: bool) -> ConvKernel:
    """The cheapest block: large ones reuse more of what they load, but take longer to compile."""
    work = rows * columns * terms * channel_groups
    largest = 64 if work < 1 << 22 or not whole else 128 if work < 1 << 25 else 256
    blocks = [(m, n) for m in (16, 8, 4, 2, 1) for n in (16, 8, 4) if m <= rows and m * n <= largest]

    def cost(block: tuple[int, int]) -> int:
        m, n = block
        return _blocks(rows, columns, channel_groups, m, 8 * n) * (16 + 24 * m + 30 * n + m * n)

    m, n = min(blocks, key=cost)
    return _direct(rows, columns, channel_groups, m, n, lanes=8)


@dataclass(frozen=True)
class Launch:
    """What one launch computes: `channel_groups` groups of `channels` input and `rows` output channels, in all images.

    phases: the axes y and x of one part of the output, or of each, the first of which has the most positions.
    transposed: the weights are stored by input channel, then output channel of the group, not the other way round.
    """

    images: int
    channel_groups: int
    channels: int
    rows: int
    phases: tuple[tuple[Axis, Axis], ...]
    transposed: bool

    @property
    def merged(self) -> bool:
        return len(self.phases) > 1

    @property
    def positions(self) -> int:
        return self.phases[0][0].positions * self.phases[0][1].positions

    @property
    def terms(self) -> int:
        return self.channels * max(y.taps * x.taps for y, x in self.phases)

    @property
    def spread(self) -> bool:
        """Whether neighbouring positions are apart in the output."""
        return any(axis.every_out != 1 for axis in self.phases[0])

    def choose(self, target: str) -> ConvKernel:
        groups, whole = self.channel_groups * len(self.phases), self.merged or not self.spread
        return choose_kernel(self.rows, self.images * self.positions, self.terms, groups, target, whole)

    def divided(self, target: str) -> list[Launch]:
        """A launch for each phase, or this one for all of them where one alone would not fill a GPU."""
        alone = [replace(self, phases=(phase,)) for phase in self.phases]
        fills = target == "cpu" or alone[0].choose(target).groups >= ENOUGH_GROUPS
        return alone if fills or not self.merged else [self]

    def variant(self) -> dict[str, Any]:
        """The template variables that depend on the geometry."""
        guard_y = any(y.leaves_input for y, _ in self.phases)
        guard_x = any(x.leaves_input for _, x in self.phases)
        variant = {
            "transposed": self.transposed,
            "spread": self.spread,
            "merged": self.merged,
            "guard_y": guard_y,
            "guard_x": guard_x,
            "skips": self.transposed and (guard_y or guard_x),  # a convolution has zeros outside, which count
            "w_pad": 0 if self.transposed else 1,
        }
        return variant | ({"edge_n": True, "edge_k": True} if self.merged else {})

    def constants(self) -> dict[str, int]:
        """The overrides that depend on the geometry."""
        height, width = self.phases[0]
        const = {
            "M": self.channel_groups * self.rows,
            "N": height.out * width.out,
            "CHANNEL_GROUPS": self.channel_groups,
            "ROWS": self.rows,
            "CHANNELS": self.channels,
            "H": height.size,
            "W": width.size,
        }
        const |= self._constants_of_phases() if self.merged else self._constants_of_phase()
        for name, axis in zip("YX", self.phases[0], strict=True):
            const |= {f"STRIDE_{name}": axis.stride, f"STEP_{name}": axis.step}
            if self.transposed:
                const |= {f"KERNEL_{name}": axis.kernel, f"EVERY_TAP_{name}": axis.every_tap}
            if self.spread:
                const |= {f"EVERY_OUT_{name}": axis.every_out}
        return const | ({"OUT_WIDTH": width.out} if self.spread else {})

    def _constants_of_phase(self) -> dict[str, int]:
        """What differs between phases, where there is one."""
        const = {"COLUMNS": self.images * self.positions, "TERMS": self.terms}
        const |= {"POSITIONS": self.positions, "WIDTH": self.phases[0][1].positions}
        for name, axis in zip("YX", self.phases[0], strict=True):
            const |= {f"TAPS_{name}": max(axis.taps, 1), f"ORIGIN_{name}": axis.origin}
            if self.transposed:
                const[f"FIRST_TAP_{name}"] = axis.first_tap
            if self.spread:
                const[f"FIRST_OUT_{name}"] = axis.first_out
        return const

    def _constants_of_phases(self) -> dict[str, int]:
        """What the kernel computes it from, where there are several."""
        height, width = self.phases[0]
        const = {"IMAGES": self.images, "MOST_COLUMNS": self.images * self.positions, "OUT_HEIGHT": height.out}
        const |= {"PHASES": len(self.phases), "PHASES_X": min(width.every_out, width.out)}
        for name, axis in zip("YX", self.phases[0], strict=True):
            dilation = -axis.step * axis.every_out // axis.every_tap
            const |= {f"BEFORE_{name}": axis.before, f"DILATION_{name}": dilation}
        return const


def dispatch_conv(
    k: Lowering, op: EpilogueOp, launch: Launch, x: Operand, w: Operand, extras: Sequence[Operand], out: Operand
) -> None:
    """One launch, with op's epilogue in the store; sums in parts need a second dispatch that adds them."""
    kernel = launch.choose(k.target.name)
    bound, finish = op.lower_epilogue(extras, out)
    variant = {**kernel.variant, **launch.variant(), "title": op.name}
    const = {**launch.constants(), **kernel.constants, "GROUPS": kernel.groups}
    if kernel.parts == 1:
        bind = {"x": x, "w": w, **bound, "out": out}
        label = op.kernel_label(op.name)
        k.dispatch(kernel.template, variant=variant | finish, bind=bind, const=const, groups=kernel.groups, label=label)
        return
    parts = k.scratch(TensorType((kernel.parts, *out.shape)), "parts")
    plain = {"extras": [], "epilogue": [], "result": "sum"}
    bind = {"x": x, "w": w, "out": parts}
    const["PART"] = out.size
    label = f"{op.name}_parts"
    k.dispatch(kernel.template, variant=variant | plain, bind=bind, const=const, groups=kernel.groups, label=label)
    k.dispatch(
        "sum_parts",
        variant=finish,
        bind={"parts": parts, **bound, "out": out},
        const={"SIZE": out.size, "PARTS": kernel.parts, "M": const["M"], "N": const["N"]},
        groups=-(-out.size // GROUP),
        label=op.kernel_label("sum_parts"),
    )
