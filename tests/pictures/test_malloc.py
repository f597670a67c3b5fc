"""Memory that is kept is not asked for again: counted in page faults, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import numpy as np
from cooc.pictures.malloc import keep_memory
if sys.argv[1] == "keep":
    keep_memory(1 << 27, 1 << 30)
def fill():
    for _ in range(20):
        np.empty(60 << 20, np.uint8).fill(1)
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_pages_are_asked_for_once() -> None:
    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True).stdout)

    assert faults("keep") < 100 < faults("leave")
