"""A runner's own life: closing, and what a subclass may override."""

import signal
from typing import Any

import numpy as np
import pytest

from .runners import SCALE, Decode, Scale
from .test_stub_train import start
from .trainers import Line, batches

X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2


@pytest.mark.parametrize("own_device", [False, True])
def test_a_closed_runner_says_so(gpu: Any, own_device: bool) -> None:
    with Decode(None if own_device else gpu) as runner:
        assert runner.get_state("rows").tolist() == [0, 0]
    runner.close()
    for use in (
        lambda: runner.decode(x=[1, 2, 3, 4]),
        lambda: runner.decode(outputs=(), x=None),
        lambda: runner.get_state("rows"),
        lambda: runner.set_state("rows", [1, 2]),
        lambda: runner.reset(),
        lambda: runner.load_weights({}),
        lambda: runner.load_weights("nothing"),
        lambda: runner.init_weights(),
        lambda: runner.buffer("y"),
        lambda: runner.buffer("nothing"),
    ):
        with pytest.raises(RuntimeError, match="^decode is closed$"):
            use()
    assert runner.states and "decode" in runner.describe()


def test_closing_leaves_a_given_device(gpu: Any) -> None:
    with Scale(gpu) as runner:
        runner.init_weights()
    again = Scale(gpu)
    again.init_weights()
    assert np.array_equal(again.run(x=X)["y"], X)


def test_allocation_and_pipelines_can_be_overridden(gpu: Any) -> None:
    cache: dict[Any, Any] = {}

    class Guarded(Scale):
        def allocate(self, buffer: Any) -> Any:
            usage = self.wgpu.BufferUsage
            flags = usage.STORAGE | usage.COPY_SRC | usage.COPY_DST
            tail = np.full(4, 1e30, np.float32).tobytes()
            whole = np.full(buffer.nbytes // 4, np.nan, np.float32).tobytes() + tail
            made = self.device.create_buffer(size=len(whole), usage=flags)
            self.device.queue.write_buffer(made, 0, whole)
            return made

        def create_pipeline(self, code: str, **constants: float) -> Any:
            key = code, *constants.items()
            if key not in cache:
                cache[key] = super().create_pipeline(code, **constants)
            return cache[key]

    for _ in range(2):
        runner = Guarded(gpu)
        runner.init_weights()
        assert np.array_equal(runner.run(x=X)["y"], X)
        tail = np.frombuffer(gpu.queue.read_buffer(runner.b_y.gpu), np.float32)[6:]
        assert (tail == np.float32(1e30)).all()
    assert len(cache) == 1


def test_one_pipeline_for_one_text_and_constants(gpu: Any) -> None:
    runner = Scale(gpu)
    assert runner.pipeline(SCALE, N=6) is runner.p_scale_0
    assert runner.pipeline(SCALE, N=5) is not runner.p_scale_0
    assert runner.pipeline(SCALE, N=5).layout is runner.p_scale_0.layout


def test_bindings_are_read_from_the_text(gpu: Any) -> None:
    text = """
    @group(0) @binding(2) var<uniform> u : vec4<f32>;
    @group(0)
    @binding(0) var<storage,read_write> y: array<f32>;
    @group(0) @binding(1) var<storage> x: array<f32>;
    @compute @workgroup_size(1) fn main() { y[0] = x[0] + u.x; }
    """
    pipeline = Scale(gpu).pipeline(text)
    assert pipeline.bindings == ((0, "storage"), (1, "read-only-storage"), (2, "uniform"))


USES = {
    "call": lambda r: r.call("run", {"x": X}),
    "train_step": lambda r: r.train_step(x=np.ones(2)),
    "get_state": lambda r: r.get_state("rows"),
    "set_state": lambda r: r.set_state("rows", [1, 2]),
    "reset": lambda r: r.reset(),
    "load_weights": lambda r: r.load_weights({}),
    "init_weights": lambda r: r.init_weights(),
    "buffer": lambda r: r.buffer("y"),
}


@pytest.mark.parametrize("use", USES)
def test_a_handler_of_a_signal_is_refused(gpu: Any, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """It runs within the call, of whose steps it would see, or do again, a half."""
    runner = start(Line, gpu) if use == "train_step" else Scale(gpu)
    runner.init_weights()
    messages = list[str]()
    upload = runner.upload

    def handle(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="expected no call under way, got ") as caught:
            USES[use](runner)
        messages.append(str(caught.value))

    def interrupted(*arguments: Any) -> None:
        upload(*arguments)
        signal.raise_signal(signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "upload", interrupted)
            if use == "train_step":
                runner.train_step(**batches(1)[0])
            else:
                assert np.array_equal(runner.run(x=X)["y"], X)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert messages and all(f"got {use}() from within one" in message for message in messages)


@pytest.mark.parametrize("own_device", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_runner_closed_by_a_handler_is_freed_as_the_call_ends(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, own_device: bool, leaves: bool
) -> None:
    runner = Scale(None if own_device else gpu)
    runner.init_weights()
    upload = runner.upload

    def closing(*arguments: Any) -> None:
        runner.close()
        upload(*arguments)
        if leaves:
            raise SystemExit

    monkeypatch.setattr(runner, "upload", closing)
    if leaves:
        with pytest.raises(SystemExit):
            runner.run(x=X)
    else:
        assert np.array_equal(runner.run(x=X)["y"], X)
    assert runner.closed and all(buffer.gpu is None for buffer in runner._declared)
    runner.close()
    runner._free()  # a handler may close it between the end of the call and the look whether it was closed
    with pytest.raises(RuntimeError, match="^scale is closed$"):
        runner.run(x=X)
