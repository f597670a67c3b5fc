"""Locks between processes: the system lets go of them when a process ends, however it ends.

On POSIX systems flock does it, and a forked child lets go at once: its copy of the file would keep the lock after the
parent was killed. Where there is no fcntl (Windows) the package filelock has the system's own locks. It is not used
everywhere, since older releases of it forget about fork.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import filelock

from cooc.errors import StoreLockedError
from cooc.files import write_whole

try:
    import fcntl
except ImportError:
    FLOCK = False
else:
    FLOCK = True


class Lock(Protocol):
    def acquire(self, *, wait: bool) -> bool: ...
    def release(self) -> None: ...


class Flock:
    def __init__(self, path: Path) -> None:
        self._path, self._file = path, -1

    def acquire(self, *, wait: bool) -> bool:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        _held.add(self)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        return True

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Portable:
    def __init__(self, path: Path) -> None:
        self._lock = filelock.FileLock(path, thread_local=False)

    def acquire(self, *, wait: bool) -> bool:
        try:
            self._lock.acquire(timeout=-1 if wait else 0)
        except filelock.Timeout:
            return False
        return True

    def release(self) -> None:
        self._lock.release(force=True)


_held: weakref.WeakSet[Flock] = weakref.WeakSet()


def _let_go() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def lock_of(path: Path) -> Lock:
    return Flock(path) if FLOCK else Portable(path)


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """One process at a time; BlockingIOError where another one is at it and this is not worth waiting for."""
    lock = lock_of(path)
    if not lock.acquire(wait=wait):
        raise BlockingIOError(f"{path} is held by another process")
    try:
        yield
    finally:
        lock.release()


class WriterLock:
    """Held by the one process that changes the index in a folder; `writer` says which one, to those who want it too."""

    def __init__(self, folder: Path) -> None:
        self._lock = lock_of(folder / "writer.lock")
        if not self._lock.acquire(wait=False):
            shown = os.fsencode(folder).decode("utf-8", "backslashreplace")
            raise StoreLockedError(
                f"Another process is writing to the index in {shown}: {_holder(folder)}. "
                "Wait until it is done, or stop it; reading is possible meanwhile."
            )
        with suppress(OSError):  # the lock counts, not its holder's name
            write_whole(folder / "writer", f"process {os.getpid()} on {socket.gethostname()}\n")

    def release(self) -> None:
        self._lock.release()


def _holder(folder: Path) -> str:
    with suppress(OSError):
        return (folder / "writer").read_text(encoding="utf-8", errors="replace").strip() or "it does not say"
    return "it has just begun"
