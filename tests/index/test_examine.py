"""Files are examined ahead, in threads or in processes: the same is found in the same order, whatever one file does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cooc.index.examine import CHUNK, CRASHED, Candidate, Examined, Reader
from cooc.pictures import Entry, Fetched, Folder
from tests.tiny import write_photos

LAST = f"{2 * CHUNK:02}.jpg"


class Deadly(Folder):
    """Ends the process that reads a certain file, as a parser does that the file makes crash."""

    def fetch(self, file: Entry) -> Fetched:
        if file.name == "05.jpg":
            os._exit(1)
        if file.name == LAST:
            time.sleep(1.5)  # still under way when the other's process dies
        return super().fetch(file)


def candidates(source: Folder) -> list[Candidate]:
    return [Candidate(file, None) for file in source.entries("", follow=False, on_error=print)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_photos(tmp_path, 2 * CHUNK + 1)  # the last chunk is one file, which must not be blamed for another
    (tmp_path / "04.jpg").write_text("no picture")
    return tmp_path


def test_processes_find_what_threads_find(photos: Path) -> None:
    source = Folder(photos)
    files = candidates(source)
    threads = list(Reader(source).examined(files))
    assert [one.file for one in threads] == [one.file for one in files]
    assert [one.file.name for one in threads if one.problem] == ["04.jpg"]
    reader, processes = Reader(source), list[Examined]()
    for one in reader.examined(files):
        processes.append(one)
        if len(processes) == 3:
            reader.use_processes()
    assert processes == threads


def test_a_file_that_crashes_its_reader_is_found_out(photos: Path) -> None:
    source = Deadly(photos)
    reader = Reader(source)
    reader.use_processes()
    seen = list(reader.examined(candidates(source)))
    assert len(seen) == 2 * CHUNK + 1
    assert {one.file.name: one.problem for one in seen if one.info is None}.keys() == {"04.jpg", "05.jpg"}
    assert next(one for one in seen if one.file.name == "05.jpg").problem == CRASHED


def test_a_process_that_reads_imports_nothing_heavy() -> None:
    code = "import sys, cooc.index.examine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
