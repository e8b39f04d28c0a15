"""Matrix products: one operator for the four transpose forms, broadcast batches, and what is fused into the store."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Operand, Sample
from ..pointwise.epilogue import EpilogueOp
from ..pointwise.op import Array, Step, broadcast_shapes, collapse, coordinate, evaluate_steps, index_text
from .schedule import choose_kernel


@dataclass(frozen=True)
class MatMul(EpilogueOp):
    """out[..., M, N] = A[..., M, K] @ B[..., K, N], summed in f32; then the epilogue on every element.

    trans_a: A is stored [..., K, M]; trans_b: B is stored [..., N, K]. Batch dimensions broadcast.
    epilogue: pointwise steps over (product, extra inputs...), each broadcast to the output; empty for none.
    """

    name: ClassVar[str] = "matmul"
    tolerance: ClassVar[str] = "contraction"
    trans_a: bool = False
    trans_b: bool = False
    epilogue: tuple[Step, ...] = ()

    def infer(self, a: TensorType, b: TensorType, *extras: TensorType) -> TensorType:
        if a.rank < 2 or b.rank < 2 or a.dtype is not DType.F32 or b.dtype is not DType.F32:
            raise GraphError(f"matmul: expected two f32 tensors of rank 2 or more, got {a} and {b}")
        (m, k), (k_b, n) = self.split(a.shape, self.trans_a), self.split(b.shape, self.trans_b)
        if k != k_b:
            form = f"{a}{'^T' * self.trans_a} @ {b}{'^T' * self.trans_b}"
            raise GraphError(f"matmul: expected inner sizes that agree, got {k} and {k_b} in {form}")
        batch = broadcast_shapes("matmul", [a.shape[:-2], b.shape[:-2]])
        return self.check_epilogue(TensorType((*batch, m, n)), extras)

    @staticmethod
    def split(shape: tuple[int, ...], transposed: bool) -> tuple[int, int]:
        """The last two sizes in the order in which the product uses them."""
        return (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])

    def product(self, a: Array, b: Array) -> Array:
        a = np.swapaxes(a, -1, -2) if self.trans_a else a
        b = np.swapaxes(b, -1, -2) if self.trans_b else b
        return np.asarray(np.matmul(a, b))

    def reference(self, a: Array, b: Array, *extras: Array) -> Array:
        return evaluate_steps(self.epilogue, [self.product(a, b), *extras])

    def gradient(self, g: Any, dy: Any, y: Any, a: Any, b: Any) -> tuple[Any, ...]:
        da = g.matmul(b, dy, self.trans_b, True) if self.trans_a else g.matmul(dy, b, False, not self.trans_b)
        db = g.matmul(dy, a, True, self.trans_a) if self.trans_b else g.matmul(a, dy, not self.trans_a, False)
        return (g.sum_to(da, a.shape), g.sum_to(db, b.shape))

    def describe(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> str:
        a, b = (f"{t}{'^T' * flag}" for t, flag in zip(inputs, (self.trans_a, self.trans_b), strict=False))
        return f"{a} @ {b}{self.describe_epilogue(inputs)} -> {outputs[0]}"

    def as_matrices(self, shape: tuple[int, ...], out: tuple[int, ...]) -> tuple[int, ...] | None:
        """The batch must be the output's whole batch, or one."""
        padded = (1,) * (len(out) - len(shape)) + shape
        return padded if padded[:-2] == out[:-2] or math.prod(padded[:-2]) == 1 else None

    def lower(self, k: Lowering, a: Operand, b: Operand, *extras: Operand, out: Operand) -> None:
        if out.size == 0:
            return
        (m, depth), (_, n) = self.split(a.shape, self.trans_a), self.split(b.shape, self.trans_b)
        batch = out.shape[:-2]
        choice = choose_kernel(m, n, depth, math.prod(batch), self.trans_a, self.trans_b, k.target.name)
        layout = collapse(batch, [a.shape[:-2], b.shape[:-2]])
        a_batch, b_batch = (batch_text(spans, layout.dims) for spans in layout.spans)
        sizes = {f"D{axis}": size for axis, size in enumerate(layout.dims) if f"D{axis}" in f"{a_batch} {b_batch}"}
        bound, finish = self.lower_epilogue(extras, out)
        form = "matmul" + ("_at" if self.trans_a else "") + ("_bt" if self.trans_b else "")
        k.dispatch(
            choice.template,
            variant={
                **choice.variant,
                "trans_a": self.trans_a,
                "trans_b": self.trans_b,
                "batch_overrides": list(sizes),
                "a_batch": a_batch,
                "b_batch": b_batch,
                **finish,
            },
            bind={"a": a, "b": b, **bound, "out": out},
            const={"M": m, "N": n, "K": depth, **sizes, **choice.constants},
            groups=choice.groups,
            label=self.kernel_label(form),
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(a: tuple[int, ...], b: tuple[int, ...], trans_a: bool = False, trans_b: bool = False) -> Sample:
            return Sample(cls(trans_a, trans_b), (TensorType(a), TensorType(b)))

        return [
            sample((33, 17), (17, 65)),
            sample((17, 33), (17, 65), trans_a=True),
            sample((33, 17), (65, 17), trans_b=True),
            sample((17, 33), (65, 17), True, True),
            sample((1, 129), (129, 7)),
            sample((3, 0), (0, 4)),
            sample((0, 3), (3, 4)),
            sample((2, 3, 5, 7), (2, 3, 7, 4)),
            sample((2, 1, 5, 7), (3, 7, 4)),
            sample((4, 5, 7), (4, 7), trans_b=True),
            sample((5, 7), (4, 3, 7, 6)),
        ]


def batch_text(spans: Sequence[bool], dims: Sequence[int]) -> str:
    """WGSL for the index of a matrix in A or B from `batch`, its index in the output."""
    if not any(spans):
        return "0u"
    if all(spans):
        return "batch"
    return re.sub(r"\bc(\d+)\b", lambda c: f"({coordinate(int(c[1]), len(dims), 'batch')})", index_text(spans))
