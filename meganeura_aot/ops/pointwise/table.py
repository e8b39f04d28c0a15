"""The table of pointwise operators: a row names an operator and says what it means everywhere.

Functions ending in _f32, _i32 or _u32 are those of shaders/lib: the builtins of WGSL promise too little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar

import numpy as np

from ...graph import DType, TensorType
from ...op import Sample, make
from .op import Array, Pointwise

F32, I32, U32 = DType.F32, DType.I32, DType.U32
FLAT = "flat"
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _by_dtype(f32: str, i32: str, u32: str) -> Mapping[DType, str]:
    return {F32: f32, I32: i32, U32: u32}


def _sigmoid(x: Array) -> Array:
    return np.where(x < 0, np.exp(-np.logaddexp(0, -x)), 1 / (1 + np.exp(-x)))


def _silu(x: Array) -> Array:
    return np.where(np.isneginf(x), -0.0, x * _sigmoid(x))


def _gelu(x: Array) -> Array:
    return np.where(np.isneginf(x), -0.0, 0.5 * x * _erfc(-x / math.sqrt(2)))


def _gelu_tanh(x: Array) -> Array:
    # 1 + tanh(u) = 2 sigmoid(2u), which does not cancel in the tail
    return np.where(np.isneginf(x), -0.0, x * _sigmoid(2 * SQRT_2_OVER_PI * (x + 0.044715 * x**3)))


def _integer_divide(a: Array, b: Array) -> Array:
    return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b))).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, 0, np.remainder(a, np.where(b == 0, 1, b))).astype(a.dtype)


def _cast(x: Array, dtype: str) -> Array:
    if dtype == "f32":
        return x.astype(np.float64)
    if x.dtype.kind != "f":
        return x.astype(DType(dtype).numpy)
    limits = np.iinfo(DType(dtype).numpy)
    whole = np.trunc(np.where(np.isnan(x), 0, x))
    return np.asarray(np.clip(whole, limits.min, limits.max)).astype(DType(dtype).numpy)


def _clip(x: Array, low: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def _comparison(compare: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: compare(a, b).astype(np.float64)


def _of_input(name: str) -> Callable[..., Any]:
    """The gradient by the row `name` over dy and the input, with the attributes of the operator."""
    return lambda g, dy, y, x, **attributes: (g.apply(make(name, **attributes), dy, x),)


def _of_output(name: str) -> Callable[..., Any]:
    """The gradient by the row `name` over dy and the output."""
    return lambda g, dy, y, x, **attributes: (g.apply(make(name, **attributes), dy, y),)


def _d_extremum(name: str) -> Callable[..., Any]:
    """Gradient of maximum and minimum: equal inputs share it."""
    return lambda g, dy, y, a, b: (g.apply(make(name), dy, a, b), g.apply(make(name), dy, b, a))


def row(
    name: str,
    arity: int,
    wgsl: str | Mapping[DType, str],
    numpy: Callable[..., Any],
    derivative: Callable[..., Any] | str | None = None,
    *,
    rule: str = "float",
    draws: Sequence[str] = ("normal", "small", "negative", "special"),
    attributes: Sequence[tuple[str, type, Any]] = (),
) -> None:
    """derivative: see Pointwise; FLAT where it is zero everywhere, None where there is none: then the row cannot train."""
    namespace = {
        "__module__": __name__,
        "name": name,
        "arity": arity,
        "wgsl": wgsl,
        "numpy": staticmethod(numpy),
        "derivative": staticmethod(derivative) if callable(derivative) else None,
        "is_flat": derivative == FLAT,
        "rule": rule,
        "samples": classmethod(lambda cls: _samples(cls, tuple(draws))),
    }
    class_name = "".join(part.capitalize() for part in name.split("_"))
    make_dataclass(class_name, attributes, bases=(Pointwise,), namespace=namespace, frozen=True)


def _samples(cls: type[Pointwise], draws: Sequence[str]) -> list[Sample]:
    """Shapes around a workgroup, broadcasts of every kind, each kind of numbers, each dtype."""
    dtypes = {"float": [F32], "integer": [I32, U32], "signed": [F32, I32]}.get(cls.rule, [F32, I32, U32])
    shapes = [(7,), (257,), (3, 65)]
    samples = []
    for dtype in dtypes:
        kinds = draws if dtype is F32 else ("integer",)
        samples += [Sample(cls(), (TensorType(s, dtype),) * cls.arity, k) for k in kinds for s in shapes]
        if cls.arity > 1:
            samples += [Sample(cls(), _broadcast(cls.arity, dtype), kinds[0])]
    return samples


def _broadcast(arity: int, dtype: DType) -> tuple[TensorType, ...]:
    return tuple(TensorType(s, dtype) for s in ((2, 1, 5), (3, 1), (), (1, 5))[:arity])


def define_table() -> None:
    """Register every row. Gradients are written with the builder g: x and y are the input and the output."""
    define_float_functions()
    define_activations()
    define_arithmetic()
    define_comparisons()
    define_integer_functions()


def define_float_functions() -> None:
    row("exp", 1, "exp_f32({0})", np.exp, lambda g, dy, y, x: (dy * y,))
    row("log", 1, "log_f32({0})", np.log, lambda g, dy, y, x: (dy / x,))
    row("log1p", 1, "log1p_f32({0})", np.log1p, lambda g, dy, y, x: (dy / (x + 1.0),))
    row("expm1", 1, "expm1_f32({0})", np.expm1, lambda g, dy, y, x: (dy * g.exp(x),))
    row("sqrt", 1, "sqrt({0})", np.sqrt, lambda g, dy, y, x: (dy * 0.5 / y,))
    row("rsqrt", 1, "inverseSqrt({0})", lambda x: 1 / np.sqrt(x), lambda g, dy, y, x: (dy * y * y * y * -0.5,))
    row("recip", 1, "div_f32(1.0, {0})", lambda x: 1 / x, lambda g, dy, y, x: (-(dy * y * y),))
    row("erf", 1, "erf_f32({0})", _erf, _of_input("erf_grad"))
    row("sin", 1, "sin_f32({0})", np.sin, lambda g, dy, y, x: (dy * g.cos(x),))
    row("cos", 1, "cos_f32({0})", np.cos, lambda g, dy, y, x: (-(dy * g.sin(x)),))
    row("floor", 1, "floor({0})", np.floor, FLAT)
    row("ceil", 1, "ceil({0})", np.ceil, FLAT)
    row("round", 1, "round({0})", np.rint, FLAT)
    row("sign", 1, _by_dtype("sign_f32({0})", "sign({0})", ""), np.sign, FLAT, rule="signed")
    row("pow", 2, "pow_f32({0}, {1})", np.power, _d_pow, draws=("positive", "special"))


def _d_pow(g: Any, dy: Any, y: Any, a: Any, b: Any) -> tuple[Any, ...]:
    return (g.apply(make("pow_grad_base"), dy, a, b), g.apply(make("pow_grad_exponent"), dy, y, a, b))


def define_activations() -> None:
    row("relu", 1, _by_dtype("relu_f32({0})", "max({0}, 0i)", "{0}"), _relu, _of_output("relu_grad"), rule="number")
    row("sigmoid", 1, "sigmoid_f32({0})", _sigmoid, _of_output("sigmoid_grad"))
    row("tanh", 1, "tanh_f32({0})", np.tanh, _of_output("tanh_grad"))
    row("silu", 1, "silu_f32({0})", _silu, _of_input("silu_grad"))
    row("gelu", 1, "gelu_erf_f32({0})", _gelu, _of_input("gelu_grad"))
    row("gelu_tanh", 1, "gelu_tanh_f32({0})", _gelu_tanh, _of_input("gelu_tanh_grad"))
    row("softplus", 1, "softplus_f32({0})", lambda x: np.logaddexp(0, x), lambda g, dy, y, x: (dy * g.sigmoid(x),))
    alpha = ("alpha", float)
    row(
        "leaky_relu",
        1,
        "select({0} * {alpha}, {0}, {0} > 0.0)",
        lambda x, alpha: np.where(x > 0, x, x * np.float32(alpha)),
        _of_input("leaky_relu_grad"),
        attributes=[(*alpha, 0.01)],
    )
    row(
        "elu",
        1,
        "elu_f32({0}, {alpha})",
        lambda x, alpha: np.where(x > 0, x, np.float32(alpha) * np.expm1(np.minimum(x, 0))),
        _of_input("elu_grad"),
        attributes=[(*alpha, 1.0)],
    )
    row(
        "hard_sigmoid",
        1,
        "clip_f32({0} * {alpha} + {beta}, 0.0, 1.0)",
        lambda x, alpha, beta: np.minimum(np.maximum(x * np.float32(alpha) + np.float32(beta), 0), 1),
        lambda g, dy, y, x, alpha, beta: (g.apply(make("hard_sigmoid_grad", alpha), dy, y),),
        attributes=[(*alpha, 0.2), ("beta", float, 0.5)],
        draws=("normal", "special"),
    )
    row(
        "hard_swish",
        1,
        "{0} * clip_f32({0} + 3.0, 0.0, 6.0) / 6.0",
        lambda x: x * np.minimum(np.maximum(x + 3, 0), 6) / 6,
        _of_input("hard_swish_grad"),
        draws=("normal", "small"),
    )
    row("swiglu", 2, "silu_f32({0}) * {1}", lambda a, b: _silu(a) * b, _d_swiglu, draws=("normal", "small"))


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


def _d_swiglu(g: Any, dy: Any, y: Any, gate: Any, up: Any) -> tuple[Any, ...]:
    return (g.swiglu_grad_gate(dy, gate, up), g.swiglu_grad_up(dy, gate))


def define_arithmetic() -> None:
    largest = _by_dtype("maximum_f32({0}, {1})", *["max({0}, {1})"] * 2)
    smallest = _by_dtype("minimum_f32({0}, {1})", *["min({0}, {1})"] * 2)
    number = {"rule": "number", "draws": ("normal", "small")}
    row("add", 2, "{0} + {1}", np.add, lambda g, dy, y, a, b: (dy, dy), **number)  # type: ignore[arg-type]
    row("sub", 2, "{0} - {1}", np.subtract, lambda g, dy, y, a, b: (dy, -dy), **number)  # type: ignore[arg-type]
    row("mul", 2, "{0} * {1}", np.multiply, lambda g, dy, y, a, b: (dy * b, dy * a), **number)  # type: ignore[arg-type]
    row(
        "div",
        2,
        "div_f32({0}, {1})",
        np.divide,
        _d_div,
        draws=("normal", "small"),
    )
    row("neg", 1, "-{0}", np.negative, lambda g, dy, y, x: (-dy,), rule="signed")
    row("abs", 1, "abs({0})", np.abs, lambda g, dy, y, x: (dy * g.sign(x),), rule="signed")
    row(
        "maximum",
        2,
        largest,
        np.maximum,
        _d_extremum("maximum_grad"),
        rule="number",
    )
    row(
        "minimum",
        2,
        smallest,
        np.minimum,
        _d_extremum("minimum_grad"),
        rule="number",
    )
    row(
        "clip",
        3,
        _by_dtype("clip_f32({0}, {1}, {2})", *["min(max({0}, {1}), {2})"] * 2),
        _clip,
        _d_clip,
        rule="number",
        draws=("normal",),
    )
    row("clip_low", 2, largest, np.maximum, _d_clip_low, rule="number", draws=("normal",))
    row("clip_high", 2, smallest, np.minimum, _d_clip_high, rule="number", draws=("normal",))
    row(
        "where",
        3,
        "select({1}, {2}, {0} == 0)",
        lambda c, a, b: np.where(c != 0, a, b),
        lambda g, dy, y, c, a, b: (None, g.where(c, dy, 0.0), g.where(c, 0.0, dy)),
        rule="select",
        draws=("normal", "special"),
    )


def _d_div(g: Any, dy: Any, y: Any, a: Any, b: Any) -> tuple[Any, ...]:
    da = dy / b
    return (da, -(da * y))


def _d_clip(g: Any, dy: Any, y: Any, x: Any, low: Any, high: Any) -> tuple[Any, ...]:
    """x passes it between the bounds and on them; else the bound that is the output, `high` where they are crossed."""
    of_low = g.where(g.less(x, low) * g.less(low, high), dy, 0.0)
    of_high = g.where(g.less(high, low) + g.greater(x, high), dy, 0.0)
    return (g.apply(make("clip_grad"), dy, x, low, high), of_low, of_high)


def _d_clip_low(g: Any, dy: Any, y: Any, x: Any, low: Any) -> tuple[Any, ...]:
    return (g.apply(make("clip_grad"), dy, x, low, x), g.where(g.less(x, low), dy, 0.0))


def _d_clip_high(g: Any, dy: Any, y: Any, x: Any, high: Any) -> tuple[Any, ...]:
    return (g.apply(make("clip_grad"), dy, x, x, high), g.where(g.greater(x, high), dy, 0.0))


def define_comparisons() -> None:
    for name, symbol, compare in [
        ("greater", ">", np.greater),
        ("greater_equal", ">=", np.greater_equal),
        ("less", "<", np.less),
        ("less_equal", "<=", np.less_equal),
        ("equal", "==", np.equal),
        ("not_equal", "!=", np.not_equal),
    ]:
        text = f"select(0.0, 1.0, {{0}} {symbol} {{1}})"
        if symbol == "!=":  # some adapters call NaN != NaN false, and none calls NaN == NaN true
            text = "select(1.0, 0.0, {0} == {1})"
        row(name, 2, text, _comparison(compare), FLAT, rule="compare", draws=("normal", "special"))


def define_integer_functions() -> None:
    def pair(name: str) -> Mapping[DType, str]:
        return {I32: f"{name}_i32({{0}}, {{1}})", U32: f"{name}_u32({{0}}, {{1}})"}

    divide = {I32: "floor_div_i32({0}, {1})", U32: "div_u32({0}, {1})"}
    row("floor_div", 2, divide, _integer_divide, rule="integer")
    row("mod", 2, pair("mod"), _remainder, rule="integer")
    row("bitwise_and", 2, "{0} & {1}", np.bitwise_and, rule="integer")
    row("bitwise_or", 2, "{0} | {1}", np.bitwise_or, rule="integer")
    row("bitwise_xor", 2, "{0} ^ {1}", np.bitwise_xor, rule="integer")
    row("shift_left", 2, pair("shift_left"), np.left_shift, rule="integer")
    row("shift_right", 2, pair("shift_right"), np.right_shift, rule="integer")


define_table()


@dataclass(frozen=True)
class Cast(Pointwise):
    """Convert to `dtype`. f32 to integer truncates towards zero and saturates, NaN gives 0; integers wrap."""

    arity: ClassVar[int] = 1
    rule: ClassVar[str] = "cast"
    numpy: ClassVar[Callable[..., Any]] = staticmethod(_cast)
    derivative: ClassVar[Callable[..., Any] | None] = None
    is_flat: ClassVar[bool] = True
    wgsl: ClassVar[str | Mapping[DType, str]] = {
        F32: "f32_to_{dtype}({0})",
        I32: "{dtype}({0})",
        U32: "{dtype}({0})",
    }
    dtype: str = "f32"

    @classmethod
    def samples(cls) -> list[Sample]:
        pairs = [(F32, "i32"), (F32, "u32"), (I32, "f32"), (U32, "f32"), (I32, "u32"), (U32, "i32")]
        draw = {F32: "special", I32: "integer", U32: "integer"}
        return [Sample(cls(to), (TensorType((257,), dtype),), draw[dtype]) for dtype, to in pairs]
