"""Decoding in other processes: each picture has so much time and memory, and no more.

    with Decoders(Limits(seconds=30)) as decoders:
        pixels = decoders.run(load_image, picture, size=1024)       # from any thread, which waits

A hostile file may keep a decoder busy for hours, ask for all memory there is, or crash it; and large pictures leave
memory behind that the C library does not give back. Here that costs one process, which is replaced. A process has one
picture at a time, so the file that ends it is known and no other is blamed.

Time is processor time: a picture is not bad because the machine is busy, or its disk asleep. A process that neither
answers nor works is given up too, later, and that is a MachineError; so is one that takes long while others wait.

Processes are started by name, not forked and not by multiprocessing: they hold nothing of a parent that has loaded a
network, and do not import its main module, so that a script which serves an index needs no special form.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Self, TypeVar

from cooc.errors import CoocError, ImageError, MachineError
from cooc.pictures.decode import name_of

T = TypeVar("T")
STARTING = 60.0  # seconds
LOOK = 0.2  # seconds between two looks whether others wait
STOPPED = "Decoding was stopped."
NOT_STARTED = "A process for decoding could not be started"
ONE_THREAD = {"OPENCV_FOR_THREADS_NUM": "1", "OPENBLAS_NUM_THREADS": "1"}  # there are processes enough
CRASHES = {signal.SIGSEGV, signal.SIGILL, signal.SIGFPE}  # so a decoder ends by what it is given; else it gave up, as
# libraries do that get no memory (SIGABRT, an exit code; SIGBUS where shared memory cannot be had), or it was killed


@dataclass(frozen=True)
class Limits:
    """Of one process. Generous: these are for a picture of 300 megapixels in the slowest format."""

    seconds: float = 120.0  # of processor time for a picture
    wait: float = 600.0  # seconds by the clock: machines are busy, and disks slow
    memory: int = 16 << 30  # bytes for a picture, or what the machine has
    keep: int = 256 << 20  # bytes that are kept for the next picture, which is then faster
    turn: float = math.inf  # seconds by the clock after which a picture makes room for others, if any wait


class Decoders:
    """As many processes as threads ask at a time; they are kept for the next question."""

    def __init__(self, limits: Limits | None = None, shared: str = "") -> None:
        """`shared`: the address of memory for pictures, see `cooc.pictures.shared_memory`."""
        self.limits, self._shared = limits or Limits(), shared
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False

    def run(
        self,
        work: Callable[..., T],
        picture: Any,
        *args: Any,
        others_wait: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> T:
        """`work(picture, ...)`, a function that can be imported, in a process. Its errors are raised here.

        The process imports what the arguments are made of: give it nothing of a module that needs torch.
        """
        question = ForkingPickler.dumps((work, (picture, *args), options))
        process = self._take()
        try:
            good, answer, stays = process.ask(question, others_wait)
        except _EndedError as end:
            self._drop(process)
            raise MachineError(STOPPED) if self._closed else self._why(end, picture) from None
        except BaseException:  # Ctrl-C
            self._drop(process)
            raise
        if stays:
            self._put(process)
        else:
            self._drop(process)
        if not good:
            raise answer
        return answer  # type: ignore[no-any-return]

    def start(self, count: int = 1) -> None:
        """Have so many ready, so that the first to ask need not wait."""
        ready: list[_Process] = []
        try:
            while len(ready) < count:
                ready.append(self._take())
        finally:
            for process in ready:
                self._put(process)

    def close(self) -> None:
        """Whatever is under way is killed, and whoever waits for it gets a MachineError."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = self._busy.copy()
        for process in busy:
            process.kill()
        for process in idle:
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take(self) -> _Process:
        """One that lives: what ended while it had nothing to do is nobody's fault."""
        process = None
        while process is None or not process.lives():
            if process is not None:
                process.end()
            with self._lock:
                process = self._idle.pop() if self._idle else None  # the one that was used last
            process = process or _Process(self.limits, self._shared)
        with self._lock:
            if not self._closed:
                self._busy.add(process)
                return process
        process.end()
        raise MachineError(STOPPED)

    def _put(self, process: _Process) -> None:
        with self._lock:
            self._busy.discard(process)
            if not self._closed:
                self._idle.append(process)
                return
        process.end()

    def _drop(self, process: _Process) -> None:
        with self._lock:
            self._busy.discard(process)
        process.end()

    def _why(self, end: _EndedError, picture: Any) -> CoocError:
        name, code = name_of(picture), end.code
        if code == -signal.SIGPROF:
            took = f"takes longer than {self.limits.seconds:g} s to decode"
            return ImageError(f"{name} {took}. Save it again with another program, or leave it out.")
        if code is None:
            return MachineError(f"{name} could not be decoded in time: its disk is slow, or others wait. Try again.")
        if -code in CRASHES:
            return ImageError(f"Decoding {name} crashed the decoder. Leave the file out, or save it again.")
        how = {one.value: one.name for one in signal.Signals}.get(-code, f"code {code}")
        return MachineError(f"The process that decoded {name} ended ({how}): is there enough memory? Try again.")


class _EndedError(Exception):
    """A process that ended instead of answering; without a code if it did neither."""

    def __init__(self, code: int | None) -> None:
        self.code = code


class _Process:
    """The parent's end of a process."""

    def __init__(self, limits: Limits, shared: str) -> None:
        self._limits = limits
        try:
            self._start()
        except OSError as error:
            raise MachineError(f"{NOT_STARTED} ({error.strerror}).") from error
        try:
            self._pipe.send((limits, shared))
            self._answer(STARTING)
        except (_EndedError, OSError):
            self.end()
            raise MachineError(f"{NOT_STARTED}: is there enough memory?") from None

    def _start(self) -> None:
        here, there = socket.socketpair()
        with here, there:
            code = f"from cooc.pictures.child_process import serve; serve({there.fileno()})"
            path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],  # -P: nothing is imported from the folder that we happen to be in
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env=os.environ | ONE_THREAD | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the parent
            )
            self._pipe = Connection(here.detach())

    def ask(self, question: memoryview, others_wait: Callable[[], bool]) -> tuple[bool, Any, bool]:
        """Was it done; the result or the error; does the process stay?"""
        try:
            self._pipe.send_bytes(question)
        except OSError:
            raise _EndedError(self._code()) from None
        begun = time.monotonic()
        seconds = min(self._limits.turn, self._limits.wait)
        while not self._pipe.poll(seconds):
            if time.monotonic() - begun >= self._limits.wait or others_wait():
                raise _EndedError(None)
            seconds = LOOK
        good, answer, stays = self._answer(0)
        return good, answer, stays

    def _answer(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise _EndedError(None)
            return self._pipe.recv()
        except (EOFError, OSError):
            raise _EndedError(self._code()) from None

    def _code(self) -> int:
        try:
            return self._process.wait(10)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def lives(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self.kill()
        with suppress(subprocess.TimeoutExpired):  # one that hangs in a system call ends when that does
            self._process.wait(1)
        self._pipe.close()
