"""A runner among others: in threads, in forked children, closed and forgotten."""

import gc
import importlib
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph, compile_graph
from runtime_stub import TrainingRunner, doctor

from .runners import Decode, Scale
from .trainers import Adam, Stateful, batches

ROOT = Path(__file__).parents[2]
X = np.ones((2, 3), np.float32)


def python(program: str, folder: Path, *arguments: str) -> str:
    """What a program prints that must end well, and not hang."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"
    return done.stdout


def emitted(folder: Path, *names: str) -> None:
    """Runner files of y = 2 x."""
    g = Graph()
    x = g.input("x", (2, 3))
    g.set_outputs({"y": x * 2.0})
    for name in names:
        compile_graph(g, name=name).save(folder / f"{name}.py")


# ---- threads

THREADS = """
import runpy, threading
import numpy as np

problems = []


def work(name):
    try:
        for number in range(3):
            with runpy.run_path(f"{name}.py")["Runner"]() as runner:
                assert (runner.run(x=np.full((2, 3), number))["y"] == 2 * number).all()
    except BaseException as error:
        problems.append(repr(error))


threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two") for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(problems)
"""


def test_runners_of_two_files_in_threads(tmp_path: Path) -> None:
    emitted(tmp_path, "one", "two")
    for _ in range(3):
        assert python(THREADS, tmp_path) == "[]\n"


def test_gl_adapters_are_no_reason_to_end_the_process(tmp_path: Path) -> None:
    """Where there is no Vulkan driver; without a GL driver either, each thread says that there is no adapter."""
    emitted(tmp_path, "one", "two")
    hidden = f"import os; os.environ.update(VK_DRIVER_FILES='{tmp_path}/no', VK_ICD_FILENAMES='{tmp_path}/no')\n"
    out = python(hidden + THREADS, tmp_path)
    assert out == "[]\n" or out.count("no GPU adapter found") == 4


def test_what_a_process_shares_does_not_belong_to_a_file(tmp_path: Path) -> None:
    emitted(tmp_path, "one", "two")
    print_same = "import one, two; print(one.this_process() is two.this_process(), one.Process is two.Process)"
    assert python(print_same, tmp_path) == "True False\n"


def is_free(lock: Any) -> bool:
    """For another thread."""
    found: list[bool] = []

    def try_it() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return found[0]


def test_one_thread_at_a_time_looks_for_adapters_and_requests_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, free = doctor.this_process().lock, []
    adapter = doctor.choose_adapter(None)
    found, request = doctor.find_adapters_without_gl, adapter.request_device_sync
    monkeypatch.setattr(doctor, "find_adapters_without_gl", lambda: free.append(is_free(lock)) or found())
    monkeypatch.setattr(adapter, "request_device_sync", lambda **more: free.append(is_free(lock)) or request(**more))
    doctor.find_adapters()
    doctor.request_device(adapter, Scale).destroy()
    assert free == [False, False] and is_free(lock)


def test_gl_is_only_asked_for_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    gl = [object()]
    monkeypatch.setattr(doctor.import_wgpu().gpu, "enumerate_adapters_sync", lambda: asked.append(1) or gl)
    monkeypatch.setattr(doctor.this_process(), "gl_adapters", [])
    assert doctor.find_adapters() and not asked
    assert {adapter.info["backend_type"] for adapter in doctor.find_adapters()} <= {"Vulkan", "Metal", "D3D12"}
    monkeypatch.setattr(doctor, "find_adapters_without_gl", list)
    assert doctor.find_adapters() == doctor.find_adapters() == gl
    assert asked == [1], "they are kept"


def test_another_wgpu_is_asked_by_its_public_call(monkeypatch: pytest.MonkeyPatch) -> None:
    native = pytest.importorskip("wgpu.backends.wgpu_native._api")
    monkeypatch.delattr(native.libf, "wgpuInstanceEnumerateAdapters")
    monkeypatch.setattr(doctor.import_wgpu().gpu, "enumerate_adapters_sync", lambda: ["all"])
    assert doctor.find_adapters() == ["all"]


# ---- forked children

FORK = """
import gc, multiprocessing, sys
import numpy as np
import one

