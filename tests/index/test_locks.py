"""Locks between processes, on systems with flock and on those without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cooc.errors import StoreLockedError
from cooc.index.embedded import locks
from tests.index.test_embedded import ROOT


@pytest.fixture(params=[locks.Flock, locks.Portable], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[locks.Lock]:
    monkeypatch.setattr(locks, "FLOCK", request.param is locks.Flock)
    return request.param


HOLDER = """
import sys
from pathlib import Path
from cooc.index.embedded import locks
locks.FLOCK = sys.argv[2] == "Flock"
lock = locks.WriterLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def test_one_process_at_a_time_until_it_ends_however_it_ends(kind: type[locks.Lock], tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), kind.__name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        for _ in range(2):  # who asks does not wipe out what the holder wrote
            with pytest.raises(StoreLockedError, match=f"process {process.pid} on "):
                locks.WriterLock(tmp_path)
        process.kill()
        process.wait()
        locks.WriterLock(tmp_path).release()


def test_in_one_process(tmp_path: Path) -> None:
    first = locks.WriterLock(tmp_path)
    with pytest.raises(StoreLockedError, match="Wait until it is done"):
        locks.WriterLock(tmp_path)
    first.release()
    first.release()
    locks.WriterLock(tmp_path).release()


def test_waiting_or_not(tmp_path: Path) -> None:
    held, wanted = locks.locked(tmp_path / "lock", wait=True), locks.locked(tmp_path / "lock", wait=False)
    with held, pytest.raises(BlockingIOError), wanted:
        raise AssertionError
    with locks.locked(tmp_path / "lock", wait=False):
        pass


def test_a_system_without_fcntl() -> None:
    """The module loads, and takes the other kind."""
    script = (
        "import sys\nsys.modules['fcntl'] = None\nfrom cooc.index.embedded import locks\n"
        "from pathlib import Path\nprint(type(locks.lock_of(Path('x'))).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "Portable\n"
