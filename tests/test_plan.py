"""The plan refuses what WebGPU or the plan itself forbids; memory is shared only where lives do not meet."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meganeura_aot import Graph, KernelError, PlanError, Program, compile_graph
from meganeura_aot.kernel import Kernel, render, with_library
from meganeura_aot.lowering import fold_grid
from meganeura_aot.memory import lives, lower_bound, share_buffers, verify_sharing
from meganeura_aot.op import OPS
from meganeura_aot.plan import Dispatch, ExecutionPlan


def chain(length: int = 5, size: int = 100) -> Program:
    g = Graph()
    x = g.input("x", (size,))
    for _ in range(length):
        x = g.tanh(x)
    g.set_outputs({"y": x})
    return compile_graph(g)


def changed(plan: ExecutionPlan, index: int, change: Callable[[Dispatch], Dispatch]) -> ExecutionPlan:
    (entry,) = plan.entries
    dispatches = list(entry.dispatches)
    dispatches[index] = change(dispatches[index])
    return replace(plan, entries=(replace(entry, dispatches=tuple(dispatches)),))


def rebind(dispatch: Dispatch, binding: str, buffer: str) -> Dispatch:
    bindings = tuple((b, buffer if b == binding else name, access) for b, name, access in dispatch.bindings)
    return replace(dispatch, bindings=bindings)


MISTAKES: dict[str, tuple[Callable[[Dispatch], Dispatch], str]] = {
    "written buffer bound twice": (
        lambda d: rebind(d, "a", {b: n for b, n, _ in d.bindings}["out"]),
        "bound twice",
    ),
    "bindings swapped": (lambda d: replace(d, bindings=d.bindings[::-1]), "are not those of the kernel"),
    "override renamed": (lambda d: replace(d, constants=(("M", 100),)), "are not the overrides"),
    "override missing": (lambda d: replace(d, constants=()), "are not the overrides"),
    "empty grid": (lambda d: replace(d, grid=(0, 1, 1)), "grid"),
    "grid not folded": (lambda d: replace(d, grid=(65536, 1, 1)), "grid"),
    "reads what nothing wrote": (lambda d: rebind(d, "a", "y"), "before anything writes it"),
    "writes an input": (lambda d: rebind(d, "out", "x"), "writes x, a input"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str) -> None:
    change, message = MISTAKES[name]
    plan = chain().plan
    plan.verify()
    with pytest.raises(PlanError, match=message):
        changed(plan, 1, change).verify()


def test_unwritten_output() -> None:
    plan = chain().plan
    (entry,) = plan.entries
    with pytest.raises(PlanError, match="nothing writes"):
        replace(plan, entries=(replace(entry, dispatches=entry.dispatches[:-1]),)).verify()


def test_nine_buffers() -> None:
    lines = "\n".join(f"@group(0) @binding({i}) var<storage, read> x{i}: array<f32>;" for i in range(9))
    kernel = Kernel.of(lines + "\n@compute @workgroup_size(1)\nfn main() {}\n")
    nine = replace(chain().plan.entries[0].dispatches[0], kernel=kernel, constants=())
    nine = replace(nine, bindings=tuple((b.name, "x", b.access) for b in kernel.bindings))
    with pytest.raises(PlanError, match="9 storage buffers"):
        changed(chain().plan, 0, lambda _: nine).verify()


def test_buffer_over_every_limit() -> None:
    plan = chain().plan
    huge = replace(plan.buffers["x"], nbytes=1 << 33)
    with pytest.raises(PlanError, match="max-storage-buffer-binding-size"):
        replace(plan, buffers={**plan.buffers, "x": huge}).verify()


def test_limits_are_raised_only_where_needed() -> None:
    assert chain().plan.limits() == {}
    g = Graph()
    x = g.input("x", (40_000_000,))
    g.set_outputs([x[:3]])
    assert compile_graph(g).plan.limits() == {"max-storage-buffer-binding-size": 160_000_000}


def test_the_runner_asks_for_what_the_plan_needs() -> None:
    """The emitted class names the raised limits and the optional features; a plan without them names neither."""
    g = Graph()
    g.set_outputs([g.input("x", (40_000_000,))[:3]])
    program = compile_graph(g, target="native")
    namespace: dict[str, Any] = {"__name__": "emitted"}
    exec(program.text, namespace)
    assert namespace["Runner"].limits == {"max-storage-buffer-binding-size": 160_000_000}
    assert namespace["Runner"].optional_features == ("subgroup", "shader-f16")
    assert "max-storage-buffer-binding-size 160000000; uses subgroup, shader-f16 where present" in program.text
    plain = chain().text
    assert "    limits =" not in plain.split("# ==== Model ====")[1]
    assert "WebGPU default limits; no optional features" in plain


def test_a_chain_needs_two_buffers() -> None:
    program = chain(9)
    scratch = [b for b in program.plan.buffers.values() if b.kind == "scratch"]
    assert len(scratch) == 2
    assert program.report.scratch_bytes == program.report.scratch_bound == 800


def test_sharing_two_live_buffers_is_refused() -> None:
    program = chain(3)
    both = changed(program.plan, 0, lambda d: rebind(d, "out", "t0"))
    both = changed(both, 1, lambda d: rebind(rebind(d, "a", "t0"), "out", "t0"))
    with pytest.raises(PlanError, match="tanh_1 is in t0, not in t1"):
        verify_sharing(program.unshared, both)
    both = changed(both, 2, lambda d: rebind(d, "a", "t0"))
    with pytest.raises(PlanError, match="alive together"):
        verify_sharing(program.unshared, both)


def test_a_home_that_is_too_small_is_refused() -> None:
    program = chain(3)
    small = {name: replace(b, nbytes=4) if name == "t0" else b for name, b in program.plan.buffers.items()}
    with pytest.raises(PlanError, match="is smaller"):
        verify_sharing(program.unshared, replace(program.plan, buffers=small))


def test_lives_of_a_diamond() -> None:
    g = Graph()
    x = g.input("x", (10,))
    a = g.exp(x)
    b, c = g.sin(a), g.cos(a)
    g.set_outputs({"y": g.maximum(b, c)})
    program = compile_graph(g)
    alive = lives(program.unshared)
    assert (alive["exp_0"].first, alive["exp_0"].last) == (0, 2)
    assert len({b for b in program.plan.buffers if b.startswith("t")}) == 3
    assert lower_bound(program.unshared) == 120
    verify_sharing(program.unshared, share_buffers(program.unshared))


@pytest.mark.parametrize("groups", [1, 65535, 65536, 131070, 131071, 10**7, 65535**2])
def test_fold_grid(groups: int) -> None:
    x, y, z = fold_grid(groups, 65535)
    assert z == 1
    assert max(x, y) <= 65535
    assert groups <= x * y < groups + y


def test_kernel_interface() -> None:
    kernel = render("pointwise", pointwise_variables())
    assert [(b.name, b.access) for b in kernel.bindings] == [("a", "read"), ("out", "read_write")]
    assert kernel.overrides == ("N",)
    assert "fn tanh_f32" in kernel.text


def pointwise_variables(**changes: Any) -> dict[str, Any]:
    base = {
        "inputs": [("a", "f32")],
        "out_dtype": "f32",
        "dims": [],
        "lines": [],
        "result": "tanh_f32(a[i])",
        "wide": False,
        "title": "t",
    }
    return base | changes


def test_template_mistakes() -> None:
    variables = pointwise_variables()
    del variables["result"]
    with pytest.raises(KernelError, match=r"template pointwise: .*result"):
        render("pointwise", variables)
    with pytest.raises(KernelError, match="template nowhere"):
        render("nowhere", {})
    with pytest.raises(KernelError, match="numbered"):
        Kernel.of("@group(0) @binding(1) var<storage, read> a: array<f32>;\n@compute @workgroup_size(1)\nfn main() {}")
    with pytest.raises(KernelError, match="in a form that the compiler does not read"):
        Kernel.of("@group(1) @binding(0) var<storage, read> a: array<f32>;\n@compute @workgroup_size(1)\nfn main() {}")


def test_library_is_included_once_and_with_what_it_calls() -> None:
    text = with_library("fn main() { silu_f32(1.0); silu_f32(2.0); } // gelu_erf_f32(x)")
    assert text.count("fn silu_f32(") == 1
    assert "fn gelu_erf_f32(" not in text
    for name in set(re.findall(r"\b(\w+_f32)\(", re.sub("//.*", "", text))):
        assert f"fn {name}(" in text, name


def test_wrong_binding_name_in_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator's author sees after misspelling a binding or an override."""

    def misspelt(self: Any, k: Any, x: Any, *, out: Any) -> None:
        k.dispatch("pointwise", variant=pointwise_variables(), bind={"x": x, "out": out}, const={"N": 1}, groups=1)

    monkeypatch.setattr(OPS["tanh"], "lower", misspelt)
    with pytest.raises(
        KernelError, match=r"tanh: template pointwise declares \['a', 'out'\].*the operator gave \['x', 'out'\]"
    ):
        chain(1)
