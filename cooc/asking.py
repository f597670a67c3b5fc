"""Asking the process that stays (`cooc.cli.warm`) to run a search, or starting it.

A search that it answers should not wait for imports of its own: here are none that take time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from platformdirs import user_runtime_path

from cooc.errors import InputError

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
# Threads that wait for work sleep. As they come they spin, and a search, which runs network and local features side by
# side, takes a quarter longer (docs/performance.md). Read when numpy and torch are loaded, which commands do later.
SLEEPING = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_THREAD_TIMEOUT": "10"}
KEPT = 100_000  # objects between two looks for garbage: a search imports half a million, and all of them stay
TAKEN = b"T"
NONE_STAYS = ImportError, OSError  # Windows; no folder that is ours alone, no socket, a process that has just ended
GIVEN = dict(os.environ)  # as this process was started: libraries add to it
BEGIN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from cooc.cli.warm import stay; stay(*sys.argv[2:])"


def ask(words: list[str]) -> int | None:
    """The exit code of a command that the process runs; None where it must be run here."""
    if not (minutes := _minutes()):
        return None
    try:
        with _connected(minutes) as (connection, started):
            return _asked(connection, words, None if started else PATIENCE)
    except KeyboardInterrupt:
        _say("cooc: interrupted.")
        return 130
    except NONE_STAYS:
        return None


def stand_by(index: str, device: str) -> None:
    """Start the process where a search would start it, with the network of that index."""
    if minutes := _minutes():
        with contextlib.suppress(*NONE_STAYS), _connected(minutes, {"COOC_INDEX": index}, device):
            pass


def _minutes() -> float:
    given = os.environ.get("COOC_WARM")
    if given is None:
        return MINUTES if sys.stderr.isatty() else 0
    try:
        return max(0, float(given))
    except ValueError:
        raise InputError(f"COOC_WARM={given!r}: minutes are wanted, or 0.") from None


@contextlib.contextmanager
def _connected(
    minutes: float, settings: dict[str, str] | None = None, device: str = ""
) -> Iterator[tuple[socket.socket, bool]]:
    """A connection, and whether the process was started for it: then what is sent waits until it has loaded."""
    import fcntl

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
                _start(place, minutes, settings or {}, device)
                connection.connect(str(place))
        finally:
            os.close(handle)
        if started:
            _say(f"The network stays loaded for {minutes:g} minutes (COOC_WARM=0: it does not).")
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
    package = Path(__file__).parent
    newest = max(file.stat().st_mtime_ns for file in package.rglob("*.py"))
    settings = {name: value for name, value in (SLEEPING | GIVEN).items() if name.startswith(AT_START)}
    about = json.dumps([sys.executable, str(package), newest, settings], sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def _start(place: Path, minutes: float, settings: dict[str, str], device: str) -> None:
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        command = [sys.executable, "-P", "-c", BEGIN, json.dumps(sys.path), str(listener.fileno()), str(minutes)]
        null = subprocess.DEVNULL
        subprocess.Popen(
            [*command, str(place), device],
            stdin=null,
            stdout=null,
            stderr=null,
            env=GIVEN | settings,  # an address with a password is nothing for a command line
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
    request = {"words": words, "folder": str(Path.cwd()), "environment": SLEEPING | os.environ, "umask": mask}
    text = json.dumps(request).encode()
    try:
        socket.send_fds(connection, [b"F"], [0, 1, 2])  # not before: a process that is busy would hold them open
        connection.sendall(len(text).to_bytes(8) + text)
        code = connection.recv(1)
    except ConnectionError:
        code = b""
    if not code:
        _say("cooc: the process that was kept for searches has died. Again without it: COOC_WARM=0")
        return 1
    return code[0]


def _say(text: str) -> None:
    print(text, file=sys.stderr)
