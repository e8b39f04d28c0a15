"""The runner as a script: `python runner.py --help`."""

import argparse
import os
import sys
import zipfile
from typing import Any

import numpy as np

from .core import ModelRunner
from .doctor import doctor
from .profile import time_runs


def main(model: type[ModelRunner], arguments: list[str] | None = None) -> None:
    """Exit code 0: done, 1: failed, with one message, 2: wrong usage."""
    declared = model.__new__(model).declare()
    parser = argparse.ArgumentParser(description=model.__doc__)
    parser.add_argument("--list", action="store_true", help="show inputs, outputs, parameters and states; needs no GPU")
    parser.add_argument(
        "--doctor", action="store_true", help="show what this machine offers beside what the model needs"
    )
    parser.add_argument("--entry", choices=list(declared.entries), default=declared.only, help="what to run")
    parser.add_argument("--weights", metavar="W.safetensors")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=FILE.npy", help="repeatable")
    parser.add_argument("--output", metavar="OUT.npz")
    parser.add_argument("--bench", type=int, default=0, metavar="N", help="time N runs; what is not given is random")
    parser.add_argument("--profile", action="store_true", help="time each dispatch on the GPU")
    parser.add_argument("--adapter", metavar="NAME", help="a part of the adapter's name")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs and weights")
    args = parser.parse_args(arguments)
    if not (args.list or args.doctor):
        timed = args.bench or args.profile
        if not args.entry:
            parser.error(f"--entry is needed, one of {', '.join(declared.entries)}")
        if args.bench < 0 or any("=" not in text for text in args.input):
            parser.error("--bench takes a positive number, --input NAME=FILE.npy")
        if declared.parameters and not (args.weights or timed):
            parser.error("--weights is needed")
    try:
        code = (
            print(model.describe()) if args.list else doctor(model, args.adapter) if args.doctor else run(model, args)
        )
    except Exception as error:
        known = (OSError, ValueError, RuntimeError, ImportError, EOFError, MemoryError)
        if not isinstance(error, known) and not type(error).__module__.startswith("wgpu"):
            raise  # a defect of the runner, not of what it was given
        sys.exit(f"{parser.prog}: {error}")
    sys.exit(code)


def run(model: type[ModelRunner], args: argparse.Namespace) -> None:
    inputs: dict[str, Any] = dict(text.split("=", 1) for text in args.input)
    for name, path in inputs.items():
        with open(path, "rb") as file:
            inputs[name] = np.lib.format.read_array(file, allow_pickle=False)
    with model(adapter=args.adapter) as runner:
        if args.weights:
            runner.load_weights(args.weights)
        elif runner.parameters:
            print(f"weights: random, seed {args.seed}")
            runner.init_weights(args.seed, ("normal", 0.02))
        if args.bench or args.profile:
            rng = np.random.default_rng(args.seed)
            for name, (shape, dtype) in runner.entries[args.entry].inputs.items():
                drawn = rng.standard_normal(shape) if dtype == "f32" else np.zeros(shape, int)
                if inputs.setdefault(name, drawn) is drawn:
                    print(f"input {name}: {'random, seed' if dtype == 'f32' else 'zeros, not'} {args.seed}")
            time_runs(runner, args.entry, inputs, args.bench or 10, args.profile)
            return
        outputs = runner.call(args.entry, inputs)
    for name, array in outputs.items():
        print(
            f"{name}: {array.dtype}{list(array.shape)}"
            + f", {array.min()} to {array.max()}, mean {array.mean()}" * bool(array.size)
        )
    if args.output:
        save_npz(args.output, outputs)


def save_npz(path: str, arrays: dict[str, Any]) -> None:
    """As np.savez does, but for any name, and all or nothing."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with zipfile.ZipFile(temporary, "w") as file:
            for name, array in arrays.items():
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
