"""The runner as a script: exit codes, messages, files."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime_stub import cli, doctor, main, profile
from runtime_stub.core import ModelRunner

from . import runners
from .runners import Decode, Kinds, Scale

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights and an input for Scale."""
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"w": np.full((2, 3), 3, np.float32)}, tmp_path / "w.safetensors")
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(2, 3))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], model: type[ModelRunner], *arguments: str) -> tuple[int, str, str]:
    code: Any = 0
    try:
        main(model, list(arguments))
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return (1, out, f"{err}{code}") if isinstance(code, str) else (code, out, err)


GIVEN = ("--weights", "w.safetensors", "--input", "x=x.npy")


def test_a_run_writes_its_outputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, Scale, *GIVEN, "--output", "out.npz")
    assert (code, err) == (0, "") and "y" in out and "float32[2, 3]" in out
    with np.load("out.npz") as file:
        assert np.array_equal(file["y"], 3 * np.arange(6).reshape(2, 3)) and file["y"].dtype == np.float32
    assert sorted(os.listdir()) == ["out.npz", "w.safetensors", "x.npy"]


def test_without_output_a_summary_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, Scale, *GIVEN)
    assert code == 0 and "0.0 to 15.0" in out and "mean 7.5" in out


@pytest.mark.parametrize("target", ["", ".", "existing", "new/", "to_existing"])
def test_an_output_that_is_no_file_is_refused_before_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    Path("existing").mkdir()
    os.symlink("existing", "to_existing")
    before = sorted(os.listdir())
    monkeypatch.setattr(Scale, "__init__", None)
    code, _, err = run(capsys, Scale, *GIVEN, "--output", target)
    assert code == 1 and f"--output {target}: expected a file" in err
    assert sorted(os.listdir()) == before


HOSTILE_NPY = {
    "a list as a key": "{[]: 1}",
    "a huge shape": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**23},)}}",
    "a shape beyond memory": f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({10**15},)}}",
    "a shape of text": "{'descr': '<f4', 'fortran_order': False, 'shape': ('2',)}",
    "no shape": "{'descr': '<f4', 'fortran_order': False}",
    "an unknown type": "{'descr': 'nonsense', 'fortran_order': False, 'shape': (2,)}",
    "a type that is a number": "{'descr': 7, 'fortran_order': False, 'shape': (2,)}",
    "not Python": "{'descr'",
    "deep nesting": "(" * 5000,
    "a number": "7",
    "too little data": "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}",
}


@pytest.mark.parametrize("kind", HOSTILE_NPY)
def test_hostile_inputs(folder: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    text = HOSTILE_NPY[kind].encode() + b"\n"
    Path("x.npy").write_bytes(b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + bytes(8))
    code, _, err = run(capsys, Scale, *GIVEN)
    assert code == 1 and re.search(r"x\.npy: not a sound \.npy file: \w*Error: ", err), err


def test_outputs_of_any_name_can_be_saved(folder: Path) -> None:
    arrays = {"file": np.ones(2), "args": np.zeros((0, 3)), "allow_pickle": np.array(1)}
    cli.save_npz("out.npz", arrays)
    with np.load("out.npz") as file:
        assert sorted(file) == sorted(arrays) and file["args"].shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--weights", "nothing.safetensors", "--input", "x=x.npy"], 1, "nothing.safetensors"),
        (["--weights", "x.npy", "--input", "x=x.npy"], 1, "x.npy: not a sound safetensors file"),
        (["--weights", "w.safetensors"], 1, r"expected \['x'\], got \[\]"),
        (["--weights", "w.safetensors", "--input", "x=nothing.npy"], 1, "nothing.npy"),
        (["--weights", "w.safetensors", "--input", "x=w.safetensors"], 1, "magic"),
        (["--weights", "w.safetensors", "--input", "x=empty"], 1, "empty|EOF|read"),
        (["--weights", "w.safetensors", "--input", "x=pickle.npy"], 1, "allow_pickle"),
        (["--weights", "w.safetensors", "--input", "z=x.npy"], 1, r"expected \['x'\], got \['z'\]"),
        ([*GIVEN, "--output", "no/such/folder.npz"], 1, "no/such/folder.npz.*folder that is there"),
        ([*GIVEN, "--output", "x.npy/below.npz"], 1, "x.npy/below.npz.*folder that is there"),
        ([*GIVEN, "--adapter", "voodoo"], 1, "'voodoo'.*llvmpipe|there are"),
        (["--weights", "w.safetensors", "--input", "x.npy"], 2, "NAME=FILE.npy"),
        (["--input", "x=x.npy"], 1, "without weights: w"),
        (["--bench", "-1"], 2, "--bench"),
        (["--bench", "many"], 2, "--bench"),
        ([*GIVEN, "--entry", "train"], 2, "--entry.*'train'"),
        (["--frobnicate"], 2, "--frobnicate"),
        (["--bench", "1", "--output", "out.npz"], 2, "--output is what a run gives: not with --bench"),
        (["--profile", "--output", "out.npz"], 2, "--output is what a run gives"),
        (["--list", "--output", "out.npz"], 2, "--output is what a run gives"),
        (["--weights", "", "--input", "x=x.npy"], 1, "No such file"),
    ],
)
def test_errors_are_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    Path("empty").write_bytes(b"")
    np.save("pickle.npy", np.array([{}, {}], object), allow_pickle=True)
    got, _, err = run(capsys, Scale, *arguments)
    assert got == code and re.search(message, err) and "Traceback" not in err


