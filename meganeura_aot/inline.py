"""Copy whole files of runtime_stub into a runner: imports merged at the top, the rest verbatim."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import KernelError
from .kernel import data_folder

INFERENCE = ("core", "weights", "weight_files", "doctor", "files", "profile", "cli")
TRAINING = (*INFERENCE, "optimizer", "fit", "checkpoint", "train")


@dataclass(frozen=True)
class Inlined:
    """imports: the lines at the top of the file; body: the files, each under its docstring as a comment; names: what
    they define at their top level."""

    imports: str
    body: str
    names: frozenset[str]


@dataclass(frozen=True)
class Module:
    """One file of the stub, taken apart."""

    docstring: str
    uses: tuple[str, ...]
    plain: frozenset[str]
    froms: tuple[tuple[str, str], ...]
    body: str


@functools.cache
def inline(names: Sequence[str] = INFERENCE) -> Inlined:
    """The stub's modules, each after the ones that it imports. Names at their top level are unique, as tests check."""
    modules = {name: read_module(name) for name in names}
    ordered: list[str] = []

    def place(name: str) -> None:
        if name in ordered:
            return
        if name not in modules:
            raise KernelError(f"runtime_stub: {name} is imported but not inlined")
        for other in modules[name].uses:
            place(other)
        ordered.append(name)

    for name in names:
        place(name)
    sections = [section(modules[name]) for name in ordered]
    defined = frozenset(re.findall(r"^(?:def |class )?(\w+)\b(?=[:(=]| =)", "\n".join(sections), re.MULTILINE))
    return Inlined(merge_imports(list(modules.values())), "\n\n\n".join(sections) + "\n", defined)


def section(module: Module) -> str:
    """A module's text under its docstring; black wants two empty lines above a class or a function."""
    gap = "\n\n\n" if module.body.startswith(("class ", "def ", "@")) else "\n\n"
    return f"# {comment(module.docstring)}{gap}{module.body}"


def comment(docstring: str) -> str:
    return "\n# ".join(docstring.strip().splitlines()).replace("# \n", "#\n")


def read_module(name: str) -> Module:
    """Take runtime_stub/<name>.py apart. Its imports stand at the top, one statement after the other."""
    source = (data_folder("runtime_stub") / f"{name}.py").read_text()
    tree = ast.parse(source)
    uses: list[str] = []
    plain: set[str] = set()
    froms: list[tuple[str, str]] = []
    lines = source.splitlines()
    end = 0
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            plain |= {alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.level:
            uses.append(statement.module or "")
        elif isinstance(statement, ast.ImportFrom):
            froms += [
                (statement.module or "", a.name + (f" as {a.asname}" if a.asname else "")) for a in statement.names
            ]
        elif statement is not tree.body[0]:
            break
        end = statement.end_lineno or end
    body = "\n".join(lines[end:]).strip()
    return Module(ast.get_docstring(tree) or name, tuple(uses), frozenset(plain), tuple(froms), body)


def merge_imports(modules: Sequence[Module]) -> str:
    """Every import once, the standard library first, in the order that isort gives."""
    plain = sorted(set().union(*(module.plain for module in modules)))
    froms: dict[str, set[str]] = {}
    for module in modules:
        for source, name in module.froms:
            froms.setdefault(source, set()).add(name)
    blocks: list[list[str]] = [[], [], []]
    for name in plain:
        blocks[_block(name)].append(f"import {name}")
    for source in sorted(froms):
        names = ", ".join(sorted(froms[source], key=lambda name: (not name.isupper(), not name[0].isupper(), name)))
        blocks[_block(source)].append(f"from {source} import {names}")
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _block(name: str) -> int:
    root = name.split(" ")[0].split(".")[0]
    return 0 if root == "__future__" else 1 if root in sys.stdlib_module_names else 2
