"""The rules of the layout: who imports whom, sizes, nothing unreferenced, nothing that belongs to one machine."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "meganeura_aot"
SHADERS = ROOT / "shaders"

# A module may import from the layers before its own, and a package from itself; those in one set do not see each other.
LAYERS: list[set[str]] = [
    {"errors", "version"},
    {"target", "program"},
    {"graph"},
    {"indexing", "rope_scaling"},
    {"op"},
    {"ops"},
    {"tensor"},
    {"arguments"},
    {"builder_pointwise"},
    {"builder_ops"},
    {"builder_gather"},
    {"builder_norm"},
    {"builder_attention"},
    {"builder_conv"},
    {"builder"},
    {"autodiff", "reference", "passes"},
    {"kernel"},
    {"plan"},
    {"bounds"},
    {"lowering", "training"},
    {"memory"},
    {"names"},
    {"inline"},
    {"emit"},
    {"report"},
    {"compiler", "model_file"},
    {"cli"},
    {"__main__"},
]
# These sit on the builder and do not see the compiler; of the layers, only the command line may use them.
ABOVE_BUILDER = {"nn": set[str](), "models": {"nn"}, "load": {"nn", "models"}}
USERS_OF_ABOVE_BUILDER = {"cli", "__main__"}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

LINK_HOSTS = {
    "arxiv.org",
    "docs.pytorch.org",
    "docs.rs",
    "git-lfs.github.com",
    "github.com",
    "gpuweb.github.io",
    "huggingface.co",
    "numpy.org",
    "onnx.ai",
    "onnxruntime.ai",
    "pytorch.org",
    "wgpu-py.readthedocs.io",
    "www.w3.org",
}
A_PERSONS_FOLDER = re.compile(r"(?<![\w.)}$-])/(?:home|opt|root|Users|work)/\w+")


@cache
def listed_files() -> tuple[Path, ...]:
    """Every file of the checkout that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return tuple(path for name in sorted(set(names.split("\0")) - {""}) if (path := ROOT / name).is_file())


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def handwritten(*suffixes: str) -> list[Path]:
    files = [path for path in listed_files() if path.name.endswith(suffixes)]
    return [path for path in files if path.relative_to(ROOT).parts[0] != "out" and "golden" not in path.parts]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def strings_in(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


# ---- who imports whom


def is_type_checking(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return getattr(test, "id", None) == "TYPE_CHECKING" or getattr(test, "attr", None) == "TYPE_CHECKING"


def imports_at_run_time(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Also those inside functions: an import put off is an import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif is_type_checking(child):
            for other in child.orelse:  # type: ignore[attr-defined]
                yield from imports_at_run_time(ast.Module([other], []))
        else:
            yield from imports_at_run_time(child)


def imported_units(tree: ast.Module, parts: tuple[str, ...]) -> set[str]:
    """The units of meganeura_aot (its modules and packages) that a module imports; parts: its place in the package."""
    found = set()
    for node in imports_at_run_time(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        else:
            base = list(("meganeura_aot", *parts)[: -node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            targets = [[*base, alias.name] for alias in node.names]
        found |= {target[1] if len(target) > 1 else "__init__" for target in targets if target[0] == "meganeura_aot"}
    return found


def allowed_units(unit: str) -> set[str]:
    order = {name: place for place, layer in enumerate(LAYERS) for name in layer}
    place = order["builder"] + 1 if unit in ABOVE_BUILDER else order[unit]
    allowed = {name for name, other in order.items() if other < place} | {unit}
    if unit in ABOVE_BUILDER:
        allowed |= ABOVE_BUILDER[unit]
    if unit in USERS_OF_ABOVE_BUILDER:
        allowed |= ABOVE_BUILDER.keys()
    return allowed


def forbidden_imports(tree: ast.Module, parts: tuple[str, ...]) -> set[str]:
    unit = parts[0].removesuffix(".py")
    return imported_units(tree, parts) - allowed_units(unit)


def test_every_module_has_a_layer() -> None:
    units = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    known = set().union(*LAYERS) | ABOVE_BUILDER.keys() | {"__init__"}
    assert units <= known, "give these a place in LAYERS"


def test_import_order() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if parts != ("__init__.py",):
            wrong += [f"{relative(path)} imports {name}" for name in sorted(forbidden_imports(tree_of(path), parts))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("place", "source", "expected"),
    [
        ("graph.py", "from .errors import GraphError", set()),
        ("graph.py", "from .op import Op", {"op"}),
        ("graph.py", "def f():\n    from .op import Op", {"op"}),
        ("graph.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .op import Op", set()),
        ("graph.py", "import meganeura_aot.op", {"op"}),
        ("graph.py", "import meganeura_aot", {"__init__"}),
        ("ops/matmul.py", "from ..op import Op\nfrom .pointwise import Pointwise\nfrom . import leaf", set()),
        ("ops/matmul.py", "from .. import builder", {"builder"}),
        ("ops/__init__.py", "from . import leaf\nfrom ..errors import GraphError", set()),
        ("passes/fuse.py", "from ..reference import evaluate", {"reference"}),
        ("nn.py", "from .builder import Graph\nfrom .lowering import lower", {"lowering"}),
        ("models/llama.py", "from ..nn import Linear", set()),
        ("nn.py", "from .models import llama", {"models"}),
        ("compiler.py", "from .load import gguf", {"load"}),
        ("cli.py", "from .load import gguf\nfrom .compiler import compile_graph", set()),
    ],
)
def test_import_rule_itself(place: str, source: str, expected: set[str]) -> None:
    assert forbidden_imports(ast.parse(source), tuple(place.split("/"))) == expected


# ---- sizes


def test_file_sizes() -> None:
    """The stub, which customers debug, has no limit: it is written one statement a line."""
    files = [path for path in handwritten(".py", ".sh", ".j2", ".wgsl", ".toml") if path.parent.name != "runtime_stub"]
    sizes = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {name: size for name, size in sizes.items() if size > MAX_FILE_LINES}


def test_function_sizes() -> None:
    long = []
    for path in handwritten(".py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{relative(path)}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


# ---- nothing unreferenced


def test_every_template_is_used() -> None:
    templates = {path.name for path in SHADERS.glob("*.wgsl.j2")}
    used = {text for path in PACKAGE.rglob("*.py") for text in strings_in(path)}
    for path in SHADERS.rglob("*.j2"):
        used |= set(re.findall(r"""(?:include|import|from)\s+["']([^"']+)["']""", path.read_text(encoding="utf-8")))
    unused = {name for name in templates if not {name, name.removesuffix(".wgsl.j2")} & used}
    assert not unused


def spellings(function: str) -> set[str]:
    """How a text may name a function of shaders/lib: `name`, or `base` or `base_` where it adds the dtype itself."""
    base = re.sub(r"_(?:f32|i32|u32)$", "", function)
    return {function, base, f"{base}_"}


def test_every_shader_function_is_used() -> None:
    """By a call in a shader, or by its name, with or without the dtype, in a text of the package."""
    shaders = "\n".join(path.read_text(encoding="utf-8") for path in SHADERS.rglob("*.*"))
    shaders = re.sub(r"//.*", "", shaders)
    in_python = {
        word for path in PACKAGE.rglob("*.py") for text in strings_in(path) for word in re.findall(r"\w+", text)
    }
    called = set(re.findall(r"(?<!\bfn )(?<!\bmacro )\b(\w+)\(", shaders)) | in_python
    defined = re.findall(r"\b(?:fn|macro) (\w+)\(", "\n".join(map(Path.read_text, (SHADERS / "lib").iterdir())))
    unused = {name for name in defined if not spellings(name) & called}
    assert not unused


# ---- nothing that belongs to one machine


def text_files() -> Iterator[tuple[Path, str]]:
    for path in listed_files():
        content = path.read_bytes()
        if b"\0" not in content:
            yield path, content.decode("utf-8")


def test_no_path_of_one_machine() -> None:
    found = [f"{relative(path)}: {match}" for path, text in text_files() for match in A_PERSONS_FOLDER.findall(text)]
    assert not found, "\n".join(found)


def test_links_lead_to_known_hosts() -> None:
    links = [(path, host) for path, text in text_files() for host in re.findall(r"https?://([\w.-]+)", text)]
    unknown = [f"{relative(path)}: {host}" for path, host in links if host not in LINK_HOSTS]
    assert not unknown, "\n".join(unknown)
