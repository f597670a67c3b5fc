"""A failing machine is never taken for a bad file: what is known stays, and the next run tries again."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from cooc.descriptor import Descriptor
from cooc.errors import MachineError
from cooc.image_search import ImageSearch
from cooc.index.report import Report
from cooc.index.run import FAILURES
from cooc.pictures import Entry, Fetched, Folder
from tests.starving import BROKEN, Starved, few_files
from tests.tiny import RECIPE, descriptor, write_photos

MB = 1 << 20


class Device(Descriptor):
    """The tiny descriptor on a device that may fail."""

    def __init__(self) -> None:
        self.__dict__.update(descriptor().__dict__)
        self.fails: Callable[[Tensor], bool] = lambda images: False

    def raw(self, images: Tensor) -> Tensor:
        if self.fails(images):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return super().raw(images)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_photos(tmp_path / "photos", 6)
    return tmp_path / "photos"


@pytest.fixture
def search(photos: Path, device: Device, tmp_path: Path) -> Iterator[ImageSearch]:
    with ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=photos, descriptor=device) as made:
        yield made


def is_white(images: Tensor) -> bool:
    return bool((images.float().mean(dim=(1, 2, 3)) > 250).any())


def reasons(report: Report) -> dict[str, str]:
    return {problem.path: problem.reason for problem in report.problems if problem.machine}


def bad(search: ImageSearch) -> list[str]:
    return [file.path for file in search.store.bad_files()]


# The network


def test_out_of_memory_keeps_the_old_record_and_remembers_nothing(
    search: ImageSearch, photos: Path, device: Device
) -> None:
    search.index([photos])
    search.tag(["00.jpg"], add=["mine"])
    before = search.store.find(["00.jpg"])[0]
    assert before is not None
    Image.new("RGB", (64, 48), (250, 20, 20)).save(photos / "00.jpg")
    Image.new("RGB", (64, 48), (20, 250, 20)).save(photos / "new.jpg")
    device.fails = lambda images: True
    report = search.index([photos])
    assert (report.failed, report.bad, report.removed, report.unchanged, report.done) == (2, 0, 0, 5, 7)
    assert reasons(report).keys() == {"00.jpg", "new.jpg"}
    assert "out of memory" in reasons(report)["new.jpg"]
    assert len(search.store) == 6
    assert search.store.find(["00.jpg"])[0] == search.store.get([before.id])[0]
    assert bad(search) == []
    assert search.status().failed == 2

    device.fails = lambda images: False
    report = search.index([photos])
    assert (report.described, report.failed, report.bad, len(search.store)) == (2, 0, 0, 7)
    (after,) = search.store.find(["00.jpg"])
    assert after is not None
    assert (after.id == before.id, after.tags) == (False, {"mine"})
    assert search.status().failed == 0


def test_a_poisoned_file_neither_ends_a_run_nor_blocks_others(
    search: ImageSearch, photos: Path, device: Device
) -> None:
    write_photos(photos / "more", 20, seed=1)
    Image.new("RGB", (64, 48), "white").save(photos / "00-white.png")
    device.fails = is_white
    report = search.index([photos])
    assert (report.described, report.failed) == (26, 1)
    report = search.index([photos])
    assert (report.unchanged, report.failed, bad(search)) == (26, 1, [])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_machine_that_fails_again_and_again_ends_the_run(
    search: ImageSearch, photos: Path, device: Device, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is done committed; the next run begins with the others, so that none of them waits behind."""
    monkeypatch.setattr("cooc.stream.batch_pixels", lambda device: 64 * 48)  # one by one, in order
    for i in range(FAILURES + 2):
        Image.new("RGB", (64, 48), (255, 255, 255 - i)).save(photos / f"02-white-{i}.png")
    write_photos(photos / "more", 3, seed=1)
    device.fails = is_white
    with pytest.raises(MachineError, match=f"{FAILURES} files in a row could not be described.*out of memory"):
        search.index([photos], workers=workers)
    done = len(search.store)
    assert 0 < done < 9
    assert (bad(search), search.store.verify()) == ([], [])

    with pytest.raises(MachineError):
        search.index([photos], workers=workers)
    assert len(search.store) == 9  # all but the white ones

    device.fails = lambda images: False
    report = search.index([photos], workers=workers)
    assert (report.described, report.unchanged, report.failed) == (FAILURES + 2, 9, 0)


# Files


def test_a_disk_with_read_errors(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    search.tag(["00.jpg"], add=["mine"])
    (photos / "00.jpg").unlink()
    (photos / "00.jpg").symlink_to(BROKEN)
    (photos / "new.jpg").symlink_to(BROKEN)
    report = search.index([photos], follow=True)
    assert (report.failed, report.bad, report.unchanged, report.removed) == (2, 0, 5, 0)
    assert all("Input/output error" in reason for reason in reasons(report).values())
    assert bad(search) == []
    (record,) = search.store.find(["00.jpg"])
    assert record is not None
    assert record.tags == {"mine"}

    report = search.add([photos / "new.jpg"])
    assert (report.failed, report.bad) == (1, 0)
    for name in ("00.jpg", "new.jpg"):
        (photos / name).unlink()
        Image.new("RGB", (64, 48), (200, 30, len(name))).save(photos / name)
    assert search.index([photos]).described == 2


def test_a_disk_that_gives_nothing_but_read_errors(search: ImageSearch, photos: Path) -> None:
    for i in range(FAILURES):
        (photos / f"00-broken-{i}.jpg").symlink_to(BROKEN)
    with pytest.raises(MachineError, match=r"could not be read on this machine.*Input/output error"):
        search.index([photos], follow=True)
    with pytest.raises(MachineError):
        search.index([photos], follow=True)
    assert len(search.store) == 6  # what is good comes first now
    assert bad(search) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("spare", [0, 1, 3, 9, 15, 20])
def test_no_file_handles(photos: Path, tmp_path: Path, spare: int, workers: int) -> None:
    """However many there are: a file is described, or it is tried again."""
    write_photos(photos / "below", 12, seed=1)
    with ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=photos, descriptor=descriptor()) as search:
        search.add([photos / "00.jpg"])
        failed = 0
        with few_files(spare):
            try:
                failed = search.index([photos], workers=workers).failed
            except MachineError as error:
                assert "Too many open files" in str(error)  # noqa: PT017
                failed = -1
        assert bad(search) == []
        assert failed or len(search.store) == 18
        report = search.index([photos])
        assert (len(search.store), report.bad, report.failed) == (18, 0, 0)
        assert bad(search) == []


