"""Adapters, devices, limits and features; private wgpu functions and what replaces them."""

import os
import sys
import tempfile
import types
from typing import Any

import numpy as np
import pytest

from runtime_stub import doctor
from runtime_stub.core import ModelRunner

from .runners import SCALE, Decode, Scale

X = np.ones((2, 3), np.float32)
WEBGPU = {
    "max-texture-dimension-1d": 8192,
    "max-texture-dimension-2d": 8192,
    "max-texture-dimension-3d": 2048,
    "max-texture-array-layers": 256,
    "max-bind-groups": 4,
    "max-bindings-per-bind-group": 1000,
    "max-dynamic-uniform-buffers-per-pipeline-layout": 8,
    "max-dynamic-storage-buffers-per-pipeline-layout": 4,
    "max-sampled-textures-per-shader-stage": 16,
    "max-samplers-per-shader-stage": 16,
    "max-storage-buffers-per-shader-stage": 8,
    "max-storage-textures-per-shader-stage": 4,
    "max-uniform-buffers-per-shader-stage": 12,
    "max-uniform-buffer-binding-size": 65536,
    "max-storage-buffer-binding-size": 134217728,
    "min-uniform-buffer-offset-alignment": 256,
    "min-storage-buffer-offset-alignment": 256,
    "max-vertex-buffers": 8,
    "max-buffer-size": 268435456,
    "max-vertex-attributes": 16,
    "max-vertex-buffer-array-stride": 2048,
    "max-inter-stage-shader-variables": 16,
    "max-color-attachments": 8,
    "max-color-attachment-bytes-per-sample": 32,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroup-size-y": 256,
    "max-compute-workgroup-size-z": 64,
    "max-compute-workgroups-per-dimension": 65535,
    "max-immediate-size": 0,
}


