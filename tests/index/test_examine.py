"""Files are examined ahead, in threads or in processes: the same is found in the same order, whatever one file does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cooc.errors import ImageError, MachineError
from cooc.index.examine import CHUNK, Candidate, Examined, Reader
from cooc.pictures import Folder
from tests.starving import Deadly
from tests.tiny import write_photos


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
    assert [one.file.name for one in threads if one.error] == ["04.jpg"]
    reader, processes = Reader(source), list[Examined]()
    for one in reader.examined(files):
        processes.append(one)
        if len(processes) == 3:
            reader.use_processes()
    assert [replace(one, error=None) for one in processes] == [replace(one, error=None) for one in threads]
    assert [(type(one.error), str(one.error)) for one in processes] == [
        (type(one.error), str(one.error)) for one in threads
    ]


def test_a_file_that_crashes_its_reader_is_found_out(photos: Path) -> None:
    source = Deadly(photos)
    source.slow = f"{2 * CHUNK:02}.jpg"  # the last one
    reader = Reader(source)
    reader.use_processes()
    seen = list(reader.examined(candidates(source)))
    assert len(seen) == 2 * CHUNK + 1
    errors = {one.file.name: one.error for one in seen if one.info is None}
    assert errors.keys() == {"04.jpg", *Deadly.ends}
    assert isinstance(errors["05.jpg"], ImageError)
    assert "crashed the decoder" in str(errors["05.jpg"])
    assert isinstance(errors["08.jpg"], MachineError)
    assert "SIGKILL" in str(errors["08.jpg"])


def test_a_process_that_reads_imports_nothing_heavy() -> None:
    code = "import sys, cooc.index.examine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
