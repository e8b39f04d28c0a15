"""The builder's pointwise operators, under the names of PyTorch and ONNX. Numbers may stand for tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import GraphError
from .op import OPS, Op
from .ops.pointwise.table import Cast
from .tensor import Number, Tensor

Operand = Tensor | Number


class PointwiseOperators:
    """Methods over `apply`; shapes broadcast as in NumPy, and GraphError names what does not fit."""

    def apply(self, op: Op, *inputs: Operand) -> Tensor:
        raise NotImplementedError

    def lift(self, x: Any, like: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def _pointwise(self, name: str, *inputs: Operand, **attributes: Any) -> Tensor:
        return self.apply(OPS[name](**attributes), *inputs)

    # arithmetic: f32, i32, u32 of one dtype; integers wrap

    def add(self, a: Operand, b: Operand) -> Tensor:
        """a + b"""
        return self._pointwise("add", a, b)

    def sub(self, a: Operand, b: Operand) -> Tensor:
        """a - b"""
        return self._pointwise("sub", a, b)

    def mul(self, a: Operand, b: Operand) -> Tensor:
        """a * b"""
        return self._pointwise("mul", a, b)

    def div(self, a: Operand, b: Operand) -> Tensor:
        """a / b, f32"""
        return self._pointwise("div", a, b)

    def neg(self, x: Tensor) -> Tensor:
        """-x, f32 or i32"""
        return self._pointwise("neg", x)

    def abs(self, x: Tensor) -> Tensor:
        """|x|, f32 or i32"""
        return self._pointwise("abs", x)

    def sign(self, x: Tensor) -> Tensor:
        """-1, 0 or 1; NaN stays NaN"""
        return self._pointwise("sign", x)

    def maximum(self, a: Operand, b: Operand) -> Tensor:
        """The larger of two; NaN wins"""
        return self._pointwise("maximum", a, b)

    def minimum(self, a: Operand, b: Operand) -> Tensor:
        """The smaller of two; NaN wins"""
        return self._pointwise("minimum", a, b)

    def clip(self, x: Tensor, low: Operand | None = None, high: Operand | None = None) -> Tensor:
        """x between low and high; None leaves a side open"""
        if low is None:
            return self.lift(x) if high is None else self._pointwise("clip_high", x, high)
        if high is None:
            return self._pointwise("clip_low", x, low)
        return self._pointwise("clip", x, low, high)

    def where(self, condition: Tensor, a: Operand, b: Operand) -> Tensor:
        """a where condition is not 0, else b"""
        like = next((x for x in (a, b) if isinstance(x, Tensor)), None)
        if like is None and "f" in {np.asarray(a).dtype.kind, np.asarray(b).dtype.kind}:
            # two numbers or arrays, one of them of floats: both become f32
            like = self.lift(np.asarray(a, np.float64))
            a = like
        first = self.lift(a, like=like)
        second = self.lift(b, like=first if like is None else like)
        return self._pointwise("where", condition, first, second)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """x as "f32", "i32" or "u32": f32 truncates towards zero and saturates, NaN gives 0; integers wrap"""
        if dtype not in ("f32", "i32", "u32"):
            raise GraphError(f"cast: expected dtype f32, i32 or u32, got {dtype!r}")
        return self.lift(x) if x.dtype == dtype else self.apply(Cast(dtype), x)

    # integers

    def floor_div(self, a: Operand, b: Operand) -> Tensor:
        """a // b of integers, towards minus infinity; a // 0 is 0"""
        return self._pointwise("floor_div", a, b)

    def mod(self, a: Operand, b: Operand) -> Tensor:
        """a % b of integers, with the sign of b; a % 0 is 0"""
        return self._pointwise("mod", a, b)

    def bitwise_and(self, a: Operand, b: Operand) -> Tensor:
        """a & b"""
        return self._pointwise("bitwise_and", a, b)

    def bitwise_or(self, a: Operand, b: Operand) -> Tensor:
        """a | b"""
        return self._pointwise("bitwise_or", a, b)

    def bitwise_xor(self, a: Operand, b: Operand) -> Tensor:
        """a ^ b"""
        return self._pointwise("bitwise_xor", a, b)

    def shift_left(self, a: Operand, b: Operand) -> Tensor:
        """a << b; 0 where b >= 32"""
        return self._pointwise("shift_left", a, b)

    def shift_right(self, a: Operand, b: Operand) -> Tensor:
        """a >> b, keeping the sign; 0 or -1 where b >= 32"""
        return self._pointwise("shift_right", a, b)

    # comparisons: f32 0 or 1

    def greater(self, a: Operand, b: Operand) -> Tensor:
        """1 where a > b"""
        return self._pointwise("greater", a, b)

    def greater_equal(self, a: Operand, b: Operand) -> Tensor:
        """1 where a >= b"""
        return self._pointwise("greater_equal", a, b)

    def less(self, a: Operand, b: Operand) -> Tensor:
        """1 where a < b"""
        return self._pointwise("less", a, b)

    def less_equal(self, a: Operand, b: Operand) -> Tensor:
        """1 where a <= b"""
        return self._pointwise("less_equal", a, b)

    def equal(self, a: Operand, b: Operand) -> Tensor:
        """1 where a == b"""
        return self._pointwise("equal", a, b)

    def not_equal(self, a: Operand, b: Operand) -> Tensor:
        """1 where a != b"""
        return self._pointwise("not_equal", a, b)

    # functions of f32

    def exp(self, x: Tensor) -> Tensor:
        """e^x"""
        return self._pointwise("exp", x)

    def expm1(self, x: Tensor) -> Tensor:
        """e^x - 1, accurate near 0"""
        return self._pointwise("expm1", x)

    def log(self, x: Tensor) -> Tensor:
        """The natural logarithm; -inf at 0, NaN below"""
        return self._pointwise("log", x)

    def log1p(self, x: Tensor) -> Tensor:
        """log(1 + x), accurate near 0"""
        return self._pointwise("log1p", x)

    def sqrt(self, x: Tensor) -> Tensor:
        """The square root; NaN below 0"""
        return self._pointwise("sqrt", x)

    def rsqrt(self, x: Tensor) -> Tensor:
        """1 / sqrt(x)"""
        return self._pointwise("rsqrt", x)

    def recip(self, x: Tensor) -> Tensor:
        """1 / x"""
        return self._pointwise("recip", x)

    def pow(self, a: Operand, b: Operand) -> Tensor:
        """a^b; NaN for a negative a and a b that is no integer"""
        return self._pointwise("pow", a, b)

    def sin(self, x: Tensor) -> Tensor:
        """Sine of radians"""
        return self._pointwise("sin", x)

    def cos(self, x: Tensor) -> Tensor:
        """Cosine of radians"""
        return self._pointwise("cos", x)

    def erf(self, x: Tensor) -> Tensor:
        """The error function"""
        return self._pointwise("erf", x)

    def floor(self, x: Tensor) -> Tensor:
        """The largest integer <= x"""
        return self._pointwise("floor", x)

    def ceil(self, x: Tensor) -> Tensor:
        """The smallest integer >= x"""
        return self._pointwise("ceil", x)

    def round(self, x: Tensor) -> Tensor:
        """The nearest integer, halves to even"""
        return self._pointwise("round", x)

    # activations

    def relu(self, x: Tensor) -> Tensor:
        """max(x, 0)"""
        return self._pointwise("relu", x)

    def leaky_relu(self, x: Tensor, alpha: float = 0.01) -> Tensor:
        """x above 0, alpha * x below"""
        return self._pointwise("leaky_relu", x, alpha=alpha)

    def elu(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        """x above 0, alpha * (e^x - 1) below"""
        return self._pointwise("elu", x, alpha=alpha)

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + e^-x)"""
        return self._pointwise("sigmoid", x)

    def hard_sigmoid(self, x: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
        """clip(alpha * x + beta, 0, 1): ONNX's defaults; PyTorch has alpha = 1/6"""
        return self._pointwise("hard_sigmoid", x, alpha=alpha, beta=beta)

    def tanh(self, x: Tensor) -> Tensor:
        """The hyperbolic tangent"""
        return self._pointwise("tanh", x)

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)"""
        return self._pointwise("silu", x)

    def hard_swish(self, x: Tensor) -> Tensor:
        """x * clip(x / 6 + 1/2, 0, 1)"""
        return self._pointwise("hard_swish", x)

    def gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        """x * Phi(x); approximate="tanh" for 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))"""
        if approximate not in ("none", "tanh"):
            raise GraphError(f'gelu: expected approximate "none" or "tanh", got {approximate!r}')
        return self._pointwise("gelu" if approximate == "none" else "gelu_tanh", x)

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + e^x)"""
        return self._pointwise("softplus", x)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up"""
        return self._pointwise("swiglu", gate, up)

    def silu_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy times the slope of silu at x"""
        return self._pointwise("silu_grad", dy, x)

    def swiglu_grad_gate(self, dy: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """dy times the slope of swiglu in its gate"""
        return self._pointwise("swiglu_grad_gate", dy, gate, up)

    def swiglu_grad_up(self, dy: Tensor, gate: Tensor) -> Tensor:
        """dy times the slope of swiglu in `up`"""
        return self._pointwise("swiglu_grad_up", dy, gate)
