"""The model on the GPU: what generated code declares, and how one call of an entry point runs."""

import functools
import importlib
import math
import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from .doctor import (
    CPU_ADVICE,
    CpuAdapterWarning,
    check_offer,
    choose_adapter,
    import_wgpu,
    is_slow,
    open_process,
    request_device,
    this_process,
)
from .weight_files import read_weights
from .weights import DTYPES, Buffer, Names, check_bounds, match_tensors, to_tensor

Method = TypeVar("Method", bound=Callable[..., Any])
STAGING = 268_435_456  # WebGPU's default max-buffer-size: more than this is read back in parts
BINDING = re.compile(r"@group\(0\)\s*@binding\((\d+)\)\s*var<\s*(storage|uniform)\s*(?:,\s*(read_write|read)\s*)?>")


def guarded(method: Method) -> Method:
    """Wrap a method of a runner: it runs for one call at a time, other threads wait, and only while the runner can be used.

    A signal handler runs within the call that it interrupts and cannot wait for it. What it calls is refused: it would
    repeat half a step, or wait for locks of wgpu that the call holds. So no guarded method calls another one.
    """

    @functools.wraps(method)
    def alone(self: Any, *arguments: Any, **more: Any) -> Any:
        if self._pid != os.getpid():  # before the lock: a child may have inherited it locked
            raise RuntimeError(
                f"{self.name} was made in another process, and a GPU cannot be used across a fork: make the runner in "
                "the process that uses it, or start that one by multiprocessing.get_context('spawn')"
            )
        with self._lock:
            if self.closed:
                raise RuntimeError(f"{self.name} is closed")
            if self._busy:
                raise RuntimeError(f"{self.name}: expected no call under way, got {method.__name__}() from within one")
            if self._destroyed:
                names = ", ".join(map(repr, self._destroyed))
                raise RuntimeError(
                    f"{self.name}: the buffer of {names}, which was lent, was destroyed: make a new runner"
                )
            try:
                self._busy = True
                return method(self, *arguments, **more)
            finally:
                self._busy = False
                if self.closed:  # meanwhile, by a handler of a signal
                    self._free()

    return cast(Method, alone)


def watch_destroy(gpu: Any, name: str, destroyed: list[str]) -> None:
    """Make gpu.destroy() also append the name to `destroyed`.

    Later calls are refused by this: wgpu would end the process where a destroyed buffer is submitted.
    """
    itself = weakref.ref(gpu)  # without a reference cycle, which only Python's collector would free

    def destroy() -> None:
        destroyed.append(name)
        if (known := itself()) is not None:
            type(known).destroy(known)

    gpu.destroy = destroy


class Pipeline(NamedTuple):
    """A compute pipeline, the layout of its bind group, (binding, type) of each binding there, and its text."""

    gpu: Any
    layout: Any
    bindings: tuple[tuple[int, str], ...]
    code: str = ""


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
            pairs = zip(self.pipeline.bindings, bound, strict=True)
            entries = [{"binding": number, "resource": gpu} for (number, _), gpu in pairs]
            self.made[bound] = self.device.create_bind_group(layout=self.pipeline.layout, entries=entries)
        return self.made[bound]


class Entry:
    """An entry point: what it reads and gives, the states it advances, the dispatches it makes."""

    inputs = property(lambda self: self.feeds.types())
    outputs = property(lambda self: self.results.types())

    def __init__(self, name: str) -> None:
        self.name, self.feeds, self.results = name, Names(), Names()
        self.advances: list[tuple[Buffer, int | str, int]] = []
        self.work: list[tuple[Any, ...]] = []
        self.written: set[Buffer] = set()

    def dispatch(self, pipeline: Pipeline, group: BindGroup, *grid: int) -> None:
        """Rehearsed, with itself for an encoder, an entry learns what it does."""
        self.work.append((pipeline, group, *grid))
        self.written |= {b for b, (_, kind) in zip(group.buffers, pipeline.bindings) if kind == "storage"}


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


