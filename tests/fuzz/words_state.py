"""Words of attention and of states: caches, positions, random numbers, and reads before and after every kind of write."""

from __future__ import annotations

from typing import Any

from meganeura_aot import Causal, Full, Window
from tests.fuzz.drawer import MOST_ELEMENTS, Drawer, Rejected
from tests.fuzz.trace import Ref
from tests.fuzz.words import image, word
from tests.fuzz.words_layout import identity_of

HEAD_DIMS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 29, 30, 31, 32, 33, 40, 64, 65, 80)
KINDS = [
    "attention",
    "attention_with_lse",
    "full_attention",
    "cross_attention",
    "multi_head_attn",
    "causal_attention",
    "sliding_window_attention",
]


def heads_of(d: Drawer) -> tuple[int, int, int]:
    """heads, kv_heads, head_dim"""
    kv = d.r.choice([1, 1, 2, 3])
    return kv * d.r.choice([1, 2, 3, 4]), kv, d.r.choice(HEAD_DIMS)


def options(d: Drawer, batch: int, heads: int, queries: int, keys: int) -> dict[str, Any]:
    """A mask to add, a scale, a cap: often all of them."""
    named: dict[str, Any] = {}
    if d.chance(0.5):
        shapes = [(queries, keys), (1, 1, queries, keys), (batch, 1, queries, keys), (batch, heads, queries, keys)]
        shape = d.r.choice([*shapes, (batch, heads, 1, keys)])
        hides = d.chance(0.3)
        named["attn_mask"] = d.input(shape, "mask") if hides else d.like(shape, fresh=0.8)
    if d.chance(0.3):
        named["scale"] = d.r.choice([0.1, 0.5, -0.3])
    if d.chance(0.5):
        named["soft_cap"] = d.r.choice([2.0, 5.0, 30.0])
    return named


@word(0.9, 3)
def attended(d: Drawer) -> None:
    heads, kv, dim = heads_of(d)
    batch, queries = d.r.choice([1, 2, 2, 3, 4]), d.r.choice([1, 2, 3, 5, 7, 16, 17, 33])
    keys = queries if d.chance(0.6) else d.r.choice([1, 4, 9, 20, 65])
    lead = () if batch == 1 and d.chance(0.5) else (batch,)
    if batch * queries * heads * dim > 4000 or batch * keys * kv * dim > 4000:
        raise Rejected
    q = d.like((*lead, queries, heads * dim))
    k, v = (d.like((*lead, keys, kv * dim), fresh=0.7) for _ in range(2))
    name = d.r.choice(KINDS)
    named = options(d, batch, heads, queries, keys)
    if d.training and d.chance(0.5):
        name = "causal_attention"
    if name in ("attention", "attention_with_lse"):
        named["mask"] = d.r.choice([Full(), Causal(), Causal(keys - queries), Window(3), Window(2, 1)])
    if name == "causal_attention" and d.chance(0.3):
        named["offset"] = keys - queries
    if name == "sliding_window_attention":
        named |= {"window": d.r.choice([1, 2, 5]), "offset": d.r.choice([0, 1])}
    if name == "multi_head_attn":
        named["is_cross"] = d.chance(0.5)
    if d.chance(0.3):
        named["head_dim"] = dim
    d.call(name, q, k, v, heads, *([] if kv == heads and d.chance(0.5) else [kv]), **named)


@word(0, 1)
def attended_with_everything(d: Drawer) -> None:
    """Grouped heads of any width, several images, causal, masked and capped at once, all of it trained."""
    kv, dim = d.r.choice([1, 1, 1, 2, 3]), d.r.randint(1, 80)
    heads = kv * d.r.choice([2, 2, 3, 4])
    batch = d.r.choice([2, 2, 3, 4])
    lengths = [n for n in (1, 2, 3, 5, 7, 8, 16, 17, 33, 65) if batch * n * heads * dim <= MOST_ELEMENTS]
    length = d.r.choice(lengths)
    q, k, v = (d.leaf((batch, length, n * dim)) for n in (heads, kv, kv))
    named: dict[str, Any] = {}
    if d.chance(0.85):
        named["attn_mask"] = d.leaf((length, length)) if d.chance(0.6) else d.input((length, length), "mask")
    if d.chance(0.85):
        named["soft_cap"] = d.r.choice([2.0, 5.0, 50.0])
    d.one("causal_attention" if d.chance(0.85) else "attention", q, k, v, heads, kv, **named)


# ---- caches


def maybe_read(d: Drawer, state: Ref, p: float = 0.4) -> None:
    """The state as it is now, by an identity, a part or a computation."""
    if not d.chance(p):
        return
    if d.chance(0.6):
        identity_of(d, state)
    elif d.type(state).rank and d.chance(0.6):
        d.one("slice", state, (slice(None),) * (d.type(state).rank - 1) + (slice(0, d.r.randint(1, 3)),))
    else:
        d.one("add", state, 1 if d.type(state).dtype.is_integer else 0.5)


