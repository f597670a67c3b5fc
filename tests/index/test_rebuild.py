"""Describing all pictures of an index again: its tags stay, whatever else becomes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cooc.errors import InputError, StoreDamagedError
from cooc.image_search import ImageSearch, Report, changing
from cooc.index.records import Forgotten
from tests.shell import Shell
from tests.tiny import RECIPE, descriptor, make_descriptor, open_index, write_photos

OTHER = RECIPE.replace("size=64", "size=48")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten pictures, four of them tagged, one removed with its tag; two kinds of notes; a folder of two in another."""
    write_photos(tmp_path, 8)
    write_photos(tmp_path / "sub", 2, seed=7)
    with open_index(tmp_path / ".cooc") as search:
        search.index([tmp_path])
        search.tag(["00.jpg", "01.jpg"], add=["good", "blue"])
        search.tag(["sub"], add=["far"])
        search.tag(["07.jpg"], add=["kept"])
        search.remove(["07.jpg"])
        search.store.note("away", {"disk2": "2024"})
    return tmp_path


TAGS = {"00.jpg": {"good", "blue"}, "01.jpg": {"good", "blue"}, "sub/00.jpg": {"far"}, "sub/01.jpg": {"far"}}


def tags(index: Path) -> dict[str, set[str]]:
    with ImageSearch.open(index) as search:
        return {record.path: set(record.tags) for record in search.store.records() if record.tags}


def test_with_the_same_recipe(photos: Path) -> None:
    with ImageSearch.open(photos / ".cooc", descriptor=descriptor()) as reader:
        before = {record.id for record in reader.store.records()}
        report = ImageSearch.rebuild(photos / ".cooc", descriptor=descriptor())
        assert (report.described, report.bad) == (9, 0)
        assert {record.id for record in reader.store.records()} == before
        assert reader.search(photos / "03.jpg", k=1).matches[0].path == "03.jpg"
        assert reader.store.notes() == {"away": {"disk2": "2024"}}
        assert [one.tags for one in reader.store.forgotten()] == [{"kept"}]
        assert reader.root == photos
    assert tags(photos / ".cooc") == TAGS
    assert not (photos / ".cooc.rebuilt").exists()


def test_with_another_recipe_and_storage(photos: Path) -> None:
    made = make_descriptor(OTHER)
    report = ImageSearch.rebuild(photos / ".cooc", recipe=OTHER, storage="float16", descriptor=made)
    assert report.described == 9
    with ImageSearch.open(photos / ".cooc", recipe=OTHER, descriptor=made) as search:
        assert search.meta.recipe == OTHER
        assert search.meta.storage == "float16"
        assert search.search(photos / "03.jpg", k=1).matches[0].score > 0.999
        assert search.store.verify() == []
    assert tags(photos / ".cooc") == TAGS


def test_to_another_place(photos: Path, tmp_path: Path) -> None:
    ImageSearch.rebuild(photos / ".cooc", to=tmp_path / "new", descriptor=descriptor())
    assert tags(tmp_path / "new") == tags(photos / ".cooc") == TAGS
    with ImageSearch.open(tmp_path / "new") as search:
        assert search.root == photos
    with pytest.raises(InputError, match="--to INDEX") as caught:
        ImageSearch.rebuild("postgresql://me:secret@host/db")
    assert "secret" not in str(caught.value)


def test_interrupted_it_goes_on_where_it_was(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cooc.index.run.COMMIT_SECONDS", 0.0)

    stopped = []

    def stop(report: Report) -> None:
        if report.described >= 4 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr("cooc.index.run.PROGRESS_SECONDS", 0.0)
    report = ImageSearch.rebuild(photos / ".cooc", descriptor=descriptor(), progress=stop)
    assert report.interrupted
    assert tags(photos / ".cooc") == TAGS
    with ImageSearch.open(photos / ".cooc.rebuilt") as search:
        done = len(search.store)
        assert 0 < done < 9
    report = ImageSearch.rebuild(photos / ".cooc", descriptor=descriptor())
    assert report.unchanged == done
    assert report.described == 9 - done
    assert tags(photos / ".cooc") == TAGS
    with ImageSearch.open(photos / ".cooc") as search:
        assert [one.tags for one in search.store.forgotten()] == [{"kept"}]


def test_a_disk_that_is_not_mounted_does_not_empty_the_index(photos: Path) -> None:
    shutil.move(photos / "sub", photos.parent / "unmounted")
    report = ImageSearch.rebuild(photos / ".cooc", descriptor=descriptor())
    assert "are they there?" in report.notes[0]
    assert tags(photos / ".cooc") == TAGS
    shutil.move(photos.parent / "unmounted", photos / "sub")
    report = ImageSearch.rebuild(photos / ".cooc", descriptor=descriptor())
    assert (report.unchanged, report.described, report.notes) == (7, 2, [])
    assert tags(photos / ".cooc") == TAGS


def test_a_few_that_are_gone_do_not_stop_it(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing, "MISSING", 0.2)
    (photos / "01.jpg").unlink()
    report = ImageSearch.rebuild(photos / ".cooc", descriptor=descriptor())
    assert (report.described, report.bad) == (8, 1)
    assert "01.jpg" not in tags(photos / ".cooc")
    with ImageSearch.open(photos / ".cooc") as search:
        assert {(one.path, one.tags) for one in search.store.forgotten()} == {
            ("01.jpg", frozenset({"good", "blue"})),
            ("07.jpg", frozenset({"kept"})),
        }


def test_what_can_be_read_of_a_damaged_index_is_saved(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page of the database in turn. What is not readable is lost; nothing else is."""
    monkeypatch.setattr(changing, "MISSING", 1.0)
    path = photos / ".cooc" / "index.sqlite"
    whole = path.read_bytes()
    saved = []
    for page in range(1, len(whole) // 16384):
        path.write_bytes(whole[: page * 16384] + b"\xee" * 16384 + whole[(page + 1) * 16384 :])
        for left in ("index.sqlite-wal", "index.sqlite-shm"):
            (photos / ".cooc" / left).unlink(missing_ok=True)
        try:
            ImageSearch.rebuild(photos / ".cooc", descriptor=descriptor())
        except StoreDamagedError:  # so that it cannot even be opened
            shutil.rmtree(photos / ".cooc.rebuilt", ignore_errors=True)
            saved.append(-1)
        else:
            with ImageSearch.open(photos / ".cooc") as search:
                assert search.store.verify() == []
                saved.append(len(search.store))
            found = tags(photos / ".cooc")
            assert found.items() <= TAGS.items()
    assert saved.count(9) >= len(saved) // 2, saved


def test_the_command(cooc: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cooc.descriptor.Descriptor", lambda *_, **__: descriptor())
    done = cooc("rebuild", "--index", photos / ".cooc", "--device", "cpu")
    assert done.out == "9 pictures described, 0 left out.\n"
    (photos / "06.jpg").unlink()
    (photos / "05.jpg").unlink()
    done = cooc("rebuild", "--index", photos / ".cooc", "--device", "cpu")
    assert done.code == 3
    assert f"cooc restore {photos / '.cooc.rebuilt'} {photos / '.cooc'}" in done.err
    assert cooc("restore", photos / ".cooc.rebuilt", photos / ".cooc").out.startswith("7 pictures")
    assert isinstance(next(iter(_forgotten(photos / ".cooc"))), Forgotten)


def _forgotten(index: Path) -> list[Forgotten]:
    with ImageSearch.open(index) as search:
        return list(search.store.forgotten())
