"""Training: forward, backward and update in one submit; accumulated gradients, checkpoints, a guard against NaN."""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .checkpoint import write_safetensors
from .core import BindGroup, Entry, ModelRunner, guarded
from .fit import fit_model
from .optimizer import OptimizerNumbers, adam_numbers, check_number, sgd_numbers
from .weight_files import read_safetensors
from .weights import Buffer, Names, WeightError, match_tensors

BLOCK = 1024  # elements a workgroup of EACH_ELEMENT
EACH_ELEMENT = """
override COUNT: u32;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let first = (group.y * groups.x + group.x) * 1024 + lane;
    for (var i = first; i < min(first + 1024, COUNT); i += 256) {
"""
ADD_KEPT = f"""// gradients that were kept, added to new ones
@group(0) @binding(0) var<storage, read> kept: array<f32>;
@group(0) @binding(1) var<storage, read_write> gradient: array<f32>;
{EACH_ELEMENT}        gradient[i] = kept[i] + gradient[i];
    }}
}}
"""
FIND_NOT_FINITE = f"""// report[1] is set where a gradient has an infinity or NaN, whose exponent is all ones
@group(0) @binding(0) var<storage, read> gradient: array<u32>;
@group(0) @binding(1) var<storage, read_write> report: array<atomic<u32>>;
{EACH_ELEMENT}        if ((gradient[i] & 0x7f800000u) == 0x7f800000u) {{
            atomicStore(&report[1], 1u);
        }}
    }}
}}
"""
WRITTEN = re.compile(r"@binding\((\d+)\)\s*var<storage,\s*read_write>\s*\w+\s*:\s*array<(.*?)>\s*;")
CHECKPOINT_PREFIXES = {"parameter": "", "moment": "optimizer.", "state": "state."}
CHECKPOINT_VERSION = "1"