def adapter(summary: str, backend: str = "Vulkan", kind: str = "DiscreteGPU", **more: Any) -> Any:
    info = {"backend_type": backend, "adapter_type": kind, "description": ""}
    given = {"limits": WEBGPU | {"max-buffer-size": 10**10}, "features": set(), **more}
    return types.SimpleNamespace(summary=summary, info=info, **given)


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The adapters that wgpu will find; a test puts its own in."""
    found: list[Any] = []
    monkeypatch.setattr(doctor, "find_adapters", lambda: list(found))
    monkeypatch.setattr(doctor, "import_wgpu", lambda: types.SimpleNamespace(__version__="0"))
    monkeypatch.delenv("MEGANEURA_ADAPTER", raising=False)
    return found


def test_every_limit_is_webgpu_s_default(gpu: Any) -> None:
    with Scale() as runner:
        assert {name: runner.device.limits[name] for name in WEBGPU} == WEBGPU
        assert {name: gpu.limits[name] for name in WEBGPU} == WEBGPU
        ample = runner.device.adapter.limits
        assert ample["max-compute-invocations-per-workgroup"] > 256, "or this test says nothing"


def test_limits_are_raised_one_by_one() -> None:
    class Large(Scale):
        limits = {"max-compute-workgroup-storage-size": 32768}

    with Large() as runner:
        expected = WEBGPU | {"max-compute-workgroup-storage-size": 32768}
        assert {name: runner.device.limits[name] for name in WEBGPU} == expected


def test_a_limit_out_of_reach_is_named(gpu: Any) -> None:
    class Huge(Scale):
        limits = {"max-buffer-size": 2**60, "max-compute-invocations-per-workgroup": 99999, "max-nonsense": 1}

    with pytest.raises(RuntimeError) as caught:
        Huge()
    text = str(caught.value)
    assert "max-buffer-size: needed 1152921504606846976, offered 2147483647" in text and "--doctor" in text
    assert "max-compute-invocations-per-workgroup: needed 99999, offered 1024" in text
    assert "max-nonsense: needed 1, offered 0" in text
    with pytest.raises(RuntimeError, match="max-buffer-size: needed 1152921504606846976, offered 268435456"):
        Huge(gpu)


def test_default_limits_are_needs_too(adapters: list[Any]) -> None:
    weak = WEBGPU | {"max-storage-buffers-per-shader-stage": 4, "min-storage-buffer-offset-alignment": 512}
    adapters.append(adapter("Weak", limits=weak))
    with pytest.raises(RuntimeError) as caught:
        doctor.request_device(doctor.choose_adapter(None), Scale)
    assert "max-storage-buffers-per-shader-stage: needed 8, offered 4" in str(caught.value)
    assert "min-storage-buffer-offset-alignment: needed 256, offered 512" in str(caught.value)


def test_texture_limits_are_no_needs(adapters: list[Any]) -> None:
    asked: dict[str, int] = {}
    weak = WEBGPU | {"max-texture-dimension-2d": 4096, "max-bind-groups-plus-vertex-buffers": 0}
    adapters.append(
        adapter("Weak", limits=weak, request_device_sync=lambda **more: asked.update(more["required_limits"]))
    )
    doctor.request_device(doctor.choose_adapter(None), Scale)
    assert asked == weak


def test_features(gpu: Any) -> None:
    class Needs(Scale):
        features = ("shader-f16",)
        optional_features = ("subgroup", "no-such-feature")

    with Needs() as runner:
        assert runner.has("shader-f16") and runner.has("subgroup") and not runner.has("no-such-feature")
    with pytest.raises(RuntimeError, match="scale.*shader-f16: needed 1, offered 0.*--doctor"):
        Needs(gpu)
    Needs.features = ("no-such-feature",)
    with pytest.raises(RuntimeError, match="no-such-feature: needed 1, offered 0"):
        Needs()


def test_optional_features_that_are_refused_are_done_without(adapters: list[Any]) -> None:
    def request(required_features: list[str], required_limits: Any) -> Any:
        if "experimental" in required_features:
            raise RuntimeError("not enabled")
        return required_features

    class Hopes(Scale):
        features = ("needed",)
        optional_features = ("good", "experimental")

    offered = {"needed", "good", "experimental", "timestamp-query"}
    adapters.append(adapter("A", features=offered, request_device_sync=request))
    assert doctor.request_device(adapters[0], Hopes) == ["needed", "timestamp-query", "good"]


def test_the_order_of_adapters(adapters: list[Any]) -> None:
    best_first = [
        adapter("a", "Metal", "DiscreteGPU"),
        adapter("b", "D3D12", "IntegratedGPU"),
        adapter("c", "Vulkan", "Unknown"),
        adapter("d", "Vulkan", "CPU"),
        adapter("e", "OpenGL", "DiscreteGPU"),
        adapter("f", "OpenGLES", "CPU"),
    ]
    while best_first:
        adapters[:] = reversed(best_first)
        assert doctor.choose_adapter(None) is best_first.pop(0)


def test_an_adapter_by_name(adapters: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    adapters += [adapter("NVIDIA H200 (DiscreteGPU) via Vulkan"), adapter("llvmpipe (CPU) via Vulkan", kind="CPU")]
    assert doctor.choose_adapter("LLVM") is adapters[1]
    monkeypatch.setenv("MEGANEURA_ADAPTER", "llvmpipe")
    assert doctor.choose_adapter(None) is adapters[1]
    assert doctor.choose_adapter("h200") is adapters[0], "the argument wins over the environment"
    with pytest.raises(RuntimeError, match="'radeon'.*NVIDIA H200.*llvmpipe"):
        doctor.choose_adapter("radeon")


def test_no_adapter_gives_the_remedy(adapters: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="mesa-vulkan-drivers libvulkan1"):
        Scale()


def test_doctor_without_adapter_or_wgpu(
    adapters: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.doctor(Scale, None) == 1
    assert "mesa-vulkan-drivers" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "import_wgpu", lambda: __import__("no_such_module"))
    assert doctor.doctor(Scale, None) == 1
    assert "pip install wgpu" in capsys.readouterr().out


def test_doctor_shows_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    class Huge(Scale):
        limits = {"max-buffer-size": 2**40}
        features = ("shader-f16", "no-such-feature")

    assert doctor.doctor(Scale, None) == 0
    assert "scale can run here" in capsys.readouterr().out
    assert doctor.doctor(Huge, None) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "max-buffer-size 1099511627776 2147483647 TOO LITTLE" in text and "via Vulkan, driver" in text
    assert "shader-f16 1 1" in text and "no-such-feature 1 0 TOO LITTLE" in text and "timestamp-query 0 1" in text


def test_wgpu_is_imported_with_a_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    doctor.import_wgpu()
    assert os.environ["XDG_RUNTIME_DIR"] == tempfile.gettempdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/mine")
    doctor.import_wgpu()
    assert os.environ["XDG_RUNTIME_DIR"] == "/mine"


@pytest.fixture
def native() -> Any:
    return pytest.importorskip("wgpu.backends.wgpu_native._api")


def without_pass_functions(lib: Any) -> Any:
    """wgpu's native library as it might become: other functions record a compute pass."""

    class Without:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("wgpuComputePassEncoder"):
                raise AttributeError(name)
            return getattr(lib, name)

    return Without()


