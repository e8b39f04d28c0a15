"""The command line: the only place that prints."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .compiler import Program, compile_graph, entry_points
from .errors import GraphError, MeganeuraError
from .graph import GraphIR
from .model_file import UsageError, load_graphs, parse_setting
from .target import TARGETS
from .training import DEFAULTS, Training, trained_entry
from .version import VERSION

STAGES = ("graph", "grad", "opt", "plan", "runner")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meganeura-aot", description="Compile a neural-network graph into one file that runs it on any GPU."
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="a Python file with build() -> Graph, or `graph`")
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="the runner to write (default: out/MODEL)")
    parser.add_argument("--set", metavar="K=V", action="append", default=[], help="an argument of build(); repeatable")
    parser.add_argument("--target", choices=list(TARGETS), default="webgpu", help="what adapters it is for")
    parser.add_argument(
        "--train", metavar="KIND", choices=list(DEFAULTS), help="add a training step: sgd, adam or adamw"
    )
    parser.add_argument(
        "--opt",
        metavar="K=V",
        action="append",
        default=[],
        help="of the optimizer, repeatable: lr, betas, momentum, clip_norm, lr_mult.PREFIX, ...",
    )
    parser.add_argument(
        "--freeze",
        metavar="PATTERN",
        action="append",
        default=[],
        help="parameters not to train, such as embed.*; repeatable",
    )
    parser.add_argument("--emit", choices=STAGES, help="print a stage and write nothing")
    parser.add_argument("--check", action="store_true", help="exit 1 and show the difference when OUT is out of date")
    parser.add_argument(
        "--report", action="store_true", help="beside writing OUT, print counts of dispatches, pipelines and bytes"
    )
    parser.add_argument("--no-optimize", action="store_true", help="one kernel an operator, for comparison")
    parser.add_argument("-v", "--verbose", action="store_true", help="say how long each step took")
    parser.add_argument("--version", action="version", version=f"meganeura-aot {VERSION}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 for done, 1 for failed, 2 for wrong usage."""
    options = build_parser().parse_args(arguments)
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has seen enough
        discard_stdout()
        return 0
    except UsageError as error:
        return fail(str(error), 2)
    except GraphError as error:
        return fail(str(error) if "(built at " in str(error) else f"{options.model}: {error}", 1)
    except MeganeuraError as error:
        return fail(str(error), 1)
    except OSError as error:
        discard_stdout()
        return fail(str(error), 1)
    except RecursionError:
        return fail(f"{options.model}: the model is nested too deeply", 1)
    except MemoryError:
        return fail(f"{options.model}: this machine has too little memory to compile the model", 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)