x = np.ones((2, 3))


def use(pipe, how):
    global runner
    try:
        {"run": lambda: runner.run(x=x), "state": lambda: runner.reset(), "new": lambda: one.Runner(),
         "device": lambda: one.Runner(device=runner.device), "close": lambda: runner.close(),
         "with": lambda: runner.__exit__(None, None, None), "adapters": lambda: one.find_adapters()}[how]()
        if how == "close":
            runner.run(x=x)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    del runner
    gc.collect()
    pipe.send("went on")


runner = one.Runner()
runner.run(x=x)
context = multiprocessing.get_context("fork")
for how in sys.argv[1:]:
    here, there = context.Pipe()
    child = context.Process(target=use, args=(there, how))
    child.start()
    there.close()
    print(how)
    try:
        while here.poll(20):
            print(here.recv())
    except EOFError:
        pass
    child.join(20)
    print("hung" if child.is_alive() else child.exitcode)
    child.kill()
print(runner.run(x=x)["y"].sum())
"""
ANOTHER = "RuntimeError: one was made in another process"
FORKED = "RuntimeError: this process was forked from one that had opened the GPU"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_what_to_do(tmp_path: Path) -> None:
    emitted(tmp_path, "one")
    said = {"run": ANOTHER, "state": ANOTHER, "close": ANOTHER, "with": "", "new": FORKED, "device": FORKED}
    said["adapters"] = FORKED
    lines = iter(python(FORK, tmp_path, *said).splitlines())
    for how, message in said.items():
        assert next(lines) == how
        if message:
            line = next(lines)
            assert line.startswith(message) and "multiprocessing.get_context('spawn')" in line
        assert (next(lines), next(lines)) == ("went on", "0")
    assert list(lines) == ["12.0"], "the parent goes on"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_may_open_the_gpu_where_its_parent_has_not(tmp_path: Path) -> None:
    emitted(tmp_path, "one")
    program = """
