"""Files are written whole or not at all."""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a binary file for writing. It takes the place of `path` when the block ends without an error.

    A device or a pipe is not replaced: it is written to. A link stays: the file that it leads to is replaced. The new file
    has the mode of the old one. Raises OSError, also where the old file is read-only.
    """
    mode = mode_of(path)
    if mode is None and not os.path.basename(path):
        raise IsADirectoryError(errno.EISDIR, "expected the name of a file", path)
    regular = mode is None or stat.S_ISREG(mode)
    with naming(path), replacing_file(path, mode) if regular else open(path, "wb") as stream:
        yield stream


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors in the block name the path: a full disk is reported without."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def replacing_file(path: str | os.PathLike[str], mode: int | None) -> Iterator[Any]:
    """As `replacing`, for a new file, or one with this mode."""
    if mode is not None:
        open(path, "r+b").close()  # raises for a read-only file, which a rename would replace all the same
    target = os.path.realpath(path)
    remove_left_behind(target)
    temporary, file = open_temporary(target, 0o666 if mode is None else 0o600)
    try:
        with file:
            yield file
            file.flush()
            if mode is not None:
                os.chmod(temporary, stat.S_IMODE(mode))
            os.fsync(file.fileno())
            if os.name == "nt":  # Windows renames no open file
                file.close()
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(os.path.dirname(target))


def mode_of(path: str | os.PathLike[str]) -> int | None:
    """The mode of the file at `path`, behind links, or None where there is none."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def temporary_prefix(target: str) -> str:
    """The beginning of the names of the target's temporary files.

    50 characters have at most 200 bytes in UTF-8. With the rest, the name stays below the 255 bytes of most file systems.
    """
    return f".{os.path.basename(target)[:50]}.unfinished-"


def open_temporary(target: str, permissions: int) -> tuple[str, Any]:
    """Make a file beside the target; returns its path and the file. It is locked until it is closed or its process ends."""
    while True:
        path = os.path.join(os.path.dirname(target), temporary_prefix(target) + secrets.token_hex(8))
        try:
            file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions), "wb")
        except OSError as error:
            raise OSError(error.errno, error.strerror, target) from error  # the name that the user knows
        with contextlib.suppress(OSError):  # a file system without locks: remove_left_behind removes nothing there
            lock(file, wait=True)
        if os.path.exists(path):
            return path, file
        file.close()  # before it was locked, another writer removed it as left behind: try again


def remove_left_behind(target: str) -> None:
    """Remove temporary files of the target whose process was killed. A file that is being written is locked, and stays."""
    folder, prefix = os.path.dirname(target), temporary_prefix(target)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if re.fullmatch(re.escape(prefix) + "[0-9a-f]{16}", name):
                with contextlib.suppress(OSError), open(os.path.join(folder, name), "r+b") as file:
                    lock(file, wait=False)
                    os.unlink(file.name)


def lock(file: Any, wait: bool) -> None:
    """Lock a file against other processes and threads. Raises OSError where it is locked, or cannot be."""
    if os.name == "nt":
        raise OSError("Windows has no lock that ends with the process and lets others read the file")
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def sync_folder(folder: str) -> None:
    """Write the names in a folder to disk, so that a new one survives a power failure. Not every system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
