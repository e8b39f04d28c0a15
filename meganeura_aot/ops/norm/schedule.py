"""What norms and their gradients have in common: checks, rows in NumPy, and kernels in stages where rows are long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Operand
from ..pointwise.op import Array
from ..reduce.rows import Row, Team, fours_text, row_over, rows_of

# WGSL of `a`: norms have no infinities, so silu needs neither its guards nor their cost
ACTIVATIONS = {"": "", "silu": "a * sigmoid_f32(a)"}
SLOPES = {"": "", "silu": "silu_slope_f32(a)"}


def check_norm(name: str, x: TensorType, rank: int, each: tuple[int, ...], **weights: TensorType | None) -> None:
    """Raise GraphError unless x is f32 of this rank or more, and the weights are f32 of shape `each`."""
    if x.dtype is not DType.F32 or x.rank < rank:
        raise GraphError(f"{name}: expected f32 of rank {rank} or more, got {x}")
    for role, type_ in weights.items():
        if type_ is not None and type_ != TensorType(each):
            raise GraphError(f"{name}: expected {role} {TensorType(each)}, got {type_}")


def row_mean(x: Array) -> Array:
    """The mean over the last axis, which stays; 0 of nothing."""
    return np.asarray(np.mean(x, axis=-1, keepdims=True) if x.shape[-1] else np.zeros((*x.shape[:-1], 1)))


def standardize(x: Array, eps: float) -> Array:
    """Rows of mean 0 and variance 1."""
    with np.errstate(all="ignore"):
        centered = x - row_mean(x)
        return np.asarray(centered / np.sqrt(row_mean(centered * centered) + eps))


@dataclass(frozen=True)
class NormKernel:
    """What a norm does with a row. groups, channels: of an image and of a group, where weights are of channels."""

    title: str
    eps: float
    centered: bool
    activation: str = ""
    groups: int = 0
    channels: int = 0

    def team(self, rows: int, count: int) -> Team:
        """Who shares a row of `count` elements."""
        row = rows_of(rows, count)
        if not self.groups or count // self.channels % 4 == 0:
            row = row.in_fours()
        return Team.keeping(row, rows)


# What each stage is called in the emitted file, after the title of the norm.
SUFFIXES = {"statistics": "_statistics", "norm": "", "row": "_grad_x", "sums": "_grad_x_sums", "last": "_grad_x"}


def lower_norm(k: Lowering, kernel: NormKernel, bind: Mapping[str, Operand], out: Operand, rows: int) -> None:
    """One dispatch where threads can keep a row in registers; else one for statistics of chunks before it."""
    if out.size == 0:
        return
    team = kernel.team(rows, out.size // rows)
    if team.chunks > 1:
        bind = {**bind, "partial": _statistics(k, kernel, team, bind["x"])}
    _dispatch(k, kernel, team, "norm", {**bind, "out": out})


def lower_norm_grad(
    k: Lowering, kernel: NormKernel, bind: Mapping[str, Operand], dx: Operand, statistics: Operand
) -> None:
    """The gradient of the rows, and their statistics: at once, or statistics, sums and then the gradient of chunks."""
    if dx.size == 0:
        return
    rows = statistics.size // (3 if kernel.centered else 1)
    team = kernel.team(rows, dx.size // rows)
    if team.chunks == 1:
        _dispatch(k, kernel, team, "row", {**bind, "statistics": statistics, "dx": dx}, written=2)
        return
    partial = _statistics(k, kernel, team, bind["x"])
    sums = k.scratch(TensorType((rows, team.chunks, 2 if kernel.centered else 1)), "chunk_sums")
    found = {"partial": partial, "statistics": statistics, "chunk_sums": sums}
    _dispatch(k, kernel, team, "sums", {**bind, **found}, written=2)
    _dispatch(k, kernel, team, "last", {**bind, "statistics": statistics, "chunk_sums": sums, "dx": dx})


def _statistics(k: Lowering, kernel: NormKernel, team: Team, x: Operand) -> Operand:
    """The mean and the squares of every chunk of every row."""
    partial = k.scratch(TensorType((team.rows, team.chunks, 4 if kernel.centered else 1)))
    _dispatch(k, kernel, team, "statistics", {"x": x, "partial": partial})
    return partial


def _dispatch(
    k: Lowering, kernel: NormKernel, team: Team, stage: str, bind: Mapping[str, Operand], written: int = 1
) -> None:
    grouped = kernel.groups > 0 and "weight" in bind
    types = {"statistics": "f32"} | ({"weight": "f32", "bias": "f32"} if grouped else {})
    types |= (
        {"partial": "vec4<f32>", "chunk_sums": "vec2<f32>"}
        if kernel.centered
        else {"partial": "f32", "chunk_sums": "f32"}
    )
    const: dict[str, int | float] = {**team.const()}
    if stage not in ("statistics", "last"):
        const["EPS"] = kernel.eps
    if grouped:
        const |= {"GROUPS": kernel.groups, "CHANNELS": kernel.channels, "SPATIAL": team.row.count // kernel.channels}
    plain = stage in ("statistics", "norm")
    activation = "" if stage == "statistics" else (ACTIVATIONS if plain else SLOPES)[kernel.activation]
    title = kernel.title + SUFFIXES[stage]
    variant = {
        **team.variant(),
        "bindings": bindings(team, bind, written, types),
        "stage": stage,
        "from_partial": stage != "statistics" and "partial" in bind,
        "centered": kernel.centered,
        "grouped": grouped,
        "weight": "weight" in bind,
        "bias": "bias" in bind,
        "activation": fours_text(activation) if team.row.lanes == 4 else activation,
        "title": title,
    }
    template = "norm" if plain else "norm_grad"
    k.dispatch(template, variant=variant, bind=bind, const=const, groups=team.groups, label=title)


def bindings(
    team: Team, bind: Mapping[str, Operand], written: int, types: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Name, access and WGSL type of the elements of every binding in order; the last `written` are written."""
    load_type = team.variant()["load_type"]
    accesses = ["read"] * (len(bind) - written) + ["read_write"] * written
    return [(name, access, types.get(name, load_type)) for name, access in zip(bind, accesses, strict=True)]


