"""The choice of matmul kernels: within WebGPU's limits, covering C, and the expected one for known shapes."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import pytest

from meganeura_aot.kernel import Kernel, render
from meganeura_aot.ops.matmul.schedule import MatMulKernel, choose_kernel

FORMS = {"NN": (False, False), "NT": (False, True), "TN": (True, False), "TT": (True, True)}
SIZES = (1, 3, 8, 9, 33, 64, 130, 1024)
SHAPES = [
    *itertools.product(SIZES, SIZES, (1, 2, 7, 36, 64, 300)),
    (4096, 4096, 4096),
    (4096, 208, 440),
    (512, 49, 4608),
    (1, 49152, 576),
    (49152, 1, 576),
    (3000, 3001, 1001),
]


@dataclass(frozen=True)
class Extra:
    name: str
    dtype: str


def rendered(kernel: MatMulKernel, form: str, **changes: Any) -> Kernel:
    trans_a, trans_b = FORMS[form]
    variables = {
        **kernel.variant,
        "trans_a": trans_a,
        "trans_b": trans_b,
        "batch_overrides": [],
        "a_batch": "batch",
        "b_batch": "batch",
        "extras": [],
        "epilogue": [],
        "result": "sum",
    }
    return render(kernel.template, variables | changes)


def choose(shape: tuple[int, int, int], form: str, target: str = "webgpu", batch: int = 1) -> MatMulKernel:
    return choose_kernel(*shape, batch, *FORMS[form], target)


def block(kernel: MatMulKernel) -> tuple[int, int]:
    """Rows and columns of C of one workgroup, from the template's own parameters."""
    v = kernel.variant
    if kernel.template == "matmul":
        return int(v["tile_m"]), int(v["tile_n"])
    if kernel.template == "matmul_dot":
        return int(v["rows"]), int(v["cols"]) * int(v["teams"])
    return int(v["rows"]), int(v["cols"]) * int(v["lanes"])