class TrainingRunner(ModelRunner):
    """Base of a Runner compiled with --train, which has the entries `accumulate` and `apply` beside its forward ones.

    encode_accumulate overwrites the gradients; encode_apply updates parameters and moments by them.
    """

    optimizer_kind = "sgd"
    optimizer_defaults: Mapping[str, Any] = {}
    numbers: Mapping[str, tuple[str, str]] = {}  # inputs of `apply`: the lr_mult and wd_mult prefix of its parameters
    optimizer = property(lambda self: self._optimizer)
    step = property(lambda self: self._step, doc="Updates so far.")
    fit = fit_model
    encode_accumulate: Callable[[Any], None]  # generated code defines these two
    encode_apply: Callable[[Any], None]

    # Generated code declares with these too.

    moment = functools.partialmethod(ModelRunner._add, "moment")
    gradient = functools.partialmethod(ModelRunner._add, "gradient")

    def __init__(
        self, device: Any = None, adapter: str | None = None, checked: bool = False, on_nan: str = "ignore"
    ) -> None:
        if on_nan not in ("ignore", "raise"):
            raise ValueError(f"on_nan of {self.name}: expected 'ignore' or 'raise', got {on_nan!r}")
        self.on_nan = on_nan
        self._step = 0
        self._optimizer = OptimizerNumbers(self.optimizer_defaults)
        self._pending = False  # gradients wait for apply()
        self._available = False  # gradients can be read
        self._twins = dict[Buffer, Buffer]()  # gradient: buffer for what was accumulated before
        self._backups = dict[Buffer, Buffer]()  # state that the step writes: buffer for its old value
        self._adds = list[Any]()  # dispatches that add the twins to the gradients
        self._checks = list[Any]()  # dispatches that look for numbers that are not finite
        super().__init__(device, adapter, checked)
        self._zero(self._of("moment"))
        for buffer, array in self._update_numbers(None).items():  # for --bench, which makes no steps of its own
            self.upload(buffer, array)
        self._report = self._make("report", Buffer("", "loss and flag", (2,), "f32", 8))
        if on_nan == "raise":
            written = [b for b in self._of("state") if b in self.entries["accumulate"].written]
            self._backups = {b: self._make("backup", b) for b in written}
            self._checks = [self._each(FIND_NOT_FINITE, b, b, self._report) for b in self._of("gradient")]

    def declare(self) -> "TrainingRunner":
        super().declare()
        both = self.entries["accumulate"]
        step = self.entries.pop("train_step")
        self.entries["train_step"] = step  # the last one
        step.feeds, step.results, step.advances = both.feeds, both.results, both.advances
        apply = self.entries["apply"]
        self._number_feeds = apply.feeds  # for the optimizer's numbers, which the runner uploads and users do not give
        apply.feeds = Names()
        forward = [name for name in self.entries if name not in ("accumulate", "apply", "train_step")]
        self._only = forward[0] if len(forward) == 1 else None
        self._checkpointed()
        return self

    def _of(self, kind: str) -> list[Buffer]:
        return [b for b in self._declared if b.kind == kind and 0 not in b.shape]

    def _make(self, kind: str, like: Buffer) -> Buffer:
        made = Buffer(kind, f"{kind} of {like.name}", like.shape, like.dtype, like.nbytes)
        made.gpu = self.allocate(made)
        self._declared.append(made)  # close() frees it
        return made

    def _each(self, code: str, like: Buffer, *buffers: Buffer) -> tuple[Any, ...]:
        """A dispatch of a kernel over each element of a gradient, in a grid of at most 65535 groups a dimension."""
        count = int(np.prod(like.shape))
        groups, pipeline = -(-count // BLOCK), self.pipeline(code, COUNT=count)
        rows = -(-groups // 65535)
        return pipeline, self.bind(pipeline, *buffers), -(-groups // rows), rows

    def _zero(self, buffers: Iterable[Buffer]) -> None:
        commands = self.device.create_command_encoder()
        for b in buffers:
            commands.clear_buffer(b.gpu, 0, b.nbytes)
        self.device.queue.submit([commands.finish()])

    def _copy(self, commands: Any, pairs: Mapping[Buffer, Buffer]) -> None:
        for source, target in pairs.items():
            commands.copy_buffer_to_buffer(source.gpu, 0, target.gpu, 0, source.nbytes)

    def encode_train_step(self, encoder: Any) -> None:
        """Encode both passes: at start, to record the dispatches of the entry; later, for --bench and --profile."""
        self.encode_accumulate(encoder)
        self.encode_apply(encoder)

    # Steps.

    @guarded
    def train_step(self, lr: float | None = None, **inputs: Any) -> float:
        """Forward, backward and update; the loss before the update. lr: for this step only, else optimizer["lr"]."""
        return self._learn(inputs, self._update_numbers(lr))

    @guarded
    def accumulate(self, **inputs: Any) -> float:
        """Forward and backward; gradients add up until apply(), as repeated .backward() in PyTorch. The loss."""
        return self._learn(inputs, None)

    @guarded
    def apply(self, lr: float | None = None) -> None:
        """Update by the accumulated gradients."""
        self._apply(lr)

    def _apply(self, lr: float | None) -> None:
        numbers = self._update_numbers(lr)
        if not self._pending:
            raise RuntimeError(f"apply of {self.name}: expected accumulate() before it, got no gradients")
        done = functools.partial(self._done, {}, True)
        self._perform(numbers, {}, self._entry("apply", {}), [], done)

    def _run(self, target: Entry, inputs: Mapping[str, Any], results: list[Buffer]) -> dict[str, Any]:
        """call("train_step", ...) and the others do the same as the methods of their names; a pass returns the loss."""
        if target.name == "apply":
            if inputs:
                raise ValueError(
                    f"inputs of apply: expected none, for runner.optimizer has its numbers, got {list(inputs)}"
                )
            self._apply(None)
            return {}
        if target.name not in ("accumulate", "train_step"):
            return super()._run(target, inputs, results)
        loss = self._learn(inputs, None if target.name == "accumulate" else self._update_numbers(None))
        return {result.name: np.array(loss, np.float32) for result in results}

    def _update_numbers(self, lr: Any) -> dict[Buffer, Any]:
        """The optimizer's numbers for one update, as the arrays that `apply` reads. lr: None, or in place of the optimizer's."""
        feeds = self._number_feeds
        arrays = dict[Buffer, Any]()
        o = dict(self._optimizer)
        if lr is not None:
            o["lr"] = check_number(f"lr of {self.name}", lr)
        for name, (lr_prefix, wd_prefix) in self.numbers.items():
            rate = check_number(f"lr * lr_mult.{lr_prefix}", o["lr"] * (o[f"lr_mult.{lr_prefix}"] if lr_prefix else 1))
            wanted = o["weight_decay"] * (o[f"wd_mult.{wd_prefix}"] if wd_prefix else 1)
            decay = check_number(f"weight_decay * wd_mult.{wd_prefix}", wanted)
            if self.optimizer_kind == "sgd":
                arrays[feeds[name]] = sgd_numbers(rate, o["momentum"], decay)
            else:
                arrays[feeds[name]] = adam_numbers(rate, self._step + 1, o["betas"], o["eps"], decay)
        if "clip_norm" in feeds:
            arrays[feeds["clip_norm"]] = np.array(o["clip_norm"], np.float32)
        return arrays

    def _learn(self, inputs: Mapping[str, Any], numbers: dict[Buffer, Any] | None) -> float:
        """A pass over the model, and an update where there are numbers for it."""
        entry = self.entries["accumulate" if numbers is None else "train_step"]
        arrays, foreign, positions = self._prepare(entry, inputs)
        if self._pending and not self._twins:  # nobody pays for these who does not accumulate
            twins = {b: self._make("twin", b) for b in self._of("gradient")}
            self._adds = [self._each(ADD_KEPT, b, twin, b) for b, twin in twins.items()]
            self._twins = twins  # last: an interruption before leaves nothing half made
        kept = self._backups | (self._twins if self._pending else {})
        works = (self._adds if self._pending else []) + self._checks
        done = functools.partial(self._done, positions, numbers is not None)
        record = functools.partial(self._record_pass, foreign, kept, works)
        if self.on_nan == "raise":
            return self._learn_carefully(arrays, foreign, record, kept, numbers, done)
        both = functools.partial(record, update=numbers is not None)
        return float(self._perform(arrays | (numbers or {}), foreign, both, self._reading(1), done)["report"][0])

    def _entry(self, name: str, foreign: Any) -> Any:
        return functools.partial(self._record, name, getattr(self, f"encode_{name}"), foreign)

    def _record_pass(self, foreign: Any, kept: Any, works: list[Any], commands: Any, update: bool = False) -> None:
        """The loss is put aside before the update, which may use its memory."""
        loss = self.entries["accumulate"].results["loss"].data
        if self.on_nan == "raise":
            commands.clear_buffer(self._report.gpu, 0, 8)
        self._copy(commands, kept)
        self._entry("accumulate", foreign)(commands)
        if works:
            self._record("gradients", lambda encoder: [encoder.dispatch(*work) for work in works], {}, commands)
        commands.copy_buffer_to_buffer(foreign.get(loss, loss.gpu), 0, self._report.gpu, 0, 4)
        if update:
            self._entry("apply", {})(commands)

    def _reading(self, count: int) -> list[Buffer]:
        return [Buffer("output", "report", (count,), "f32", 4 * count, self._report)]

    def _done(self, positions: Mapping[Buffer, Any], updated: bool) -> None:
        self._positions.update(positions)
        self._step, self._pending, self._available = self._step + updated, not updated, True

    # With on_nan="raise".

    def _learn_carefully(
        self, arrays: Any, foreign: Any, record: Any, kept: Any, numbers: dict[Buffer, Any] | None, done: Any
    ) -> float:
        """The update follows in a submit of its own, where all is finite; else everything is as it was before."""
        open_steps = list[str]()

        def finish() -> None:
            done()
            open_steps.clear()

        try:
            begun = functools.partial(open_steps.append, "begun")
            report = self._perform(arrays, foreign, record, self._reading(2), begun)["report"]
            loss = float(report[0])
            if not math.isfinite(loss) or report.view("u4")[1]:
                self._undo(kept)
                raise RuntimeError(self._describe_failure(loss, arrays, foreign))
            if numbers is None:
                finish()
            else:
                self._perform(numbers, {}, self._entry("apply", {}), [], finish)
        except BaseException:
            if open_steps:
                self._undo(kept)
            raise
        return loss

    def _undo(self, kept: Mapping[Buffer, Buffer]) -> None:
        self._available = self._pending  # gradients that were not kept are overwritten
        commands = self.device.create_command_encoder()
        self._copy(commands, {twin: b for b, twin in kept.items()})
        self.device.queue.submit([commands.finish()])

    def _describe_failure(self, loss: float, arrays: Mapping[Buffer, Any], foreign: Mapping[Buffer, Any]) -> str:
        """Why a step was undone: what was not finite before it, and the first dispatch that gives such a number."""
        before, entry = list[str](), self.entries["accumulate"]
        for b in (*self._of("parameter"), *self._of("state"), *(b for b in entry.feeds.values() if 0 not in b.shape)):
            gpu = foreign.get(b, b.gpu)
            if b in arrays or gpu.usage & self.wgpu.BufferUsage.COPY_SRC:
                array = arrays[b] if b in arrays else b.array(self.device.queue.read_buffer(gpu, 0, b.nbytes))
                before += [] if np.isfinite(array).all() else [f"{b.kind} {b.name!r}"]
        culprit = self._find_culprit(arrays, foreign) or (
            "the sum with the gradients accumulated before is not finite" if self._pending else "a replay was finite"
        )
        given = f"not finite before it: {', '.join(before)}; " if before else ""
        what = f"expected a finite loss and gradients, got loss {loss:g}; {given}{culprit}"
        return f"step {self._step + 1} of {self.name} is undone: {what}"

    def _find_culprit(self, arrays: Mapping[Buffer, Any], foreign: Mapping[Buffer, Any]) -> str:
        """The first dispatch, in a replay of each alone, that writes an infinity or NaN where it was not before."""
        names = {group: name[2:] for name, group in vars(self).items() if isinstance(group, BindGroup)}
        own = [b for b in self.entries["accumulate"].written if b.kind in ("scratch", "gradient")]
        self._zero(own)  # what the failed step left there would hide it
        for b, array in arrays.items():
            self.upload(b, array)
        for work in self.entries["accumulate"].work:
            pipeline, group, *_ = work
            elements = {int(number): element for number, element in WRITTEN.findall(pipeline.code)}
            pairs = [(b, elements.get(n, "")) for (n, _), b in zip(pipeline.bindings, group.buffers) if b.nbytes]
            floats = {b: "<f4" if "f32" in e else "<f2" for b, e in pairs if "f32" in e or "f16" in e}
            before = {b: self._bits(b, dtype) for b, dtype in floats.items()}
            record = functools.partial(
                self._record, names.get(group, ""), lambda e, work=work: e.dispatch(*work), foreign
            )
            self._perform({}, {}, record, [], lambda: None)
            for b, dtype in floats.items():
                after = self._bits(b, dtype)
                wrong = np.flatnonzero(~np.isfinite(after.view(dtype)) & (after != before[b]))
                if wrong.size:
                    what = f"{wrong.size} such numbers of {b.name} {b}, the first at {wrong[0]}"
                    return f"the first dispatch with a result that is not finite is {names[group]}, which wrote {what}"
        return ""

    def _bits(self, b: Buffer, dtype: str) -> Any:
        return np.frombuffer(self.device.queue.read_buffer(b.gpu, 0, b.nbytes), dtype.replace("f", "u"))

    # What is trained.

    @guarded
    def gradients(self) -> dict[str, Any]:
        """Those of the last step, or accumulated so far, by parameter."""
        if not self._available:
            raise RuntimeError(f"gradients of {self.name}: expected train_step() or accumulate() before, got neither")
        return {b.name: self._download(b) for b in self._declared if b.kind == "gradient"}

    @guarded
    def weights(self) -> dict[str, Any]:
        """Every parameter."""
        self._need_weights()
        return {name: self._download(b) for name, b in self._named("parameter").items()}

    @guarded
    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Every parameter, and the f32 states that training writes, such as running statistics, into a safetensors file,
        which load_weights of any runner of the model takes."""
        self._need_weights()
        learnt = [b for b in self._of("state") if b in self.entries["accumulate"].written and b.dtype == "f32"]
        tensors = self._named("parameter") | {b.name: b for b in learnt}
        write_safetensors(path, tensors, self._download, None)

    def _drop(self) -> None:
        super()._drop()
        self._adds.clear()
        self._checks.clear()

    def _start_anew(self) -> None:
        self._step, self._pending, self._available = 0, False, False
        self._zero(self._of("moment"))

    @guarded
    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """All that training goes on from, bit by bit, into a safetensors file."""
        if self._pending:
            raise RuntimeError(f"save_checkpoint of {self.name}: expected apply() before it, got pending gradients")
        self._need_weights()
        numbers = json.dumps(dict(self._optimizer))
        metadata = {"checkpoint": CHECKPOINT_VERSION, "step": str(self._step), "numbers": numbers}
        metadata |= {"optimizer": self.optimizer_kind, "model": self.name}
        write_safetensors(path, self._checkpointed(), self._download, metadata)

    @guarded
    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Go on from there. Pending gradients are dropped. A file that does not fit is a WeightError, and no change."""
        notes = dict[str, Any]()
        given = read_safetensors(path, notes)
        try:
            step, numbers = self._read_notes(notes)
            arrays = match_tensors(given, self._checkpointed())
        except (RecursionError, TypeError, ValueError) as error:
            raise WeightError(f"{path}: {error}") from error
        self._missing = list(self.parameters)  # half a checkpoint must not run
        self._pending = self._available = False
        for b, array in arrays.items():
            self.upload(b, array)
            self.device.queue.submit([])  # lets wgpu free its copy
        self._step = step
        self._optimizer.update(numbers)
        self._missing = []

    def _checkpointed(self) -> Names:
        """What a checkpoint holds, by the name it has there."""
        found = [(CHECKPOINT_PREFIXES[b.kind] + b.name, b) for b in self._declared if b.kind in CHECKPOINT_PREFIXES]
        if len(names := Names(found)) < len(found):
            raise ValueError(
                f"{self.name}: expected different names in a checkpoint, got {sorted(n for n, _ in found)}"
            )
        return names

    def _read_notes(self, notes: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The step and the optimizer's numbers from the metadata of a checkpoint."""
        for key, expected in (("checkpoint", CHECKPOINT_VERSION), ("optimizer", self.optimizer_kind)):
            if notes.get(key) != expected:
                raise ValueError(
                    f"not a checkpoint for {self.name}: {key}: expected {expected!r}, got {notes.get(key)!r}"
                )
        step, numbers = str(notes.get("step")), json.loads(notes.get("numbers", ""))
        if not re.fullmatch("[0-9]{1,18}", step):
            raise ValueError(f"step: expected a number, got {step[:99]!r}")
        if not isinstance(numbers, dict) or numbers.keys() != self._optimizer.keys():
            got = ", ".join(numbers) if isinstance(numbers, dict) else repr(numbers)
            raise ValueError(f"optimizer numbers: expected {', '.join(self._optimizer)}, got {got[:200]}")
        return int(step), self._optimizer.check(numbers)
