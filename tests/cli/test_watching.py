"""`cooc watch` as a real process over a folder in which things happen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cooc.errors import StoreMissingError
from cooc.image_search import ImageSearch
from tests.tiny import write_photos

RECIPE = "light+size=96"


class Watched:
    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "cooc.cli", "watch", str(folder), "--device", "cpu", *options]
        self.log = folder.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def names(self) -> set[str]:
        with ImageSearch.open(self.folder / ".cooc") as search:
            return {record.path for record in search.store.records()}

    def bad(self) -> set[str]:
        with ImageSearch.open(self.folder / ".cooc") as search:
            return {file.path for file in search.store.bad_files()}

    def until(self, reached: Callable[[], bool]) -> None:
        """However long that takes; a process that has ended will not get there."""
        while not reached():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.4)

    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    write_photos(folder, 3)
    with ImageSearch.create(folder / ".cooc", recipe=RECIPE, device="cpu", features="") as search:
        search.index([folder], workers=0)
    return folder


@pytest.fixture
def watched(folder: Path) -> Iterator[Watched]:
    watched = Watched(folder)
    watched.until(lambda: "Watching" in watched.said())
    yield watched
    watched.process.kill()
    watched.process.wait()


def test_pictures_come_and_go(watched: Watched, tmp_path: Path) -> None:
    folder = watched.folder
    # a burst, in a folder that was not there
    new = {f"holiday/{path.name}" for path in write_photos(folder / "holiday", 25, seed=1)}
    watched.until(lambda: len(watched.names()) == 28)
    assert watched.names() == {"00.jpg", "01.jpg", "02.jpg"} | new
    # one is renamed, then the whole folder: nothing is described again
    (folder / "00.jpg").rename(folder / "zero.jpg")
    watched.until(lambda: "zero.jpg" in watched.names())
    (folder / "holiday").rename(folder / "summer")
    watched.until(lambda: "summer/00.jpg" in watched.names() and "holiday/00.jpg" not in watched.names())
    assert watched.names() == {"zero.jpg", "01.jpg", "02.jpg"} | {name.replace("holiday", "summer") for name in new}
    watched.until(lambda: "25 moved" in watched.said())
    assert "1 moved" in watched.said()
    # one is deleted; files that are no pictures, and hidden ones, are nothing
    (folder / "notes.txt").write_text("nothing")
    shutil.copy(folder / "01.jpg", folder / ".hidden.jpg")
    (folder / "02.jpg").unlink()
    watched.until(lambda: "02.jpg" not in watched.names())
    assert len(watched.names()) == 27


def test_a_half_written_file_is_taken_when_it_is_whole(watched: Watched, tmp_path: Path) -> None:
    (source,) = write_photos(tmp_path / "source", 1, seed=2)
    data = source.read_bytes()
    with (watched.folder / "slow.jpg").open("wb") as stream:
        stream.write(data[: len(data) // 2])
        stream.flush()
        watched.until(lambda: "slow.jpg" in watched.bad())  # a pause that is longer than the watcher's
        assert "slow.jpg" not in watched.names()
        stream.write(data[len(data) // 2 :])
    watched.until(lambda: "slow.jpg" in watched.names())
    assert watched.bad() == set()


def test_others_may_write_and_are_waited_for(watched: Watched) -> None:
    with ImageSearch.open(watched.folder / ".cooc", write=True) as search:
        assert search.tag("00.jpg", add=["mine"]) == 1
        write_photos(watched.folder / "more", 2, seed=3)
        watched.until(lambda: "Waiting for it" in watched.said())
    watched.until(lambda: "more/01.jpg" in watched.names())


def test_ctrl_c_ends_it(watched: Watched) -> None:
    watched.process.send_signal(signal.SIGINT)
    assert watched.process.wait() == 0
    assert "Traceback" not in watched.said()
    with ImageSearch.open(watched.folder / ".cooc", write=True) as search:  # nothing is locked
        assert search.store.verify() == []


def test_ctrl_c_in_a_run_keeps_what_is_done(folder: Path) -> None:
    write_photos(folder / "many", 400, seed=4)
    watched = Watched(folder)
    watched.until(lambda: len(watched.names()) > 3)
    watched.process.send_signal(signal.SIGINT)
    assert watched.process.wait() in (0, 130), watched.said()
    assert "Traceback" not in watched.said()
    with ImageSearch.open(folder / ".cooc", write=True) as search:
        assert search.store.verify() == []


def test_an_index_is_made_where_there_is_none(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", 1)
    watched = Watched(tmp_path / "photos", "--poll")

    def made() -> bool:
        try:
            return len(watched.names()) == 1
        except StoreMissingError:
            return False

    watched.until(made)
    shutil.copy(tmp_path / "photos/00.jpg", tmp_path / "photos/copy.jpg")
    watched.until(lambda: "copy.jpg" in watched.names())
    os.kill(watched.process.pid, signal.SIGINT)
    assert watched.process.wait() == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "nothing")
    assert watched.process.wait() == 2
    assert "is not a folder" in watched.said()