@pytest.mark.parametrize("target", ["webgpu", "native", "cpu"])
@pytest.mark.parametrize("form", FORMS)
def test_kernels_cover_c_and_keep_their_promises(form: str, target: str) -> None:
    trans_a, trans_b = FORMS[form]
    for shape in SHAPES:
        m, n, k = shape
        kernel = choose(shape, form, target, batch=3)
        v = kernel.variant
        rows, cols = block(kernel)
        assert kernel.groups == 3 * -(-m // rows) * -(-n // cols), (shape, kernel)
        assert kernel.constants == {"GROUPS": kernel.groups}
        assert v["edge_m"] == (m % rows != 0)
        assert v["edge_n"] == (n % cols != 0)
        if kernel.template == "matmul":
            assert v["edge_k"] == (k % int(v["tile_k"]) != 0)
            along = {"a": m if trans_a else k, "b": k if trans_b else n}
        elif kernel.template == "matmul_dot":  # reads both along the terms, and moves the last block back
            assert (not trans_a or m == 1) and (trans_b or n == 1)
            assert int(v["rows"]) <= m and int(v["cols"]) <= n
            assert k // int(v["a_vec"]) % (int(v["lanes"]) * int(v["unroll"])) == 0 or v["unroll"] == 1
            along = {"a": k, "b": k}
        else:
            assert int(v["rows"]) <= m
            assert k % (int(v["slices"]) * int(v["unroll"])) == 0 or v["unroll"] == 1
            along = {"a": 1, "b": k if trans_b else n}
        for name, length in along.items():
            assert length % int(v[f"{name}_vec"]) == 0, (shape, kernel)


def distinct_kernels() -> list[tuple[str, str, MatMulKernel]]:
    found = {}
    for target, form, shape in itertools.product(("webgpu", "cpu"), FORMS, SHAPES):
        kernel = choose(shape, form, target)
        found[kernel.template, form, tuple(kernel.variant.items())] = kernel
    return [(f"{kernel.label} {form}", form, kernel) for (_, form, _), kernel in found.items()]


def test_every_variant_renders_within_the_limits() -> None:
    kernels = distinct_kernels()
    assert {kernel.template for _, _, kernel in kernels} == {"matmul", "matmul_dot", "matmul_outer"}
    for name, form, kernel in kernels:
        module = rendered(kernel, form)
        assert [binding.name for binding in module.bindings] == ["a", "b", "out"]
        assert module.overrides == ("M", "N", "K", "GROUPS")
        assert "arrayLength" not in module.text
        assert "finish" not in module.text
        threads = re.search(r"@workgroup_size\((\d+)\)", module.text)
        assert threads and int(threads[1]) <= 256, name
        shared = re.findall(r"var<workgroup> \w+: array<(f32|vec4<f32>), (\d+)>", module.text)
        assert sum((4 if type_ == "f32" else 16) * int(n) for type_, n in shared) <= 16384, name
        assert len(shared) == module.text.count("var<workgroup>"), name
        assert "\t" not in module.text and not re.search(r" +$", module.text, re.MULTILINE), name


@pytest.mark.parametrize(("form", "target"), list(itertools.product(FORMS, ("webgpu", "cpu"))))
def test_threads_and_slices_divide_the_work_of_a_tile(form: str, target: str) -> None:
    """What the tiled template takes for granted."""
    for shape in SHAPES:
        v = {name: int(value) for name, value in choose(shape, form, target).variant.items()}
        if "tile_m" not in v:
            continue
        assert v["threads"] == v["tile_m"] // v["thread_m"] * (v["tile_n"] // v["thread_n"]) * v["slices"]
        assert v["slices"] == 1 or v["lanes_n"] == 0
        for name, size, direct in (("a", v["tile_m"], form[0] == "T"), ("b", v["tile_n"], form[1] == "N")):
            terms = v[f"{name}_terms"]
            assert size * v["tile_k"] % (4 * v["threads"] * terms) == 0
            assert v["threads"] % (size // 4 if direct else v["tile_k"] // terms) == 0
            assert v["tile_k"] // v["slices"] % terms == 0
            if not direct:  # the xor must map each slice's terms, and each quarter of the rows, onto itself
                spread = v[f"{name}_spread"]
                scale = max(1, 8 * terms // v["tile_k"])
                assert v["slices"] == 1 or v["tile_k"] // v["slices"] // terms * scale % spread == 0
                assert size // 4 % spread == 0
                per_thread = v["thread_m"] if name == "a" else v["thread_n"]
                assert per_thread == 4 or size // per_thread % spread == 0


@pytest.mark.parametrize(
    ("shape", "form", "label"),
    [
        ((4096, 4096, 4096), "NT", "tile 128x128x8"),
        ((4096, 4096, 4096), "NN", "tile 128x128x8"),
        ((4096, 4096, 4096), "TT", "tile 128x128x8"),
        ((4096, 4096, 4096), "TN", "tile 128x128x16"),
        ((4096, 4096, 64), "NT", "tile 64x64x32"),
        ((3000, 3001, 1001), "NN", "tile 64x64x32"),
        ((1024, 1024, 1024), "NT", "tile 64x64x32"),
        ((128, 1536, 576), "NT", "tile 32x32x64"),
        ((128, 576, 576), "NT", "tile 32x32x64"),
        ((512, 49, 4608), "NN", "tile 16x32x64"),
        ((32, 64, 64), "NT", "tile 32x32x16"),
        ((1, 576, 1536), "NT", "dot 1x1"),
        ((8, 4096, 4096), "NT", "dot 8x4"),
        ((4096, 1, 4096), "NN", "dot 1x1"),
        ((4096, 5, 4096), "NT", "dot 4x5"),
        ((1, 4096, 4096), "NN", "outer 1x4"),
        ((9, 4096, 4096), "NT", "tile 32x32x64"),
    ],
)
def test_known_choices_on_gpus(shape: tuple[int, int, int], form: str, label: str) -> None:
    assert choose(shape, form).label == label
    assert choose(shape, form, "native") == choose(shape, form)


@pytest.mark.parametrize(
    ("shape", "form", "label"),
    [
        ((512, 512, 512), "NN", "outer 16x16"),
        ((512, 512, 512), "TN", "outer 16x16"),
        ((512, 512, 512), "NT", "dot 16x16"),
        ((128, 128, 128), "NN", "outer 8x8"),
        ((128, 128, 128), "NT", "dot 8x8"),
        ((5, 7, 3), "NT", "outer 4x4"),
        ((1, 1000, 256), "NT", "dot 1x16"),
    ],
)
def test_known_choices_on_software_adapters(shape: tuple[int, int, int], form: str, label: str) -> None:
    assert choose(shape, form, "cpu").label == label


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
@pytest.mark.parametrize("form", FORMS)
def test_no_terms_and_empty_results(form: str, target: str) -> None:
    kernel = choose((5, 72, 0), form, target)
    assert kernel.groups > 0
    assert (kernel.variant["a_vec"], kernel.variant["b_vec"]) == (1, 1)  # the buffers may hold only four bytes
    text = rendered(kernel, form).text
    assert "k < K" in text  # the loop is what keeps the empty operands unread
    for shape in ((0, 5, 7), (5, 0, 7), (0, 0, 0)):
        assert choose(shape, form, target).groups == 0
    assert choose((5, 6, 7), form, target, batch=0).groups == 0


@pytest.mark.parametrize("target", ["webgpu", "cpu"])
@pytest.mark.parametrize("shape", [(1, 300, 77), (1, 300, 640), (100, 300, 77), (2048, 2048, 512)])
@pytest.mark.parametrize("form", FORMS)
def test_epilogue_extras_and_broadcast_batches(form: str, shape: tuple[int, int, int], target: str) -> None:
    kernel = choose(shape, form, target, batch=6)
    module = rendered(
        kernel,
        form,
        batch_overrides=["D0", "D1"],
        a_batch="(batch / D1) % D0",
        b_batch="0u",
        extras=[Extra("bias", "f32"), Extra("index", "u32")],
        epilogue=["let y = sum + bias[col];"],
        result="select(y, 0.0, index[row] == 0u)",
    )
    assert [binding.name for binding in module.bindings] == ["a", "b", "bias", "index", "out"]
    assert module.overrides == ("M", "N", "K", "GROUPS", "D0", "D1")
    assert "let matrix_a = (batch / D1) % D0;" in module.text
    assert "let matrix_b = 0u;" in module.text
    assert "    let y = sum + bias[col];\n    return select(y, 0.0, index[row] == 0u);\n" in module.text
    stores = re.findall(r"out\[.*\] = (.*);", module.text)
    assert stores and all(value.startswith("finish(") for value in stores)


def test_a_result_alone_is_an_epilogue() -> None:
    kernel = choose((64, 64, 64), "NN")
    text = rendered(kernel, "NN", result="max(sum, 0.0)").text
    assert "return max(sum, 0.0);" in text
