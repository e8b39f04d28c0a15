"""Updates of parameters by their gradients, in place, and what clipping by the global norm needs.

What changes from step to step comes in a small f32 tensor `numbers`, a uniform: `SGD_NUMBERS` and `ADAM_NUMBERS` name
what is in it, runtime_stub/optimizer.py computes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand, Sample, make
from ..pointwise.op import GROUP, Array, Pointwise, Step, dispatch_pointwise
from ..reduce.op import Fold, reduce_rows
from ..reduce.rows import rows_of

SGD_NUMBERS = ("lr", "momentum", "weight_decay")
CLIP_EPS = 1e-6
BOUND = 7  # buffers that a kernel reads at once
ADAM_NUMBERS = ("lr", "beta1", "rest1", "beta2", "rest2", "eps", "weight_decay", "bias1", "bias2")


class Update(Op, register=False):
    """Inputs param, grad, numbers, the moments, and with `scaled` a f32 [] that the gradient is multiplied by first.

    The parameter and its moments, f32 of one shape, are written in place; they are the outputs too.
    """

    tolerance: ClassVar[str] = "norm"
    names: ClassVar[tuple[str, ...]]
    scaled: bool

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of what is kept from step to step."""
        raise NotImplementedError

    def infer(self, param: TensorType, grad: TensorType, numbers: TensorType, *more: TensorType) -> Any:
        count = len(self.moments)
        kept, scale = more[:count], more[count:]
        if param.dtype is not DType.F32 or any(other != param for other in (grad, *kept)) or len(kept) < count:
            got = ", ".join(map(str, (param, grad, *kept)))
            raise GraphError(f"{self.name}: expected {count + 2} f32 tensors of one shape, got {got}")
        if numbers != TensorType((len(self.names),)):
            raise GraphError(f"{self.name}: expected numbers {TensorType((len(self.names),))}, got {numbers}")
        if scale != (TensorType(()),) * self.scaled:
            raise GraphError(f"{self.name}: expected {int(self.scaled)} scale f32[], got {list(map(str, scale))}")
        return (param, *kept) if kept else param

    def lower(self, k: Lowering, param: Operand, grad: Operand, numbers: Operand, *more: Operand, out: Any) -> None:
        outs = out if isinstance(out, tuple) else (out,)
        written = dict(zip(("param", *self.moments), outs, strict=True))
        read = {"grad": grad} | ({"scale": more[-1]} if self.scaled else {})
        lanes = 1 if param.size % 4 else 4
        k.dispatch(
            "optimizer",
            variant={
                **self.variant(),
                "title": self.name,
                "names": self.names,
                "read": list(read),
                "written": list(written),
                "scaled": self.scaled,
                "load_type": "f32" if lanes == 1 else "vec4<f32>",
            },
            bind={**read, **written, "numbers": numbers},
            const={"COUNT": param.size // lanes},
            groups=math.ceil(param.size / lanes / GROUP),
            label=self.name + "_scaled" * self.scaled,
        )

    def variant(self) -> dict[str, Any]:
        """Template variables that say which update it is."""
        raise NotImplementedError

    def describe(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> str:
        kept = f", {' and '.join(self.moments)} kept" if self.moments else ""
        return f"{self.name} of {inputs[0]}{kept}"


@dataclass(frozen=True)
class SgdUpdate(Update):
    """g = grad + weight_decay * param; velocity = momentum * velocity + g; param -= lr * velocity: PyTorch's SGD.

    Without momentum: param -= lr * g. With nesterov: param -= lr * (g + momentum * velocity), the new one.
    Moments: momentum_buffer where there is momentum.
    """

    writes: ClassVar[tuple[int, ...]] = (0, 3)
    names: ClassVar[tuple[str, ...]] = SGD_NUMBERS
    momentum: bool = False
    nesterov: bool = False
    scaled: bool = False

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def reference(self, param: Array, grad: Array, numbers: Array, *more: Array) -> Any:
        lr, momentum, weight_decay = numbers
        g = (grad * more[-1] if self.scaled else grad) + weight_decay * param
        if not self.momentum:
            return np.asarray(param - lr * g)
        velocity = momentum * more[0] + g
        step = g + momentum * velocity if self.nesterov else velocity
        return np.asarray(param - lr * step), np.asarray(velocity)

    def variant(self) -> dict[str, Any]:
        return {"rule": "sgd", "nesterov": self.nesterov}

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        shapes: list[tuple[int, ...]] = [(3, 5), (4, 256), (0, 3), (257,), ()]
        ops = [cls(), cls(True), cls(True, True), cls(scaled=True), cls(True, scaled=True)]
        return [_sample(op, shape, "sgd numbers") for op in ops for shape in shapes[: 5 if op == cls() else 3]]


@dataclass(frozen=True)
class AdamUpdate(Update):
    """PyTorch's Adam: param -= lr * (m / bias1) / (sqrt(v / bias2) + eps), bias = 1 - beta^step.

    g = grad + weight_decay * param, m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2. Moments m and v are
    exp_avg and exp_avg_sq.
    """

    writes: ClassVar[tuple[int, ...]] = (0, 3, 4)
    names: ClassVar[tuple[str, ...]] = ADAM_NUMBERS
    decoupled: ClassVar[bool] = False
    scaled: bool = False

    @property
    def moments(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def reference(
        self, param: Array, grad: Array, numbers: Array, m: Array, v: Array, scale: Array | float = 1.0
    ) -> tuple[Array, ...]:
        lr, beta1, rest1, beta2, rest2, eps, weight_decay, bias1, bias2 = numbers
        g = grad * scale if self.decoupled else grad * scale + weight_decay * param
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        kept = param * (1 - lr * weight_decay) if self.decoupled else param
        return np.asarray(kept - lr * (m / bias1) / (np.sqrt(v / bias2) + eps)), np.asarray(m), np.asarray(v)

    def variant(self) -> dict[str, Any]:
        return {"rule": "adam", "decoupled": self.decoupled}

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        shapes: list[tuple[int, ...]] = [(3, 5), (257,), (4, 256), (), (0, 3)]
        cases = [_sample(cls(), shape, "adam numbers") for shape in shapes]
        cases += [_sample(cls(True), shape, "adam numbers") for shape in shapes[:3]]
        tiny = ("normal", "small", "adam numbers", "small", "zero")
        return [*cases, Sample(cls(), cases[0].inputs, tiny)]


@dataclass(frozen=True)
class AdamWUpdate(AdamUpdate):
    """PyTorch's AdamW: as Adam, but g = grad, and the weight decay shrinks the parameter itself by 1 - lr * weight_decay."""

    name: ClassVar[str] = "adamw_update"
    decoupled: ClassVar[bool] = True


def _sample(op: Update, shape: tuple[int, ...], numbers: str) -> Sample:
    each, count = TensorType(shape), len(op.moments)
    types = (each, each, TensorType((len(op.names),)), *(each,) * count, *(TensorType(()),) * op.scaled)
    moments = ("normal", "positive")[:count]
    return Sample(op, types, ("normal", "normal", numbers, *moments, *("positive",) * op.scaled))


@dataclass(frozen=True)
class ClipScale(Op):
    """min(1, clip / (norm + 1e-6)), norm that of all gradients together: what torch.nn.utils.clip_grad_norm_ scales by.

    Inputs clip, f32 [], and one gradient or more, f32 of any shape; the output is f32 [].
    """

    tolerance: ClassVar[str] = "norm"

    def infer(self, clip: TensorType, *gradients: TensorType) -> TensorType:
        if clip != TensorType(()) or not gradients or any(t.dtype is not DType.F32 for t in gradients):
            got = ", ".join(map(str, (clip, *gradients)))
            raise GraphError(f"{self.name}: expected clip f32[] and f32 gradients, got {got}")
        return clip

    def reference(self, clip: Array, *gradients: Array) -> Array:
        norm = np.sqrt(sum(np.sum(gradient * gradient) for gradient in gradients))
        return np.asarray(np.minimum(1, clip / (norm + CLIP_EPS)))

    def lower(self, k: Lowering, clip: Operand, *gradients: Operand, out: Operand) -> None:
        """The square sum of each, sums of up to seven of them until one is left, and the scale."""
        one = TensorType(())
        sums = [k.scratch(one, f"{self.name}_square") for _ in gradients]
        for gradient, square in zip(gradients, sums, strict=True):
            fold = Fold(f"{self.name}_square", "f32", "sum", "a * a")
            reduce_rows(k, fold, {"x": gradient}, square, rows_of(1, gradient.size))
        while len(sums) > 1:
            parts = [sums[i : i + BOUND] for i in range(0, len(sums), BOUND)]
            sums = [self._sum(k, part) if len(part) > 1 else part[0] for part in parts]
        steps = (
            _step("sqrt", (0,)),
            _step("add", (4, 2)),
            _step("div", (1, 5)),
            _step("minimum", (6, 3)),
        )
        eps, most = (Operand(one, "", literal) for literal in (f"{CLIP_EPS}f", "1.0f"))
        dispatch_pointwise(k, steps, [sums[0], clip, eps, most], out, self.name)

    def _sum(self, k: Lowering, parts: Sequence[Operand]) -> Operand:
        total = k.scratch(TensorType(()), f"{self.name}_sum")
        count = len(parts)
        steps = [_step("add", (0 if i == 1 else count + i - 2, i)) for i in range(1, count)]
        dispatch_pointwise(k, steps, parts, total, f"{self.name}_sum")
        return total

    def describe(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> str:
        return f"the norm of {len(inputs) - 1} gradients, and what to scale them by"

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        shapes: list[list[tuple[int, ...]]] = [[(3, 5)], [(), (70000,), (0, 3)], [(9001, 8), (7,)], [(33,)] * 60]
        types = [(TensorType(()), *map(TensorType, each)) for each in shapes]
        return [
            *(Sample(cls(), each, "positive") for each in types),
            Sample(cls(), types[1], ("positive", *["zero"] * 3)),
        ]


def _step(name: str, operands: tuple[int, ...]) -> Step:
    op = make(name)
    assert isinstance(op, Pointwise)
    return Step(op, operands)