@dataclass(frozen=True)
class WeightSums:
    """How the gradients of weights are summed: rows of x, of which each adds to one weight.

    kind: "rms" and "centered" take statistics of every `per` elements of x, "given" those of the row.
    activation: of a norm whose weights belong to the row.
    """

    title: str
    kind: str
    per: int = 0
    eps: float = 0.0
    activation: str = ""


def channel_rows(shape: Sequence[int]) -> Row:
    """The rows of x [N, C, ...] that belong to one channel each; the elements of a vec4 are of one image."""
    spatial = math.prod(shape[2:])
    row = row_over((shape[0], shape[1], spatial), (0, 2))
    return row if spatial % 4 else row.in_fours()


def lower_weight_sums(
    k: Lowering, sums: WeightSums, bind: Mapping[str, Operand], outs: Mapping[str, Operand], row: Row
) -> None:
    """dw, and db where there is one: sums of rows; long ones in chunks whose sums are added in a second dispatch."""
    rows = outs["dw"].size
    if rows == 0:
        return
    team = Team.keeping(row, rows)
    if team.chunks == 1 and row.count:
        _dispatch_sums(k, sums, team, bind, outs)
        return
    chunks = team.chunks if row.count else 0  # of nothing nothing is read, and the sum is 0
    partial = k.scratch(TensorType((rows, chunks, len(outs))))
    if chunks:
        _dispatch_sums(k, sums, team, bind, {"partial": partial})
    _dispatch_sums(k, sums, Team.of(rows_of(rows, chunks), rows), {"partial": partial}, outs)


def _dispatch_sums(
    k: Lowering, sums: WeightSums, team: Team, bind: Mapping[str, Operand], outs: Mapping[str, Operand]
) -> None:
    first = "x" in bind
    pair = "f32" if sums.kind == "rms" else "vec2<f32>"
    others = dict.fromkeys(("statistics", "mean", "variance", "weight", "bias", "dw", "db"), "f32")
    offsets, strides = team.row.offsets()
    const: dict[str, int | float] = {**team.const(), **strides}
    of_row = ""
    if first and sums.kind == "given":
        const["EPS"] = sums.eps
        of_row = "vec2<f32>(mean[o], inverseSqrt(variance[o] + EPS))"
    elif first:
        const["PER"] = sums.per // team.row.lanes
    if first and sums.activation:
        parts = [f"{name}[o]" if name in bind else default for name, default in (("weight", "1.0"), ("bias", "0.0"))]
        of_row = f"vec2<f32>({', '.join(parts)})"
    activation = SLOPES[sums.activation] if first else ""
    title = sums.title if first else f"{sums.title}_sum"
    every = {**bind, **outs}
    variant = {
        **offsets,
        **team.variant(),
        "bindings": bindings(team, every, len(outs), others | {"partial": pair}),
        "stage": "sums" if first else "finish",
        "kind": sums.kind,
        "type": pair,
        "of_row": of_row,
        "activation": fours_text(activation) if team.row.lanes == 4 else activation,
        "title": title,
    }
    k.dispatch("norm_grad_w", variant=variant, bind=every, const=const, groups=team.groups, label=title)
