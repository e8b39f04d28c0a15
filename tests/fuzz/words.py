"""The words a random graph is made of: each draws one use of a builder method, or of a few that belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.drawer import Drawer
from tests.fuzz.trace import Ref


@dataclass(frozen=True)
class Word:
    """One kind of step of a random program. weight, training: how often inference graphs and training graphs draw it."""

    name: str
    weight: float
    training: float
    draw: Callable[[Drawer], Any]


WORDS: dict[str, Word] = {}


def word(weight: float = 1.0, training: float | None = None) -> Callable[[Callable[[Drawer], Any]], Any]:
    """Register a function as a word. training: None for the same weight, 0 where the step has no gradient."""

    def register(draw: Callable[[Drawer], Any]) -> Callable[[Drawer], Any]:
        WORDS[draw.__name__] = Word(draw.__name__, weight, weight if training is None else training, draw)
        return draw

    return register


# ---- pointwise

SMOOTH = ["sigmoid", "tanh", "silu", "gelu", "softplus", "erf", "sin", "cos", "neg"]
KINKED = ["relu", "leaky_relu", "elu", "hard_sigmoid", "hard_swish", "abs"]
FLAT = ["floor", "ceil", "round", "sign"]
COMPARISONS = ["greater", "greater_equal", "less", "less_equal", "equal", "not_equal"]

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "leaky_relu": {"alpha": 0.2},
    "elu": {"alpha": 0.7},
    "hard_sigmoid": {"alpha": 0.17, "beta": 0.45},
    "gelu": {"approximate": "tanh"},
}


@word(4)
def activation(d: Drawer) -> None:
    name = d.r.choice(SMOOTH + KINKED)
    named: dict[str, Any] = {}
    if d.chance(0.5):
        named = ATTRIBUTES.get(name, {})
    d.one(name, d.f32(), **named)


@word(0.6, 0.1)
def flat(d: Drawer) -> None:
    d.one(d.r.choice(FLAT), d.f32())


@word(1.2)
def function(d: Drawer) -> None:
    name = d.r.choice(["exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "recip"])
    bounded = d.one("tanh", d.f32()) if name in ("exp", "expm1") else d.positive()
    d.one(name, bounded)


@word(0.5)
def power(d: Drawer) -> None:
    d.one("pow", d.positive(), d.r.choice([2.0, 0.5, -1.0, 3.0, 1.7]))


@word(5)
def arithmetic(d: Drawer) -> None:
    x = d.f32()
    operands = [x, d.partner(x)]
    d.r.shuffle(operands)
    d.one(d.r.choice(["add", "add", "sub", "mul", "mul", "maximum", "minimum"]), *operands)


@word(0.8)
def quotient(d: Drawer) -> None:
    x = d.f32()
    d.one("div", d.partner(x), d.positive(x))


@word(1)
def bounded(d: Drawer) -> None:
    x = d.f32()
    low, high = d.r.choice([(None, 0.7), (-0.6, None), (-0.5, 0.8), (d.like(()), None), (None, d.partner(x))])
    d.one("clip", x, low, high)


@word(0.8)
def choice(d: Drawer) -> None:
    x = d.f32()
    condition = d.one(d.r.choice(COMPARISONS), x, d.partner(x))
    d.one("where", condition, x, d.partner(x))


@word(0.8, 0)
def comparison(d: Drawer) -> None:
    x = d.integers() if d.chance(0.4) else d.f32()
    d.one(d.r.choice(COMPARISONS), x, d.partner(x))


@word(0.6)
def gated(d: Drawer) -> None:
    x = d.f32()
    d.one("swiglu", x, d.like(d.dims(x)))


@word(0.4)
def gated_halves(d: Drawer) -> None:
    x = d.f32(1)
    if d.dims(x)[-1] % 2:
        x = d.one("concat", [x, x], axis=-1)
    d.one("swiglu_concat", x)


@word(0.6, 0)
def slopes(d: Drawer) -> None:
    dy = d.f32()
    x, up = d.like(d.dims(dy)), d.like(d.dims(dy))
    name = d.r.choice(["silu_grad", "swiglu_grad_gate", "swiglu_grad_up"])
    d.one(name, dy, x, *([up] if name == "swiglu_grad_gate" else []))


# ---- integers


@word(2.5, 0)
def integer_arithmetic(d: Drawer) -> None:
    names = ["add", "sub", "mul", "maximum", "minimum", "floor_div", "mod", "bitwise_and", "bitwise_or", "bitwise_xor"]
    x = d.integers()
    operands = [x, d.partner(x)]
    d.r.shuffle(operands)
    d.one(d.r.choice(names), *operands)


@word(0.6, 0)
def shift(d: Drawer) -> None:
    x = d.integers()
    by = d.input(d.dims(x), "below 35", d.type(x).dtype)
    d.one(d.r.choice(["shift_left", "shift_right"]), x, by)


@word(0.5, 0)
def signed(d: Drawer) -> None:
    d.one(d.r.choice(["neg", "abs", "sign", "relu"]), d.integers("i32"))


@word(1, 0)
def conversion(d: Drawer) -> None:
    x = d.f32() if d.chance(0.5) else d.integers()
    d.one("cast", x, d.r.choice(["f32", "i32", "u32"]))


@word(0.4, 0)
def integer_choice(d: Drawer) -> None:
    x = d.integers()
    d.one("where", d.one("greater", x, d.partner(x)), x, d.partner(x))


@word(0.4, 0)
def integer_sum(d: Drawer) -> None:
    x = d.integers(least=1)
    d.one(d.r.choice(["sum", "max", "min"]), x, d.axes(x), keepdims=d.chance(0.5))


# ---- products


@word(2.5)
def product(d: Drawer) -> None:
    a = d.f32(1)
    shape = d.dims(a)
    if len(shape) == 1 and d.chance(0.5):
        d.one("matmul", a, d.like((shape[0],) if d.chance(0.4) else (shape[0], d.size(0.2))))
        return
    a = a if len(shape) > 1 else d.one("reshape", a, (1, *shape))
    *batch, rows, depth = d.dims(a)
    trans_a, trans_b = d.chance(0.25), d.chance(0.4)
    inner, columns = rows if trans_a else depth, d.size(0.2)
    last = (columns, inner) if trans_b else (inner, columns)
    over = [] if d.chance(0.5) else [n if d.chance(0.7) else 1 for n in batch]
    b = d.like((*over, *last))
    if trans_b and not trans_a and d.chance(0.4):
        d.one("matmul_bt", a, b)
    elif trans_a and not trans_b and d.chance(0.6):
        d.one("matmul_at", a, b)
    else:
        d.one("matmul", a, b, trans_a, trans_b)


@word(1.5)
def dense(d: Drawer) -> None:
    """A layer, whose steps behind the product are candidates for its epilogue."""
    x = d.f32(2)
    y = d.one("matmul", x, d.leaf((d.dims(x)[-1], n := d.size(0.2))))
    if d.chance(0.8):
        y = d.one("bias_add", y, d.leaf((n,)))
    if d.chance(0.7):
        d.one(d.r.choice(SMOOTH + KINKED), y)
    if d.chance(0.4):
        d.one("add", y, d.like(d.dims(y)))


# ---- reductions and norms


@word(2)
def reduction(d: Drawer) -> None:
    x = d.f32()
    d.one(d.r.choice(["sum", "mean", "max", "min"]), x, d.axes(x), keepdims=d.chance(0.5))


@word(1.5)
def soft(d: Drawer) -> None:
    x = d.f32(1)
    d.one(d.r.choice(["softmax", "log_softmax"]), x, d.axis(x))


@word(1.5)
def row_norm(d: Drawer) -> None:
    x = d.f32(1)
    width = d.dims(x)[-1:]
    if d.chance(0.5):
        d.one("rms_norm", x, *([d.leaf(width)] if d.chance(0.6) else []), eps=d.r.choice([1e-5, 1e-3]))
        return
    w, b = (d.leaf(width) if d.chance(0.6) else None for _ in range(2))
    d.one("layer_norm", x, w, b, eps=d.r.choice([1e-5, 1e-3]))


def image(d: Drawer, least: int = 3, most: int = 4) -> Ref:
    """[N, C, (H,) W], none of them 0."""
    if not d.chance(0.4):
        found = d.find(lambda t: t.dtype == "f32" and least <= t.rank <= most and t.size > 0)
        if found:
            return found
    rank = d.r.randint(least, most)
    around = [d.r.choice([1, 2, 3]), d.r.choice([1, 2, 3, 4, 6, 8])]
    return d.leaf((*around, *(d.r.choice([3, 4, 5, 7, 8, 9, 13]) for _ in range(rank - 2))))


@word(0.8)
def group_norm(d: Drawer) -> None:
    x = image(d)
    channels = d.dims(x)[1]
    weights = [d.leaf((channels,)), d.leaf((channels,))] if d.chance(0.6) else []
    groups = d.r.choice(d.divisors(channels))
    d.one("group_norm", x, groups, *weights, eps=1e-3, activation=d.r.choice(["", "silu"]))


@word(0.7)
def batch_norm(d: Drawer) -> None:
    x = image(d, 2)
    each = d.dims(x)[1:2]
    mean, variance = d.leaf(each), d.leaf(each, "positive")
    w, b = (d.leaf(each) if d.chance(0.6) else None for _ in range(2))
    d.one("batch_norm", x, mean, variance, w, b, eps=1e-3)


@word(0.8)
def loss(d: Drawer) -> None:
    x = d.f32(1)
    if d.chance(0.5):
        d.one(d.r.choice(["mse_loss", "l1_loss"]), x, d.like(d.dims(x)))
    elif d.chance(0.4):
        d.one("bce_loss", d.one("sigmoid", x), d.input(d.dims(x), "probability"))
    elif d.chance(0.5):
        labels = d.input(d.dims(x)[:-1], f"below {max(d.dims(x)[-1], 1)}", "u32")
        d.one("cross_entropy_loss", x, labels, label_smoothing=d.r.choice([0.0, 0.1]))
    else:
        d.one("cross_entropy_loss", x, d.input(d.dims(x), "probability"), label_smoothing=d.r.choice([0.0, 0.1]))