def test_without_native_encoding_the_public_calls_do(
    gpu: Any, native: Any, spy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Decode(gpu)
    names = ("set_pipeline", "set_bind_group", "dispatch_workgroups")
    calls = [spy(native.GPUComputePassEncoder, name) for name in names]
    expected = {name: array.tobytes() for name, array in runner.decode(x=[1, 2, 3, 4]).items()}
    assert calls == [[], [], []], "where native functions are, they are used"
    monkeypatch.setattr(native, "lib", without_pass_functions(native.lib))
    assert {name: array.tobytes() for name, array in runner.decode(x=[1, 2, 3, 4]).items()} == expected
    assert [len(call) for call in calls] == [4, 4, 4]


def test_the_pipeline_is_set_only_when_it_changes(
    gpu: Any, native: Any, spy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Decode(gpu)
    monkeypatch.setattr(native, "lib", without_pass_functions(native.lib))
    calls = spy(native.GPUComputePassEncoder, "set_pipeline")

    def encode(encoder: Any) -> None:
        for pipeline, group in ((runner.p_step_0, runner.g_step_0),) * 2 + ((runner.p_step_1, runner.g_step_1),) * 3:
            encoder.dispatch(pipeline, group, 1, 1, 1)

    monkeypatch.setattr(runner, "encode_decode", encode)
    runner.decode(x=[1, 2, 3, 4])
    assert len(calls) == 2 and runner.get_state("position") == 6 and runner.get_state("rows").tolist() == [3, 3]


def test_modules_are_trusted_unless_checked(gpu: Any, native: Any, spy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spy(native.libf, "wgpuDeviceCreateShaderModuleTrusted")
    for checked, trusted in ((False, 1), (True, 1), (False, 2)):
        runner = Scale(gpu, checked=checked)
        runner.init_weights()
        assert runner.run(x=X)["y"].tobytes() == X.tobytes() and len(made) == trusted
    assert {checks for *_, checks in made} == {0}
    monkeypatch.delattr(native.libf, "wgpuDeviceCreateShaderModuleTrusted")
    runner = Scale(gpu)
    runner.init_weights()
    assert runner.run(x=X)["y"].tobytes() == X.tobytes()


def test_one_module_for_one_text(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Scale(gpu, checked=True)
    monkeypatch.setattr(runner.device, "create_shader_module", None)
    runner.pipeline(SCALE, N=1)
    with pytest.raises(TypeError):
        runner.pipeline(SCALE + "// another", N=1)


@pytest.mark.parametrize("checked", [False, True])
def test_naga_s_message_is_raised(gpu: Any, checked: bool) -> None:
    runner = Scale(gpu, checked=checked)
    with pytest.raises(runner.wgpu.GPUValidationError, match=r"(?s)wgpuDeviceCreateShaderModule\n.*foo"):
        runner.pipeline(SCALE.replace("w[id.x]", "foo[id.x]"), N=1)
    with pytest.raises(runner.wgpu.GPUValidationError, match="expected"):
        runner.pipeline(SCALE.replace("override N: u32;", "override N u32;"), N=1)
    with pytest.raises(runner.wgpu.GPUValidationError, match="'M' not found"):
        runner.pipeline(SCALE, N=1, M=2)


def test_a_bind_group_of_the_wrong_length_is_refused(gpu: Any) -> None:
    runner = Scale(gpu)
    with pytest.raises(ValueError, match="zip"):
        runner.bind(runner.p_scale_0, runner.b_x, runner.b_w)


def test_a_given_device_is_used_and_kept(gpu: Any) -> None:
    with Scale(gpu) as runner:
        assert runner.device is gpu
    assert isinstance(ModelRunner.limits, dict) and gpu.create_buffer(size=4, usage=8).size == 4


def test_without_wgpu_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wgpu", None)
    with pytest.raises(ImportError, match="pip install wgpu"):
        doctor.import_wgpu()
