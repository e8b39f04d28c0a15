"""Which adapter and device a runner gets, and what to do when it gets none."""

import importlib
import os
import platform
import tempfile
import threading
from typing import Any

# WebGPU's. wgpu-py grants every limit left out at the ADAPTER's value, and a model would run here and fail elsewhere:
# a runner asks for all of them, raised only where it needs more, and of those it has no use for takes what there is.
DEFAULT_LIMITS = """
max-storage-buffers-per-shader-stage 8 max-storage-buffer-binding-size 134217728 max-buffer-size 268435456
max-uniform-buffers-per-shader-stage 12 max-uniform-buffer-binding-size 65536 max-bindings-per-bind-group 1000
max-compute-workgroup-storage-size 16384 max-compute-invocations-per-workgroup 256 max-bind-groups 4
max-compute-workgroup-size-x 256 max-compute-workgroup-size-y 256 max-compute-workgroup-size-z 64
max-compute-workgroups-per-dimension 65535 min-uniform-buffer-offset-alignment 256
max-dynamic-storage-buffers-per-pipeline-layout 4 min-storage-buffer-offset-alignment 256
max-dynamic-uniform-buffers-per-pipeline-layout 8 max-texture-dimension-1d 8192 max-texture-dimension-2d 8192
max-texture-dimension-3d 2048 max-texture-array-layers 256 max-sampled-textures-per-shader-stage 16
max-samplers-per-shader-stage 16 max-storage-textures-per-shader-stage 4 max-bind-groups-plus-vertex-buffers 24
max-vertex-buffers 8 max-vertex-attributes 16 max-vertex-buffer-array-stride 2048 max-color-attachments 8
max-inter-stage-shader-variables 16 max-color-attachment-bytes-per-sample 32 max-immediate-size 0"""
UNUSED = ("texture", "sample", "vertex", "color", "inter-stage", "immediate")
VULKAN_METAL_DX12 = 0b1101  # flags of WGPUInstanceBackend, as wgpu-native numbers them
CPU_ADVICE = "this adapter is a CPU: compile with --target cpu, whose kernels are made for it"
REMEDY = (
    "install the GPU vendor's Vulkan driver, or Mesa's (Debian, Ubuntu: apt install mesa-vulkan-drivers libvulkan1)"
)


class CpuAdapterWarning(UserWarning):
    """A runner that was compiled for GPUs runs on a software adapter."""


def import_wgpu() -> Any:
    """wgpu, imported only when a GPU is wanted; without a runtime folder Mesa prints errors."""
    if not os.environ.get("XDG_RUNTIME_DIR"):
        os.environ["XDG_RUNTIME_DIR"] = tempfile.gettempdir()
    try:
        return importlib.import_module("wgpu")
    except ModuleNotFoundError as error:
        raise ImportError("the package wgpu is not installed: pip install wgpu") from error


class Process:
    """What all runners of a process share. Each runner file has its own copy of this class, so it is kept on the module wgpu."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held around calls of wgpu that must not run in several threads at once
        self.pid: int | None = None  # of the process that opened the GPU
        self.gl_adapters: list[Any] = []  # found once and never dropped: see find_adapters
        self.warned = False  # whether a software adapter was announced


def this_process() -> Any:
    """The Process that all runners share. setdefault is atomic, so all threads get the same one."""
    return vars(import_wgpu()).setdefault("_meganeura_process", Process())


def open_process() -> None:
    """Note that this process uses the GPU. Raises RuntimeError in a child that was forked after its parent had done so."""
    process = this_process()
    if process.pid not in (None, os.getpid()):
        raise RuntimeError(
            "this process was forked from one that had opened the GPU, and drivers do not work in such a child: "
            "start it by multiprocessing.get_context('spawn'), or make the first runner after the fork"
        )
    with process.lock:
        if process.pid is None and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=keep_what_was_inherited)
        process.pid = os.getpid()


def keep_what_was_inherited() -> None:
    """In a forked child: never release the parent's objects of wgpu. That would wait for threads that a fork does not copy."""
    try:
        native: Any = importlib.import_module("wgpu.backends.wgpu_native._api")
        first_of_child = next(importlib.import_module("wgpu._classes").object_id_counter)
        release = native.GPUObjectBase._release
    except (ImportError, AttributeError):
        return

    def release_own(self: Any) -> None:
        if self.uid > first_of_child:
            release(self)

    native.GPUObjectBase._release = release_own


def find_adapters() -> list[Any]:
    """The adapters of Vulkan, Metal and DX12. Where there are none, those of GL.

    Looking for GL adapters and dropping one both make an EGL context current. Where another thread has a context current
    at that time, wgpu ends the process. So one thread at a time looks, GL adapters are looked for once, and they are kept.
    """
    open_process()
    process = this_process()
    with process.lock:
        try:
            adapters = find_adapters_without_gl()
        except (ImportError, AttributeError):  # another wgpu than the one this was written for
            return list(import_wgpu().gpu.enumerate_adapters_sync())
        if not adapters and not process.gl_adapters:
            process.gl_adapters = import_wgpu().gpu.enumerate_adapters_sync()
        return adapters or list(process.gl_adapters)


