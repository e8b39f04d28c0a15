"""Run a user's model file and take its graphs."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from .builder import PACKAGE, Graph
from .errors import MeganeuraError, ModelError
from .graph import GraphIR


class UsageError(MeganeuraError):
    """The command line asks for something that does not exist."""


def parse_setting(text: str, option: str, dotted: bool = False) -> tuple[str, Any]:
    """`key=value`: the value as a Python literal where it is one, else as text. Raises UsageError.

    dotted: what follows the key's first dot may be any text.
    """
    key, separator, value = text.rpartition("=") if dotted else text.partition("=")
    if not separator or not (key.partition(".")[0] if dotted else key).isidentifier():
        raise UsageError(f"{option} {text}: expected key=value")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return key, value


def load_graphs(path: Path, settings: Mapping[str, Any]) -> GraphIR | Mapping[str, GraphIR]:
    """The result of `build(**settings)` in the file, or its variable `graph`, frozen. Raises ModelError, UsageError, and
    GraphError for a graph without meaning.

    What the model prints goes to stderr, for stdout belongs to --emit.
    """
    if not path.exists():
        raise UsageError(f"{path}: no such model file")
    if not path.is_file():
        raise ModelError(f"{path}: expected a Python file, got {'a folder' if path.is_dir() else 'a pipe or a device'}")
    with contextlib.redirect_stdout(sys.stderr), as_module(path) as module:
        run_file(path, module)
        found = vars(module)
        if "build" in found:
            result = call_build(path, found["build"], settings)
            return checked_result(path, result, "build() returned")
        if "graph" not in found:
            raise ModelError(f"{path}: expected a function `build` or a variable `graph`, found neither")
        if settings:
            raise UsageError(f"{path}: --set needs a function `build`, the file has a variable `graph`")
        return checked_result(path, found["graph"], "`graph` is")


@contextlib.contextmanager
def as_module(path: Path) -> Iterator[ModuleType]:
    """A module for the file, importable under its name, with its folder on the path: as when a script runs."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    search_path = sys.path
    folders = list(search_path)
    known = sys.modules.get(path.stem)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module  # dataclasses and pickle look a module up by its name
    try:
        yield module
    finally:
        search_path[:] = folders
        sys.path = search_path  # the model may have put something else there
        if known is None:
            sys.modules.pop(path.stem, None)
        else:
            sys.modules[path.stem] = known


def run_file(path: Path, module: ModuleType) -> None:
    """Execute the file in the module."""
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (MemoryError, RecursionError) as error:
        raise ModelError(f"{path}: an expression is nested too deeply for Python's compiler") from error
    except (SyntaxError, ValueError) as error:
        raise ModelError(f"{path}: {''.join(traceback.format_exception_only(error)).strip()}") from error
    guarded(path, exec, code, module.__dict__)


def call_build(path: Path, build: Any, settings: Mapping[str, Any]) -> Any:
    if not callable(build):
        raise ModelError(f"{path}: expected `build` to be a function, got {type(build).__name__}")
    parameters = guarded(path, parameters_of, build)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [key for key in settings if key not in names]
    if unknown and not takes_any:
        raise UsageError(f"--set {unknown[0]}: build takes {', '.join(names) or 'no arguments'}")
    required = [p.name for p in parameters if p.default is p.empty and p.name in names and p.name not in settings]
    if required:
        raise UsageError(f"{path}: build needs {', '.join(required)}: give --set {required[0]}=VALUE")
    return guarded(path, build, **settings)


def parameters_of(build: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(build).parameters.values())
    except ValueError:  # a builtin that does not tell
        return []


def guarded(path: Path, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user, or one that reads an object of the user's.

    Exceptions become a ModelError that shows the user's frames alone; errors of this package pass.
    """
    try:
        return function(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, MeganeuraError) and has_text(error):
            raise
        raise ModelError(f"{path}: the model raised\n{user_traceback(error)}") from error


def has_text(error: BaseException) -> bool:
    """Whether the exception can be shown: a model may put any object into it."""
    try:
        str(error)
    except BaseException:
        return False
    return True


def user_traceback(error: BaseException) -> str:
    """The traceback without this package's frames."""

    def is_user(frame: TracebackType) -> bool:
        return not frame.tb_frame.f_code.co_filename.startswith(PACKAGE)

    frames: list[TracebackType] = []
    current = error.__traceback__
    while current is not None:
        frames.append(current)
        current = current.tb_next
    summary = traceback.StackSummary.extract((frame.tb_frame, frame.tb_lineno) for frame in frames if is_user(frame))
    return "".join([*summary.format(), *last_lines(error)]).rstrip()


def last_lines(error: BaseException) -> list[str]:
    """What the exception says, or its type alone where even that cannot be shown."""
    try:
        return traceback.format_exception_only(error)
    except BaseException:
        return [f"{type(error).__name__}, whose text cannot be shown"]


def checked_result(path: Path, result: Any, what: str) -> GraphIR | dict[str, GraphIR]:
    """The frozen graphs that a model gave, `what` says how. The result is the user's object: any access to it may raise."""
    graphs: GraphIR | dict[str, GraphIR] = guarded(path, as_graphs, path, result, what)
    return graphs


def as_graphs(path: Path, result: Any, what: str) -> GraphIR | dict[str, GraphIR]:
    """A Graph frozen, a mapping of names to Graphs as a dict of frozen ones; raises ModelError for anything else."""
    if isinstance(result, Graph):
        return result.build()
    expected = "expected a Graph or a dict of entry names to Graphs"
    if not isinstance(result, Mapping):
        raise ModelError(f"{path}: {what} {type(result).__name__}, {expected}")
    graphs = dict(result.items())
    wrong_names = [name for name in graphs if not isinstance(name, str)]
    if wrong_names:
        raise ModelError(f"{path}: {what} a dict of {_kinds(wrong_names)} as names, {expected}")
    if not graphs or not all(isinstance(graph, Graph) for graph in graphs.values()):
        raise ModelError(f"{path}: {what} a dict of {_kinds(graphs.values())}, {expected}")
    return {name: graph.build() for name, graph in graphs.items()}


def _kinds(values: Iterable[Any]) -> str:
    return ", ".join(sorted({type(value).__name__ for value in values})) or "nothing"
