"""Every writer, with every kind of place: whole or not at all, a device stays a device, a mode stays."""

import contextlib
import errno
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meganeura_aot import Graph
from meganeura_aot.compiler import Program, compile_graph
from runtime_stub import TrainingRunner, cli, files, main
from runtime_stub.weight_files import read_safetensors

from .runners import Umlaut
from .test_stub_train import start
from .trainers import Line

ROOT = Path(__file__).parents[2]
ARRAYS = {"y": np.arange(6.0, dtype=np.float32)}


@pytest.fixture(scope="module")
def trained(gpu: Any) -> TrainingRunner:
    return start(Line, gpu)


@pytest.fixture(scope="module")
def program() -> Program:
    g = Graph()
    g.set_outputs({"y": g.input("x", (2,)) * 2.0})
    return compile_graph(g)


WRITERS = ("weights", "checkpoint", "npz", "output", "runner")


@pytest.fixture(params=WRITERS)
def save(request: pytest.FixtureRequest, trained: TrainingRunner, program: Program) -> Callable[[Any], None]:
    """Each writer: a function of a path."""
    return {
        "weights": trained.save_weights,
        "checkpoint": trained.save_checkpoint,
        "npz": lambda path: cli.save_npz(path, ARRAYS),
        "output": lambda path: main(Umlaut, ["--output", os.fspath(path)]),
        "runner": program.save,
    }[request.param]


def check_whole(content: bytes, folder: Path) -> None:
    """The content is what one of the writers writes, from its first to its last byte."""
    path = folder / "whole"
    path.write_bytes(content)
    if content.startswith(b"PK"):
        with zipfile.ZipFile(path) as file:
            assert file.testzip() is None
    elif content.startswith(b'"""'):
        compile(content, "whole", "exec")
    else:
        assert "w" in read_safetensors(path)
    path.unlink()


@contextlib.contextmanager
def reading(pipe: Path) -> Iterator[list[bytes]]:
    """Who reads the pipe; the list holds what came, once the block has ended."""
    content = list[bytes]()
    reader = threading.Thread(target=lambda: content.append(pipe.read_bytes()), daemon=True)
    reader.start()
    yield content
    reader.join(10)
    assert not reader.is_alive(), "nobody wrote to the pipe"


# ---- where it is written


def test_a_new_file_has_the_mode_of_any_new_file(save: Callable[[Any], None], tmp_path: Path) -> None:
    umask = os.umask(0o027)
    try:
        save(tmp_path / "new")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["new"]
    check_whole((tmp_path / "new").read_bytes(), tmp_path)


