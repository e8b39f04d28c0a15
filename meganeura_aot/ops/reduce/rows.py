"""Rows of a tensor, and how threads share them: what reductions, softmax, norms and losses have in common."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...op import Operand
from ..layout.op import join_axes, row_major_strides
from ..pointwise.op import GROUP

ACROSS = 32  # neighbouring rows that threads read together where the elements of one row are apart


@dataclass(frozen=True)
class Walk:
    """How an index over some axes of a row-major tensor becomes an offset: sizes and strides, outermost first."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """outer: from a row's index to the start of the row; inner: from a position in it; count: its length.

    lanes: elements a position, 1, or 4 where the kernel reads vec4.
    """

    outer: Walk
    inner: Walk
    count: int
    lanes: int = 1

    @property
    def is_apart(self) -> bool:
        """Whether neighbouring elements of a row are apart in memory; those of neighbouring rows are together then."""
        return bool(self.inner.strides) and self.inner.strides[-1] != 1

    def in_fours(self) -> Row:
        """The same row read as vec4 where it consists of runs of a multiple of four elements, else itself."""
        sizes, strides = self.inner.sizes, self.inner.strides
        if not self.count or not strides or strides[-1] != 1 or sizes[-1] % 4:
            return self  # all other strides are multiples of the length of a run
        outer = Walk(self.outer.sizes, tuple(stride // 4 for stride in self.outer.strides))
        inner = Walk((*sizes[:-1], sizes[-1] // 4), (*(stride // 4 for stride in strides[:-1]), 1))
        return Row(outer, inner, self.count // 4, lanes=4)

    def offsets(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Variables and overrides of reduce/row_offsets.wgsl.j2."""
        variant: dict[str, Any] = {}
        const: dict[str, int] = {}
        for name, steps in (("outer", self.outer), ("inner", self.inner)):
            variant[name] = len(steps.sizes)
            prefix = name.upper()
            const |= {f"{prefix}_{axis}": stride for axis, stride in enumerate(steps.strides) if stride != 1}
            const |= {f"{prefix}_SIZE_{axis}": size for axis, size in enumerate(steps.sizes) if axis}
            variant[f"{name}_unit"] = [axis for axis, stride in enumerate(steps.strides) if stride == 1]
        return variant, const


def row_over(shape: Sequence[int], axes: Sequence[int]) -> Row:
    """The rows of a row-major tensor that extend over `axes`, one for each place of the other axes."""
    kept = [axis for axis, size in enumerate(shape) if axis not in axes and size != 1]
    inner = [axis for axis in axes if shape[axis] != 1]
    return Row(_walk(shape, kept), _walk(shape, inner), math.prod(shape[axis] for axis in axes))


def rows_of(rows: int, count: int) -> Row:
    """Contiguous rows, one after the other."""
    return row_over((rows, count), (1,))


def _walk(shape: Sequence[int], axes: Sequence[int]) -> Walk:
    """The walk over `axes`, with neighbouring axes joined."""
    strides = row_major_strides(shape)
    sizes, joined = join_axes([shape[axis] for axis in axes], {"": [strides[axis] for axis in axes]})
    return Walk(tuple(sizes), tuple(joined[""]))


@dataclass(frozen=True)
class Team:
    """How the 256 threads of a workgroup share rows: `size` threads a row, 256 / size rows at a time.

    steps: positions a thread reads of its row, or of a chunk of it where the row is cut into several `chunks`.
    """

    row: Row
    rows: int
    size: int
    steps: int
    chunks: int = 1

    @staticmethod
    def of(row: Row, rows: int) -> Team:
        """The team of a row that a kernel reads once, step by step: as many threads as read a few positions each."""
        few, most = 4, GROUP
        if row.is_apart:
            few, most = 16, GROUP // min(ACROSS, power_of_two(rows))
        size = min(power_of_two(math.ceil(row.count / few)), most)
        return Team(row, rows, size, math.ceil(row.count / size))

    @staticmethod
    def keeping(row: Row, rows: int) -> Team:
        """The same for a kernel that keeps what it read in registers: long rows are cut into chunks."""
        team = Team.of(row, rows)
        return team.cut() if team.is_long else team

    @property
    def is_long(self) -> bool:
        """Whether a thread reads more than it can keep in registers: 16 numbers, or 8 vec4."""
        return self.steps > (8 if self.row.lanes == 4 else 16)

    def cut(self) -> Team:
        """Cut the row into chunks of 16 elements a thread."""
        steps = 16 // self.row.lanes
        return replace(self, steps=steps, chunks=math.ceil(self.row.count / (self.size * steps)))

    @property
    def groups(self) -> int:
        """Workgroups that all rows need."""
        return math.ceil(self.rows / (GROUP // self.size)) * self.chunks

    @property
    def members(self) -> int:
        """Elements of a row."""
        return self.row.count * self.row.lanes

    def variant(self, dtype: str = "f32") -> dict[str, Any]:
        """What reduce/row_team.wgsl.j2 asks for."""
        row, member = f"lane / {self.size}", f"lane % {self.size}"
        if self.row.is_apart:
            row, member = f"lane % {GROUP // self.size}", f"lane / {GROUP // self.size}"
        if self.size in (1, GROUP):
            row, member = ("lane", "0u") if self.size == 1 else ("0u", "lane")
        return {
            "team": self.size,
            "rows": GROUP // self.size,
            "row": row,
            "member": member,
            "apart": self.row.is_apart,
            "lanes": self.row.lanes,
            "load_type": f"vec4<{dtype}>" if self.row.lanes == 4 else dtype,
            "steps": self.steps,
            "chunked": self.chunks > 1,
            "loose": [self.chunks > 1 or step == self.steps - 1 for step in range(self.steps)],
        }

    def bindings(self, bind: Mapping[str, Operand], **types: str) -> list[tuple[str, str, str]]:
        """Name, access and WGSL type of the elements of every binding in order; only the last one is written."""
        *read, written = bind
        load_type = self.variant()["load_type"]
        return [(name, "read", types.get(name, load_type)) for name in read] + [
            (written, "read_write", types.get(written, load_type))
        ]

    def const(self) -> dict[str, int]:
        """Overrides of reduce/row_team.wgsl.j2."""
        return {"N": self.rows, "COUNT": self.row.count} | ({"CHUNKS": self.chunks} if self.chunks > 1 else {})


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def fours_text(text: str, dtype: str = "f32") -> str:
    """The same WGSL for operands a and b that are vec4: functions of the library, and comparisons, are of numbers."""
    if "_f32(" not in text and "==" not in text:
        return text
    parts = (re.sub(r"\b([ab])\b", rf"\1.{component}", text) for component in "xyzw")
    return f"vec4<{dtype}>({', '.join(parts)})"
