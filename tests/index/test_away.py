"""An unmounted disk deletes nothing: folders that had pictures and have none now are away, until they are back."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.index import away
from tests.tiny import RECIPE, Watched, write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three here, four on what may be another disk, in two folders of it."""
    folder = tmp_path / "photos"
    write_photos(folder, 3)
    write_photos(folder / "disk2/a", 2, seed=1)
    write_photos(folder / "disk2/b/c", 2, seed=2)
    return folder


@pytest.fixture
def search(photos: Path, tmp_path: Path, watched: Watched) -> Iterator[ImageSearch]:
    with ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=photos, descriptor=watched) as made:
        yield made


def tagged(search: ImageSearch) -> dict[str, set[str]]:
    return {record.path: set(record.tags) for record in search.store.records() if record.tags}


def paths(search: ImageSearch) -> set[str]:
    return {record.path for record in search.store.records()}


@pytest.mark.parametrize("left", ["an empty folder", "nothing", "a note", "empty folders"])
def test_a_folder_without_pictures_is_away_until_it_is_back(
    search: ImageSearch, photos: Path, tmp_path: Path, left: str
) -> None:
    search.index([photos])
    search.tag(["disk2"], add=["mine"])
    before = tagged(search)
    shutil.move(photos / "disk2", tmp_path / "unplugged")
    if left != "nothing":
        (photos / "disk2").mkdir()
    if left == "a note":
        (photos / "disk2/NOT MOUNTED.txt").touch()
    if left == "empty folders":
        (photos / "disk2/b/c").mkdir(parents=True)
    for _ in range(2):
        report = search.index([photos])
        assert (report.removed, report.away, report.unchanged, report.described) == (0, 4, 3, 0)
        (note,) = report.notes
        assert all(words in note for words in ("4 pictures", "disk2", "mounted", "--prune"))
        assert search.status().away.keys() == {"disk2"}
    assert len(search.store) == 7
    found = {match.path: match.away for match in search.search(photos / "00.jpg").matches}
    assert len(found) == 7
    assert {path for path, gone in found.items() if gone} == {path for path in paths(search) if "disk2" in path}

    shutil.rmtree(photos / "disk2", ignore_errors=True)
    shutil.move(tmp_path / "unplugged", photos / "disk2")
    report = search.index([photos])
    assert (report.unchanged, report.away, report.notes, report.described) == (7, 0, [], 0)
    assert search.status().away == {}
    assert tagged(search) == before
    assert not any(match.away for match in search.search(photos / "00.jpg").matches)


def test_the_moment_since_when_is_kept(search: ImageSearch, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search.index([photos])
    shutil.rmtree(photos / "disk2/b")
    for moment in ("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"):
        monkeypatch.setattr(away, "now", lambda moment=moment: moment)
        search.index([photos])
        assert search.status().away == {"disk2/b": "2026-01-01T00:00:00+00:00"}
    shutil.rmtree(photos / "disk2")  # the folder around it: one mark for both
    search.index([photos])
    assert search.status().away == {"disk2": "2026-01-01T00:00:00+00:00"}


def test_a_deleted_file_in_a_folder_with_others_is_removed(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    (photos / "00.jpg").unlink()
    (photos / "disk2/a/00.jpg").unlink()
    report = search.index([photos])
    assert (report.removed, report.away) == (2, 0)


def test_the_only_picture_of_a_folder_is_away_until_pruned(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    (photos / "disk2/a/01.jpg").unlink()
    search.index([photos])
    (photos / "disk2/a/00.jpg").unlink()
    report = search.index([photos])
    assert (report.removed, report.away) == (0, 1)
    assert "1 picture of" in report.notes[0]
    report = search.index([photos], prune=True)
    assert (report.removed, report.away, report.notes) == (1, 0, [])
    assert search.status().away == {}
    assert len(search.store) == 5


def test_a_renamed_folder_has_moved(search: ImageSearch, photos: Path, watched: Watched) -> None:
    search.index([photos])
    search.tag(["disk2"], add=["mine"])
    (photos / "disk2").rename(photos / "elsewhere")
    report = search.index([photos])
    assert (report.moved, report.away, report.removed, watched.count) == (4, 0, 0, 7)
    assert tagged(search).keys() == {path for path in paths(search) if path.startswith("elsewhere/")}
    assert search.status().away == {}


def test_removing_an_away_folder_ends_it(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    shutil.rmtree(photos / "disk2")
    search.index([photos])
    assert search.remove(["disk2/a"]) == 2
    assert search.status().away.keys() == {"disk2"}
    assert search.remove([photos / "disk2"]) == 2
    assert search.status().away == {}
    assert search.index([photos]).notes == []


def test_several_folders_of_which_one_is_missing(search: ImageSearch, photos: Path, tmp_path: Path) -> None:
    write_photos(photos / "other", 2, seed=5)
    search.index([photos])
    shutil.move(photos / "disk2", tmp_path / "unplugged")
    write_photos(photos / "other/new", 1, seed=6)
    report = search.index([photos / "disk2/b", photos / "other"])
    assert (report.described, report.unchanged, report.away, report.removed) == (1, 2, 2, 0)
    assert search.status().away.keys() == {"disk2/b"}
    with pytest.raises(InputError, match="never"):
        search.index([photos / "never", photos / "other"])
    shutil.move(tmp_path / "unplugged", photos / "disk2")
    assert search.index([photos / "other"]).unchanged == 3
    assert search.status().away.keys() == {"disk2/b"}  # nobody has looked
    assert search.index([photos / "disk2/b/c"]).unchanged == 2
    assert search.status().away == {}


def test_a_root_that_is_empty_or_missing(search: ImageSearch, photos: Path, tmp_path: Path, watched: Watched) -> None:
    search.index([photos])
    shutil.move(photos, tmp_path / "unplugged")
    for _ in range(2):
        report = search.index([photos])
        assert (report.away, report.removed, search.status().away.keys()) == (7, 0, {""})
        photos.mkdir(exist_ok=True)
    photos.rmdir()
    shutil.move(tmp_path / "unplugged", photos)
    assert search.index([photos]).unchanged == 7
    assert (search.status().away, watched.count) == ({}, 7)


def test_keeping_and_pruning(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    (photos / "00.jpg").unlink()
    shutil.rmtree(photos / "disk2")
    with pytest.raises(InputError, match="not both"):
        search.index([photos], keep_missing=True, prune=True)
    report = search.index([photos], keep_missing=True)
    assert (report.removed, report.away, len(search.store)) == (0, 4, 7)
    assert search.status().away.keys() == {"disk2"}
    assert search.index([photos / "disk2"], prune=True).removed == 4
    assert search.index([photos]).removed == 1


def test_bad_files_of_an_away_folder_are_not_forgotten(search: ImageSearch, photos: Path, tmp_path: Path) -> None:
    (photos / "disk2/bad.jpg").write_text("no picture")
    (photos / "bad.jpg").write_text("none, either")
    search.index([photos])
    (photos / "bad.jpg").unlink()
    shutil.move(photos / "disk2", tmp_path / "unplugged")
    search.index([photos])
    assert [file.path for file in search.store.bad_files()] == ["disk2/bad.jpg"]
    search.index([photos], prune=True)
    assert list(search.store.bad_files()) == []


# Disks that are really mounted


class Mounted:
    """A file system in memory, mounted where it may be."""

    def __init__(self, place: Path, source: Path) -> None:
        self.place, self.source = place, source

    def mount(self) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(self.place)], check=True)
        shutil.copytree(self.source, self.place, dirs_exist_ok=True)

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.place)], check=True)


