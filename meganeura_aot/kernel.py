"""Render a template, and read the kernel's interface back from the WGSL: the text is the only truth."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from .errors import KernelError

_BINDING = re.compile(
    r"@group\(0\) @binding\((?P<index>\d+)\) var<(?P<space>storage, read_write|storage, read|uniform)> (?P<name>\w+)\s*:"
)
_OVERRIDE = re.compile(r"^override (\w+)\s*:\s*(u32|i32|f32)", re.MULTILINE)
_SIZE = re.compile(r"@workgroup_size\(([^)]*)\)")


@dataclass(frozen=True)
class Binding:
    """One `@binding` of group 0. access is "read", "read_write" or "uniform"."""

    name: str
    access: str


@dataclass(frozen=True)
class Kernel:
    """A rendered WGSL module with one entry point `main`, and what it asks for."""

    text: str
    bindings: tuple[Binding, ...]
    overrides: tuple[str, ...]

    @staticmethod
    def of(text: str) -> Kernel:
        """Read the interface of `text`; raises KernelError when bindings are not 0, 1, 2, ... in order."""
        found = list(_BINDING.finditer(text))
        if [int(match["index"]) for match in found] != list(range(len(found))):
            raise KernelError(f"bindings must be numbered 0, 1, 2, ... in order:\n{text}")
        if text.count("@binding") != len(found):
            raise KernelError(f"a binding is written in a form that the compiler does not read:\n{text}")
        if len(_SIZE.findall(text)) != 1:
            raise KernelError(f"expected one @workgroup_size:\n{text}")
        access = {"storage, read": "read", "storage, read_write": "read_write", "uniform": "uniform"}
        bindings = tuple(Binding(match["name"], access[match["space"]]) for match in found)
        return Kernel(text, bindings, tuple(match[0] for match in _OVERRIDE.findall(text)))


def data_folder(name: str) -> Path:
    """The folder `shaders` or `runtime_stub`, in an installed wheel or in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_data" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise KernelError(f"{name}: not found beside the package; the installation is damaged")


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_folder("shaders")),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="//%",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


@functools.cache
def _template_path(template: str) -> str:
    """Where a template lies below shaders/, by its name alone; raises KernelError where not just one has it."""
    folder = data_folder("shaders")
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob(f"{template}.wgsl.j2"))
    if len(found) != 1:
        raise KernelError(f"template {template}: expected one file of this name below shaders, got {found or 'none'}")
    return found[0]


@functools.cache
def _library() -> Mapping[str, str]:
    """The text of each function of shaders/lib, by its name."""
    return {path.stem: path.read_text().strip() for path in sorted((data_folder("shaders") / "lib").glob("*.wgsl"))}


def with_library(text: str) -> str:
    """Append the library functions that `text` calls, and those that they call, in order of name."""
    library = _library()
    needed: set[str] = set()
    pending = [text]
    while pending:
        code = re.sub(r"//.*", "", pending.pop())
        called = set(re.findall(r"\b(\w+)\(", code)) & library.keys() - needed
        needed |= called
        pending += [library[name] for name in sorted(called)]
    return text.rstrip() + "\n" + "".join(f"\n{library[name]}\n" for name in sorted(needed))


# The head of an entry point whose first argument is the workgroup_id.
_ENTRY = re.compile(r"^fn main\(\n    @builtin\(workgroup_id\) (\w+): vec3<u32>,\n(?:    .*\n)*\) \{\n", re.MULTILINE)


def with_unknown_zero(text: str) -> str:
    """Where `text` calls `kept_f32` of the library, declare and set the variable `unknown_zero` that it reads.

    It is the z coordinate of the workgroup: 0, because grids have two dimensions, which no shader compiler knows.
    """
    if "kept_f32(" not in text:
        return text
    entry = _ENTRY.search(text)
    if entry is None:
        raise KernelError(f"main calls kept_f32, and its first argument is not the workgroup_id:\n{text}")
    body = f"    unknown_zero = {entry[1]}.z;\n{text[entry.end() :]}"
    return f"{text[: entry.end()]}{body.rstrip()}\n\nvar<private> unknown_zero: u32;\n"


# How a binding that a kernel declares as an array of f32 or of its vectors reads halves, two to a u32.
HALVES = {
    "f32": ("u32", "unpack2x16float({name}[i / 2])[i % 2]"),
    "vec2<f32>": ("u32", "unpack2x16float({name}[i])"),
    "vec4<f32>": ("vec2<u32>", "vec4<f32>(unpack2x16float({name}[i].x), unpack2x16float({name}[i].y))"),
}


def read_as_f16(kernel: Kernel, name: str) -> Kernel:
    """The kernel with the read-only binding `name` stored as f16: every `name[...]` becomes a call."""
    if re.search(rf"> {name}: array<(vec2<)?u32>+;", kernel.text):
        return kernel  # written for halves
    declaration = re.search(rf"var<storage, read> {name}: array<(f32|vec2<f32>|vec4<f32>)>;", kernel.text)
    if declaration is None:
        raise KernelError(f"binding {name} cannot be stored as f16:\n{kernel.text}")
    element = declaration[1]
    stored, expression = HALVES[element]
    head, body = kernel.text[: declaration.end()], kernel.text[declaration.end() :]
    head = head.replace(declaration[0], declaration[0].replace(f"array<{element}>", f"array<{stored}>"))
    parts = []
    while (use := re.search(rf"\b{name}\[", body)) is not None:
        end = closing(body, use.end())
        parts += [body[: use.start()], f"read_{name}("]
        body = f"u32({body[use.end() : end]})){body[end + 1 :]}"
    function = f"fn read_{name}(i: u32) -> {element} {{\n    return {expression.format(name=name)};\n}}\n"
    return Kernel.of(f"{head}{''.join(parts)}{body.rstrip()}\n\n// {name} holds halves, two to a u32\n{function}")


def closing(text: str, start: int) -> int:
    """Where the bracket that was opened before `start` closes."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "[") - (text[place] == "]")
        if depth == 0:
            return place
    raise KernelError(f"a bracket is not closed:\n{text}")


def tidy(text: str) -> str:
    """One blank line between kinds of declarations and around functions: line statements of jinja swallow them."""
    lines: list[str] = []
    kind = "comment"
    for line in re.sub(r"\n{2,}", "\n\n", text).strip().split("\n"):
        declared = next(
            (k for k in ("@group", "override", "var<workgroup>", "fn", "@compute") if line.startswith(k)), ""
        )
        start = len(lines)
        while start and lines[start - 1].startswith("//"):
            start -= 1
        if declared and kind != "@compute" and start and lines[start - 1] and (declared != kind or declared == "fn"):
            lines.insert(start, "")
        kind = declared or kind
        lines.append(line)
    return "\n".join(lines) + "\n"


def render(template: str, variables: Mapping[str, Any]) -> Kernel:
    """Render shaders/<subject>/<template>.wgsl.j2; raises KernelError naming the template and what is undefined."""
    try:
        text = _environment().get_template(_template_path(template)).render(**variables)
    except jinja2.TemplateError as error:
        raise KernelError(f"template {template}: {error}") from error
    text = tidy(text)
    if re.search(r"\{[{%#]|[}%#]\}", text):
        raise KernelError(f"template {template}: a jinja marker is left in the WGSL")
    return Kernel.of(with_unknown_zero(with_library(text)))
