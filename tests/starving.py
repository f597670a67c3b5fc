"""Real want, for who must bear it: no memory or file handles left, read errors, processes that end.

Processes that decode or read import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from cooc.pictures import Entry, Fetched, Folder

BROKEN = Path("/proc/self/mem")  # regular, and reading its beginning is an EIO: no page of any process lies there


@contextmanager
def few_files(spare: int) -> Iterator[None]:
    """This process can open so many files more, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(spare + 1)]
    for file in free:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Starved:
    """A picture that takes the memory from the process which it is sent to, but for `spare` bytes."""

    def __init__(self, path: Path, spare: int) -> None:
        self.path, self.spare = path, spare

    def __reduce__(self) -> tuple[object, ...]:
        return starve, (self.path, self.spare)


def starve(path: Path, spare: int) -> Path:
    from cooc.pictures.opening import formats

    formats(path.suffix == ".jpg")  # what a worker has loaded when it decodes its second picture
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare, resource.RLIM_INFINITY))
    return path


class Deadly(Folder):
    """One file crashes the process that reads it; for another one the system has no memory, and kills it."""

    ends: ClassVar = {"05.jpg": signal.SIGSEGV, "08.jpg": signal.SIGKILL}
    slow = ""  # this one is still being read when they die

    def fetch(self, file: Entry) -> Fetched:
        if file.name in self.ends:
            signal.raise_signal(self.ends[file.name])
        if file.name == self.slow:
            time.sleep(1.5)
        return super().fetch(file)
