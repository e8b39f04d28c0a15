"""No result depends on what an earlier kernel left in workgroup memory, which wgpu-native never zeroes.

Each kernel first fills its workgroup memory: another dispatch that does so may have got other memory. What it is filled with
is data, so that the same machine code runs each time and bits may be compared, those of NaNs too.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import wgpu

from meganeura_aot import compile_graph
from meganeura_aot.kernel import Kernel, data_folder
from meganeura_aot.op import Sample
from runtime_stub.core import Encoder, Pipeline
from tests import harness
from tests.test_operators import CASES, feeds_of, graph_of

# what to fill floats and integers with: what a maximum hides and what it does not, a flag that is set, the largest index
FILLS = {"NaN and 1": (np.nan, 1), "1e30 and 2^32 - 1": (1e30, 2**32 - 1)}
GROUP = ((0, "uniform"),)  # group 1: the bits of both

MEMORY = re.compile(r"var<workgroup> (\w+): (?:array<(u32|i32|f32|vec[234]<f32>), (\d+)>|atomic<u32>);")
MAIN = re.compile(r"@workgroup_size\((\d+)\)\nfn main\([^{]*@builtin\(local_invocation_index\) (\w+)[^{]*{\n")


def filling(code: str) -> str:
    """The kernel, which first fills its workgroup memory."""
    memory, main = MEMORY.findall(code), MAIN.search(code)
    assert main is not None and len(memory) == code.count("var<workgroup>"), code
    lines = []
    for name, element, count in memory:
        value = f"{element}({'bitcast<f32>(fill.x)' if 'f32' in element else 'fill.y'})"
        loop = f"for (var i = {main[2]}; i < {count}; i += {main[1]}) {{ {name}[i] = {value}; }}"
        lines.append(loop if element else f"atomicStore(&{name}, fill.y);")
    head, body = code[: main.end()], code[main.end() :]
    group = "@group(1) @binding(0) var<uniform> fill: vec2<u32>;"
    return "\n".join([f"{group}\n{head}", *lines, "workgroupBarrier();", body])


class FillingRunner(harness.CanaryRunner):
    """A runner of such kernels."""

    left: tuple[float, int] = (0.0, 0)

    def create_pipeline(self, code: str, **constants: float) -> Pipeline:
        if "var<workgroup>" not in code:
            return super().create_pipeline(code, **constants)
        kinds = {"read": "read-only-storage", "read_write": "storage", "uniform": "uniform"}
        bindings = tuple((n, kinds[binding.access]) for n, binding in enumerate(Kernel.of(code).bindings))
        layout = self.device.create_pipeline_layout(bind_group_layouts=[self._layout(bindings), self._layout(GROUP)])
        compute = {"module": self._module(filling(code)), "constants": constants}
        pipeline = self.device.create_compute_pipeline(layout=layout, compute=compute)
        return Pipeline(pipeline, self._layout(bindings), bindings, code)

    def _record(self, label: str, encode: Any, foreign: Any, commands: Any, stamps: Any = None) -> None:
        data = np.array(self.left, "f4,u4")
        buffer = self.device.create_buffer_with_data(data=data, usage=wgpu.BufferUsage.UNIFORM)
        entries = [{"binding": 0, "resource": {"buffer": buffer}}]
        compute_pass = commands.begin_compute_pass(label=label)
        compute_pass.set_bind_group(1, self.device.create_bind_group(layout=self._layout(GROUP), entries=entries))
        encode(Encoder(compute_pass, foreign))
        compute_pass.end()


@pytest.mark.parametrize("sample", CASES)
def test_what_is_left_there_does_not_matter(
    sample: Sample, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compile_graph(graph_of(sample))
    if not any("var<workgroup>" in dispatch.kernel.text for dispatch in program.plan.dispatches()):
        return
    monkeypatch.setattr(harness, "CanaryRunner", FillingRunner)
    runner = harness.load(program)
    feeds = feeds_of(sample, request)
    clean = runner.run(**harness.feeds_of(runner, feeds))
    for name, runner.left in FILLS.items():
        results = runner.run(**harness.feeds_of(runner, feeds))
        harness.assert_same(clean, results, f"with {name} left in workgroup memory")


def test_flags_are_cleared_before_the_first_barrier() -> None:
    """The ways that a flag chooses between may give the same bits on one adapter, and others on another."""
    for path in sorted(data_folder("shaders").rglob("*.j2")):
        text = path.read_text()
        start = text.split("fn main(")[-1].split("workgroupBarrier();")[0]
        for name in re.findall(r"var<workgroup> (\w+): atomic<u32>;", text):
            assert f"atomicStore(&{name}, 0);" in start, f"{path.name}: {name}"
