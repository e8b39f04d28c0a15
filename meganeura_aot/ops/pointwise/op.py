"""Pointwise operators: each is a row of the table in pointwise_table.py; broadcasting is built in."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import DType, TensorType
from ...op import Lowering, Op, Operand

GROUP = 256  # threads a workgroup
LARGE = 1 << 20  # elements from which a thread takes four: one load each keeps too few bytes under way

ARITHMETIC = ("add", "sub", "mul", "div")
NUMBER = re.compile(r"(-?\d.*)f")  # an f32 literal of WGSL

Array = np.ndarray[Any, Any]


class Pointwise(Op, register=False):
    """out[i] = f(a[i], b[i], ...) with the inputs broadcast against each other as in NumPy.

    wgsl: a format string over the operands {0}, {1}, ... and the attributes, or one such string per dtype
    numpy: the same function over arrays, then the attributes
    rule: which dtypes it takes and gives: see `result_dtype`
    derivative: (g, dy, y, inputs, attributes) -> one gradient per input; None for an operator that has none, as what is
        a gradient itself, or whose gradient is zero everywhere, which then says is_flat
    """

    wgsl: ClassVar[str | Mapping[DType, str]]
    numpy: ClassVar[Callable[..., Any]]
    rule: ClassVar[str]
    arity: ClassVar[int]
    derivative: ClassVar[Callable[..., Any] | None]

    def attributes(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def infer(self, *types: TensorType) -> TensorType:
        """Broadcast the shapes; raises GraphError when they do not fit or the dtypes are not allowed."""
        if len(types) != self.arity:
            raise GraphError(f"{self.name}: expected {self.arity} inputs, got {len(types)}")
        return TensorType(broadcast_shapes(self.name, [t.shape for t in types]), self.result_dtype(types))

    def result_dtype(self, types: Sequence[TensorType]) -> DType:
        """float: f32 to f32. number, integer: one dtype in and out. compare: one dtype to f32. select: (any, T, T)
        to T. cast: any dtype to the attribute `dtype`."""
        dtypes = [t.dtype for t in types]
        if self.rule == "cast":
            return DType(self.attributes()["dtype"])
        same = dtypes[1:] if self.rule == "select" else dtypes
        if len(set(same)) > 1:
            raise GraphError(f"{self.name}: expected inputs of one dtype, got {' and '.join(map(str, dtypes))}")
        if self.rule == "float" and same[0].is_integer:
            raise GraphError(f"{self.name}: expected f32, got {same[0]}")
        if self.rule == "integer" and not same[0].is_integer:
            raise GraphError(f"{self.name}: expected i32 or u32, got {same[0]}")
        if self.rule == "signed" and same[0] is DType.U32:
            raise GraphError(f"{self.name}: expected f32 or i32, got u32")
        return DType.F32 if self.rule == "compare" else same[0]

    def reference(self, *arrays: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(type(self).numpy(*arrays, **self.attributes()))

    def expression(self, operands: Sequence[str], dtype: DType) -> str:
        """The WGSL of this operator over operand texts; `dtype` is that of the last operand."""
        wgsl = type(self).wgsl
        template = wgsl if isinstance(wgsl, str) else wgsl[dtype]
        shown = self.attributes()
        for place, (name, value) in enumerate(shown.items(), start=self.arity):
            shown[name] = attribute_text(value, place) if isinstance(value, float) else value
        return template.format(*operands, **shown)

    def gradient(self, g: Any, dy: Any, y: Any, *inputs: Any) -> tuple[Any, ...]:
        rule = type(self).derivative
        if rule is None:
            raise NotImplementedError("its row of the table has none")
        parts = rule(g, dy, y, *inputs, **self.attributes())
        return tuple(None if part is None else g.sum_to(part, x.shape) for part, x in zip(parts, inputs, strict=True))

    def lower(self, k: Lowering, *inputs: Operand, out: Operand) -> None:
        dispatch_pointwise(k, (Step(self, tuple(range(len(inputs)))),), inputs, out, self.name)


def kept(text: str, place: int) -> str:
    """WGSL for the same float, of which the shader compiler knows nothing. At two places it is two values to the compiler."""
    return f"kept_f32({text}, {place}u)"


def attribute_text(value: float, place: int) -> str:
    """A number in an operator's expression. 0 is hidden: the shader compiler would make 0 of a product with it, also of a
    product that is NaN. It simplifies nothing with other numbers."""
    text = f"{np.float32(value)!s}f"
    return text if value else kept(text, place)


@dataclass(frozen=True)
class Step:
    """One pointwise operator inside a kernel. Operands: 0.. are the kernel's inputs, then the earlier steps."""

    op: Pointwise
    operands: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op.name}({', '.join(map(str, self.operands))})"


