"""The command line of both generators: processes, progress, and one line of counts at the end."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress

from tests import harness

PIPELINES_KEPT = 1500  # in the cache of a process: a driver keeps memory for each
LEAST_SHARE = 0.8  # of the elements that must be compared


@dataclass(frozen=True)
class Outcome:
    """What a seed gave. text: the smallest program that still fails, and how; notes: counts of what was left out."""

    seed: int
    words: set[str]
    outputs: int
    elements: int
    compared: int
    problems: list[str]
    text: str
    notes: dict[str, int] = field(default_factory=dict)


TrySeed = Callable[[int, str, bool], Outcome]


def attempt(try_seed: TrySeed, seed: int, target: str, checked: bool) -> Outcome:
    if len(harness.PIPELINES) > PIPELINES_KEPT:
        harness.PIPELINES.clear()
    try:
        return try_seed(seed, target, checked)
    except Exception as error:  # of the generator itself
        problem = f"{type(error).__name__}: {error}"
        return Outcome(seed, set(), 0, 0, 0, [problem], "the generator failed")


def outcomes(try_seed: TrySeed, options: argparse.Namespace) -> Iterator[Outcome]:
    """Of every seed in turn, until the time is over; in this process where there is one job."""
    end = time.monotonic() + options.seconds
    seeds = iter(range(options.seed, options.seed + options.count))
    rest = (options.target, options.checked)
    if options.jobs == 1:
        for seed in seeds:
            if time.monotonic() > end:
                return
            yield attempt(try_seed, seed, *rest)
        return
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        pending: dict[Future[Outcome], int] = {}
        while True:
            room = 3 * options.jobs - len(pending) if time.monotonic() < end else 0
            for new in itertools.islice(seeds, room):
                pending[pool.submit(attempt, try_seed, new, *rest)] = new
            if not pending:
                return
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                seed = pending.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    under_way = sorted([seed, *pending.values()])
                    yield Outcome(seed, set(), 0, 0, 0, [f"a process died; seeds under way: {under_way}"], "")
                    return


@dataclass
class Counts:
    """What all outcomes add up to."""

    graphs: int = 0
    outputs: int = 0
    elements: int = 0
    compared: int = 0
    failures: int = 0
    words: set[str] = field(default_factory=set)
    notes: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.graphs += 1
        self.outputs += outcome.outputs
        self.elements += outcome.elements
        self.compared += outcome.compared
        self.failures += bool(outcome.problems)
        self.words |= outcome.words
        for note, count in outcome.notes.items():
            self.notes[note] = self.notes.get(note, 0) + count

    @property
    def share(self) -> float:
        return self.compared / max(self.elements, 1)

    def __str__(self) -> str:
        notes = "".join(f", {count} {note}" for note, count in self.notes.items())
        return (
            f"{self.graphs} graphs, {len(self.words)} builder methods, {self.outputs} arrays, {self.elements} elements "
            f"of which {100 * self.share:.2f}% compared{notes}, {self.failures} failures"
        )


def parse(name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz.{name}", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--one", type=int, help="this seed alone, and its program printed")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a device")
    parser.add_argument("--target", choices=("webgpu", "native", "cpu"), default="webgpu")
    parser.add_argument("--checked", action="store_true", help="shader modules with bounds checks")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after this time")
    return parser.parse_args()


def main(name: str, try_seed: TrySeed, show: Callable[[int], str] = str) -> None:
    """Run, print failures as they come, and exit with 1 where there are any, or too little was compared."""
    options = parse(name)
    if options.one is not None:
        options.seed, options.count, options.jobs = options.one, 1, 1
        print(show(options.one))
    console, counts, start = Console(soft_wrap=True, highlight=False), Counts(), time.monotonic()
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=options.count)
        for outcome in outcomes(try_seed, options):
            counts.add(outcome)
            progress.advance(bar)
            if outcome.problems:
                what = "\n".join(outcome.problems[:3])
                console.print(f"FAILED seed {outcome.seed}: {what}\n{outcome.text}\n", markup=False)
    rate = counts.graphs / (time.monotonic() - start)
    console.print(f"{counts}, {rate:.1f} a second", markup=False)
    sys.exit(counts.failures > 0 or counts.share < LEAST_SHARE)
