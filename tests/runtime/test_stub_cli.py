"""The runner as a script: exit codes, messages, files."""

import os
import re
import subprocess
import sys
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


def test_a_failed_write_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out.npz").write_bytes(b"old")
    monkeypatch.setattr(np.lib.format, "write_array", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.save_npz("out.npz", {"y": np.zeros(3)})
    assert Path("out.npz").read_bytes() == b"old" and len(os.listdir()) == 3


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
        ([*GIVEN, "--output", "no/such/folder.npz"], 1, "no/such/folder.npz"),
        ([*GIVEN, "--adapter", "voodoo"], 1, "'voodoo'.*llvmpipe|there are"),
        (["--weights", "w.safetensors", "--input", "x.npy"], 2, "NAME=FILE.npy"),
        (["--input", "x=x.npy"], 1, "without weights: w"),
        (["--bench", "-1"], 2, "--bench"),
        (["--bench", "many"], 2, "--bench"),
        ([*GIVEN, "--entry", "train"], 2, "--entry.*'train'"),
        (["--frobnicate"], 2, "--frobnicate"),
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
