"""One process at a time may write to an index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cooc.errors import StoreLockedError
from cooc.index.embedded import locks
from tests.index.test_embedded import ROOT

HOLDER = """
import sys
from pathlib import Path
from cooc.index.embedded import locks
lock = locks.WriterLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def test_one_process_at_a_time_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
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