def test_several_entries_need_a_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("n.npy", np.array(2))
    code, _, err = run(capsys, Decode, "--input", "n=n.npy")
    assert code == 2 and "prefill, decode" in err
    code, out, _ = run(capsys, Decode, "--input", "n=n.npy", "--entry", "prefill")
    assert code == 0 and "position" in out
    np.save("n.npy", np.array(9))
    code, _, err = run(capsys, Decode, "--input", "n=n.npy", "--entry", "prefill")
    assert code == 1 and "limit 8" in err


def test_a_defect_of_the_runner_keeps_its_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scale, "bind_groups", lambda self: self.b_nothing)
    with pytest.raises(AttributeError, match="b_nothing"):
        main(Scale, list(GIVEN))


def test_wgpu_s_own_errors_are_messages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Scale):
        def pipelines(self) -> None:
            self.p_scale_0 = self.pipeline(runners.SCALE.replace("w[id.x]", "foo"), N=6)

    code, _, err = run(capsys, Broken, *GIVEN)
    assert code == 1 and "foo" in err


def script(*arguments: str, flags: tuple[str, ...] = ("-I",)) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python that finds neither this folder nor any variable."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['wgpu'] = None\n"
    program += "from tests.runtime.runners import Kinds, Scale; from runtime_stub import main\n"
    program += "main(locals()[sys.argv[2]], sys.argv[3:])"
    command = [sys.executable, *flags, "-c", program, str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_list_needs_neither_gpu_nor_wgpu() -> None:
    done = script("Kinds", "--list")
    assert (done.returncode, done.stderr) == (0, "")
    for line in (
        "input ids u32[3]",
        "input s f32[]",
        "output none f32[3, 0]",
        "parameter w f32[4]",
        "state cache f32[2, 2]",
    ):
        assert line in done.stdout


def piped(stdout: Any, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code and stderr of a script whose stdout is this."""
    command = [sys.executable, "-m", "tests.runtime.runners", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "", **variables}
    done = subprocess.run(
        command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [["Kinds", "--list"], ["Scale", "--help"], ["Scale", "--doctor"]])
def test_a_reader_that_leaves_is_no_news(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for variables in ({}, {"PYTHONUNBUFFERED": "1"}):
        code, err = piped(writer, *arguments, **variables)
        assert code in (0, 1) and err == ""
    os.close(writer)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
def test_a_full_disk_is_one_message() -> None:
    with open("/dev/full", "w") as full:
        code, err = piped(full, "Kinds", "--list")
        assert code == 1 and re.fullmatch(r"runners\.py: .*No space left on device\n", err)
        assert piped(full, "Scale", "--help")[1] == ""


def test_a_name_that_the_terminal_cannot_show(folder: Path) -> None:
    with open("out.txt", "wb") as out:
        arguments = ("Umlaut", "--output", str(folder / "out.npz"))
        assert piped(out, *arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="0") == (0, "")
        assert piped(out, "Umlaut", "--list", PYTHONIOENCODING="ascii", PYTHONUTF8="0") == (0, "")
    assert "gr\\xf6\\xdfe: float32[3], 0.0 to 0.0" in Path("out.txt").read_text()
    assert np.load("out.npz")["größe"].tolist() == [0, 0, 0]


def test_outputs_are_saved_before_they_are_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    arguments = ("Umlaut", "--output", str(folder / "out.npz"))
    code, err = piped(writer, *arguments, PYTHONUNBUFFERED="1")
    os.close(writer)
    assert (code, err) == (1, "") and np.load("out.npz")["größe"].tolist() == [0, 0, 0]


def test_without_wgpu_the_message_says_so() -> None:
    done = script("Scale", "--doctor")
    assert done.returncode == 1 and "pip install wgpu" in done.stdout and "Traceback" not in done.stderr
    done = script("Scale", "--bench", "1")
    assert done.returncode == 1 and "wgpu" in done.stderr and "Traceback" not in done.stderr


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, Scale, "--doctor")
    assert code == 0 and "max-storage-buffers-per-shader-stage" in out and "chosen: " in out
    code, out, _ = run(capsys, Scale, "--doctor", "--adapter", "voodoo")
    assert code == 1 and "'voodoo'" in out


def test_bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, Scale, "--bench", "5", "--seed", "3")
    assert code == 0 and "random" in out and re.search(r"\d+\.\d+ .*wall", out) and re.search(r"\d+\.\d+ .*GPU", out)
    code, out, _ = run(capsys, Scale, *GIVEN, "--bench", "5")
    assert code == 0 and "random" not in out


def test_bench_waits_once_for_all_runs(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, real = Scale(gpu), gpu.queue.read_buffer
    runner.init_weights()

    def read_buffer(*arguments: Any) -> Any:
        time.sleep(0.2)
        return real(*arguments)

    monkeypatch.setattr(gpu.queue, "read_buffer", read_buffer)
    profile.time_runs(runner, "run", {"x": np.ones((2, 3))}, 20, False)
    out = capsys.readouterr().out
    wall = re.search(r"(\d+\.\d+)  wall, 20 runs in a row", out)
    assert wall and 10 <= float(wall[1]) < 100, "a twentieth of the wait"


@pytest.mark.parametrize("count", [1, 7, 4100])
def test_gpu_time_is_that_of_each_pass_of_each_run(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """The ticks that the GPU wrote are looked at, then known ones take their place."""
    runner, real = Decode(gpu), gpu.queue.read_buffer
    written: list[Any] = []

    def read_buffer(buffer: Any, *more: Any) -> Any:
        runs = np.frombuffer(real(buffer, *more), np.int64).reshape(-1, 32).copy()  # of 256 bytes each
        written.append(runs.copy())
        runs[:, :8:2] = np.arange(4) * 10_000 + np.arange(len(runs))[:, None] * 1_000_000
        runs[:, 1:8:2] = runs[:, :8:2] + [1000, 4000, 2000, 3000]
        return memoryview(runs.tobytes())

    monkeypatch.setattr(gpu.queue, "read_buffer", read_buffer)
    profile.time_runs(runner, "decode", {"x": np.ones(4)}, count, True)
    rows = re.findall(r"(\d+\.\d+) +(\d+\.\d+) +(\d+\.\d) % +(\w+)", capsys.readouterr().out)
    assert [name for *_, name in rows] == ["step_1", "add_0", "scale_0", "step_0"]
    assert [share for *_, share, _ in rows] == ["40.0", "30.0", "20.0", "10.0"]
    assert all(median == least for median, least, *_ in rows)
    last = written[-1]
    assert len(last) == min(count, 4096) and last[:, :8].all() and not last[:, 8:].any()
    assert (np.diff(last[:, :8]) >= 0).all() and len(np.unique(last[:, 0])) == len(last)
    assert last[:, 0].min() > written[-2][:, :8].max(), "all are those of the runs in a row"


def test_bench_resets_states_at_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, Decode, "--entry", "decode", "--bench", "7")
    assert code == 0 and "wall" in out
    code, out, _ = run(capsys, Decode, "--entry", "prefill", "--bench", "2")
    assert code == 0 and "wall" in out, "an input that advances is zero"


def test_bench_passes_no_limit(gpu: Any) -> None:
    runner = Decode(gpu)
    profile.time_runs(runner, "decode", {"x": np.ones(4)}, 3, False)
    assert 0 < runner.get_state("position") <= 8


def test_bench_uploads_nothing_while_it_times(spy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    uploads = spy(ModelRunner, "upload")
    run(capsys, Scale, "--bench", "9")
    assert [buffer.name for _, buffer, _ in uploads] == ["w", "x"]


def test_profile_names_every_dispatch(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, Decode, "--entry", "decode", "--profile")
    rows = re.findall(r"(\d+\.\d+) +\d+\.\d+ +(\d+\.\d) % +(\w+)", out)
    assert code == 0 and {name for *_, name in rows} == {"step_0", "step_1", "scale_0", "add_0"}
    assert [float(time) for time, *_ in rows] == sorted((float(time) for time, *_ in rows), reverse=True)
    assert abs(sum(float(share) for _, share, _ in rows) - 100) < 1
    code, out, _ = run(capsys, Kinds, "--profile")
    assert code == 0, "an entry without dispatches"


def test_without_timestamps_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def request(adapter: Any, model: Any) -> Any:
        return adapter.request_device_sync(required_limits=doctor.check_offer(adapter, model))

    monkeypatch.setattr("runtime_stub.core.request_device", request)
    for option in ("--bench=2", "--profile"):
        code, out, _ = run(capsys, Scale, option)
        assert code == 0 and "no timestamp-query" in out and "wall" in out


def test_a_pipe_as_an_input_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    code, _, err = run(capsys, Scale, "--weights", "w.safetensors", "--input", "x=pipe")
    assert code == 1 and "pipe: not a regular file but a pipe or a device" in err


def test_an_interrupt_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scale, "call", interrupt)
    code, out, err = run(capsys, Scale, *GIVEN)
    assert (code, out) == (130, "") and err.endswith(": interrupted\n") and err.count("\n") == 1
