"""The runner as a script: `python runner.py --help`."""

import argparse
import io
import os
import stat
import sys
import zipfile
from typing import Any

import numpy as np

from .core import ModelRunner
from .doctor import doctor
from .files import mode_of, replacing
from .profile import time_runs
from .weights import Buffer


def main(model: type[ModelRunner], arguments: list[str] | None = None) -> None:
    """Exit code 0: done, 1: failed, with one message, 2: wrong usage."""
    declared = model.__new__(model).declare()
    parser = argparse.ArgumentParser(description=model.__doc__)
    parser.add_argument("--list", action="store_true", help="show inputs, outputs, parameters, states; needs no GPU")
    parser.add_argument("--doctor", action="store_true", help="compare this machine with what the model needs")
    parser.add_argument("--entry", choices=list(declared.entries), default=declared._only, help="what to run")
    parser.add_argument("--weights", metavar="W.safetensors")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="repeatable")
    parser.add_argument("--output", metavar="OUT.npz")
    parser.add_argument("--bench", type=int, default=0, metavar="N", help="time N runs; what is not given is random")
    parser.add_argument("--profile", action="store_true", help="time each dispatch on the GPU")
    parser.add_argument("--adapter", metavar="NAME", help="a part of the adapter's name")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs and weights")
    try:
        args = parser.parse_args(arguments)
        if not args.entry and not (args.list or args.doctor):
            parser.error(f"--entry is needed, one of {', '.join(declared.entries)}")
        if args.bench < 0 or any("=" not in text for text in args.input):
            parser.error("--bench takes a positive number, --input NAME=FILE.npy")
        if args.output is not None and (args.bench or args.profile or args.list or args.doctor):
            parser.error("--output is what a run gives: not with --bench, --profile, --list or --doctor")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        if args.list:
            print(model.describe())
        elif args.doctor:
            sys.exit(doctor(model, args.adapter))
        else:
            run_script(model, args)
        print(end="", flush=True)
    except Exception as error:
        if isinstance(error, (ArithmeticError, AttributeError, LookupError, NameError, TypeError)):
            raise  # a defect of the runner, not of what it was given
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"{parser.prog}: {error}")
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        try:
            print(end="", flush=True)
        except OSError:  # what stdout does not take is dropped, or Python would complain as it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_script(model: type[ModelRunner], args: argparse.Namespace) -> None:
    if args.output is not None:
        target = os.path.realpath(args.output)
        if os.path.isdir(target) or not os.path.isdir(os.path.dirname(target)) or args.output[-1:] == "/":
            raise ValueError(f"--output {args.output}: expected a file, or a new name in a folder that is there")
    inputs: dict[str, Any] = dict(text.split("=", 1) for text in args.input)
    for name, path in inputs.items():
        mode = mode_of(path)
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # could block for ever
            raise ValueError(f"{path}: not a regular file but a pipe or a device: copy it to a file")
        with open(path, "rb") as file:
            try:
                inputs[name] = np.lib.format.read_array(file, allow_pickle=False)
            except Exception as error:
                raise ValueError(f"{path}: not a sound .npy file: {type(error).__name__}: {error}") from error
    timed = args.bench or args.profile
    rng = np.random.default_rng(args.seed)
    with model(adapter=args.adapter) as runner:
        if args.weights is not None:
            runner.load_weights(args.weights)
        elif timed and runner.parameters:
            print(f"random weights, seed {args.seed}")
            runner.init_weights(args.seed, ("normal", 0.02))
        if timed:
            for name, buffer in runner.entries[args.entry].feeds.items():
                if name not in inputs:
                    inputs[name] = made_up_input(buffer, args.seed, rng)
            time_runs(runner, args.entry, inputs, args.bench or 10, args.profile)
            return
        outputs = runner.call(args.entry, inputs)
    if args.output is not None:
        save_npz(args.output, outputs)
    for name, array in outputs.items():
        values = f", {array.min()} to {array.max()}, mean {array.mean()}" if array.size else ""
        print(f"{name}: {array.dtype}{list(array.shape)}{values}")


def made_up_input(buffer: Buffer, seed: int, rng: np.random.Generator) -> Any:
    """Numbers for an input that is not given, which a line names. Integers are within the input's bounds."""
    if buffer.dtype == "f32":
        print(f"input {buffer.name}: random, seed {seed}")
        return rng.standard_normal(buffer.shape)
    low, high = buffer.data or (0, 0)
    number = min(max(low, 0), high)  # the number within the bounds that is nearest to 0
    print(f"input {buffer.name}: all {number}")
    return np.full(buffer.shape, number)


def save_npz(path: str | os.PathLike[str], arrays: dict[str, Any]) -> None:
    """The same as np.savez, for arrays of any name; the file is written whole or not at all."""
    whole = io.BytesIO()  # ZipFile seeks in its file, which a pipe or a device cannot
    with zipfile.ZipFile(whole, "w") as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    with replacing(path) as stream:
        stream.write(whole.getbuffer())
