"""Words over images and over rows that indices name: convolutions, pools, padding, gather, sort, RoPE."""

from __future__ import annotations

from typing import Any

from meganeura_aot.rope_scaling import Linear, Llama3, Yarn
from tests.fuzz.drawer import Drawer, Rejected
from tests.fuzz.words import image, word

PADDINGS = ("valid", "same", "same_upper", "same_lower")


def sizes(d: Drawer, axes: int, choices: list[int]) -> Any:
    """One number, or one an axis."""
    return d.r.choice(choices) if d.chance(0.5) else tuple(d.r.choice(choices) for _ in range(axes))


@word(0.9, 1.5)
def convolution(d: Drawer) -> None:
    x = image(d)
    channels, axes = d.dims(x)[1], d.type(x).rank - 2
    groups = d.r.choice(d.divisors(channels)) if d.chance(0.4) else 1
    out = groups * d.r.choice([1, 2, 3, 5])
    w = d.leaf((out, channels // groups, *(d.r.choice([1, 2, 3]) for _ in range(axes))))
    named: dict[str, Any] = {"groups": groups} if groups > 1 else {}
    named["padding"] = d.r.choice(PADDINGS) if d.chance(0.3) else sizes(d, axes, [0, 1, 2])
    if d.chance(0.5):
        named |= {"stride": sizes(d, axes, [1, 2, 3])}
    if d.chance(0.3):
        named |= {"dilation": sizes(d, axes, [1, 2])}
    d.one(d.r.choice(["conv", "conv1d", "conv2d"]), x, w, *([d.leaf((out,))] if d.chance(0.6) else []), **named)


@word(0.7, 0.8)
def convolution_transposed(d: Drawer) -> None:
    x = image(d)
    channels, axes = d.dims(x)[1], d.type(x).rank - 2
    groups = d.r.choice(d.divisors(channels)) if d.chance(0.4) else 1
    each, stride = d.r.choice([1, 2, 3]), d.r.choice([1, 2, 3])
    w = d.leaf((channels, each, *(d.r.choice([1, 2, 3]) for _ in range(axes))))
    bias = d.leaf((each * groups,)) if d.chance(0.5) else None
    added = d.r.choice([0, 1]) if stride > 1 else 0
    name = d.r.choice(["conv_transpose", "conv_transpose1d", "conv_transpose2d"])
    dilation = d.r.choice([1, 1, 2])
    padding = d.r.choice([0, 0, 1])
    d.one(name, x, w, bias, stride, padding, added, dilation, groups)


@word(0.9)
def pool(d: Drawer) -> None:
    x = image(d)
    axes = d.type(x).rank - 2
    named: dict[str, Any] = {"padding": d.r.choice([0, 0, 1, *PADDINGS]), "ceil_mode": d.chance(0.3)}
    stride = d.r.choice([None, 1, 2, 3])
    kernel = sizes(d, axes, [2, 3])
    if d.chance(0.5):
        d.one("max_pool", x, kernel, stride, dilation=d.r.choice([1, 1, 2]), **named)
    else:
        d.one("avg_pool", x, kernel, stride, count_include_pad=d.chance(0.5), **named)


@word(0.7)
def pool_all(d: Drawer) -> None:
    d.one(d.r.choice(["global_avg_pool", "global_max_pool"]), image(d), keepdims=d.chance(0.5))


@word(0.7)
def enlarged(d: Drawer) -> None:
    x = image(d)
    if d.chance(0.5):
        d.one("upsample_2x", x)
    else:
        d.one("upsample", x, sizes(d, d.type(x).rank - 2, [1, 2, 3]))


@word(1.2)
def padded(d: Drawer) -> None:
    x = d.f32(1) if d.training or d.chance(0.8) else d.integers(least=1)
    mode = d.r.choice(["constant", "constant", "reflect", "edge"])
    least = -1 if mode == "constant" else 0
    widths = [(d.r.randint(least, 2), d.r.randint(least, 2)) for _ in d.dims(x)]
    named = {"value": d.r.choice([0, 1, 2])} if mode == "constant" else {}
    if d.chance(0.3):
        d.one("pad", x, widths[:1], axes=[d.axis(x)], mode=mode, **named)
    else:
        d.one("pad", x, widths, mode=mode, **named)


# ---- indices


@word(0.8)
def looked_up(d: Drawer) -> None:
    rows = d.r.choice([2, 5, 17, 33])
    table = d.like((rows, d.size(0.3)), fresh=0.7)
    d.one("embedding", d.input(d.shape(0, 2), f"below {rows}", "u32"), table)


@word(1)
def gathered(d: Drawer) -> None:
    x = d.find(lambda t: t.rank >= 1 and t.size > 0 and (t.dtype == "f32" or not d.training)) or image(d)
    axis = d.axis(x)
    n = d.dims(x)[axis]
    if d.chance(0.5):
        d.one("gather", x, d.input(d.shape(0, 2), f"below {n}", "u32"), axis)
        return
    shape = list(d.dims(x))
    shape[axis] = d.size()
    d.one("gather_elements", x, d.input(shape, f"below {n}", "u32"), axis)


@word(0.4, 0)
def gathered_by_values(d: Drawer) -> None:
    """Indices that were computed: some are out of range."""
    x, ids = d.f32(1), d.one("minimum", d.integers("u32"), d.r.choice([3, 20]))
    d.one("gather", x, ids, d.axis(x))


@word(0.8)
def scattered(d: Drawer) -> None:
    src = d.f32(1)
    rows = d.r.choice([1, 3, 8])
    d.one("scatter_add", d.input(d.dims(src)[:-1], f"below {rows}", "u32"), src, rows)


@word(0.4, 0)
def one_hot(d: Drawer) -> None:
    d.one("one_hot", d.input(d.shape(0, 2), "below 9", "u32"), d.r.choice([4, 9, 11]))


@word(0.8, 0)
def extreme_index(d: Drawer) -> None:
    x = d.f32(1)
    d.one(d.r.choice(["argmax", "argmin"]), x, d.axis(x), d.chance(0.5))


@word(0.7)
def largest(d: Drawer) -> None:
    x = d.f32(1)
    d.call("top_k", x, d.r.randint(1, max(1, min(d.dims(x)[-1], 9))))


@word(0.9)
def rotated(d: Drawer) -> None:
    head_dim = d.r.choice([2, 4, 6, 8, 10, 16])
    x = d.find(lambda t: t.dtype == "f32" and t.rank in (2, 3) and t.shape[-1] > 0 and t.shape[-1] % head_dim == 0)
    if x is None or d.chance(0.4):
        x = d.leaf((*([d.r.choice([1, 2, 3])] if d.chance(0.6) else []), d.size(), head_dim * d.r.choice([1, 2, 3])))
    named: dict[str, Any] = {"head_dim": head_dim, "interleaved": d.chance(0.4)}
    if d.chance(0.3):
        named["rotary_dim"] = d.r.choice(range(2, head_dim + 1, 2))
    if d.chance(0.3):
        named["base"] = 500.0
    if d.chance(0.3):
        named["scaling"] = d.r.choice([Linear(2.0), Llama3(8.0, original_max_position=64), Yarn(4.0, 64)])
    batch = d.dims(x)[:1] if d.type(x).rank == 3 else ()
    named["offset"] = d.r.choice([0, 5, None])
    if named["offset"] is None:
        named["offset"] = d.input(d.r.choice([(), batch]), "below 40", "u32")
    d.one("rope", x, **named)


@word(0.5, 1)
def dropped(d: Drawer) -> None:
    x = d.f32()
    if d.training and not d.type(x).size:
        raise Rejected
    d.one("dropout", x, d.r.choice([0.1, 0.5]))
