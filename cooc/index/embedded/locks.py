"""The lock of the one process that writes. The system lets go of it when a process ends, however it ends, and a forked
child lets go at once: its copy of the file would keep the lock after the parent was killed."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from cooc.files import write_whole
from cooc.index.checks import locked
from cooc.index.records import show


class WriterLock:
    """Held by the one process that changes the index in a folder; `writer` says which one, to those who want it too."""

    def __init__(self, folder: Path) -> None:
        from filelock import FileLock, Timeout  # who only reads has no use for it

        self._lock = FileLock(folder / "writer.lock", blocking=False, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise locked(f"in {show(folder)}", _holder(folder)) from None
        with suppress(OSError):  # the lock counts, not its holder's name
            write_whole(folder / "writer", f"process {os.getpid()} on {socket.gethostname()}\n")

    def release(self) -> None:
        self._lock.release(force=True)


def _holder(folder: Path) -> str:
    with suppress(OSError):
        return (folder / "writer").read_text(encoding="utf-8", errors="replace").strip() or "it does not say"
    return "it has just begun"
