"""Updates of parameters by their gradients: pure functions that give the new parameter and the new state.

What changes from step to step comes in a small f32 tensor `numbers`; `sgd_numbers` and `adam_numbers` say what is in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import GraphError
from ..graph import DType, TensorType
from ..op import Lowering, Op, Operand, Sample
from .pointwise import GROUP, Array

SGD_NUMBERS = ("lr", "momentum", "weight_decay")
ADAM_NUMBERS = ("lr", "beta1", "rest1", "beta2", "rest2", "eps", "weight_decay", "bias1", "bias2")


def sgd_numbers(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> Array:
    """The `numbers` of SgdUpdate."""
    return np.array([lr, momentum, weight_decay], dtype=np.float32)


def adam_numbers(
    lr: float, step: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Array:
    """The `numbers` of AdamUpdate and AdamWUpdate for the 1-based `step`.

    rest is 1 - beta and bias is 1 - beta^step: both would lose digits in f32.
    """
    (b1, b2), t = betas, step
    return np.array([lr, b1, 1 - b1, b2, 1 - b2, eps, weight_decay, 1 - b1**t, 1 - b2**t], dtype=np.float32)


@dataclass(frozen=True)
class SgdUpdate(Op):
    """g = grad + weight_decay * param; velocity = momentum * velocity + g; param - lr * velocity, as PyTorch's SGD.

    Without a velocity: param - lr * g. With nesterov: param - lr * (g + momentum * velocity), the new one.
    Inputs param, grad, numbers[, velocity]; outputs param[, velocity].
    """

    tolerance: ClassVar[str] = "norm"
    nesterov: bool = False

    def infer(
        self, param: TensorType, grad: TensorType, numbers: TensorType, velocity: TensorType | None = None
    ) -> TensorType | tuple[TensorType, ...]:
        _check(self.name, param, numbers, len(SGD_NUMBERS), grad, velocity or param)
        if velocity is None and self.nesterov:
            raise GraphError(f"{self.name}: expected a velocity, which nesterov needs, got none")
        return param if velocity is None else (param, param)

    def reference(self, param: Array, grad: Array, numbers: Array, velocity: Array | None = None) -> Any:
        lr, momentum, weight_decay = numbers
        g = grad + weight_decay * param
        if velocity is None:
            return np.asarray(param - lr * g)
        velocity = momentum * velocity + g
        step = g + momentum * velocity if self.nesterov else velocity
        return np.asarray(param - lr * step), np.asarray(velocity)

    def lower(
        self,
        k: Lowering,
        param: Operand,
        grad: Operand,
        numbers: Operand,
        velocity: Operand | None = None,
        *,
        out: Operand | tuple[Operand, ...],
    ) -> None:
        read = {"param": param, "grad": grad, "numbers": numbers} | ({"velocity": velocity} if velocity else {})
        outs = out if isinstance(out, tuple) else (out,)
        written = dict(zip(("out_param", "out_velocity"), outs, strict=False))
        names = SGD_NUMBERS if velocity else ("lr", "", "weight_decay")
        _dispatch(k, self.name, names, read, written, rule="sgd", nesterov=self.nesterov)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        draws = ("normal", "normal", "sgd numbers", "normal")
        plain: list[tuple[int, ...]] = [(3, 5), (4, 256)]
        moving: list[tuple[tuple[int, ...], bool]] = [((8, 33), False), ((257,), True), ((4, 256), True), ((), False)]

        def types(shape: tuple[int, ...]) -> tuple[TensorType, ...]:
            return (*(TensorType(shape),) * 2, TensorType((len(SGD_NUMBERS),)))

        return [
            *(Sample(cls(), types(shape), draws[:3]) for shape in [*plain, (0, 3)]),
            *(Sample(cls(nesterov), (*types(shape), TensorType(shape)), draws) for shape, nesterov in moving),
        ]


@dataclass(frozen=True)
class AdamUpdate(Op):
    """PyTorch's Adam: g = grad + weight_decay * param, m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,

    param - lr * (m / bias1) / (sqrt(v / bias2) + eps). Inputs param, grad, m, v, numbers; outputs param, m, v.
    """

    tolerance: ClassVar[str] = "norm"
    decoupled: ClassVar[bool] = False

    def infer(
        self, param: TensorType, grad: TensorType, m: TensorType, v: TensorType, numbers: TensorType
    ) -> tuple[TensorType, ...]:
        _check(self.name, param, numbers, len(ADAM_NUMBERS), grad, m, v)
        return (param, param, param)

    def reference(self, param: Array, grad: Array, m: Array, v: Array, numbers: Array) -> tuple[Array, ...]:
        lr, beta1, rest1, beta2, rest2, eps, weight_decay, bias1, bias2 = numbers
        g = grad if self.decoupled else grad + weight_decay * param
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        kept = param * (1 - lr * weight_decay) if self.decoupled else param
        return np.asarray(kept - lr * (m / bias1) / (np.sqrt(v / bias2) + eps)), np.asarray(m), np.asarray(v)

    def lower(
        self,
        k: Lowering,
        param: Operand,
        grad: Operand,
        m: Operand,
        v: Operand,
        numbers: Operand,
        *,
        out: tuple[Operand, ...],
    ) -> None:
        read = {"param": param, "grad": grad, "m": m, "v": v, "numbers": numbers}
        written = dict(zip(("out_param", "out_m", "out_v"), out, strict=True))
        _dispatch(k, self.name, ADAM_NUMBERS, read, written, rule="adam", decoupled=self.decoupled)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        draws = ("normal", "normal", "normal", "positive", "adam numbers")
        numbers = TensorType((len(ADAM_NUMBERS),))
        shapes: list[tuple[int, ...]] = [(3, 5), (257,), (4, 256), (), (0, 3)]
        tiny = Sample(cls(), (*(TensorType((2, 33)),) * 4, numbers), ("normal", "small", "small", "zero", draws[-1]))
        return [*(Sample(cls(), (*(TensorType(s),) * 4, numbers), draws) for s in shapes), tiny]


@dataclass(frozen=True)
class AdamWUpdate(AdamUpdate):
    """PyTorch's AdamW: as Adam, but g = grad, and the weight decay shrinks the parameter itself by 1 - lr * weight_decay."""

    name: ClassVar[str] = "adamw_update"
    decoupled: ClassVar[bool] = True


def _check(name: str, param: TensorType, numbers: TensorType, count: int, *others: TensorType) -> None:
    """Raise GraphError unless all are f32, `others` of the shape of the parameter, and `numbers` of shape [count]."""
    if param.dtype is not DType.F32 or any(other != param for other in others):
        raise GraphError(f"{name}: expected f32 tensors of one shape, got {', '.join(map(str, (param, *others)))}")
    if numbers != TensorType((count,)):
        raise GraphError(f"{name}: expected numbers {TensorType((count,))}, got {numbers}")


def _dispatch(
    k: Lowering,
    title: str,
    names: Sequence[str],
    read: dict[str, Operand],
    written: dict[str, Operand],
    **variant: Any,
) -> None:
    size = read["param"].size
    lanes = 1 if size % 4 else 4
    k.dispatch(
        "optimizer",
        variant={
            **variant,
            "title": title,
            "names": names,
            "read": list(read),
            "written": list(written),
            "load_type": "f32" if lanes == 1 else "vec4<f32>",
        },
        bind={**read, **written},
        const={"COUNT": size // lanes},
        groups=math.ceil(size / lanes / GROUP),
        label=title,
    )
