"""Graph to plan: each operator lowers itself; this file gives it names, storage and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .bounds import input_bounds
from .errors import GraphError, KernelError, LoweringError
from .graph import GraphIR, Node, TensorType, Value
from .kernel import read_as_f16, render
from .op import Operand
from .ops.pointwise.op import dispatch_copy
from .ops.state.leaf import Constant, Gradient, Input, Leaf, Moment, Parameter, State, gradient_label
from .plan import KINDS, BufferRef, Dispatch, EntryPlan, ExecutionPlan, Output
from .program import TrainingSpec
from .target import Target

EMPTY = 16  # bytes of a buffer that holds nothing: a kernel may bind it as an array of vec4
LARGEST_CONSTANT = 1 << 20  # bytes of one constant inside the emitted file
SHARED = ("parameter", "moment", "gradient", "state")  # kinds of buffers that all entries have in common
KIND_OF_LEAF: Mapping[type[Leaf], str] = {
    Input: "input",
    Parameter: "parameter",
    Moment: "moment",
    Gradient: "gradient",
    State: "state",
}


def fold_grid(groups: int, limit: int) -> tuple[int, int, int]:
    """A grid of at least `groups` workgroups in x and y; kernels compute group = y * size_x + x and guard the rest."""
    if groups <= limit:
        return (groups, 1, 1)
    rows = -(-groups // limit)
    return (-(-groups // rows), rows, 1)


class EntryLowering:
    """Lowers one graph; `dispatch` and `scratch` are what operators call."""

    def __init__(
        self,
        entry: str,
        graph: GraphIR,
        target: Target,
        several: bool,
        shared: frozenset[str],
        trained: frozenset[str],
    ) -> None:
        """shared: names of the leaves that all entries have in common, which no other buffer may take.

        trained: labels of the parameters that an entry updates.
        """
        self.entry, self.graph, self.target, self.several = entry, graph, target, several
        self.shared, self.trained = shared, trained
        self.buffers: dict[str, BufferRef] = {}
        self.dispatches: list[Dispatch] = []
        self.storage: dict[Value, str] = {}
        self.counts: Counter[str] = Counter()
        self.current: tuple[Node, str] | None = None
        self.bounds = input_bounds(graph)

    # what operators call

    def dispatch(
        self,
        template: str,
        *,
        variant: Mapping[str, Any],
        bind: Mapping[str, Operand],
        const: Mapping[str, int | float],
        groups: int,
        label: str = "",
    ) -> None:
        """Append a launch of `groups` workgroups of a template; nothing where groups is 0."""
        if groups == 0:
            return
        assert self.current is not None
        node, comment = self.current
        kernel = render(template, variant)
        missing = {binding.name for binding in kernel.bindings} ^ bind.keys()
        if missing or set(kernel.overrides) != const.keys():
            raise KernelError(
                f"{node.op.name}: template {template} declares {[b.name for b in kernel.bindings]} and overrides "
                f"{list(kernel.overrides)}, the operator gave {list(bind)} and {list(const)}"
            )
        halves = [b.name for b in kernel.bindings if bind[b.name].storage == "f16"]
        for name in halves:
            kernel = read_as_f16(kernel, name)
        self.dispatches.append(
            Dispatch(
                name=self.unique(node.op.name),
                template=template,
                kernel=kernel,
                label=(label or node.op.name) + "_f16" * bool(halves),
                bindings=tuple((b.name, bind[b.name].buffer, b.access) for b in kernel.bindings),
                constants=tuple((name, const[name]) for name in kernel.overrides),
                grid=fold_grid(groups, self.target.limits["max-compute-workgroups-per-dimension"]),
                comment=comment,
            )
        )

    def scratch(self, type_: TensorType, name: str = "partial") -> Operand:
        """A new buffer for values between two dispatches of one operator."""
        return Operand(type_, self.add_buffer("scratch", name, type_))

    # names and buffers

    def unique(self, base: str) -> str:
        name = f"{base}_{self.counts[base]}"
        self.counts[base] += 1
        return f"{self.entry}.{name}" if self.several else name

    def add_buffer(self, kind: str, label: str, type_: TensorType, **more: Any) -> str:
        if kind in SHARED:
            name, entry = label, ""
            if name in self.buffers:
                raise GraphError(
                    f"{kind} {label!r}: expected a name of its own, got that of a {self.buffers[name].kind}"
                )
        else:
            name, entry = f"{self.entry}.{label}" if self.several else label, self.entry
            while name in self.buffers or name in self.shared:
                name += "_"
        nbytes = -(-type_.size // 2) * 4 if more.get("storage") == "f16" else type_.nbytes
        self.buffers[name] = BufferRef(name, kind, label, type_, nbytes or EMPTY, entry, **more)
        return name

    def operand(self, value: Value) -> Operand:
        op = self.graph.nodes[value.node].op
        literal = op.literal() if isinstance(op, Constant) else None
        memory = self.storage[value]
        return Operand(self.graph.type_of(value), memory, literal, self.buffers[memory].storage)

    # the walk

    def run(self) -> EntryPlan:
        problems: list[str] = []
        results = self._name_results()
        for index, node in enumerate(self.graph.nodes):
            try:
                self._lower(index, node, results)
            except NotImplementedError as error:
                problems.append(f"%{index} {node.op.name} (built at {node.location}): {error}")
        if problems:
            raise LoweringError("cannot lower:\n" + "\n".join(problems))
        for value, (_, name, _) in results.items():
            if self.buffers[self.storage[value]].storage:
                self._unpack_output(value, name)
        for name, value in self.graph.gradients:
            self._keep_gradient(name, value)
        plans = tuple(
            Output(name, self.storage[value], self.graph.type_of(value)) for name, value in self.graph.outputs
        )
        nodes = enumerate(self.graph.nodes)
        inputs = tuple(self.storage[Value(index)] for index, node in nodes if isinstance(node.op, Input))
        return EntryPlan(self.entry, inputs, plans, tuple(self.dispatches), self.graph.advances)

    def _name_results(self) -> dict[Value, tuple[str, str, TensorType]]:
        """The kind, label and type of the buffer that each value to be kept is stored in: by the first of its names."""
        results: dict[Value, tuple[str, str, TensorType]] = {}
        for name, value in self.graph.outputs:
            owner = self._owner(value)
            results.setdefault(owner, ("output", name, self.graph.type_of(owner)))
        for name, value in self.graph.gradients:
            results.setdefault(self._owner(value), ("gradient", gradient_label(name), self.graph.type_of(value)))
        return results

    def _keep_gradient(self, name: str, value: Value) -> None:
        """Every gradient has a buffer of its own, also one that is an output, a leaf, or another's as well."""
        label, operand = gradient_label(name), self.operand(value)
        if operand.buffer == label:
            return
        result = Operand(operand.type, self.add_buffer("gradient", label, operand.type))
        self.current = (self.graph.nodes[value.node], f"{operand.buffer} kept: {operand.type}")
        dispatch_copy(self, operand, result)

    def _unpack_output(self, value: Value, name: str) -> None:
        """An output that is a parameter stored as f16 is read as f32."""
        node, operand = self.graph.nodes[value.node], self.operand(value)
        result = Operand(operand.type, self.add_buffer("output", name, operand.type))
        self.current = (node, f"{operand.buffer} as {operand.type}")
        dispatch_copy(self, operand, result)
        self.storage.update({v: result.buffer for v, memory in self.storage.items() if memory == operand.buffer})

    def _owner(self, value: Value) -> Value:
        """The computed value in whose memory `value` is: itself, what it is a view of, or what it was written over."""
        own = value = self.graph.viewed(value)
        while (op := self.graph.nodes[value.node].op).writes:
            value = self.graph.viewed(self.graph.nodes[value.node].inputs[op.writes[value.port]])
        return own if isinstance(op, Leaf) else value

    def _lower(self, index: int, node: Node, results: Mapping[Value, tuple[str, str, TensorType]]) -> None:
        value = Value(index)
        if isinstance(node.op, Leaf):
            more: dict[str, Any] = {}
            if isinstance(node.op, Parameter):
                more = {"init": node.op.init, "storage": node.op.storage, "trained": node.op.label in self.trained}
            elif isinstance(node.op, State):
                more = {"init": node.op.init or None, "storage": node.op.storage}
            elif value in self.bounds:
                more = {"bounds": self.bounds[value]}
            kind = KIND_OF_LEAF[type(node.op)]
            self.storage[value] = self.add_buffer(kind, node.op.label, node.types[0], **more)
            return
        if isinstance(node.op, Constant):
            if node.types[0].nbytes > LARGEST_CONSTANT:
                where = f"constant {node.types[0]} (built at {node.location})"
                raise GraphError(
                    f"{where}: expected at most 1 MiB, got {node.types[0].nbytes} bytes; make it a parameter"
                )
            name = self.unique("constant").removeprefix(f"{self.entry}.")
            self.storage[value] = self.add_buffer("constant", name, node.types[0], data=node.op.data)
            return
        if node.op.is_view:
            self.storage[value] = self.storage[node.inputs[0]]
            return
        if node.op.writes:
            self._write_in_place(index, node)
            return
        for port, type_ in enumerate(node.types):
            kept = results.get(Value(index, port))
            place = f".{port}" if port else ""
            scratch = ("scratch", f"{node.op.name}_{self.counts[node.op.name]}{place}", type_)
            self.storage[Value(index, port)] = self.add_buffer(*(kept or scratch))
        self._call(node, [self.operand(v) for v in node.inputs], [Value(index, p) for p in range(len(node.types))])

    def _call(self, node: Node, inputs: list[Operand], outputs: list[Value]) -> None:
        results = [Operand(self.graph.type_of(value), self.storage[value]) for value in outputs]
        self.current = (node, describe(node, [operand.type for operand in inputs]) + self._named(results[0].buffer))
        node.op.lower(self, *inputs, out=results[0] if len(results) == 1 else tuple(results))

    def _write_in_place(self, index: int, node: Node) -> None:
        """Lower a write; an old version is copied first when someone still reads it afterwards."""
        memory = {before: self.storage[before] for before, _ in self.graph.writes(index)}
        for before in memory:
            self._save_old(index, before)
        for before, after in self.graph.writes(index):
            self.storage[after] = memory[before]
        written = range(len(node.types))
        places = dict(zip(node.op.writes, written, strict=False))
        operands = [
            self._in_memory(v, memory[v]) if place in places else self.operand(v) for place, v in enumerate(node.inputs)
        ]
        self._call(node, operands, [Value(index, port) for port in written])

    def _named(self, buffer: str) -> str:
        """For the comment: the user's name of what is written, where a parameter, a gradient or a state is."""
        ref = self.buffers[buffer]
        return f": {ref.label}" if ref.kind in SHARED else ""

    def _in_memory(self, value: Value, memory: str) -> Operand:
        return Operand(self.graph.type_of(value), memory, storage=self.buffers[memory].storage)

    def _save_old(self, index: int, old: Value) -> None:
        """Copy what node `index` is about to overwrite where it, a later node or an output reads it."""
        node, memory = self.graph.nodes[index], self.storage[old]
        views = {value for value, name in self.storage.items() if name == memory}
        readers = [v for place, v in enumerate(node.inputs) if place not in node.op.writes[: len(node.types)]]
        readers += [v for later in self.graph.nodes[index + 1 :] for v in later.inputs]
        readers += [self.graph.viewed(value) for _, value in self.graph.outputs + self.graph.gradients]
        if not views.intersection(readers):
            return
        is_output = any(self.graph.viewed(value) in views for _, value in self.graph.outputs)
        kind, label = "output" if is_output else "scratch", f"old_{self.buffers[memory].label}"
        type_ = self.graph.type_of(old)
        saved = Operand(type_, self.add_buffer(kind, label, type_))
        self.current = (node, f"{memory} before it is written: {saved.type}")
        dispatch_copy(self, self._in_memory(old, memory), saved)
        self.storage.update(dict.fromkeys(views, saved.buffer))


