"""The model on the GPU: what generated code declares, and how one call of an entry point runs."""

import base64
import functools
import importlib
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .doctor import check_offer, choose_adapter, import_wgpu, request_device
from .weights import DTYPES, WeightError, read_safetensors, to_tensor

BINDING = re.compile(r"@group\(0\)\s*@binding\((\d+)\)\s*var<\s*(storage|uniform)\s*(?:,\s*(read_write|read)\s*)?>")


class Buffer:
    """A declared buffer or output; `gpu` is None until a device allocates it, for declaring needs no GPU."""

    def __init__(self, kind: str, name: str, shape: tuple[int, ...], dtype: str, nbytes: int, data: Any = None) -> None:
        self.kind, self.name, self.shape, self.dtype, self.nbytes = kind, name, shape, dtype, nbytes
        self.data = data  # a parameter's init, a constant's values, the buffer that an output is read from
        self.gpu: Any = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Names(dict[str, Any]):
    """Buffers or entries by name; asking for an unknown one is a ValueError that lists them."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{name!r}: expected one of {', '.join(self) or 'none'}")

    def types(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (buffer.shape, buffer.dtype) for name, buffer in self.items()}


class Pipeline(NamedTuple):
    """A compute pipeline, the layout of its bind group, and (binding, type) of each binding there."""

    gpu: Any
    layout: Any
    bindings: tuple[tuple[int, str], ...]


class BindGroup:
    """Buffers bound whole, in @binding order."""

    def __init__(self, device: Any, pipeline: Pipeline, *buffers: Buffer) -> None:
        self.device, self.pipeline, self.buffers = device, pipeline, buffers
        self.made: dict[tuple[Any, ...], Any] = {}
        self.gpu = self.using({})

    def using(self, foreign: Mapping[Buffer, Any]) -> Any:
        """The bind group with the host program's buffers in place of inputs, made once for each of them."""
        bound = tuple(foreign.get(buffer, buffer.gpu) for buffer in self.buffers)
        if bound not in self.made:
            if len(self.made) == 32:  # what the host program has dropped must not live on here
                self.made.clear()
            entries = [
                {"binding": n, "resource": gpu} for (n, _), gpu in zip(self.pipeline.bindings, bound, strict=True)
            ]
            self.made[bound] = self.device.create_bind_group(layout=self.pipeline.layout, entries=entries)
        return self.made[bound]


class Entry:
    """An entry point: what it reads and gives, the states it advances, the bind groups it uses."""

    inputs = property(lambda self: self.feeds.types())
    outputs = property(lambda self: self.results.types())

    def __init__(self, name: str) -> None:
        self.name, self.feeds, self.results = name, Names(), Names()
        self.advances: list[tuple[Buffer, int | str, int]] = []
        self.groups: list[BindGroup] = []

    def dispatch(self, _: Pipeline, group: BindGroup, *grid: int) -> None:
        """Rehearsed, with itself for an encoder, an entry learns what it binds."""
        self.groups.append(group)


class Encoder:
    """Records dispatches into a compute pass, through native functions where present: half the cost of public ones."""

    def __init__(self, compute_pass: Any, foreign: Mapping[Buffer, Any]) -> None:
        self.foreign, self.pipeline = foreign, None
        try:
            native: Any = importlib.import_module("wgpu.backends.wgpu_native._api")
            lib, null, handle = native.lib, native.ffi.NULL, compute_pass._internal
            set_pipeline, set_group = lib.wgpuComputePassEncoderSetPipeline, lib.wgpuComputePassEncoderSetBindGroup
            self.launch: Any = functools.partial(lib.wgpuComputePassEncoderDispatchWorkgroups, handle)
            self.set_pipeline: Any = lambda pipeline: set_pipeline(handle, pipeline._internal)
            self.set_group: Any = lambda group: set_group(handle, 0, group._internal, 0, null)
        except (ImportError, AttributeError):
            self.launch, self.set_pipeline = compute_pass.dispatch_workgroups, compute_pass.set_pipeline
            self.set_group = functools.partial(compute_pass.set_bind_group, 0)

    def dispatch(self, pipeline: Pipeline, group: BindGroup, x: int, y: int = 1, z: int = 1) -> None:
        if pipeline.gpu is not self.pipeline:
            self.set_pipeline(pipeline.gpu)
            self.pipeline = pipeline.gpu
        self.set_group(group.using(self.foreign) if self.foreign else group.gpu)
        self.launch(x, y, z)


def unpack(text: str) -> bytes:
    """A large constant: base85 of zlib, wrapped."""
    return zlib.decompress(base64.b85decode("".join(text.split())))


