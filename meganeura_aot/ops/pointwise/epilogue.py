"""What a kernel does to each element of its result as it stores it: pointwise steps, over extra inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Op, Operand
from .op import Step, broadcast_shapes, step_dtypes, write_steps

SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


class EpilogueOp(Op, register=False):
    """An operator that takes pointwise steps into its store: `fuse_epilogue` moves its users there.

    To the kernel the output is a batch of matrices: `batch`, `row` and `col` are WGSL variables, `M` and `N` overrides.

    epilogue: steps over (result, extra inputs...), each broadcast to the output; empty for none.
    """

    epilogue: tuple[Step, ...]
    operands: ClassVar[int] = 2  # the inputs of the operator itself; the extra inputs follow

    def as_matrices(self, shape: tuple[int, ...], out: tuple[int, ...]) -> tuple[int, ...] | None:
        """`shape`, which broadcasts to `out`, as [batch..., rows, columns] of `out`: a dimension is whole or 1.

        None where it cannot be written so: the kernel has no index for such an extra input.
        """
        raise NotImplementedError

    def check_epilogue(self, out: TensorType, extras: Sequence[TensorType]) -> TensorType:
        """The output type; raises GraphError when an extra input or the last step does not fit."""
        for extra in extras:
            if broadcast_shapes(f"{self.name} epilogue", [out.shape, extra.shape]) != out.shape:
                raise GraphError(f"{self.name} epilogue: {extra} does not broadcast to {out}")
        if self.epilogue and step_dtypes(self.epilogue, [DType.F32, *(e.dtype for e in extras)])[-1] != DType.F32:
            raise GraphError(f"{self.name} epilogue: expected f32 as its result")
        return out

    def lower_epilogue(self, extras: Sequence[Operand], out: Operand) -> tuple[dict[str, Operand], dict[str, Any]]:
        """The extra bindings by name, and the template variables `extras`, `epilogue` and `result`."""
        bound: dict[str, Operand] = {}
        texts = ["sum"]
        for extra in extras:
            if extra.literal is not None:
                texts.append(extra.literal)
                continue
            name = f"d{len(bound)}"
            bound[name] = extra
            texts.append(f"{name}[{self._index(extra.shape, out.shape)}]")
        lines, result = write_steps(self.epilogue, texts, [DType.F32, *(extra.dtype for extra in extras)])
        declared = [{"name": name, "dtype": operand.dtype} for name, operand in bound.items()]
        return bound, {"extras": declared, "epilogue": lines, "result": result}

    def _index(self, shape: tuple[int, ...], out: tuple[int, ...]) -> str:
        matrices = self.as_matrices(shape, out)
        assert matrices is not None, f"{self.name}: an extra input of shape {shape} was fused into {out}"
        return matrix_index(matrices)

    def kernel_label(self, form: str) -> str:
        """A name for the kernel: the form, then the steps."""
        return "_".join([form, *(step.op.name for step in self.epilogue)])

    def describe_epilogue(self, inputs: Sequence[TensorType]) -> str:
        """Text for the comment of a dispatch: ` + f32[64]` for a sum with an extra input, `, relu` for a function."""
        return "".join(self._step_text(step, inputs[self.operands :]) for step in self.epilogue)

    @staticmethod
    def _step_text(step: Step, extras: Sequence[TensorType]) -> str:
        positions = range(1, len(extras) + 1)
        others = [str(extras[i - 1]) for i in step.operands if i in positions]
        if step.op.name in SYMBOLS and len(others) == 1 and step.operands[0] not in positions:
            return f" {SYMBOLS[step.op.name]} {others[0]}"
        return f", {step.op.name}" + (f"({', '.join(others)})" if others else "")


def matrix_index(matrices: tuple[int, ...]) -> str:
    """WGSL for the index into [batch..., rows, columns] from batch, row and col: dimensions of size 1 are broadcast."""
    *batch, rows, columns = matrices
    terms = []
    if any(size > 1 for size in batch):
        terms.append("batch" + (" * M" if rows > 1 else "") + (" * N" if columns > 1 else ""))
    if rows > 1:
        terms.append("row" + (" * N" if columns > 1 else ""))
    if columns > 1:
        terms.append("col")
    return " + ".join(terms) or "0"
