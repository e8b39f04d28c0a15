"""Where the time goes: --bench times whole runs, --profile each dispatch."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from .core import BindGroup, Encoder, Entry, ModelRunner, Pipeline


class Stopwatch:
    """Takes the place of a runner's `record`: timestamps around the run, or around each dispatch in a pass of its own."""

    def __init__(self, runner: Any, each: bool) -> None:
        self.runner, self.each, self.record_run, usage = runner, each, runner.record, runner.wgpu.BufferUsage
        self.queries = runner.device.create_query_set(type="timestamp", count=4096)
        self.ticks = runner.device.create_buffer(size=8 * 4096, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        self.names = {group: name[2:] for name, group in vars(runner).items() if isinstance(group, BindGroup)}
        runner.record = self.record

    def record(self, commands: Any, target: Entry, foreign: Mapping[Any, Any]) -> None:
        self.commands, self.foreign, self.passes = commands, foreign, ["run"][self.each :]
        if self.each:
            self.runner.encode(target, self)
        else:
            self.record_run(commands, target, foreign, self.stamps(0))
        commands.resolve_query_set(self.queries, 0, 2 * len(self.passes), self.ticks, 0)

    def dispatch(self, pipeline: Pipeline, group: BindGroup, *grid: int) -> None:
        compute_pass = self.commands.begin_compute_pass(timestamp_writes=self.stamps(len(self.passes)))
        Encoder(compute_pass, self.foreign).dispatch(pipeline, group, *grid)
        compute_pass.end()
        self.passes.append(self.names[group])

    def stamps(self, index: int) -> dict[str, Any]:
        ends = {"beginning_of_pass_write_index": 2 * index, "end_of_pass_write_index": 2 * index + 1}
        return {"query_set": self.queries, **ends}

    def read(self) -> Any:
        data = self.runner.device.queue.read_buffer(self.ticks, 0, 16 * len(self.passes))
        return np.frombuffer(data, np.int64).reshape(-1, 2)


def time_runs(runner: ModelRunner, entry: str, inputs: dict[str, Any], count: int, each: bool) -> None:
    """Print the times of runs without upload and read-back, after a second of load, for an idle card clocks down."""
    runner.call(entry, inputs, ())
    target, watch = runner.entries[entry], Stopwatch(runner, each) if runner.has("timestamp-query") else None
    numbers = [n for _, n, _ in target.advances]
    resident = {name: inputs[name] if name in numbers else b.gpu for name, b in target.feeds.items()}

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            try:
                runner.call(entry, resident, ())
            except RuntimeError:  # a state is at its limit
                runner.reset()
                runner.call(entry, resident, ())
        runner.device.queue.read_buffer(runner.declared[0].gpu, 0, 4)  # waits for the GPU: wgpu's own wait is broken
        return time.perf_counter() - start

    marks = [(run(1), time.perf_counter_ns(), watch.read()[-1, 1] if watch else 0)]
    while marks[-1][1] - marks[0][1] < 1e9:
        run(int(0.02 / marks[0][0]))
        marks.append((run(1), time.perf_counter_ns(), watch.read()[-1, 1] if watch else 0))
    walls, ticks = [], []
    for _ in range(count):
        walls.append(1e3 * run(1))
        ticks.append(np.diff(watch.read())[:, 0] if watch else [])
    print(f"{runner.name} {entry}, {count} runs on {runner.device.adapter.summary}: median and least ms")
    print(f"{np.median(walls):10.3f} {min(walls):10.3f}  wall, with encoding and waiting")
    if not watch:
        print("GPU time is not known: this device has no timestamp-query")
        return
    # wgpu does not tell how long a tick is: the host's clock does, and most GPUs tick once in a nanosecond.
    period = (marks[-1][1] - marks[0][1]) / max(1, marks[-1][2] - marks[0][2])
    gpu = np.array(ticks) * (1 if 0.98 < period < 1.02 else period) / 1e6
    print(f"{np.median(gpu.sum(1)):10.3f} {gpu.sum(1).min():10.3f}  GPU")
    rows = sorted(zip(np.median(gpu, 0), gpu.min(0), watch.passes), reverse=True) if each else []
    for median, least, name in rows:
        print(f"{median:10.3f} {least:10.3f}  {100 * median / max(1e-9, np.median(gpu, 0).sum()):5.1f} %  {name}")