class ModelRunner:
    """Base of the generated Runner: that one declares, and everything that happens is here."""

    name = "model"
    limits: Mapping[str, int] = {}  # those above WebGPU's defaults
    features: tuple[str, ...] = ()
    optional_features: tuple[str, ...] = ()
    parameters = property(lambda self: self.named("parameter").types())
    states = property(lambda self: self.named("state").types())
    inputs = property(lambda self: self.entries[self.only].inputs)
    outputs = property(lambda self: self.entries[self.only].outputs)

    def __init__(self, device: Any = None, adapter: str | None = None, checked: bool = False) -> None:
        self.declare()
        self.wgpu, self.checked, self.own_device = import_wgpu(), checked, device is None
        self.device = request_device(choose_adapter(adapter), self) if device is None else device
        check_offer(self.device, self)
        self.has = self.device.features.__contains__
        self.bind = functools.partial(BindGroup, self.device)
        self.module, self.pipeline = functools.cache(self.create_module), functools.cache(self.create_pipeline)
        self.layouts: dict[Any, Any] = {}
        for buffer in self.declared:
            buffer.gpu = self.allocate(buffer)
            if buffer.kind == "constant":
                self.upload(buffer, buffer.data)
        self.reset()
        self.pipelines()
        self.bind_groups()
        for entry in self.entries.values():
            self.encode(entry, entry)
        size = max((sum(b.nbytes for b in entry.results.values()) for entry in self.entries.values()), default=0)
        usage = self.wgpu.BufferUsage.MAP_READ | self.wgpu.BufferUsage.COPY_DST
        self.staging = self.device.create_buffer(label="staging", size=max(8, size), usage=usage)

    def declare(self) -> "ModelRunner":
        """Record what buffers() declares: a runner with no more than this needs no GPU and cannot run."""
        names = [name[7:] for base in reversed(type(self).__mro__) for name in vars(base) if name.startswith("encode_")]
        self.entries = Names((name, Entry(name)) for name in names)
        self.only = names[0] if len(self.entries) == 1 else None
        self.declared: list[Buffer] = []
        self.positions: dict[Buffer, Any] = {}  # the host's copy of the states that entries advance
        self.buffers()
        self.missing = list(self.parameters)
        return self

    @classmethod
    def describe(cls) -> str:
        """What the runner takes, gives and keeps, as text."""
        runner, lines = cls.__new__(cls).declare(), [cls.__doc__ or cls.name]
        for entry in runner.entries.values():
            lines += [f"{entry.name}: {b.kind} {b.name} {b}" for b in (*entry.feeds.values(), *entry.results.values())]
        return "\n".join(
            lines + [f"{b.kind} {b.name} {b}" for b in runner.declared if b.kind in ("parameter", "state")]
        )

    def named(self, kind: str) -> Names:
        return Names((buffer.name, buffer) for buffer in self.declared if buffer.kind == kind)

    # Generated code overrides these three, and declares with the words below.

    def buffers(self) -> None: ...
    def pipelines(self) -> None: ...
    def bind_groups(self) -> None: ...

    def add(self, kind: str, name: str, shape: Any, dtype: str = "f32", *, nbytes: int, init: Any = None) -> Buffer:
        self.declared.append(Buffer(kind, name, shape, dtype, nbytes, init))
        return self.declared[-1]

    parameter = functools.partialmethod(add, "parameter")
    state = functools.partialmethod(add, "state")

    def constant(self, name: str, shape: Any, data: Any, dtype: str = "f32", *, nbytes: int) -> Buffer:
        values = np.frombuffer(data, DTYPES[dtype]) if isinstance(data, bytes) else np.array(data, DTYPES[dtype])
        return self.add("constant", name, shape, dtype, nbytes=nbytes, init=values.reshape(shape))

    def input(self, entry: str, name: str, shape: Any, dtype: str = "f32", *, nbytes: int) -> Buffer:
        self.entries[entry].feeds[name] = buffer = self.add("input", name, shape, dtype, nbytes=nbytes)
        return buffer

    def output(self, entry: str, name: str, buffer: Buffer, shape: tuple[int, ...], dtype: str = "f32") -> None:
        self.entries[entry].results[name] = Buffer("output", name, shape, dtype, 4 * math.prod(shape), buffer)

    def advance(self, entry: str, state: Buffer, n: int | str, *, limit: int) -> None:
        """The entry adds n, or its input called n, to this state, which must not pass the limit."""
        self.entries[entry].advances.append((state, n, limit))
        self.positions[state] = np.zeros(state.shape, np.int64)

    def buffer(self, name: str, entry: str | None = None, *, nbytes: int | None = None) -> Any:
        """With nbytes, declare scratch; without, the GPU's buffer of an output, else of a state or parameter."""
        if nbytes is not None:
            return self.add("scratch", name, (nbytes // 4,), nbytes=nbytes)
        found = {e.results[name].data for e in self.entries.values() if entry in (None, e.name) and name in e.results}
        found = found or {b for b in self.declared if b.name == name and b.kind in ("state", "parameter")}
        if len(found) != 1:
            raise ValueError(
                f"buffer {name!r}: expected an output, state or parameter, and entry= where entries differ"
            )
        return found.pop().gpu

    def allocate(self, buffer: Buffer) -> Any:
        usage = self.wgpu.BufferUsage
        flags = usage.STORAGE | usage.UNIFORM | usage.COPY_SRC | usage.COPY_DST
        return self.device.create_buffer(label=buffer.name, size=max(4, buffer.nbytes), usage=flags)

    def create_module(self, code: str) -> Any:
        """TRUSTED unless checked: no bounds checks and no loop guards make kernels up to 2.3 times as fast."""
        try:
            if not self.checked:
                native: Any = importlib.import_module("wgpu.backends.wgpu_native._api")
                text, source = native.ffi.new("char[]", code.encode()), native.ffi.new("WGPUShaderSourceWGSL *")
                source.chain.sType = native.lib.WGPUSType_ShaderSourceWGSL
                source.code.data, source.code.length = text, len(text) - 1
                descriptor = native.ffi.new("WGPUShaderModuleDescriptor *")
                descriptor.nextInChain = native.ffi.cast("WGPUChainedStruct *", source)
                handle = native.libf.wgpuDeviceCreateShaderModuleTrusted(self.device._internal, descriptor, 0)
                return native.GPUShaderModule("", handle, self.device)
        except (ImportError, AttributeError, self.wgpu.GPUError):
            pass  # no such function here; or the text is wrong, and the public call raises naga's message
        return self.device.create_shader_module(code=code)

    def create_pipeline(self, code: str, **constants: float) -> Pipeline:
        kinds = {"uniform": "uniform", "storageread_write": "storage"}
        found = [(int(n), kinds.get(space + access, "read-only-storage")) for n, space, access in BINDING.findall(code)]
        bindings = tuple(sorted(found))
        if bindings not in self.layouts:  # explicit, one for each signature, so that bind groups can be shared
            stage = self.wgpu.ShaderStage.COMPUTE
            entries = [{"binding": n, "visibility": stage, "buffer": {"type": kind}} for n, kind in bindings]
            self.layouts[bindings] = self.device.create_bind_group_layout(entries=entries)
        layout = self.device.create_pipeline_layout(bind_group_layouts=[self.layouts[bindings]])
        compute = {"module": self.module(code), "constants": constants}
        pipeline = self.device.create_compute_pipeline(layout=layout, compute=compute)
        return Pipeline(pipeline, self.layouts[bindings], bindings)

    def call(self, entry: str, inputs: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        """Run an entry point once; everything is checked before anything is uploaded or encoded."""
        target = self.entries[entry]
        wanted = {target.results[name] for name in (target.results if outputs is None else outputs)}
        results = [result for result in target.results.values() if result in wanted]
        arrays, foreign, positions = self.prepare(target, inputs)
        for buffer, array in arrays.items():
            self.upload(buffer, array)
        commands, size = self.device.create_command_encoder(label=entry), 0
        self.record(commands, target, foreign)
        for b in results:
            if b.nbytes:
                source = foreign.get(b.data, b.data.gpu)
                commands.copy_buffer_to_buffer(source, 0, self.staging, size, b.nbytes)
            size += b.nbytes
        self.device.queue.submit([commands.finish()])
        self.positions |= positions
        data: Any = b""
        if size:
            self.staging.map_sync(self.wgpu.MapMode.READ, 0, size)
            data = self.staging.read_mapped(0, size)
            self.staging.unmap()
        outcome = {}
        for b in results:
            outcome[b.name] = np.frombuffer(data[: b.nbytes], DTYPES[b.dtype]).reshape(b.shape)
            data = data[b.nbytes :]
        return outcome

    def prepare(self, target: Entry, given: Mapping[str, Any]) -> tuple[dict[Buffer, Any], ...]:
        """The arrays to upload, the host program's buffers to use in place, and the positions after the run."""
        if self.missing:
            raise RuntimeError(f"{self.name}: load_weights or init_weights first, for {', '.join(self.missing)}")
        if given.keys() != target.feeds.keys():
            raise ValueError(f"inputs of {target.name}: expected {list(target.feeds)}, got {list(given)}")
        arrays, foreign, after = dict[Buffer, Any](), dict[Buffer, Any](), dict[Buffer, Any]()
        for name, own in target.feeds.items():
            try:
                if isinstance(given[name], self.wgpu.GPUBuffer):
                    foreign[own] = self.in_place(target, own, given[name])
                else:
                    arrays[own] = to_tensor(given[name], own)
            except (TypeError, ValueError, self.wgpu.GPUError) as error:
                raise ValueError(f"input {name!r} of {target.name}: {error}") from error
        for state, n, limit in target.advances:
            now, step = after.get(state, self.positions[state]), n if isinstance(n, int) else arrays[target.feeds[n]]
            if now.max(initial=0) + step > limit:
                problem = f"at {now.max()}, {step} more would pass its limit {limit}: reset() or set_state() it"
                raise RuntimeError(f"{target.name}: state {state.name!r} is {problem}")
            after[state] = now + step
        return arrays, foreign, after

    def in_place(self, target: Entry, own: Buffer, given: Any) -> Any:
        """The host program's buffer, when the entry can read it in place of its own."""
        usage, flags = self.wgpu.BufferUsage, given.usage
        copied = own in [result.data for result in target.results.values()]
        if given.size < own.nbytes or not flags & usage.STORAGE or (copied and not flags & usage.COPY_SRC):
            needed = f"{own.nbytes} bytes or more, usage STORAGE{' and COPY_SRC' if copied else ''}"
            raise ValueError(f"expected a buffer of {needed}, got {given.size} bytes, usage {flags}")
        bound = [(b, kind) for group in target.groups for b, (_, kind) in zip(group.buffers, group.pipeline.bindings)]
        if any(kind == "storage" and (b is own or b.gpu is given) for b, kind in bound):
            raise ValueError("expected a buffer that the entry does not write, or an array")
        if own.name in [n for _, n, _ in target.advances]:
            raise ValueError("expected an array, for the runner must know this number")
        for group in target.groups:
            group.using({own: given})  # wgpu refuses another device's buffer
        return given

    def record(self, commands: Any, target: Entry, foreign: Mapping[Buffer, Any], timestamps: Any = None) -> None:
        """Append one run of the entry, a single compute pass, to the commands."""
        compute_pass = commands.begin_compute_pass(label=target.name, timestamp_writes=timestamps)
        self.encode(target, Encoder(compute_pass, foreign))
        compute_pass.end()

    def encode(self, target: Entry, encoder: Any) -> None:
        getattr(self, f"encode_{target.name}")(encoder)

    def upload(self, buffer: Buffer, array: Any) -> None:
        if array.nbytes:
            self.device.queue.write_buffer(buffer.gpu, 0, array)

    def load_weights(self, source: Any, strict: bool = True) -> None:
        """From a safetensors file or a mapping, by name and shape: all of it, or WeightError and nothing."""
        given = source if isinstance(source, Mapping) else read_safetensors(source)
        buffers, arrays = self.named("parameter"), {}
        problems = [f"{name}: not a parameter of this model" for name in given if strict and name not in buffers]
        for name, b in buffers.items():
            try:
                arrays[b] = to_tensor(given[name], b, mixed=False)
            except KeyError:
                problems.append(f"{name}: missing, expected {b}")
            except (TypeError, ValueError) as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise WeightError("\n  ".join(["the weights do not fit the model:", *problems]))
        for b, array in arrays.items():
            self.upload(b, array)
            self.device.queue.submit([])  # lets wgpu free its copy
        self.missing = []

    def init_weights(self, seed: int = 0, default: Any = None) -> None:
        """Starting values, which depend on seed and name only: NumPy's PCG64, seeded with [seed, *name in UTF-8]."""
        buffers = self.named("parameter").values()
        if without := [b.name for b in buffers if (b.data or default) is None]:
            raise RuntimeError(f"{self.name}: parameters without init: {', '.join(without)}")
        for b in buffers:
            rng, init = np.random.default_rng([seed, *b.name.encode()]), b.data or default
            kind, scale = (init, 0) if isinstance(init, str) else init
            drawn = rng.random(b.shape, "f4") * 2 - 1 if kind == "uniform" else rng.standard_normal(b.shape, "f4")
            self.upload(b, (drawn * scale + (kind == "ones")).astype(DTYPES[b.dtype]))
        self.missing = []

    def get_state(self, name: str) -> Any:
        b = self.named("state")[name]
        data = self.device.queue.read_buffer(b.gpu, 0, b.nbytes) if b.nbytes else b""
        return np.frombuffer(data, DTYPES[b.dtype]).reshape(b.shape)

    def set_state(self, name: str, value: Any) -> None:
        b = self.named("state")[name]
        array = to_tensor(value, b)
        self.upload(b, array)
        self.positions |= {b: array.astype(np.int64)} if b in self.positions else {}

    def reset(self) -> None:
        """Zero every state."""
        for name, (shape, dtype) in self.states.items():
            self.set_state(name, np.zeros(shape, DTYPES[dtype]))

    def close(self, *error: object) -> None:
        """Free the buffers, and the device unless it is the host program's."""
        for gpu in (self.staging, *(buffer.gpu for buffer in self.declared)):
            gpu.destroy()
        if self.own_device:
            self.device.destroy()

    __exit__ = close

    def __enter__(self) -> Any:
        return self
