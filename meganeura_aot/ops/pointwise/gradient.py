"""Rows of the pointwise table that are gradients of others: one dispatch each. They have no gradient of their own."""

from __future__ import annotations

import math

import numpy as np

from .op import Array
from .table import SQRT_2_OVER_PI, _erfc, _sigmoid, _silu, row


def define_gradients() -> None:
    """Register every row: dy is {0}, the upstream gradient, which is selected where a slope is 0 or 1, so that an
    infinite or NaN one does not pass where nothing should. Ties and bounds are PyTorch's."""
    define_slopes_by_output()
    define_slopes_by_input()
    define_slopes_by_two()


def define_slopes_by_output() -> None:
    """{1} is the output."""
    row(
        "relu_grad",
        2,
        "select({0}, 0.0, {1} <= 0.0)",
        lambda dy, y: np.where(y <= 0, 0, dy),
        draws=("normal", "special"),
    )
    row("sigmoid_grad", 2, "{0} * ({1} * (1.0 - {1}))", lambda dy, y: dy * (y * (1 - y)), draws=("normal",))
    row(
        "tanh_grad",
        2,
        "{0} * ((1.0 - {1}) * (1.0 + {1}))",
        lambda dy, y: dy * ((1 - y) * (1 + y)),
        draws=("normal", "small"),
    )
    row(
        "hard_sigmoid_grad",
        2,
        "select(0.0, {0} * {alpha}, {1} > 0.0 && {1} < 1.0)",
        lambda dy, y, alpha: np.where((y > 0) & (y < 1), dy * np.float32(alpha), 0),
        attributes=[("alpha", float, 0.2)],
        draws=("normal", "special"),
    )


def define_slopes_by_input() -> None:
    """{1} is the input."""
    smooth = ("normal", "small", "negative", "large")
    row("silu_grad", 2, "{0} * silu_slope_f32({1})", lambda dy, x: dy * silu_slope(x), draws=smooth[:2])
    row("gelu_grad", 2, "{0} * gelu_erf_slope_f32({1})", lambda dy, x: dy * _gelu_slope(x), draws=smooth)
    row(
        "gelu_tanh_grad",
        2,
        "{0} * gelu_tanh_slope_f32({1})",
        lambda dy, x: dy * _gelu_tanh_slope(x),
        draws=smooth,
    )
    row(
        "erf_grad",
        2,
        "{0} * (1.12837917 * exp_f32(-({1} * {1})))",
        lambda dy, x: dy * (2 / math.sqrt(math.pi) * np.exp(-x * x)),
        draws=smooth,
    )
    row(
        "leaky_relu_grad",
        2,
        "select({0} * {alpha}, {0}, {1} > 0.0)",
        lambda dy, x, alpha: np.where(x > 0, dy, dy * np.float32(alpha)),
        attributes=[("alpha", float, 0.01)],
        draws=("normal", "special"),
    )
    row(
        "elu_grad",
        2,
        "select({0} * ({alpha} * exp_f32({1})), {0}, {1} > 0.0)",
        lambda dy, x, alpha: np.where(x > 0, dy, dy * (np.float32(alpha) * np.exp(np.minimum(x, 0)))),
        attributes=[("alpha", float, 1.0)],
        draws=smooth,
    )
    row(
        "hard_swish_grad",
        2,
        "select(select({0} * ({1} / 3.0 + 0.5), {0}, {1} >= 3.0), 0.0, {1} <= -3.0)",
        lambda dy, x: np.where(x <= -3, 0, np.where(x >= 3, dy, dy * (x / 3 + 0.5))),
        draws=smooth,
    )


def define_slopes_by_two() -> None:
    """Of operators of several inputs."""
    row(
        "swiglu_grad_gate",
        3,
        "{0} * {2} * silu_slope_f32({1})",
        lambda dy, gate, up: dy * up * silu_slope(gate),
        draws=("normal", "small"),
    )
    row(
        "swiglu_grad_up",
        2,
        "{0} * silu_f32({1})",
        lambda dy, gate: dy * _silu(gate),
        draws=("normal", "small"),
    )
    row(
        "pow_grad_base",
        3,
        "select({0} * ({2} * pow_f32({1}, {2} - 1.0)), 0.0, {2} == 0.0)",
        lambda dy, a, b: np.where(b == 0, 0, dy * (b * np.power(a, b - 1))),
        draws=("positive", "normal"),
    )
    row(
        "pow_grad_exponent",
        4,
        "select({0} * ({1} * log_f32({2})), 0.0, {2} == 0.0 && {3} >= 0.0)",
        lambda dy, y, a, b: np.where((a == 0) & (b >= 0), 0, dy * (y * np.log(a))),
        draws=("positive", "special"),
    )
    for name, symbol, loses in (("maximum_grad", "<", np.less), ("minimum_grad", ">", np.greater)):
        row(
            name,
            3,
            f"select(select({{0}}, 0.5 * {{0}}, {{1}} == {{2}}), 0.0, {{1}} {symbol} {{2}})",
            lambda dy, a, b, loses=loses: np.where(loses(a, b), 0, np.where(a == b, 0.5 * dy, dy)),
            draws=("normal", "special"),
        )
    row(
        "clip_grad",
        4,
        "select(0.0, {0}, {1} >= {2} && {1} <= {3})",
        lambda dy, x, low, high: np.where((x >= low) & (x <= high), dy, 0),
        draws=("normal", "special"),
    )


def _at_infinities(slope: Array, x: Array) -> Array:
    """The slope of an activation. At the infinities, where its formula is 0 times infinity, it is 0 or 1."""
    return np.where(np.isinf(x), x > 0, slope)


def silu_slope(x: Array) -> Array:
    """The derivative of silu."""
    return _at_infinities(_sigmoid(x) * (1 + x * _sigmoid(-x)), x)


def _gelu_slope(x: Array) -> Array:
    slope = 0.5 * _erfc(-x / math.sqrt(2)) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return _at_infinities(slope, x)


def _gelu_tanh_slope(x: Array) -> Array:
    v = 2 * SQRT_2_OVER_PI * (x + 0.044715 * x**3)
    slope = _sigmoid(v) * (1 + x * _sigmoid(-v) * 2 * SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x))
    return _at_infinities(slope, x)


define_gradients()