def describe(node: Node, types: list[TensorType]) -> str:
    """The comment above a dispatch: what is computed, in shapes."""
    custom = getattr(node.op, "describe", None)
    if custom is not None:
        return str(custom(types, node.types))
    return f"{node.op.name}({', '.join(map(str, types))}) -> {', '.join(map(str, node.types))}"


def lower(graphs: Mapping[str, GraphIR], target: Target, training: TrainingSpec | None = None) -> ExecutionPlan:
    """The plan of a whole program; parameters and states are shared by name. Raises LoweringError, GraphError."""
    trained = frozenset(name for graph in graphs.values() for name, _ in graph.gradients)
    buffers: dict[str, BufferRef] = {}
    entries = []
    nodes = [node for graph in graphs.values() for node in graph.nodes]
    shared = frozenset(node.op.label for node in nodes if isinstance(node.op, Leaf) and not isinstance(node.op, Input))
    for name, graph in graphs.items():
        lowering = EntryLowering(name, graph, target, len(graphs) > 1, shared, trained)
        entries.append(lowering.run())
        buffers |= lowering.buffers  # compiler.py has refused entries that declare a shared buffer differently
    order = sorted(buffers.values(), key=lambda buffer: KINDS.index(buffer.kind))
    return ExecutionPlan({buffer.name: buffer for buffer in order}, tuple(entries), target, training).verify()
