"""What runs in the processes that we start. None of them outlives its parent.

serve   of `Decoders`: answers one question after the other, within its limits
start   the first thing in a worker of multiprocessing
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cooc.errors import CoocError, ImageError, MachineError, NoMemoryError
from cooc.pictures import shared_memory
from cooc.pictures.decode import name_of
from cooc.pictures.faults import exhausted
from cooc.pictures.malloc import give_back, keep_memory

SPARE = 64 << 20  # bytes that a process may have grown by and stay


def serve(file: int) -> None:
    """Answer questions until there are no more, or the parent is gone."""
    with suppress(EOFError, ConnectionError):  # it went before it read, or while we wrote: a reset, or a broken pipe
        _answer(Connection(file))


def _answer(pipe: Connection) -> None:
    limits, shared = pipe.recv()
    threading.Thread(target=_end_with_pipe, args=(pipe.fileno(),), daemon=True).start()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends a process
    shared_memory.attach(shared)
    if limits.keep:
        keep_memory(1 << 25, limits.keep)
    memory = _limit_memory(limits.memory)
    resident = _resident()
    pipe.send("ready")
    while True:
        question = pipe.recv_bytes()
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        good, answer = _done(question, memory)
        signal.setitimer(signal.ITIMER_PROF, 0)
        stays = give_back(_resident, resident + limits.keep + SPARE)
        stays &= not isinstance(answer, MachineError)  # what failed it here, no memory or half an import, may last
        pipe.send((good, answer, stays))
        del question, answer
        if not stays:
            return


def _done(question: bytes, memory: int) -> tuple[bool, Any]:
    """Was it done; the result, or the error."""
    picture: Any = None
    try:
        work, (picture, *args), options = pickle.loads(question)
        return True, work(picture, *args, **options)
    except CoocError as error:
        return False, _blame(error, picture, memory)
    except Exception as error:  # decoders' own have become ImageErrors: this is a pipe, a disk, ...
        return False, MachineError(f"It could not be decoded ({type(error).__name__}: {error}). Try again.")


def _blame(error: CoocError, picture: Any, memory: int) -> CoocError:
    """Where the limit is ours, it is the picture that wants too much; else the machine has too little."""
    if memory and isinstance(error, NoMemoryError) and not exhausted(9 * memory // 10):
        size = f"{memory / 1e9:.0f} GB" if memory >= 1e9 else f"{memory / 1e6:.0f} MB"
        return ImageError(f"{name_of(picture)} needs more than {size} of memory to decode. Save it again, or smaller.")
    return error


def _limit_memory(most: int) -> int:
    """Bytes that we allow this process from now on; 0: as many as the machine has, or the system itself allows."""
    try:
        import resource

        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            return 0
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        used = int(Path("/proc/self/statm").read_text().split()[5]) * page
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + min(most, pages * page), hard))
    except (ImportError, OSError, ValueError):
        return 0
    return most if most < pages * page else 0  # who needs all that the machine has may be well on another one


def _resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _end_with_pipe(file: int) -> None:
    """A parent that was killed tells nobody, but its end of the pipe is closed."""
    hung_up = select.poll()
    hung_up.register(file, 0)  # that the other end has gone is told in any case
    hung_up.poll()
    os._exit(1)


def start() -> None:
    """Ctrl-C is for the parent, which stops feeding its workers. One that is killed cannot, so they watch over it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_memory(1 << 25, 1 << 28)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
