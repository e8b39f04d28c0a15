"""Words that move numbers: shapes, slices, joins, and steps that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.drawer import Drawer
from tests.fuzz.trace import Ref
from tests.fuzz.words import word


@word(1.5)
def reshaped(d: Drawer) -> None:
    x = d.find(lambda t: t.size > 0) or d.f32()
    left = d.type(x).size
    shape: list[int] = []
    while left > 1 and len(shape) < 3:
        shape.append(d.r.choice(d.divisors(left)))
        left //= shape[-1]
    shape.insert(d.r.randint(0, len(shape)), -1 if d.chance(0.5) else left)
    d.one("reshape", x, tuple(shape))


@word(1.5)
def permuted(d: Drawer) -> None:
    x = d.find(lambda t: t.rank >= 2) or d.f32(2)
    axes = d.r.sample(range(d.type(x).rank), d.type(x).rank)
    if d.chance(0.5):
        d.one("permute", x, axes)
    else:
        d.one("transpose", x, *([axes] if d.chance(0.5) else []))


@word(1)
def expanded(d: Drawer) -> None:
    x = d.find(lambda t: t.size < 200) or d.f32()
    shape = [d.r.choice([2, 3, 5]) if n == 1 and d.chance(0.6) else n for n in d.dims(x)]
    d.one("expand", x, (*([d.r.choice([1, 2, 3])] if d.chance(0.4) else []), *shape))


@word(0.3)
def expanded_axes(d: Drawer) -> None:
    x = d.f32(1)
    axes = d.r.sample(range(d.type(x).rank), d.r.randint(1, d.type(x).rank))
    d.one("expand_axes", d.one("mean", x, axes), d.dims(x), axes)


@word(0.4)
def summed_to(d: Drawer) -> None:
    x = d.f32()
    d.one("sum_to", x, tuple(n if d.chance(0.6) else 1 for n in d.dims(x))[d.r.choice([0, 0, 1]) :])


@word(1.2)
def concatenated(d: Drawer) -> None:
    x = d.find(lambda t: t.rank >= 1) or d.f32(1)
    axis, type_ = d.axis(x), d.type(x)
    parts = [x]
    for _ in range(d.r.randint(0, 3)):
        shape = list(type_.shape)
        shape[axis] = d.r.choice([shape[axis], d.size()])
        parts.append(d.like(shape, type_.dtype))
    d.r.shuffle(parts)
    d.one("concat", parts, axis)


@word(0.8)
def split(d: Drawer) -> None:
    x = d.find(lambda t: t.rank >= 1) or d.f32(1)
    axis = d.axis(x)
    total = d.dims(x)[axis]
    if not total or d.chance(0.5):
        d.call("split", x, d.r.randint(max(1, total // 3), max(total, 1)), axis)
    else:
        first = d.r.randint(0, total)
        d.call("split", x, [first, total - first], axis)


@word(2)
def sliced(d: Drawer) -> None:
    x = d.find(lambda t: t.rank >= 1) or d.f32(1)
    index: list[Any] = []
    for n in d.dims(x):
        start, stop = (d.r.choice([None, d.r.randint(-n, n)]) for _ in range(2))
        kinds: list[Any] = [slice(None), slice(start, stop), slice(start, None, 2), slice(None, None, -1)]
        kinds += [slice(None, None, 3), slice(start, stop, -2)] + ([d.r.randrange(-n, n)] if n else [])
        index.append(d.r.choice(kinds))
    if d.chance(0.2):
        index.insert(d.r.randint(0, len(index)), None)
    if d.chance(0.2):
        index = [index[0], ...] if d.chance(0.5) else [..., index[-1]]
    d.one("slice", x, tuple(index))


@word(0.4, 0.6)
def stopped(d: Drawer) -> None:
    d.one("stop_gradient", d.f32())


def identity_of(d: Drawer, x: Ref) -> Ref:
    """A value of x now, by a step that the builder may leave out."""
    shape, rank, dtype = d.dims(x), d.type(x).rank, d.type(x).dtype
    everything = slice(None)
    ways: list[Callable[[], Ref]] = [
        lambda: d.one("reshape", x, shape),
        lambda: d.one("slice", x, everything if rank else ()),
        lambda: d.one("slice", x, ...),
        lambda: d.one("expand", x, shape),
        lambda: d.one("clip", x),
        lambda: d.one("sum_to", x, shape),
    ]
    if dtype == "f32":
        ways += [lambda: d.one("stop_gradient", x), lambda: d.one("dropout", x, 0.0), lambda: d.one("dropout", x, 0.3)]
    if not d.training:
        ways.append(lambda: d.one("cast", x, dtype))
    if rank:
        ways += [
            lambda: d.one("slice", x, tuple(slice(0, n) for n in shape)),
            lambda: d.one("permute", x, list(range(rank))),
            lambda: d.one("concat", [x], axis=0),
            lambda: d.one("split", x, [shape[0]], axis=0),
            lambda: d.one("pad", x, [(0, 0)] * rank),
        ]
    if rank > 2 and dtype == "f32":
        ways.append(lambda: d.one("upsample", x, 1))
    return d.r.choice(ways)()


@word(2)
def identity(d: Drawer) -> None:
    identity_of(d, d.find(lambda t: True) or d.f32())
