"""One process in a run's directory at a time.

The lock belongs to the system, which takes it back when the process ends, even by `kill -9`. The file only says who
has the lock; an old file does no harm.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from espalier.app.errors import Problem

NAME = ".lock"
TRIES = 100  # each fails only when another process removes the file between our opening and locking it
TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system without locks says


_open: set[int] = set()


def _close_copies() -> None:
    """In a forked child, such as a data loader's worker: its copy would hold the lock after our end."""
    for file in _open:
        with suppress(OSError):
            os.close(file)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)


@contextmanager
def locked(directory: Path, doing: str) -> Iterator[bool]:
    """Hold the lock of a run's directory. The directory is made if it is missing, and removed if it stays empty.

    Args:
        directory: the run's directory.
        doing: what we do there, for the message of a process that finds the lock taken.

    Yields:
        Whether there is a lock: some file systems have none, and without the right to write there can't be one.

    Raises:
        Problem: another process has the lock.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    file = _take(directory)
    if file is None:
        yield False
        return
    _open.add(file)
    try:
        _sign(file, doing)
        yield True
    finally:
        _open.discard(file)
        _give_back(file, directory, made)


def _take(directory: Path) -> int | None:
    path = directory / NAME
    for _ in range(TRIES):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = _opened(path)
        except FileNotFoundError:  # another process has just removed the directory that it had made
            continue
        if file is None:
            return None
        try:
            _lock(file)
        except OSError as error:
            who = _holder(file)
            os.close(file)
            if error.errno in NO_LOCKS:
                return None
            if error.errno not in TAKEN:
                raise
            raise Problem(f"{directory} is in use by {who}") from None
        with suppress(OSError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)  # another process has removed the file that we opened
    raise Problem(f"{path} can't be locked: other processes keep making and removing it")


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    try:
        return os.open(path, os.O_RDONLY)  # another user's file can be locked, too
    except OSError:
        return None


def _sign(file: int, doing: str) -> None:
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    said = {"pid": os.getpid(), "host": socket.gethostname(), "doing": doing, "since": since}
    with suppress(OSError):  # a full disk, or a file that is not ours: the lock holds without
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, json.dumps(said).encode())


def _holder(file: int) -> str:
    """Who has the lock, and the way out."""
    try:
        os.lseek(file, 0, os.SEEK_SET)
        said = json.loads(os.read(file, 4096))
        pid, host, doing, since = int(said["pid"]), said["host"], said["doing"], said["since"]
    except (OSError, ValueError, LookupError, TypeError):  # it has not written that yet
        return "another process: wait until it ends"
    here = "" if host == socket.gethostname() else f" on {host}"
    return (
        f"process {pid} on {host} (espalier {doing}, since {since}): wait until it ends, or stop it with "
        f"`kill {pid}`{here}"
    )


def _give_back(file: int, directory: Path, made: list[Path]) -> None:
    with suppress(OSError):
        os.ftruncate(file, 0)
    with suppress(OSError):
        if os.listdir(directory) == [NAME]:  # nothing was begun
            os.unlink(directory / NAME)
            for path in made:
                path.rmdir()
    with suppress(OSError):
        os.close(file)


if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        """Lock a byte far behind what the file holds, which others may then read."""
        os.lseek(file, 1 << 20, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: int) -> None:
        """Lock the file; the kernel gives the lock back when the process has ended, however it ended."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
