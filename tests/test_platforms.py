"""Systems other than Linux, as far as one can be without it: what they lack is taken away, and a user's day goes on.

What other systems have in its place (their own file locks, memory, wheels) is not tested here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from tests.tiny import write_photos

ROOT = Path(__file__).parent.parent

# Every process of the test, the decoding workers too, begins with this.
WITHOUT_LINUX = """
import os, sys
import filelock  # has locks of its own on every system

for name in ("copy_file_range", "eventfd", "fdatasync", "memfd_create", "pidfd_open", "posix_fadvise",
             "posix_fallocate", "sched_getaffinity", "sched_setaffinity", "splice", "O_TMPFILE", "O_PATH"):
    if hasattr(os, name):
        delattr(os, name)
for name in os.environ["WITHOUT_MODULES"].split():
    sys.modules[name] = None

def refuse(event, values):
    if event == "open" and isinstance(values[0], str) and values[0].startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "there is no such thing on this system", values[0])

sys.addaudithook(refuse)
"""

DAY = """
import os, sys
from pathlib import Path
from tests.tiny import descriptor, open_index, write_photos

if __name__ == "__main__":
    assert not hasattr(os, "memfd_create") and not Path("/proc/cpuinfo").is_dir()
    root = Path(sys.argv[1])
    with open_index(root / ".cooc", root) as search:
        report = search.index([root], workers=1)
        assert (report.described, report.bad) == (6, 0), report
        (root / "00.jpg").unlink()
        assert search.index([root], workers=0).removed == 1
        found = search.search(root / "03.jpg", k=2).matches
        assert found[0].path == "03.jpg" and found[0].score > 0.999, found
        search.store.compact()
        assert not search.store.verify()
        search.store.snapshot(str(root / "copy"))
    import cooc.api.open_files, cooc.cli, cooc.provenance, cooc.training.train
    cooc.api.open_files.raise_limit()
    most, each = cooc.api.open_files.room(8, 4)
    assert 1 <= each <= most <= 8
    assert cooc.provenance.provenance("cpu")["machine"]["cpu"]
    print("a day without Linux")
"""


@pytest.mark.parametrize("without", ["", "fcntl resource"], ids=["like macOS", "without fcntl"])
def test_a_day_without_linux(tmp_path: Path, without: str) -> None:
    (tmp_path / "system").mkdir()
    (tmp_path / "system/sitecustomize.py").write_text(WITHOUT_LINUX)
    (tmp_path / "day.py").write_text(DAY)
    write_photos(tmp_path / "photos", 6)
    paths = os.pathsep.join([str(tmp_path / "system"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(tmp_path / "day.py"), str(tmp_path / "photos")],
        env=os.environ | {"PYTHONPATH": paths, "WITHOUT_MODULES": without, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "a day without Linux\n", done.stderr
    assert done.returncode == 0


def test_types_are_told_to_those_who_import_it() -> None:
    assert (resources.files("cooc") / "py.typed").is_file()


def test_platforms_are_said() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = {one.rpartition(" :: ")[2] for one in project["classifiers"]}
    assert project["requires-python"] == ">=3.11"
    assert {"3.11", "3.12", "3.13", "Linux", "MacOS", "Typed"} <= stated
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in stated  # what runs these tests, and nothing older