@pytest.fixture
def disk(photos: Path, tmp_path: Path) -> Iterator[Mounted]:
    """Mounted at photos/disk2, with the pictures that were there."""
    shutil.move(photos / "disk2", tmp_path / "content")
    (photos / "disk2").mkdir()
    made = Mounted(photos / "disk2", tmp_path / "content")
    try:
        made.mount()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount anything")
    yield made
    subprocess.run(["umount", str(photos / "disk2")], check=False, capture_output=True)


def test_pictures_below_a_mount_point_are_not_the_disks(search: ImageSearch, photos: Path, disk: Mounted) -> None:
    """What lies in the folder itself shows when the disk is gone; that is no reason to take the others for deleted."""
    search.index([photos])
    search.tag(["disk2"], add=["mine"])
    before = tagged(search)
    disk.unmount()
    write_photos(photos / "disk2", 1, seed=8)
    report = search.index([photos])
    assert (report.described, report.away, report.removed) == (1, 4, 0)
    assert "not the disk" in report.notes[0]
    found = {match.path for match in search.search(photos / "00.jpg").matches if match.away}
    assert found == set(before)
    (photos / "disk2/00.jpg").unlink()

    (photos / "new.jpg").write_bytes((disk.source / "a/00.jpg").read_bytes())  # a copy of a picture that is away
    report = search.index([photos])
    assert (report.copied, report.moved, report.away) == (1, 0, 5)
    assert tagged(search) == before | {"new.jpg": {"mine"}}

    disk.mount()
    report = search.index([photos])
    assert (report.unchanged, report.removed, report.described) == (8, 1, 0)  # the one that lay below
    assert search.status().away == {}


def test_another_disk_at_the_same_place(search: ImageSearch, photos: Path, disk: Mounted, tmp_path: Path) -> None:
    search.index([photos])
    disk.unmount()
    write_photos(tmp_path / "second", 2, seed=9)
    second = Mounted(photos / "disk2", tmp_path / "second")
    second.mount()
    report = search.index([photos])
    assert (report.described, report.away, report.removed) == (2, 4, 0)
    second.unmount()
    disk.mount()
    report = search.index([photos])
    assert (report.unchanged, report.away, report.removed) == (7, 0, 2)


def test_a_mount_point_that_is_no_longer_one(search: ImageSearch, photos: Path, disk: Mounted) -> None:
    """Its pictures were copied into the folder: from then on, it is like others."""
    search.index([photos])
    assert search.store.notes()["mounts"] == ["disk2"]
    disk.unmount()
    shutil.copytree(disk.source, photos / "disk2", dirs_exist_ok=True)
    assert search.index([photos]).unchanged == 7
    assert "mounts" not in search.store.notes()
    (photos / "disk2/a/00.jpg").unlink()
    assert search.index([photos]).removed == 1
