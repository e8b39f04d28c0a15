"""Where the time goes: --bench times whole runs, --profile each dispatch."""

import time
from typing import Any

import numpy as np

from .core import BindGroup, ModelRunner


def time_runs(runner: ModelRunner, entry: str, inputs: dict[str, Any], count: int, each: bool) -> None:
    """Print the times of runs without upload and read-back, after a second of load, because an idle GPU clocks down.

    The runs are real: they write states, and training steps change the weights; a line says so. `step` of a training runner
    does not count them.
    """
    target, device, usage = runner.entries[entry], runner.device, runner.wgpu.BufferUsage
    for buffer, array in runner._prepare(target, inputs)[0].items():
        runner.upload(buffer, array)
    numbers = [n for _, n, _ in target.advances]
    resident = {name: inputs[name] if name in numbers else b.gpu for name, b in target.feeds.items()}
    passes: list[tuple[str, Any]] = [("run", getattr(runner, f"encode_{entry}"))]
    if each and target.work:
        names = {group: name[2:] for name, group in vars(runner).items() if isinstance(group, BindGroup)}
        passes = [(names[work[1]], lambda encoder, work=work: encoder.dispatch(*work)) for work in target.work]
        del passes[2048:]  # a query set holds no more
    stamped, slot = runner.has("timestamp-query"), -(-16 * len(passes) // 256) * 256
    kept = max(1, min(count, 2**20 // slot))  # so many runs' ticks are kept, the last ones
    ticks = device.create_buffer(size=kept * slot, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
    queries = stamped and device.create_query_set(type="timestamp", count=2 * len(passes))

    def run(times: int) -> tuple[float, Any]:
        """Wall seconds of runs in a row and one wait; the ticks at the begin and end of each pass of the last ones."""
        start = time.perf_counter()
        for number in range(times):
            try:
                *_, positions = runner._prepare(target, resident)
            except RuntimeError:  # a state is at its limit
                runner.reset()
                *_, positions = runner._prepare(target, resident)
            commands = device.create_command_encoder()
            for i, (_, encode) in enumerate(passes):
                ends = {"beginning_of_pass_write_index": 2 * i, "end_of_pass_write_index": 2 * i + 1}
                stamps = {"query_set": queries, **ends} if stamped else None
                runner._record(entry, encode, {}, commands, stamps)
            if stamped:
                commands.resolve_query_set(queries, 0, 2 * len(passes), ticks, number % kept * slot)
            device.queue.submit([commands.finish()])
            runner._positions |= positions
        read = np.frombuffer(device.queue.read_buffer(ticks), np.int64).reshape(kept, -1)  # waits for the GPU
        return time.perf_counter() - start, read[:, : 2 * len(passes)].reshape(kept, -1, 2)

    first, began = run(1)[1].max(), time.perf_counter()
    while time.perf_counter() - began < 1:
        run(1 + int(0.02 / run(1)[0]))
    wall, read = run(count)
    # wgpu does not tell how long a tick is, but the host's clock does; most GPUs tick every nanosecond.
    tick = 1e3 * (time.perf_counter() - began) / max(1, read.max() - first)
    if any(buffer.kind == "parameter" for buffer in target.written):
        print("the timed steps have changed the weights of this runner; nothing is saved")
    print(f"{runner.name} {entry}, ms a run on {device.adapter.summary}")
    print(f"{1e3 * wall / count:10.3f}  wall, {count} runs in a row, with encoding and one wait")
    if not stamped:
        print("GPU time is not known: this device has no timestamp-query")
        return
    gpu = np.diff(read)[..., 0] * (1e-6 if 0.98e-6 < tick < 1.02e-6 else tick)
    medians = np.median(gpu, 0)
    print(f"{np.median(gpu.sum(1)):10.3f} {gpu.sum(1).min():10.3f}  GPU, median and least")
    for median, least, (name, _) in sorted(zip(medians, gpu.min(0), passes), reverse=True) if each else ():
        print(f"{median:10.3f} {least:10.3f}  {100 * median / max(1e-9, medians.sum()):5.1f} %  {name}")