def discard_stdout() -> None:
    """Let what is still buffered go nowhere: Python would fail once more on it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, code: int) -> int:
    print(f"meganeura-aot: {message}".encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
    return code


def run(options: argparse.Namespace) -> int:
    if options.emit and options.check:
        raise UsageError("--emit prints and --check compares: give one of them")
    training = training_of(options)
    start = time.perf_counter()
    output = Path.cwd() / (options.output or Path("out") / f"{options.model.stem}.py")  # a model may change folder
    refuse_overwriting(options.model, output)
    graphs = load_graphs(options.model, dict(parse_setting(text, "--set") for text in options.set))
    if options.emit == "graph":
        print(stage_text(entry_points(graphs)), end="")
        return 0
    if training and isinstance(graphs, Mapping):
        try:
            trained_entry(graphs)
        except GraphError as error:
            raise UsageError(f"--train: {error}") from error
    program = compile_program(graphs, training, options)
    log(options, f"compiled {options.model}", start)
    if options.emit:
        print(emitted(program, options.emit), end="")
        return 0
    shown = options.output or output.relative_to(output.parents[1])
    if options.check:
        return check(program, options.model, output, shown)
    program.save(output)
    log(options, f"wrote {shown}", start)
    if options.report:
        print_report(program)
    else:
        report = program.report
        print(f"{shown}: {report.dispatches} dispatches, {report.pipelines} pipelines, {report.buffers} buffers")
    return 0


def training_of(options: argparse.Namespace) -> Training | None:
    """What --train, --opt and --freeze ask for; raises UsageError."""
    if options.train is None:
        given = [name for name in ("opt", "freeze") if getattr(options, name)] + ["emit grad"] * (
            options.emit == "grad"
        )
        if given:
            raise UsageError(f"--{given[0]}: needs --train")
        return None
    try:
        numbers = dict(parse_setting(text, "--opt", dotted=True) for text in options.opt)
        return Training(options.train, options.freeze, **numbers)
    except (GraphError, TypeError) as error:  # TypeError: a key that is an argument of Training
        raise UsageError(f"--opt: {error}") from error


def compile_program(
    graphs: GraphIR | Mapping[str, GraphIR], training: Training | None, options: argparse.Namespace
) -> Program:
    changing = [word for setting in options.set for word in ("--set", setting)]
    changing += ["--train", options.train] if options.train else []
    changing += [word for name in ("opt", "freeze") for text in getattr(options, name) for word in (f"--{name}", text)]
    changing += ["--target", options.target] if options.target != "webgpu" else []
    changing += ["--no-optimize"] if options.no_optimize else []
    return compile_graph(
        graphs,
        name=options.model.stem,
        target=options.target,
        train=training,
        optimize=not options.no_optimize,
        command=shlex.join(["meganeura-aot", options.model.name, *changing]),
    )


def emitted(program: Program, stage: str) -> str:
    return {
        "grad": lambda: stage_text(program.differentiated),
        "opt": lambda: stage_text(program.graphs),
        "plan": lambda: program.plan.text(),
        "runner": lambda: program.text,
    }[stage]()


def stage_text(graphs: Mapping[str, GraphIR]) -> str:
    """The text of a graph; of several, each under a heading."""
    if len(graphs) == 1:
        return next(iter(graphs.values())).text()
    return "\n".join(f"==== {entry} ====\n{graph.text()}" for entry, graph in graphs.items())


def check(program: Program, model: Path, output: Path, shown: Path) -> int:
    if not output.is_file():
        return fail(f"{shown}: expected the runner of {program.name}, found no file", 1)
    found = output.read_bytes()
    if found == program.text.encode():
        print(f"{shown}: up to date")
        return 0
    lines = difflib.unified_diff(
        found.decode("utf-8", "replace").splitlines(keepends=True),
        program.text.splitlines(keepends=True),
        str(shown),
        "what would be generated",
    )
    with contextlib.suppress(BrokenPipeError):  # whoever reads the difference may have seen enough
        sys.stdout.writelines(line if line.endswith("\n") else f"{line}\n" for line in lines)
        sys.stdout.flush()
    words = shlex.split(program.command)[2:]
    rebuild = shlex.join(["meganeura-aot", str(model), *words, "-o", str(shown)])
    return fail(f"{shown}: out of date; rebuild it with {rebuild}", 1)


def refuse_overwriting(model: Path, output: Path) -> None:
    if output.exists() and model.exists() and output.samefile(model):
        raise UsageError(f"{output}: is the model itself; give another file with -o")
    if output.is_dir():
        raise UsageError(f"{output}: is a folder; give a file with -o")


def print_report(program: Program) -> None:
    console = Console()
    counts = Table(title=program.name, show_header=False)
    for label, value in program.report.rows():
        counts.add_row(label, value)
    console.print(counts)
    kernels = Table("kernel", "dispatches")
    for label, number in program.report.operators:
        kernels.add_row(label, str(number))
    console.print(kernels)


def log(options: argparse.Namespace, message: str, start: float) -> None:
    if options.verbose:
        print(f"{message} ({time.perf_counter() - start:.2f} s)", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