@pytest.mark.parametrize("mode", [0o600, 0o666, 0o640, 0o755])
def test_an_existing_file_keeps_its_mode(save: Callable[[Any], None], tmp_path: Path, mode: int) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(mode)
    save(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode and os.listdir(tmp_path) == ["old"]
    check_whole(path.read_bytes(), tmp_path)


def test_nobody_else_reads_a_private_file_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with files.replacing(path) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600


def test_a_read_only_file_stays(save: Callable[[Any], None]) -> None:
    """As another user than root, who may write anything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kept")
        path.write_bytes(b"old")
        path.chmod(0o444)
        Path(folder).chmod(0o777)
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            with pytest.raises((PermissionError, SystemExit), match="kept"):
                save(path)
        finally:
            os.seteuid(user)
        assert path.read_bytes() == b"old" and os.listdir(folder) == ["kept"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(save: Callable[[Any], None], tmp_path: Path) -> None:
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        (tmp_path / f"to_{folder}").symlink_to(f"{folder}/file")
        (tmp_path / f"again_{folder}").symlink_to(f"to_{folder}")
    (tmp_path / "old/file").write_bytes(b"old")
    (tmp_path / "old/file").chmod(0o600)
    for folder in ("old", "new"):
        save(tmp_path / f"again_{folder}")
        assert (tmp_path / f"again_{folder}").is_symlink() and (tmp_path / f"to_{folder}").is_symlink()
        assert os.listdir(tmp_path / folder) == ["file"]
        check_whole((tmp_path / folder / "file").read_bytes(), tmp_path)
    assert stat.S_IMODE((tmp_path / "old/file").stat().st_mode) == 0o600


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_pipe_is_written_to(save: Callable[[Any], None], tmp_path: Path, through_a_link: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("pipe")
    with reading(pipe) as content:
        save(tmp_path / "link" if through_a_link else pipe)
    assert pipe.is_fifo() and sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    check_whole(content[0], tmp_path)


def test_a_pipe_that_only_has_a_number_is_written_to(save: Callable[[Any], None], tmp_path: Path) -> None:
    """As /dev/stdout in a shell's pipeline, which leads to a name that no folder has."""
    end, start = os.pipe()
    with reading(Path(f"/dev/fd/{end}")) as content:
        save(f"/dev/fd/{start}")
        os.close(start)
    os.close(end)
    check_whole(content[0], tmp_path)


def test_a_device_is_written_to(save: Callable[[Any], None], tmp_path: Path) -> None:
    """For root, whose wrong writer would destroy the machine's, a device of the test's own."""
    device = Path("/dev/null")
    if os.geteuid() == 0:
        device = tmp_path / "null"
        try:
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            device.write_bytes(b"")
        except PermissionError:
            pytest.skip("this root makes no devices")
    save(device)
    assert device.is_char_device()
    assert os.listdir(tmp_path) == ([device.name] if device.parent == tmp_path else [])


@pytest.mark.parametrize(
    "name",
    [pytest.param(letter * count, id=f"{count}") for letter, count in (("n", 240), ("n", 255), ("ö", 127), ("🙂", 63))],
)
def test_long_names(save: Callable[[Any], None], tmp_path: Path, name: str) -> None:
    for _ in range(2):
        save(tmp_path / name)
        assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("place", [".", "folder", "to_folder", "loop", "file/below", "n" * 256], ids=lambda p: p[:10])
def test_places_that_cannot_be_written(save: Callable[[Any], None], tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "to_folder").symlink_to("folder")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises((OSError, SystemExit), match=re.escape(str(tmp_path / place.split("/")[0]))):
        save(tmp_path / place)
    assert sorted(os.listdir(tmp_path)) == before and (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("writer", WRITERS[:4])
def test_a_folder_that_is_not_there(trained: TrainingRunner, tmp_path: Path, writer: str) -> None:
    """Only the compiler makes one: its default is out/."""
    save = {
        "npz": lambda path: cli.save_npz(path, ARRAYS),
        "output": lambda path: main(Umlaut, ["--output", str(path)]),
    }
    save |= {"weights": trained.save_weights, "checkpoint": trained.save_checkpoint}
    with pytest.raises((FileNotFoundError, SystemExit), match="missing/file"):
        save[writer](tmp_path / "missing/file")
    assert not os.listdir(tmp_path)


# ---- whole or not at all


class FullDisk:
    """A file that takes so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(data))


def modules_of_files() -> list[Any]:
    """The runner's, and the compiler's copy of it."""
    from meganeura_aot.compiler import files_of_runners

    return [files, files_of_runners()]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("failure", ["at once", "midway", "fsync", "replace", "interrupt"])
def test_a_failure_leaves_the_old_file(
    save: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, there: bool
) -> None:
    path = tmp_path / "file"
    if there:
        path.write_bytes(b"old")

    def fail(*arguments: Any) -> Any:
        raise KeyboardInterrupt if failure == "interrupt" else OSError(errno.EIO, "the disk is broken")

    if failure in ("at once", "midway"):
        for module in modules_of_files():
            real = module.open_temporary
            room = 0 if failure == "at once" else 100

            def full(*arguments: Any, real: Any = real, room: int = room) -> tuple[str, Any]:
                temporary, file = real(*arguments)
                return temporary, FullDisk(file, room)

            monkeypatch.setattr(module, "open_temporary", full)
    else:
        monkeypatch.setattr(os, "replace" if failure == "replace" else "fsync", fail)
    with pytest.raises((OSError, SystemExit, KeyboardInterrupt)):
        save(path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == (["file"] if there else [])
    assert not there or path.read_bytes() == b"old"
    save(path)
    check_whole(path.read_bytes(), tmp_path)


def test_file_then_name_are_on_disk(
    save: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        real_fsync(handle)

    def replace(source: str, target: str) -> None:
        order.append("replace")
        assert Path(source).parent == tmp_path, "beside, for a rename does not leave a disk"
        check_whole(Path(source).read_bytes(), tmp_path)
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path / "file")
    assert order == ["file", "replace", "folder"]


# ---- what a killed process leaves behind

KILLED = """
import sys
from runtime_stub.files import replacing
with replacing(sys.argv[1]) as file:
    file.write(bytes(100_000))
    print("writing", flush=True)
    sys.stdin.read()
"""


def start_writing(path: Path) -> subprocess.Popen[str]:
    """A process that is in the middle of writing this file."""
    command = [sys.executable, "-c", KILLED, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "writing\n"
    return process


@pytest.mark.parametrize("name", ["file", "n" * 255])
def test_what_a_killed_process_left_is_removed_by_the_next_save(
    save: Callable[[Any], None], tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    with start_writing(path) as one, start_writing(path) as other:
        one.send_signal(signal.SIGKILL)
        other.send_signal(signal.SIGKILL)
    left = set(os.listdir(tmp_path))
    assert len(left) == 2 and name not in left
    save(path)
    assert os.listdir(tmp_path) == [name]


def test_what_another_process_is_writing_stays(save: Callable[[Any], None], tmp_path: Path) -> None:
    path = tmp_path / "file"
    with start_writing(path) as process:
        writing = os.listdir(tmp_path)
        save(path)
        assert sorted(os.listdir(tmp_path)) == sorted([*writing, "file"])
        check_whole(path.read_bytes(), tmp_path)
        process.communicate("")
    assert process.returncode == 0
    assert os.listdir(tmp_path) == ["file"] and path.stat().st_size == 100_000


def test_what_another_thread_is_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with files.replacing(path) as outer:
        outer.write(b"outer")
        with files.replacing(path) as inner:
            inner.write(b"inner")
        assert path.read_bytes() == b"inner"
    assert path.read_bytes() == b"outer" and os.listdir(tmp_path) == ["file"]


def test_a_file_taken_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two steps of making and locking it, another writer may find it without a lock."""
    real, taken = files.lock, list[str]()

    def lock(file: Any, wait: bool) -> None:
        if wait and not taken:
            taken.extend(os.listdir(tmp_path))
            files.remove_left_behind(str(tmp_path / "file"))
        real(file, wait)

    monkeypatch.setattr(files, "lock", lock)
    with files.replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert len(taken) == 1
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"new"


def test_files_of_others_stay(save: Callable[[Any], None], tmp_path: Path) -> None:
    others = [
        ".file.tmp",
        ".file.unfinished-",
        ".file.unfinished-notes",
        ".file.unfinished-0123456789abcdef.txt",
        ".other.unfinished-0123456789abcdef",
        "file.unfinished-0123456789abcdef",
    ]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    save(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "file"])


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(files, "lock", lock)
    left = ".file.unfinished-0123456789abcdef"
    (tmp_path / left).write_bytes(b"")
    with files.replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert sorted(os.listdir(tmp_path)) == [left, "file"]


@pytest.mark.parametrize("name", ["", "folder/", "folder/below/"])
def test_a_path_without_a_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(IsADirectoryError, match="expected the name of a file: "), files.replacing(f"{name}"):
        raise AssertionError("opened")
    with pytest.raises(IsADirectoryError), files.replacing(f"{tmp_path}/{name}"):
        raise AssertionError("opened")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["new", "old", "full"])
def test_a_full_disk_is_told_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = tmp_path / place
    if place == "old":
        path.write_bytes(b"old")
    if place == "full":
        path.symlink_to("/dev/full")
    real = files.open_temporary

    def full(*arguments: Any) -> tuple[str, Any]:
        temporary, file = real(*arguments)
        return temporary, FullDisk(file, 0)

    monkeypatch.setattr(files, "open_temporary", full)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{path}'")):
        cli.save_npz(path, ARRAYS)
