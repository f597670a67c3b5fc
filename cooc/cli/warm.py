"""`cooc search` again without loading anything: a process that stays for some minutes, with the network in it.

    cooc search a.jpg           in a terminal: starts it, and asks it
    cooc search b.jpg           asks it
    COOC_WARM=0 cooc search     without it; COOC_WARM=30 keeps it for 30 minutes, and uses it outside terminals, too

Only its user can reach it: its socket lies in a folder that nobody else may enter. It gets the caller's own files,
folder and environment, runs the same command, and gives the exit code back. It ends by itself after minutes without a
search, with a search that is interrupted, and where it would hold a GPU's memory. A caller that finds it busy, or of
another version of the code, searches without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_runtime_path

import cooc
from cooc.cli import app, err, renew_consoles, run
from cooc.errors import InputError

if TYPE_CHECKING:
    from cooc.descriptor import Descriptor
    from cooc.image_search import ImageSearch


MINUTES = 5.0  # without a search, after which it ends
PATIENCE = 1.0  # seconds until a process that was there already must have taken a search
AT_START = (
    "COOC_",
    "CUDA_",
    "HOME",
    "KMP_",
    "LANG",
    "LC_",
    "LD_",
    "MKL_",
    "OMP_",
    "OPENBLAS",
    "PYTHON",
    "TORCH",
    "XDG_",
)
TAKEN = b"T"
BEGIN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from cooc.cli.warm import stay; stay(*sys.argv[2:])"

_stays = False
_loaded: dict[str, Descriptor] = {}  # of the last search, by its --device


# The caller


def ask(words: list[str]) -> int | None:
    """The exit code of a command that the warm process runs; None where it must be run here."""
    if not (minutes := _minutes()):
        return None
    try:
        with _connected(minutes) as (connection, started):
            return _asked(connection, words, None if started else PATIENCE)
    except KeyboardInterrupt:
        err.print("cooc: interrupted.")
        return 130
    except OSError:  # no folder that is ours alone, no socket to be had, a process that has just ended
        return None


def _minutes() -> float:
    given = os.environ.get("COOC_WARM")
    if given is None:
        return MINUTES if sys.stderr.isatty() else 0
    try:
        return max(0, float(given))
    except ValueError:
        raise InputError(f"COOC_WARM={given!r}: minutes are wanted, or 0.") from None


@contextlib.contextmanager
def _connected(minutes: float) -> Iterator[tuple[socket.socket, bool]]:
    """A connection, and whether the process was started for it: then what is sent waits until it has loaded."""
    folder = _folder()
    place = folder / _name()
    handle = os.open(folder, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # or two at a time would start one each
            started = False
            try:
                connection.connect(str(place))
            except (FileNotFoundError, ConnectionRefusedError):
                started = True
                _start(place, minutes)
                connection.connect(str(place))
        finally:
            os.close(handle)
        if started:
            err.print(f"[dim]The network stays loaded for {minutes:g} minutes (COOC_WARM=0: it does not).[/dim]")
        yield connection, started


def _folder() -> Path:
    with warnings.catch_warnings(action="ignore"):  # where the system names no such folder, it is one below /tmp
        folder = user_runtime_path("cooc")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    if folder.is_symlink() or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def _name() -> str:
    """Of the socket: another Python, other code and other settings are another process."""
    package = Path(cooc.__file__).parent
    newest = max(file.stat().st_mtime_ns for file in package.rglob("*.py"))
    settings = {name: value for name, value in os.environ.items() if name.startswith(AT_START)}
    about = json.dumps([sys.executable, str(package), newest, settings], sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def _start(place: Path, minutes: float) -> None:
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        command = [sys.executable, "-P", "-c", BEGIN, json.dumps(sys.path), str(listener.fileno()), str(minutes)]
        null = subprocess.DEVNULL
        subprocess.Popen(
            [*command, str(place)],
            stdin=null,
            stdout=null,
            stderr=null,
            start_new_session=True,
            pass_fds=[listener.fileno()],
        )


def _asked(connection: socket.socket, words: list[str], patience: float | None) -> int | None:
    connection.settimeout(patience)
    if connection.recv(1) != TAKEN:  # TimeoutError is an OSError
        return None
    connection.settimeout(None)
    mask = os.umask(0o077)
    os.umask(mask)
    request = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ), "umask": mask}
    text = json.dumps(request).encode()
    try:
        socket.send_fds(connection, [b"F"], [0, 1, 2])  # not before: a process that is busy would hold them open
        connection.sendall(len(text).to_bytes(8) + text)
        code = connection.recv(1)
    except ConnectionError:
        code = b""
    if not code:
        err.print("cooc: the process that was kept for searches has died. Again without it: COOC_WARM=0", style="red")
        return 1
    return code[0]


# The process that stays


def stay(listening: str, minutes: str, place: str) -> None:
    global _stays
    _stays = True
    from cooc.cli import showing  # noqa: F401 (what a search needs is loaded before it is asked for)
    from cooc.pictures.malloc import keep_pyramids

    keep_pyramids()
    _image_search()
    os.chdir("/")
    with socket.socket(fileno=int(listening)) as listener:
        listener.settimeout(60 * float(minutes))
        try:
            while all(network.device.type == "cpu" for network in _loaded.values()):
                with listener.accept()[0] as connection, contextlib.suppress(ConnectionError):
                    connection.settimeout(None)
                    _served(connection, Path(place))
        except TimeoutError:
            pass
        finally:  # first of all: nobody is to find a socket that nobody answers
            Path(place).unlink(missing_ok=True)


def _served(connection: socket.socket, place: Path) -> None:
    connection.sendall(TAKEN)
    sent, files, _, _ = socket.recv_fds(connection, 1, 3)
    if not sent:  # the caller did not wait
        return
    with connection.makefile("rb") as stream:
        request = json.loads(stream.read(int.from_bytes(stream.read(8))))
    done = threading.Event()

    def watch() -> None:
        if not connection.recv(1) and not done.is_set():  # the caller was interrupted
            place.unlink(missing_ok=True)
            os._exit(130)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    code = _run(request, files)
    done.set()
    connection.sendall(bytes([code & 0xFF]))
    watching.join()


def _run(request: dict[str, Any], files: list[int]) -> int:
    """The command as the caller would run it; afterwards this process has nothing of the caller's."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    own = dict(os.environ)
    mask = os.umask(request["umask"])
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv[:] = ["cooc", *request["words"]]
        renew_consoles()
        run(app)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.close(null)
        os.chdir("/")
        os.umask(mask)
        os.environ.clear()
        os.environ.update(own)
    return 0


@contextlib.contextmanager
def opened(index: str, device: str) -> Iterator[ImageSearch]:
    """An index to search in; in a process that stays, with the network of the last search, if it is the right one."""
    from cooc.errors import StoreMismatchError

    opening = _image_search().open
    try:
        search = opening(index, device=device, descriptor=_loaded.get(device))
    except StoreMismatchError:
        search = opening(index, device=device)
    with search:
        if _stays:
            _loaded.clear()
            _loaded[device] = search.descriptor
        yield search


def _image_search() -> type[ImageSearch]:
    """Imported without a look for garbage meanwhile: modules are none, and it takes a tenth of a second."""
    gc.disable()
    try:
        from cooc.image_search import ImageSearch
    finally:
        gc.enable()
    return ImageSearch