@word(0.6, 0)
def cache(d: Drawer) -> None:
    """Write rows, attend, advance, in an order that has a meaning; reads of old and new versions in between."""
    batch, kv = d.r.choice([1, 1, 2, 3]), d.r.choice([1, 2])
    heads, dim = kv * d.r.choice([1, 2, 3]), d.r.choice([d for d in HEAD_DIMS if d <= 40])
    rows, size = d.r.choice([1, 1, 2, 3]), d.r.choice([7, 24, 40])
    ring = d.chance(0.4)
    window = d.r.choice([2, 5]) if ring or d.chance(0.3) else None
    half = d.chance(0.3) and not dim % 2
    place = d.state(d.r.choice([(), (batch,)]), "u32", "position")
    caches = [d.state((batch, size, kv * dim), "f16" if half else "f32", "cache") for _ in range(2)]
    maybe_read(d, place)
    for state in caches:
        maybe_read(d, state)
        new = d.like((batch, rows, kv * dim))
        written = d.one("cache_write", state, new, place, ring=ring)
        maybe_read(d, d.r.choice([state, written]), 0.2)
    if d.chance(0.8):
        q = d.like((batch, rows, heads * dim))
        named = {"scale": 0.3} if d.chance(0.3) else {}
        if d.chance(0.3):
            named["soft_cap"] = 5.0
        if d.chance(0.3):
            named["head_dim"] = dim
        d.one("cached_attention", q, *caches, place, heads, kv, window=window, ring=ring, **named)
    maybe_read(d, place)
    if d.chance(0.4):
        d.one("advance", place, d.input((), f"below {rows + 1}", "u32"), 1000)
    else:
        d.one("advance", place, rows, 1000)
    maybe_read(d, place, 0.6)


@word(0.6, 0.15)
def position(d: Drawer) -> None:
    place = d.state(d.r.choice([(), (2,)]), "u32", "position")
    maybe_read(d, place, 0.6)
    d.one("advance", place, d.r.randint(0, 2), 1000)
    maybe_read(d, place, 0.6)


# ---- states

ASSIGNED = "assigned"


def assigned_state(d: Drawer) -> Ref:
    found = [call.results[0] for call in d.trace.leaves("state") if d.world.role(call.label) == ASSIGNED]
    if found and d.chance(0.7):
        return d.r.choice(found)
    dtype = d.r.choice(["f32", "f32", "f32", "i32", "u32"]) if not d.training else "f32"
    return d.state(d.shape(0, 3), dtype, ASSIGNED, init=d.r.choice([0, 1, 5]))


@word(2.5, 0.4)
def assigned(d: Drawer) -> None:
    """A new value of a state, with reads before and after."""
    state = assigned_state(d)
    maybe_read(d, state, 0.7)
    type_ = d.type(state)
    value: Any = d.like(type_.shape, type_.dtype, fresh=0.2)
    if d.chance(0.3):
        value = d.one("add", d.one("maximum", state, value) if d.chance(0.5) else state, value)
        if not type_.dtype.is_integer:
            value = d.one("mul", value, 0.5)
    written = d.one("assign", state, value)
    maybe_read(d, d.r.choice([state, written]))


@word(0.8)
def state_again(d: Drawer) -> None:
    """A read of a state, whatever was written before."""
    states = [call.results[0] for call in d.trace.leaves("state")]
    if not states:
        raise Rejected
    maybe_read(d, d.r.choice(states), 1.0)


@word(0.8, 0.2)
def drawn(d: Drawer) -> None:
    """Random numbers, twice from one state at times."""
    keys = [call.results[0] for call in d.trace.leaves("state") if d.world.role(call.label) == "key"]
    state = d.r.choice(keys) if keys and d.chance(0.6) else d.state((4,), "u32", "key")
    maybe_read(d, state, 0.3)
    names = ["random_uniform", "random_normal"]
    if not d.training:
        names.append("random_bits")
    d.one(d.r.choice(names), d.shape(0, 3), state)
    maybe_read(d, state, 0.3)


@word(0.7)
def batch_norm_training(d: Drawer) -> None:
    x = image(d, 2)
    each = d.dims(x)[1:2]
    if d.type(x).size // each[0] < 3:
        raise Rejected
    mean, variance = d.state(each, "f32", "mean"), d.state(each, "f32", "variance", init=1)
    if d.chance(0.3):
        identity_of(d, mean)
    w, b = (d.leaf(each) if d.chance(0.6) else None for _ in range(2))
    d.one("batch_norm", x, mean, variance, w, b, eps=1e-2, training=True, momentum=d.r.choice([0.1, 0.5]))