import multiprocessing, numpy, one
one.import_wgpu()
def use(): print(one.Runner().run(x=numpy.ones((2, 3)))["y"].sum(), flush=True)
child = multiprocessing.get_context("fork").Process(target=use)
child.start()
child.join()
"""
    assert python(program, tmp_path) == "12.0\n"


# ---- lent buffers that are destroyed


def uses(runner: Any, path: Path) -> list[Any]:
    """Every public method that works on buffers."""
    batch = batches(1)[0]
    return [
        lambda: runner.run(**batch),
        lambda: runner.run(outputs=(), **batch),
        lambda: runner.call("run", batch),
        lambda: runner.call("train_step", batch),
        lambda: runner.train_step(**batch),
        lambda: runner.accumulate(**batch),
        lambda: runner.apply(),
        lambda: runner.fit([batch], log_every=0),
        lambda: runner.gradients(),
        lambda: runner.weights(),
        lambda: runner.load_weights({"w": X[0], "head.b": X[0]}),
        lambda: runner.init_weights(),
        lambda: runner.get_state("mean"),
        lambda: runner.set_state("mean", [1, 2, 3]),
        lambda: runner.reset(),
        lambda: runner.buffer("w"),
        lambda: runner.save_weights(path / "w"),
        lambda: runner.save_checkpoint(path / "c"),
        lambda: runner.load_checkpoint(path / "there"),
    ]


@pytest.mark.parametrize("name", ["error", "w", "mean"])
def test_a_lent_buffer_that_was_destroyed_is_named(gpu: Any, tmp_path: Path, name: str) -> None:
    runner = Stateful(gpu)
    runner.init_weights()
    runner.save_checkpoint(tmp_path / "there")
    runner.accumulate(**batches(1)[0])
    assert runner.buffer(name) is runner.buffer(name)
    runner.buffer(name).destroy()
    for use in uses(runner, tmp_path):
        with pytest.raises(RuntimeError, match=f"^line: the buffer of '{name}', which was lent, was destroyed"):
            use()
    assert os.listdir(tmp_path) == ["there"]
    runner.close()


def test_a_lent_buffer_as_another_s_input_is_checked(gpu: Any) -> None:
    giver, taker = Scale(gpu), Scale(gpu)
    for runner in (giver, taker):
        runner.init_weights()
    giver.run(x=X)
    lent = giver.buffer("y")
    assert np.array_equal(taker.run(x=lent)["y"], X)
    lent.destroy()
    with pytest.raises(ValueError, match="(?s)input 'x' of run: .*destroyed"):
        taker.run(x=lent)


def test_a_closed_runner_s_buffer_may_be_destroyed_again(gpu: Any) -> None:
    runner = Scale(gpu)
    lent = runner.buffer("y")
    runner.close()
    lent.destroy()
    runner.close()


# ---- what stays behind


@pytest.fixture
def no_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def native_counts() -> dict[str, int]:
    """Objects that wgpu-native holds, by kind."""
    importlib.import_module("wgpu.backends.wgpu_native")  # which counts
    counts = doctor.import_wgpu().diagnostics.get_dict()["wgpu_native_counts"]
    kinds = ("Device", "Buffer", "BindGroup", "BindGroupLayout", "ComputePipeline", "PipelineLayout", "ShaderModule")
    return {kind: counts[kind]["count"] for kind in kinds}


def test_closing_frees_everything_at_once(no_collector: None) -> None:
    before, threads = native_counts(), threading.active_count()
    kept: list[Any] = []
    for _ in range(20):
        with Decode() as runner:
            runner.decode(x=[1, 2, 3, 4])
        kept.append(runner)
    assert native_counts() == before and threading.active_count() == threads
    assert kept[0].states and kept[0].entries["decode"].inputs


def test_closing_frees_what_training_made(gpu: Any, no_collector: None) -> None:
    before = native_counts()
    kept: list[Any] = []
    for _ in range(3):
        with Stateful(gpu, on_nan="raise") as runner:
            runner.init_weights()
            for _ in range(2):
                runner.accumulate(**batches(1)[0])
        kept.append(runner)
    assert native_counts() == before


@pytest.mark.parametrize("kind", [Decode, Stateful])
def test_a_runner_that_nobody_holds_is_gone(gpu: Any, no_collector: None, kind: Any) -> None:
    before = native_counts()
    runner = kind(gpu)
    runner.buffer("y" if kind is Decode else "w")
    known = weakref.ref(runner)
    del runner
    assert known() is None and native_counts() == before


@pytest.mark.parametrize("way", ["step", "raise", "accumulate", "buffers"])
def test_nothing_grows_from_step_to_step(gpu: Any, no_collector: None, way: str) -> None:
    runner = Adam(gpu, on_nan="raise" if way == "raise" else "ignore")
    runner.init_weights()
    given = batches(4)

    def steps(count: int) -> tuple[int, int, float]:
        """What there is after so many steps, and the seconds of the fastest one."""
        seconds = list[float]()
        for number in range(count):
            start = time.perf_counter()
            take_step(runner, given[number % 4], way)
            seconds.append(time.perf_counter() - start)
        return len(gc.get_objects()), sum(native_counts().values()), min(seconds)

    # Multiples of 32: so many bind groups are kept of the host program's buffers, then none.
    steps(64)
    objects, native, seconds = steps(96)
    more_objects, more_native, more_seconds = steps(320)
    assert abs(more_objects - objects) < 32 and more_native == native
    assert more_seconds < 3 * seconds


def take_step(runner: TrainingRunner, batch: dict[str, Any], way: str) -> None:
    if way == "accumulate":
        runner.accumulate(**batch)
        runner.accumulate(**batch)
        runner.apply()
        return
    if way == "buffers":
        storage = runner.wgpu.BufferUsage.STORAGE
        make = runner.device.create_buffer_with_data
        batch = {name: make(data=array, usage=storage) for name, array in batch.items()}
    runner.train_step(**batch)