class Starving(Folder):
    """Whose second picture finds no memory in the process that decodes it."""

    spare = 0

    def fetch(self, file: Entry) -> Fetched:
        found = super().fetch(file)
        if file.name != "01.jpg":
            return found
        return found._replace(later=Starved(self.root / file.name, self.spare))  # type: ignore[arg-type]


@pytest.mark.parametrize("spare", [0, 2 * MB])
def test_no_memory_in_a_worker(search: ImageSearch, photos: Path, spare: int) -> None:
    Image.linear_gradient("L").resize((6000, 4000)).convert("RGB").save(photos / "01.jpg")
    search.collection = Starving(photos)
    search.collection.spare = spare  # type: ignore[attr-defined]
    report = search.index([photos], workers=1)
    assert (report.described, report.failed, report.bad) == (5, 1, 0)
    assert reasons(report).keys() == {"01.jpg"}
    assert bad(search) == []
    search.collection = Folder(photos)
    assert search.index([photos], workers=1).described == 1


# What is remembered, and what is not


def test_retry_tries_bad_files_again(search: ImageSearch, photos: Path) -> None:
    good = (photos / "00.jpg").read_bytes()

    def write(content: bytes) -> None:
        (photos / "00.jpg").write_bytes(content)
        os.utime(photos / "00.jpg", ns=(1, 10**18))

    write(bytes(len(good)))
    assert search.index([photos]).bad == 1
    (first,) = search.store.bad_files()
    write(good)  # size and time as they were: nothing tells that it is another file
    report = search.index([photos])
    assert (report.bad, [problem.path for problem in report.problems]) == (1, ["00.jpg"])
    report = search.index([photos], retry=True)
    assert (report.described, report.bad, bad(search)) == (1, 0, [])

    write(bytes(len(good)))
    os.utime(photos / "00.jpg", ns=(1, 10**18 + 1))
    search.index([photos])
    search.index([photos], retry=True)  # still bad
    (second,) = search.store.bad_files()
    assert first.since
    assert second.since >= first.since
    assert search.add([photos / "00.jpg"]).bad == 1  # who names a file wants it tried


def test_only_problems_of_this_run_are_in_its_report(search: ImageSearch, photos: Path) -> None:
    (photos / "one.jpg").write_text("no picture")
    (photos / "two.jpg").write_text("none, either")
    search.index([photos])
    report = search.add([photos / "two.jpg"])
    assert [problem.path for problem in report.problems] == ["two.jpg"]


def test_a_pipe_is_not_waited_for(search: ImageSearch, photos: Path) -> None:
    os.mkfifo(photos / "pipe.jpg")
    report = search.add([photos / "pipe.jpg", photos / "00.jpg"])
    assert (report.bad, report.described) == (1, 1)
    assert "not a regular file" in report.problems[0].reason


# Vectors


def harm(search: ImageSearch, index: Path, *names: str) -> ImageSearch:
    """Flip a bit of their vectors, as a failing disk does, and open the index again."""
    search.close()
    with closing(sqlite3.connect(index / "index.sqlite")) as connection:
        for name in names:
            which = "slot = (SELECT slot FROM images WHERE path = ?)"
            (vector,) = connection.execute(f"SELECT vector FROM vectors WHERE {which}", (name.encode(),)).fetchone()
            flipped = bytes([vector[0], vector[1], vector[2], vector[3] ^ 4, *vector[4:]])
            connection.execute(f"UPDATE vectors SET vector = ? WHERE {which}", (flipped, name.encode()))
        connection.commit()
    return ImageSearch.open(index, write=True, descriptor=descriptor())


def test_damaged_vectors_are_made_again(search: ImageSearch, photos: Path, tmp_path: Path) -> None:
    shutil.copy(photos / "01.jpg", photos / "copy.jpg")
    search.index([photos])
    search.tag(["00.jpg", "05.jpg"], add=["mine"])
    before = {r.path: search.vectors([r.id]).tobytes() for r in search.store.records()}
    with harm(search, tmp_path / "index", "00.jpg", "01.jpg", "05.jpg") as again:
        assert list(again.store.damaged()) == ["00.jpg", "01.jpg", "05.jpg"]
        (photos / "05.jpg").rename(photos / "moved.jpg")
        (photos / "second-copy.jpg").write_bytes((photos / "copy.jpg").read_bytes())
        report = again.index([photos])
        assert (report.described, report.copied, report.moved, report.unchanged) == (2, 2, 0, 4)
        assert list(again.store.damaged()) == []
        after = {r.path: again.vectors([r.id]).tobytes() for r in again.store.records()}
        wanted = {path: vector for path, vector in before.items() if path != "05.jpg"}
        assert after == wanted | {"moved.jpg": before["05.jpg"], "second-copy.jpg": before["copy.jpg"]}
        assert {r.path for r in again.store.records() if r.tags} == {"00.jpg", "moved.jpg"}
        assert again.store.verify() == []