class ModelRunner:
    """Base of the generated Runner: that one declares, and everything that happens is here."""

    name = "model"
    limits: Mapping[str, int] = {}  # those above WebGPU's defaults
    features: tuple[str, ...] = ()
    optional_features: tuple[str, ...] = ()
    target = ""  # the compiler's --target
    parameters = property(lambda self: self._named("parameter").types())
    states = property(lambda self: self._named("state").types())
    inputs = property(lambda self: self._only_entry("inputs").inputs)
    outputs = property(lambda self: self._only_entry("outputs").outputs)

    def __init__(self, device: Any = None, adapter: str | None = None, checked: bool = False) -> None:
        self.declare()
        self.wgpu = import_wgpu()
        open_process()
        self.checked = checked
        self._own_device = device is None
        self.device = request_device(choose_adapter(adapter), self) if device is None else device
        check_offer(self.device, self)
        self._slow = is_slow(self.device.adapter, self)
        self.has = self.device.features.__contains__
        self.bind = functools.partial(BindGroup, self.device)
        self._modules = dict[str, Any]()  # by text
        self._layouts = dict[Any, Any]()  # by signature
        self._pipelines = dict[Any, Pipeline]()  # by text and constants
        for buffer in self._declared:
            buffer.gpu = self.allocate(buffer)
            if buffer.kind == "constant":
                self.upload(buffer, buffer.data)
        self.reset()
        self.pipelines()
        self.bind_groups()
        size = 8
        for entry in self.entries.values():
            getattr(self, f"encode_{entry.name}")(entry)
            sizes = [b.nbytes for b in entry.results.values()]
            size = max(size, min(sum(sizes), STAGING), *sizes)
        self._staging_size = size
        self._staging: Any = self._make_staging()

    def _make_staging(self) -> Any:
        """What results are copied to and read from."""
        return self.device.create_buffer(size=self._staging_size, usage="MAP_READ | COPY_DST")

    def declare(self) -> "ModelRunner":
        """Record what buffers() declares: a runner with no more than this needs no GPU and cannot run."""
        names = [name[7:] for base in reversed(type(self).__mro__) for name in vars(base) if name.startswith("encode_")]
        self.entries = Names((name, Entry(name)) for name in names)
        self._only = names[0] if len(self.entries) == 1 else None
        self._lock = threading.RLock()  # reentrant, for a handler of a signal comes as the same thread
        self._busy = False  # in the middle of a call
        self._pid = os.getpid()
        self.closed = False
        self._declared = list[Buffer]()
        self._destroyed = list[str]()  # lent buffers that the host program has destroyed
        self._positions: dict[Buffer, Any] = {}  # the host's copy of the states that entries advance
        self.buffers()
        self._missing = list(self.parameters)
        return self

    @classmethod
    def describe(cls) -> str:
        """What the runner takes, gives and keeps, as text."""
        runner = cls.__new__(cls).declare()
        named = [("", b) for b in runner._declared if b.kind in ("parameter", "state")]
        for e in runner.entries.values():
            named += [(f"{e.name}: ", b) for b in (*e.feeds.values(), *e.results.values())]
        return "\n".join([cls.__doc__ or cls.name, *(f"{where}{b.kind} {b.name} {b}" for where, b in named)])

    def _only_entry(self, what: str) -> Entry:
        """The entry of a model with one entry. For several, a ValueError says how to get `what` of each."""
        if self._only is None:
            names = list(self.entries)
            raise ValueError(
                f"{what} of {self.name}: expected a model with one entry, got {', '.join(names)}: "
                f'runner.entries["{names[0]}"].{what}'
            )
        entry: Entry = self.entries[self._only]
        return entry

    def _named(self, kind: str) -> Names:
        return Names((buffer.name, buffer) for buffer in self._declared if buffer.kind == kind)

    # Generated code overrides these three, and declares with the words below.
    def buffers(self) -> None: ...
    def pipelines(self) -> None: ...
    def bind_groups(self) -> None: ...

    def _add(self, kind: str, name: str, shape: Any, dtype: str = "f32", *, nbytes: int, init: Any = None) -> Buffer:
        self._declared.append(Buffer(kind, name, shape, dtype, nbytes, init))
        return self._declared[-1]

    parameter = functools.partialmethod(_add, "parameter")
    state = functools.partialmethod(_add, "state")

    def constant(self, name: str, shape: Any, data: Any, dtype: str = "f32", *, nbytes: int) -> Buffer:
        values = np.frombuffer(data, DTYPES[dtype]) if isinstance(data, bytes) else np.array(data, DTYPES[dtype])
        return self._add("constant", name, shape, dtype, nbytes=nbytes, init=values.reshape(shape))

    def input(
        self, entry: str, name: str, shape: Any, dtype: str = "f32", *, nbytes: int, bounds: Any = None
    ) -> Buffer:
        """bounds: the least and the largest number that a given array may have. Those of a GPU buffer are not checked."""
        self.entries[entry].feeds[name] = buffer = self._add("input", name, shape, dtype, nbytes=nbytes, init=bounds)
        return buffer

    def output(self, entry: str, name: str, buffer: Buffer, shape: tuple[int, ...], dtype: str = "f32") -> None:
        nbytes = (math.prod(shape) * DTYPES[dtype].itemsize + 3) // 4 * 4
        self.entries[entry].results[name] = Buffer("output", name, shape, dtype, nbytes, buffer)

    def advance(self, entry: str, state: Buffer, n: int | str, *, limit: int) -> None:
        """The entry adds n, or its input called n, to this state, which must not pass the limit."""
        self.entries[entry].advances.append((state, n, limit))
        self._positions[state] = np.zeros(state.shape, np.int64)

    @guarded
    def buffer(self, name: str, entry: str | None = None, *, nbytes: int | None = None) -> Any:
        """With nbytes, declare scratch; without, lend the buffer of an output, state or parameter.

        The runner still owns it: once it is destroyed, every later use of the runner raises RuntimeError.
        """
        if nbytes is not None:
            return self._add("scratch", name, (nbytes // 4,), nbytes=nbytes)
        entry = entry or self._only
        found = {e.results[name].data for e in self.entries.values() if entry in (None, e.name) and name in e.results}
        found = found or {b for b in self._declared if b.name == name and b.kind in ("state", "parameter")}
        if len(found) != 1:
            raise ValueError(f"buffer {name!r}: expected an output, state or parameter; entry= where entries differ")
        gpu = found.pop().gpu
        if "destroy" not in vars(gpu):
            watch_destroy(gpu, name, self._destroyed)
        return gpu

    def allocate(self, buffer: Buffer) -> Any:
        usage = "STORAGE | UNIFORM | COPY_SRC | COPY_DST"
        return self.device.create_buffer(label=buffer.name, size=max(4, buffer.nbytes), usage=usage)

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

    def _module(self, code: str) -> Any:
        if code not in self._modules:
            self._modules[code] = self.create_module(code)
        return self._modules[code]

    def pipeline(self, code: str, **constants: float) -> Pipeline:
        key = (code, *constants.items())
        if key not in self._pipelines:
            self._pipelines[key] = self.create_pipeline(code, **constants)
        return self._pipelines[key]

    def create_pipeline(self, code: str, **constants: float) -> Pipeline:
        kinds = {"uniform": "uniform", "storageread_write": "storage"}
        found = ((int(n), kinds.get(space + access, "read-only-storage")) for n, space, access in BINDING.findall(code))
        bindings = tuple(sorted(found))
        layout = self.device.create_pipeline_layout(bind_group_layouts=[self._layout(bindings)])
        stage = {"module": self._module(code), "constants": constants}
        gpu = self.device.create_compute_pipeline(layout=layout, compute=stage)
        return Pipeline(gpu, self._layout(bindings), bindings, code)

    def _layout(self, bindings: tuple[tuple[int, str], ...]) -> Any:
        """Explicit, one for each signature, so that bind groups can be shared."""
        if bindings not in self._layouts:
            stage = self.wgpu.ShaderStage.COMPUTE
            entries = [{"binding": n, "visibility": stage, "buffer": {"type": kind}} for n, kind in bindings]
            self._layouts[bindings] = self.device.create_bind_group_layout(entries=entries)
        return self._layouts[bindings]

    @guarded
    def call(
        self, entry: str, inputs: Mapping[str, Any], *only: Any, outputs: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Run an entry point once; everything is checked before anything is uploaded or encoded.

        only: the array of an entry's only input, in place of `inputs`. outputs: names of the outputs to read back; all by
        default.
        """
        target = self.entries[entry]
        inputs = self._named_inputs(target, inputs, only)
        results = self._wanted(target, outputs)
        return self._run(target, inputs, results)

    def _named_inputs(self, target: Entry, inputs: Mapping[str, Any], only: tuple[Any, ...]) -> Mapping[str, Any]:
        """The inputs by name; one array without a name is the only input of the entry."""
        if not isinstance(inputs, Mapping):
            kind = type(inputs).__name__
            raise ValueError(f"inputs of {target.name}: expected a mapping, {{name: array}}, got {kind}")
        if not only:
            return inputs
        if inputs or len(only) > 1 or len(target.feeds) != 1:
            names = ", ".join(f"{name}=" for name in target.feeds) or "none"
            raise ValueError(
                f"inputs of {target.name}: expected {names} by name, or one array for an only input; "
                f"got {len(only)} without a name and {list(inputs)}; outputs are chosen by outputs="
            )
        return dict(zip(target.feeds, only))

    def _wanted(self, target: Entry, outputs: Iterable[str] | None) -> list[Buffer]:
        """The results with these names, in the order of declaration. None: all."""
        if outputs is None:
            return list(target.results.values())
        if isinstance(outputs, str) or not np.iterable(outputs):
            expected = f"expected a tuple of some of {list(target.results)}"
            raise ValueError(f"outputs of {target.name}: {expected}, got {outputs!r}")
        wanted = {target.results[name] for name in outputs}
        return [result for result in target.results.values() if result in wanted]

    def _run(self, target: Entry, inputs: Mapping[str, Any], results: list[Buffer]) -> dict[str, Any]:
        arrays, foreign, positions = self._prepare(target, inputs)
        encode = getattr(self, f"encode_{target.name}")
        record = functools.partial(self._record, target.name, encode, foreign)
        return self._perform(arrays, foreign, record, results, functools.partial(self._positions.update, positions))

    def _record(self, label: str, encode: Any, foreign: Any, commands: Any, stamps: Any = None) -> None:
        compute_pass = commands.begin_compute_pass(label=label, timestamp_writes=stamps)
        encode(Encoder(compute_pass, foreign))
        compute_pass.end()

    def _perform(self, arrays: Any, foreign: Any, record: Any, results: list[Buffer], done: Any) -> dict[str, Any]:
        """Upload, record, submit once, call `done` right behind that, and read the results back."""
        for buffer, array in arrays.items():
            self.upload(buffer, array)
        if self._staging.map_state != "unmapped":  # a read-back was interrupted, and wgpu would abort the process
            self._staging = self._make_staging()
        outcome = dict[str, Any]()
        while record or results:
            commands, size, part, data = self.device.create_command_encoder(), 0, list[Buffer](), memoryview(b"")
            record = record and record(commands)
            while results and size + results[0].nbytes <= self._staging.size:
                part.append(b := results.pop(0))
                commands.copy_buffer_to_buffer(foreign.get(b.data, b.data.gpu), 0, self._staging, size, b.nbytes)
                size += b.nbytes
            work = [commands.finish()]
            try:
                self.device.queue.submit(work)
            except KeyboardInterrupt:  # raised as the call returns: the GPU has the work
                done()
                raise
            done()
            if size:
                self._staging.map_sync(self.wgpu.MapMode.READ, 0, size)
                data = self._staging.read_mapped(0, size)
                self._staging.unmap()
            for b in part:
                outcome[b.name], data = b.array(data), data[b.nbytes :]
        return outcome

    def _say_slow(self) -> None:
        """Warn about a software adapter, once a process."""
        self._slow = False
        process = this_process()
        if not process.warned:
            process.warned = True
            warnings.warn(f"{self.name}: {CPU_ADVICE}", CpuAdapterWarning, stacklevel=2)

    def _need_weights(self) -> None:
        if self._missing:
            raise RuntimeError(f"{self.name} is without weights: {', '.join(self._missing)}: load or init them")

    def _prepare(self, target: Entry, given: Mapping[str, Any]) -> tuple[dict[Buffer, Any], ...]:
        """The arrays to upload, the host program's buffers to use in place, and the positions after the run."""
        self._need_weights()
        if self._slow:
            self._say_slow()
        if given.keys() != target.feeds.keys():
            raise ValueError(f"inputs of {target.name}: expected {list(target.feeds)}, got {list(given)}")
        arrays, foreign, after = dict[Buffer, Any](), dict[Buffer, Any](), dict[Buffer, Any]()
        for name, own in target.feeds.items():
            try:
                if not isinstance(given[name], self.wgpu.GPUBuffer):
                    arrays[own] = to_tensor(given[name], own)
                    check_bounds(arrays[own], own.data)
                elif given[name] is not own.gpu:
                    foreign[own] = self._in_place(target, own, given[name])
            except (TypeError, ValueError, self.wgpu.GPUError) as error:
                raise ValueError(f"input {name!r} of {target.name}: {error}") from error
        for state, n, limit in target.advances:
            now, step = after.get(state, self._positions[state]), n if isinstance(n, int) else arrays[target.feeds[n]]
            if now.max(initial=0) + step > limit:
                problem = f"at {now.max()}, {step} more would pass its limit {limit}: reset() or set_state() it"
                raise RuntimeError(f"{target.name}: state {state.name!r} is {problem}")
            after[state] = now + step
        return arrays, foreign, after

    def _in_place(self, target: Entry, own: Buffer, given: Any) -> Any:
        """The host program's buffer, when the entry can read it in place of its own."""
        usage, copied = self.wgpu.BufferUsage, own in [result.data for result in target.results.values()]
        size = max(4, own.nbytes)
        rules = {
            f"at least {size} bytes": given.size >= size,
            "usage STORAGE": given.usage & usage.STORAGE,
            "usage COPY_SRC, as it is an output too": given.usage & usage.COPY_SRC or not copied,
            "that it is not mapped": given.map_state == "unmapped",
            "that the entry does not write it": not {own, given} & {x for b in target.written for x in (b, b.gpu)},
            "an array, for the runner must know the number": own.name not in [n for _, n, _ in target.advances],
        }
        if broken := [rule for rule, kept in rules.items() if not kept]:
            got = f"a buffer of {given.size} bytes, usage {given.usage}, {given.map_state}"
            raise ValueError(f"expected {', '.join(broken)}; got {got}")
        # Binding it anew is all that tells a destroyed buffer: once submitted, it would end the process.
        layout, some = self._layout(((0, "read-only-storage"),)), {"buffer": given, "offset": 0, "size": 4}
        self.device.create_bind_group(layout=layout, entries=[{"binding": 0, "resource": some}])
        for group in {group for _, group, *_ in target.work if own in group.buffers}:
            group.using({own: given})
        return given

    def upload(self, buffer: Buffer, array: Any) -> None:
        array = np.pad(array.ravel(), (0, 1)) if array.nbytes % 4 else array  # f16, an odd number of them
        if array.nbytes:
            self.device.queue.write_buffer(buffer.gpu, 0, array)
        if buffer in self._positions:  # the host's copy follows
            self._positions[buffer] = array.astype(np.int64)

    @guarded
    def load_weights(self, source: Any, strict: bool = True) -> None:
        """Load parameters, and states that are given too, by name and shape. Where one does not fit, WeightError, and nothing
        is loaded.

        source: a safetensors file, the index.json of several, or a mapping of names to arrays or PyTorch's tensors. An
        optimizer starts anew.
        """
        given = read_weights(source)
        wanted = self._named("parameter") | {n: b for n, b in self._named("state").items() if n in given}
        arrays = match_tensors(given, Names(wanted), strict, source)
        self._missing = list(self.parameters)  # half is none
        for b, array in arrays.items():
            self.upload(b, array)
            self.device.queue.submit([])  # lets wgpu free its copy
        self._start_anew()
        self._missing = []

    @guarded
    def init_weights(self, seed: int = 0, default: Any = None) -> None:
        """Starting values, which depend on seed and name only: NumPy's PCG64, seeded with [seed, *name in UTF-8].

        An optimizer starts anew.
        """
        buffers = self._named("parameter").values()
        if without := [b.name for b in buffers if (b.data or default) is None]:
            raise RuntimeError(f"{self.name}: parameters without init: {', '.join(without)}")
        self._missing = list(self.parameters)
        for b in buffers:
            rng, init = np.random.default_rng([seed, *b.name.encode()]), b.data or default
            kind, scale = (init, 0) if isinstance(init, str) else init
            drawn = rng.random(b.shape, "f4") * 2 - 1 if kind == "uniform" else rng.standard_normal(b.shape, "f4")
            self.upload(b, (drawn * scale + (kind == "ones")).astype(DTYPES[b.dtype]))
        self._start_anew()
        self._missing = []

    def _start_anew(self) -> None:
        """Forget what belongs to other weights."""

    @guarded
    def get_state(self, name: str) -> Any:
        return self._download(self._named("state")[name])

    def _download(self, b: Buffer) -> Any:
        return b.array(self.device.queue.read_buffer(b.gpu, 0, b.nbytes) if math.prod(b.shape) else b"")

    @guarded
    def set_state(self, name: str, value: Any) -> None:
        b = self._named("state")[name]
        self.upload(b, to_tensor(value, b))

    @guarded
    def reset(self) -> None:
        """Give every state what it starts with, which is zero unless the model says otherwise."""
        for b in self._named("state").values():
            self.upload(b, np.full(b.shape, b.data or 0, DTYPES[b.dtype]))

    def close(self, *error: object) -> None:
        """Free all memory of the runner on the GPU, and the device unless it is the host program's.

        A signal handler that closes the runner within a call does so when that call ends.
        """
        if self._pid != os.getpid():  # a forked child: the memory belongs to its parent
            self.closed = True
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
            if not self._busy:
                self._free()

    def _free(self) -> None:
        if self._staging is None:  # done, by a handler between the end of a call and this
            return
        for gpu in (self._staging, *(buffer.gpu for buffer in self._declared)):
            gpu.destroy()
        if self._own_device:
            self.device.destroy()
        self._drop()

    def _drop(self) -> None:
        """Drop all objects of wgpu, so that their memory is freed now and not by Python's collector."""
        for buffer in self._declared:
            buffer.gpu = None
        for entry in self.entries.values():
            entry.work.clear()
        for name, value in list(vars(self).items()):
            if isinstance(value, Pipeline | BindGroup):
                delattr(self, name)
        for made in (self._modules, self._layouts, self._pipelines):
            made.clear()
        self._staging = None
        if self._own_device and hasattr(self.device, "_release"):
            self.device._release()  # a device is in a reference cycle

    __exit__ = close

    def __enter__(self) -> Any:
        return self