def find_adapters_without_gl() -> list[Any]:
    """The same as wgpu's enumerate_adapters_sync, without GL: that function has no argument for backends."""
    native: Any = importlib.import_module("wgpu.backends.wgpu_native._api")
    enumerate_adapters = native.libf.wgpuInstanceEnumerateAdapters
    instance = native.get_wgpu_instance()
    options = native.ffi.new("WGPUInstanceEnumerateAdapterOptions *", {"backends": VULKAN_METAL_DX12})
    handles = native.ffi.new("WGPUAdapter[]", enumerate_adapters(instance, options, native.ffi.NULL))
    enumerate_adapters(instance, options, handles)
    return [native.gpu._create_adapter(handle) for handle in handles]


def compare(offer: Any, model: Any) -> list[tuple[str, int, int, bool]]:
    """(name, needed, offered, enough) of every limit, and of every feature as if it were a limit of 0 or 1."""
    words, rows = DEFAULT_LIMITS.split(), []
    for name, needed in (dict(zip(words[::2], map(int, words[1::2]))) | dict(model.limits)).items():
        offered = offer.limits.get(name, 0)
        needed = min(needed, offered) if any(word in name for word in UNUSED) else needed
        rows.append((name, needed, offered, needed >= offered if name.startswith("min") else needed <= offered))
    for name in (*model.features, "timestamp-query", *model.optional_features):
        needed, offered = int(name in model.features), int(name in offer.features)
        rows.append((name, needed, offered, needed <= offered))
    return rows


def choose_adapter(wanted: str | None) -> Any:
    """The best adapter with this text, or MEGANEURA_ADAPTER, in its summary: GL last, then discrete to CPU."""
    text, order = wanted or os.environ.get("MEGANEURA_ADAPTER", ""), {"DiscreteGPU": 0, "IntegratedGPU": 1, "CPU": 3}
    adapters = find_adapters()
    adapters.sort(key=lambda a: ("GL" in a.info["backend_type"], order.get(a.info["adapter_type"], 2)))
    for adapter in adapters:
        if text.lower() in adapter.summary.lower():
            return adapter
    there = f"no adapter matches {text!r}, there are: {', '.join(a.summary for a in adapters)}"
    raise RuntimeError(there if adapters else f"no GPU adapter found: {REMEDY}; --doctor says more")


def check_offer(offer: Any, model: Any) -> dict[str, int]:
    """The limits to ask for; RuntimeError naming every limit and feature that the adapter or device lacks."""
    rows = compare(offer, model)
    gaps = [f"{name}: needed {needed}, offered {offered}" for name, needed, offered, enough in rows if not enough]
    if gaps:
        raise RuntimeError(f"{model.name} cannot run here: {'; '.join(gaps)}; --doctor says more")
    return {name: needed for name, needed, _, _ in rows if name in offer.limits}


def request_device(adapter: Any, model: Any) -> Any:
    """A device with what the model needs, and with the optional features that it can have."""
    limits = check_offer(adapter, model)
    extra = [name for name in ("timestamp-query", *model.optional_features) if name in adapter.features]
    with this_process().lock:
        while True:
            try:
                return adapter.request_device_sync(required_features=[*model.features, *extra], required_limits=limits)
            except RuntimeError:  # an adapter may offer an experimental feature and refuse it
                if not extra:
                    raise
                extra.pop()


def is_slow(adapter: Any, model: Any) -> bool:
    """Whether the model was compiled for GPUs, and the adapter is a CPU."""
    return model.target in ("webgpu", "native") and adapter.info["adapter_type"] == "CPU"


def doctor(model: Any, wanted: str | None) -> int:
    """Print what there is beside what the model needs; 0 when it can run here, else 1."""
    print(f"{model.name} on Python {platform.python_version()}, {platform.platform()}")
    try:
        print(f"wgpu {import_wgpu().__version__}")
        for found in find_adapters():
            print(f"adapter: {found.summary}, driver {found.info['description'] or 'unknown'}")
        adapter = choose_adapter(wanted)
        print(f"chosen: {adapter.summary}")
        if is_slow(adapter, model):
            print(CPU_ADVICE)
        print(f"{'limit or feature':<48}{'needed':>12}{'offered':>12}")
        for name, needed, offered, enough in compare(adapter, model):
            print(f"{name:<48}{needed:>12}{offered:>12}{'' if enough else '  TOO LITTLE'}")
        request_device(adapter, model).destroy()
    except (ImportError, RuntimeError) as error:
        remedy = "pip install wgpu" if isinstance(error, ImportError) else f"try another --adapter, or {REMEDY}"
        print(f"{error}\nRemedy: {remedy}")
        return 1
    print(f"{model.name} can run here.")
    return 0
