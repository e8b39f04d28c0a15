"""Write docs/builder.md, docs/ops.md and docs/seed_parity.md from the code: python docs/generate.py [--check]"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from meganeura_aot import Graph, compile_graph  # noqa: E402
from meganeura_aot.graph import GraphIR  # noqa: E402
from meganeura_aot.op import OPS, Op  # noqa: E402
from meganeura_aot.ops.pointwise.op import Pointwise  # noqa: E402
from tests.seed_entries import COOPERATIVE, OPERATORS, SHADER_ENTRIES, Build  # noqa: E402
from tests.test_operators import graph_of  # noqa: E402

BUILDER_HEAD = """# The methods of Graph

Made by `python docs/generate.py`; a test fails when it is out of date. A tensor also has `.shape`, `.dtype` and NumPy's
operators. Every method takes arrays of NumPy and numbers in place of tensors, and numbers, booleans and arrays of NumPy in
place of Python's numbers, flags and sequences. It refuses a float that f32 does not hold, and an integer that 32 bits do not.
"""

HEADINGS = {
    "Graph": "Leaves, states, outputs",
    "GatherOperators": "Indices, order, random numbers, positions",
    "NormOperators": "Norms and losses",
    "AttentionOperators": "Attention and caches",
    "ImageOperators": "Images and sequences",
    "Operators": "Products, reductions, layout",
    "PointwiseOperators": "Pointwise",
}

OPS_HEAD = """# Operators

Made by `python docs/generate.py` from the registry; a test fails when it is out of date. Users call the builder's methods;
these are the operators behind them. `tolerance` is the line of the one rule that its kernels are held to.
"""

PARITY_HEAD = """# Parity with the seed

The seed is the compile stage of meganeura 0.2.0, a neural-network system in Rust whose operators this project writes anew.
Made by `python docs/generate.py`. Every shader entry and operator of the seed, the operators and kernels here that do its
work, and the test that runs them against the float64 reference. `template: variants` are files of `shaders/`.
"""


def kernels(graphs: list[Graph | GraphIR]) -> str:
    """`template: variant, variant` of everything that the graphs dispatch."""
    found: dict[str, dict[str, None]] = {}
    for graph in graphs:
        for dispatch in compile_graph(graph).plan.dispatches():
            found.setdefault(dispatch.template, {})[dispatch.label] = None
    return "; ".join(f"{template}: {', '.join(labels)}" for template, labels in found.items()) or "none"


def meaning(op: type[Op]) -> str:
    """The first paragraph of an operator's docstring; of a pointwise row, its WGSL."""
    if issubclass(op, Pointwise):
        wgsl = op.wgsl if isinstance(op.wgsl, str) else next(iter(op.wgsl.values()))
        text = wgsl
        for place, name in enumerate("abcd"):
            text = text.replace(f"{{{place}}}", name)
        return f"`{text}`"
    return " ".join((op.__doc__ or "").strip().split("\n\n")[0].split())


def attributes(op: type[Op]) -> str:
    fields = getattr(op, "__dataclass_fields__", {})
    shown = [name for name, field in fields.items() if field.repr and field._field_type.name == "_FIELD"]
    return ", ".join(shown) or "-"


def ops_text() -> str:
    lines = [OPS_HEAD]
    modules: dict[str, list[type[Op]]] = {}
    for op in OPS.values():
        modules.setdefault(op.__module__.rsplit(".", 1)[-1], []).append(op)
    for module in sorted(modules):
        lines += [
            f"## {module}",
            "",
            "| operator | attributes | meaning | tolerance | templates | samples |",
            "|---|---|---|---|---|--:|",
        ]
        for op in sorted(modules[module], key=lambda op: op.name):
            samples = list(op.samples())
            plans = [compile_graph(graph_of(sample)).plan for sample in samples]
            templates = ", ".join(sorted({d.template for plan in plans for d in plan.dispatches()})) or "-"
            cells = [
                f"`{op.name}`",
                attributes(op),
                meaning(op).replace("|", "\\|"),
                op.tolerance,
                templates,
                str(len(samples)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def entry_graph(build: Build) -> Graph:
    g = Graph()
    g.set_outputs({"y": build(g)})
    return g


def parity_row(name: str, build: Build | str) -> str:
    if isinstance(build, str):
        return f"| {name} | {build} | - | - |"
    graph = entry_graph(build)
    leaves = ("input", "parameter", "state", "constant")
    ops = dict.fromkeys(node.op.name for node in graph.build().nodes if node.op.name not in leaves)
    test = f"tests/test_seed_parity.py::test_entry[{name}]"
    return f"| {name} | {', '.join(ops)} | {kernels([graph])} | `{test}` |"


def parity_text() -> str:
    lines = [PARITY_HEAD]
    for title, table in (("Shader entries", SHADER_ENTRIES), ("Operators that are no shader entry", OPERATORS)):
        lines += [f"## {title}", "", "| seed | operators | template: variants | test |", "|---|---|---|---|"]
        lines += [parity_row(name, build) for name, build in table.items()]
        lines.append("")
    lines += [
        "## Cooperative matrices",
        "",
        "Refused by wgpu-py 0.32.",
        "",
        "| seed | kernel that does the work |",
        "|---|---|",
    ]
    lines += [f"| {name} | {kernel} |" for name, kernel in COOPERATIVE.items()]
    return "\n".join(lines) + "\n"


def builder_text() -> str:
    """The public methods of Graph, a heading a class that defines them."""
    lines = [BUILDER_HEAD]
    for cls in Graph.__mro__:
        methods = {name: f for name, f in vars(cls).items() if inspect.isfunction(f) and not name.startswith("_")}
        shown = [name for name in methods if methods[name].__doc__]
        if cls is Graph:  # it wraps all of them; its own are those that no other class has
            inherited = [vars(base).get(name) for base in Graph.__mro__[1:] for name in shown]
            known = {method.__name__ for method in inherited if method is not None and method.__doc__}
            shown = [name for name in shown if name not in known]
        if shown:
            lines += [f"## {HEADINGS[cls.__name__]}", "", inspect.cleandoc(cls.__doc__ or ""), ""]
        for name in shown:
            method = inspect.unwrap(getattr(cls, name))
            text = inspect.cleandoc(method.__doc__ or "")
            lines += [f"**`{name}{signature_text(method)}`**", "", *text.splitlines(), ""]
    return "\n".join(lines)


def signature_text(method: Any) -> str:
    """Arguments and defaults, without types."""
    signature = inspect.signature(method)
    plain = [p.replace(annotation=p.empty) for name, p in signature.parameters.items() if name != "self"]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


TEXTS = {"builder.md": builder_text, "ops.md": ops_text, "seed_parity.md": parity_text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of date")
    options = parser.parse_args()
    stale = 0
    for name, make in TEXTS.items():
        path, text = ROOT / "docs" / name, make()
        if options.check:
            stale += not path.is_file() or path.read_text() != text
        else:
            path.write_text(text)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
