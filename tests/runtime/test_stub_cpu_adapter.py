"""A software adapter under a runner that was compiled for GPUs is announced."""

from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from runtime_stub import doctor

from .runners import Scale

X = np.ones((2, 3), np.float32)


class Compiled(Scale):
    """compiled: as the compiler would write it for a target."""


@pytest.mark.parametrize(("target", "warns"), [("webgpu", True), ("native", True), ("cpu", False), ("", False)])
@pytest.mark.parametrize("kind", ["CPU", "DiscreteGPU"])
def test_a_software_adapter_is_announced_once(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, target: str, warns: bool, kind: str
) -> None:
    monkeypatch.setattr(Compiled, "target", target)
    monkeypatch.setattr(doctor.this_process(), "warned", False)
    monkeypatch.setitem(gpu.adapter.info, "adapter_type", kind)
    for _ in range(2):
        runner = Compiled(gpu)
        runner.init_weights()
        for _ in range(2):
            runner.run(x=X)
    said = [warning for warning in recwarn.list if warning.category is doctor.CpuAdapterWarning]
    assert len(said) == (warns and kind == "CPU")
    for warning in said:
        assert str(warning.message).startswith("scale: this adapter is a CPU: compile with --target cpu")


def test_doctor_announces_a_software_adapter(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "choose_adapter", lambda _: gpu.adapter)
    for kind, target, said in (
        ("CPU", "webgpu", True),
        ("CPU", "native", True),
        ("CPU", "cpu", False),
        ("IntegratedGPU", "webgpu", False),
    ):
        monkeypatch.setitem(gpu.adapter.info, "adapter_type", kind)
        monkeypatch.setattr(Compiled, "target", target)
        assert doctor.doctor(Compiled, None) == 0
        assert ("this adapter is a CPU: compile with --target cpu" in capsys.readouterr().out) == said


@pytest.mark.parametrize("target", ["webgpu", "native", "cpu"])
def test_the_compiler_writes_the_target(gpu: Any, target: str) -> None:
    g = Graph()
    g.set_outputs({"y": g.input("x", (2, 3)) * 2.0})
    assert compile_graph(g, target=target).load(device=gpu).target == target