def broadcast_shapes(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """NumPy's rule for any rank; raises GraphError with the shapes."""
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        larger = {size for size in sizes if size != 1}
        if len(larger) > 1:
            got = " and ".join(str(list(shape)) for shape in shapes)
            raise GraphError(f"{name}: expected shapes that broadcast together, got {got}")
        result.append(larger.pop() if larger else 1)
    return tuple(result)


def evaluate_steps(steps: Sequence[Step], arrays: Sequence[Array]) -> Array:
    """NumPy's meaning of a chain of steps."""
    values = list(arrays)
    for step in steps:
        values.append(step.op.reference(*(values[i] for i in step.operands)))
    return values[-1]


def step_dtypes(steps: Sequence[Step], dtypes: Sequence[DType]) -> list[DType]:
    """The dtype of every input, then of every step."""
    known = list(dtypes)
    for step in steps:
        known.append(step.op.result_dtype([TensorType((), known[i]) for i in step.operands]))
    return known


def write_steps(steps: Sequence[Step], texts: Sequence[str], dtypes: Sequence[DType]) -> tuple[list[str], str]:
    """WGSL statements for all steps but the last, and the expression of the last (the input where there is none).

    The shader compiler assumes that floats are finite when it simplifies. So the result of each step is hidden from it,
    and so is a value that occurs twice in a step: it has nothing to simplify.
    """
    known, values = step_dtypes(steps, dtypes), list(texts)
    lines: list[str] = []
    for index, step in enumerate(steps):
        result = step.op.expression(hidden_operands(step, values, known), known[step.operands[-1]])
        if index == len(steps) - 1:
            return lines, result
        is_float = known[len(texts) + index] is DType.F32
        lines.append(f"let v{index} = {kept(result, 0) if is_float else result};")
        values.append(f"v{index}")
    return lines, values[-1]


def hidden_operands(step: Step, values: Sequence[str], dtypes: Sequence[DType]) -> list[str]:
    """The WGSL of a step's operands. Floats with which the shader compiler could simplify the step are hidden from it.

    These are values that occur twice, and numbers. Numbers other than 0 in plain arithmetic stay visible: there is
    nothing to simplify, and the shader is easier to read.
    """
    texts = [values[i] for i in step.operands]
    operands = []
    for place, (i, text) in enumerate(zip(step.operands, texts, strict=True)):
        number = NUMBER.fullmatch(text)
        simplifies = number is not None and (step.op.name not in ARITHMETIC or float(number[1]) == 0)
        hide = dtypes[i] is DType.F32 and (simplifies or text in texts[:place])
        operands.append(kept(text, place) if hide else text)
    return operands


@dataclass(frozen=True)
class Collapsed:
    """Several shapes that broadcast to one, with neighbouring dimensions joined where all shapes agree to.

    dims: sizes, outermost first. spans[k][d]: whether shape k extends over dimension d (it is broadcast elsewhere).
    """

    dims: tuple[int, ...]
    spans: tuple[tuple[bool, ...], ...]


def collapse(out: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> Collapsed:
    """Join dimensions of `out` that every one of `shapes` either spans or lacks together."""
    padded = [(1,) * (len(out) - len(shape)) + shape for shape in shapes]
    dims: list[int] = []
    patterns: list[tuple[bool, ...]] = []
    for axis, size in enumerate(out):
        if size == 1:
            continue
        pattern = tuple(shape[axis] == size for shape in padded)
        if patterns and patterns[-1] == pattern:
            dims[-1] *= size
        else:
            dims.append(size)
            patterns.append(pattern)
    return Collapsed(tuple(dims), tuple(tuple(p[k] for p in patterns) for k in range(len(shapes))))


def index_text(spans: Sequence[bool]) -> str:
    """The WGSL index of a broadcast tensor from the coordinates c0, c1, ... of the collapsed output."""
    if all(spans):
        return "i"
    terms, stride = [], ""
    for axis in reversed(range(len(spans))):
        if spans[axis]:
            terms.append(f"c{axis}{stride}")
            stride += f" * D{axis}"
    return " + ".join(reversed(terms)) or "0"


def coordinate(axis: int, rank: int, index: str) -> str:
    """WGSL for one coordinate of the linear `index` into dimensions D0, D1, ..."""
    inner = [f"D{d}" for d in range(axis + 1, rank)]
    quotient = (
        index if not inner else f"{index} / {inner[0]}" if len(inner) == 1 else f"{index} / ({' * '.join(inner)})"
    )
    return f"{quotient} % D{axis}" if axis else quotient


def coordinate_lines(used: set[int], rank: int) -> list[str]:
    """WGSL statements that split the linear index i into the coordinates in `used`."""
    return [f"let c{axis} = {coordinate(axis, rank, 'i')};" for axis in sorted(used)]


def elementwise_groups(size: int) -> tuple[bool, int]:
    """Whether a thread takes four elements, and the workgroups that cover `size` of them."""
    wide = size >= LARGE
    return wide, math.ceil(size / (4 * GROUP if wide else GROUP))


def dispatch_pointwise(k: Lowering, steps: Sequence[Step], inputs: Sequence[Operand], out: Operand, label: str) -> None:
    """One kernel that computes `steps` for every element of `out`."""
    layout = collapse(out.shape, [operand.shape for operand in inputs])
    names: dict[tuple[str, str], str] = {}
    bind: dict[str, Operand] = {}
    texts = []
    constant = all(operand.literal for operand in inputs)  # a module must not compute infinities at compile time
    for operand, spans in zip(inputs, layout.spans, strict=True):
        index = index_text(spans)
        if operand.literal is not None and not constant:
            texts.append(operand.literal)
            continue
        key = (operand.buffer, index)
        name = names.setdefault(key, "abcdefgh"[len(names)])
        bind[name] = operand
        texts.append(f"{name}[{index}]")
    lines, result = write_steps(steps, texts, [operand.dtype for operand in inputs])
    used = {axis for spans in layout.spans if not all(spans) for axis, spanned in enumerate(spans) if spanned}
    coordinates = coordinate_lines(used, len(layout.dims))
    body = "\n".join([*coordinates, *texts])
    wide, groups = elementwise_groups(out.size)
    k.dispatch(
        "pointwise",
        variant={
            "inputs": [(name, operand.dtype) for name, operand in bind.items()],
            "out_dtype": out.dtype,
            "dims": [f"D{d}" for d in range(len(layout.dims)) if f"D{d}" in body],
            "lines": [*coordinates, *lines],
            "result": result,
            "title": label,
            "wide": wide,
        },
        bind={**bind, "out": out},
        const={"N": out.size} | {f"D{d}": s for d, s in enumerate(layout.dims) if f"D{d}" in body},
        groups=groups,
        label=label,
    )


def dispatch_copy(k: Lowering, x: Operand, out: Operand) -> None:
    """Copy x, broadcast to the shape of `out`."""
    dispatch_pointwise(k, (), (x,), out, "copy")
