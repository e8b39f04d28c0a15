"""The execution plan: buffers, and dispatches in order. Everything that a runner does is written here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .errors import PlanError
from .graph import Advance, TensorType
from .kernel import Kernel
from .program import Init, TrainingSpec
from .target import RAISABLE, Target

KINDS = ("parameter", "moment", "gradient", "state", "constant", "input", "output", "scratch")


@dataclass(frozen=True)
class BufferRef:
    """A whole GPU buffer. `label` is the user's name of a leaf or output, else the name of the value it holds.

    storage: "f16" where f32 numbers are kept as halves. trained: of a parameter, whether it is updated.
    bounds: the least and the largest number that an input may hold, or None.
    """

    name: str
    kind: str
    label: str
    type: TensorType
    nbytes: int
    entry: str = ""
    init: Init | float = None
    data: bytes = field(default=b"", repr=False)
    storage: str = ""
    trained: bool = False
    bounds: tuple[int, int] | None = None


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch. bindings: (binding, buffer, access) in the kernel's order; grid: workgroups in x, y, z.

    template and label: the file of shaders/ that the kernel was rendered from, and the name of its variant.
    """

    name: str
    template: str
    kernel: Kernel = field(repr=False)
    label: str
    bindings: tuple[tuple[str, str, str], ...]
    constants: tuple[tuple[str, int | float], ...]
    grid: tuple[int, int, int]
    comment: str

    def reads(self) -> list[str]:
        return [buffer for _, buffer, access in self.bindings if access != "read_write"]

    def writes(self) -> list[str]:
        return [buffer for _, buffer, access in self.bindings if access == "read_write"]


@dataclass(frozen=True)
class Output:
    """A named output of an entry: the buffer it is read from, and its type."""

    name: str
    buffer: str
    type: TensorType


@dataclass(frozen=True)
class EntryPlan:
    """One entry point: inputs (buffers) and outputs in the user's order, dispatches in order of execution."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[Output, ...]
    dispatches: tuple[Dispatch, ...]
    advances: tuple[Advance, ...] = ()


@dataclass(frozen=True)
class ExecutionPlan:
    """A whole program."""

    buffers: Mapping[str, BufferRef]
    entries: tuple[EntryPlan, ...]
    target: Target
    training: TrainingSpec | None = None

    def dispatches(self) -> Iterator[Dispatch]:
        for entry in self.entries:
            yield from entry.dispatches

    def limits(self) -> dict[str, int]:
        """The WebGPU limits that this plan needs above the defaults."""
        largest = max((buffer.nbytes for buffer in self.buffers.values()), default=0)
        names = ("max-storage-buffer-binding-size", "max-buffer-size")
        return {name: largest for name in names if largest > self.target.limits[name]}

    def verify(self) -> ExecutionPlan:
        """Return self; raises PlanError when a rule of WebGPU or of the plan itself is broken."""
        for name, needed in self.limits().items():
            if needed > RAISABLE[name]:
                raise PlanError(f"{name}: needed {needed}, adapters give at most {RAISABLE[name]}")
        gradients: set[str] = set()  # they live from one entry to the next
        for entry in self.entries:
            computed = ("scratch", "output", "gradient")
            written = {name for name, ref in self.buffers.items() if ref.kind not in computed or ref.type.size == 0}
            written |= gradients
            for dispatch in entry.dispatches:
                self._verify_dispatch(dispatch, written)
                written.update(dispatch.writes())
                gradients.update(name for name in dispatch.writes() if self.buffers[name].kind == "gradient")
            for output in entry.outputs:
                if output.buffer not in written:
                    raise PlanError(f"output {output.name}: nothing writes buffer {output.buffer}")
                if self.buffers[output.buffer].kind == "scratch":
                    raise PlanError(f"output {output.name}: {output.buffer} is scratch, which others write")
        return self

    def _verify_dispatch(self, dispatch: Dispatch, written: set[str]) -> None:
        kernel, name = dispatch.kernel, dispatch.name
        if [(b, a) for b, _, a in dispatch.bindings] != [(b.name, b.access) for b in kernel.bindings]:
            raise PlanError(f"{name}: bindings {dispatch.bindings} are not those of the kernel {kernel.bindings}")
        if {key for key, _ in dispatch.constants} != set(kernel.overrides):
            raise PlanError(f"{name}: constants {dispatch.constants} are not the overrides {kernel.overrides}")
        if len(kernel.bindings) > self.target.limits["max-storage-buffers-per-shader-stage"]:
            raise PlanError(f"{name}: {len(kernel.bindings)} storage buffers in one dispatch")
        if not all(1 <= size <= self.target.limits["max-compute-workgroups-per-dimension"] for size in dispatch.grid):
            raise PlanError(f"{name}: grid {dispatch.grid}")
        writes = dispatch.writes()
        if len(set(writes)) < len(writes) or set(writes) & set(dispatch.reads()):
            raise PlanError(f"{name}: a written buffer is bound twice: {dispatch.bindings}")
        for buffer in dispatch.reads():
            if buffer not in written:
                raise PlanError(f"{name}: reads {buffer} before anything writes it")
        for ref in map(self.buffers.__getitem__, writes):
            if ref.kind in ("constant", "input") or (ref.kind == "parameter" and not ref.trained):
                raise PlanError(f"{name}: writes {ref.name}, a {ref.kind} that stays as it is")

    def text(self) -> str:
        """The stable text form."""
        lines = [_buffer_line(buffer) for buffer in self.buffers.values()]
        for entry in self.entries:
            lines += ["", f"entry {entry.name}({', '.join(entry.inputs)})"]
            lines += [f"  {line}" for dispatch in entry.dispatches for line in _dispatch_lines(dispatch)]
            lines += [f"  advance {a.state} by {a.step} up to {a.limit}" for a in entry.advances]
            lines += [f"  output {o.name} = {o.buffer} : {o.type}" for o in entry.outputs]
        return "\n".join(lines) + "\n"


def _buffer_line(buffer: BufferRef) -> str:
    label = f" {buffer.label!r}" if buffer.label != buffer.name else ""
    stored = f" as {buffer.storage}" if buffer.storage else ""
    bounds = "" if buffer.bounds is None else f", each from {buffer.bounds[0]} to {buffer.bounds[1]}"
    return f"{buffer.kind} {buffer.name}{label} : {buffer.type}{stored}, {buffer.nbytes} bytes{bounds}"


def _dispatch_lines(dispatch: Dispatch) -> list[str]:
    bindings = ", ".join(f"{'*' * (a == 'read_write')}{b}={buffer}" for b, buffer, a in dispatch.bindings)
    constants = ", ".join(f"{key}={value}" for key, value in dispatch.constants)
    x, y, z = dispatch.grid
    return [f"{dispatch.name}: {dispatch.label}<{constants}>({bindings}) grid {x}x{y}x{z}", f"  # {dispatch.comment}"]
