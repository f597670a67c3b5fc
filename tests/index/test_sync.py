"""An index follows its folder through everything that happens to files, and a run through everything that stops it."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks.indexing import kill_and_resume
from cooc.errors import InputError, StoreError, StoreLockedError
from cooc.image_search import ImageSearch
from cooc.index import engine, examine, run, sync
from cooc.index.report import Report
from cooc.pictures.folder import relative_path
from tests.tiny import RECIPE, Watched, descriptor, open_index, write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    write_photos(folder, 6)
    write_photos(folder / "below", 3, seed=1)
    return folder


def paths(search: ImageSearch) -> list[str]:
    return [record.path for record in search.store.records()]


def bad(search: ImageSearch) -> dict[str, str]:
    return {file.path: file.reason for file in search.store.bad_files()}


def contents(search: ImageSearch) -> dict[str, bytes]:
    return {record.path: search.vectors([record.id]).tobytes() for record in search.store.records()}


# What happens to files


def test_first_run_describes_all_and_second_none(search: ImageSearch, photos: Path, watched: Watched) -> None:
    first = search.index([photos])
    assert (first.found, first.described, first.done) == (9, 9, 9)
    assert paths(search) == [*(f"{i:02}.jpg" for i in range(6)), *(f"below/{i:02}.jpg" for i in range(3))]
    record = search.store.find(["below/01.jpg"])[0]
    status = (photos / "below/01.jpg").stat()
    assert record is not None
    assert (record.size, record.mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert (record.width, record.height) == (64, 48)
    second = search.index([photos])
    assert (second.unchanged, second.done, watched.count) == (9, 9, 9)
    assert search.store.verify() == []


def test_vectors_are_the_descriptors(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    records = list(search.store.records())
    expected = descriptor()([photos / record.path for record in records])
    torch.testing.assert_close(torch.from_numpy(search.vectors([r.id for r in records])), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_make_no_difference(search: ImageSearch, photos: Path, tmp_path: Path, workers: int) -> None:
    search.index([photos], workers=workers)
    with open_index(tmp_path / "other", photos) as other:
        other.index([photos])
        assert contents(other).keys() == contents(search).keys()
        a, b = (s.vectors([r.id for r in s.store.records()]) for s in (search, other))
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_new_time_alone_is_noted_without_describing(search: ImageSearch, photos: Path, watched: Watched) -> None:
    search.index([photos])
    os.utime(photos / "00.jpg", ns=(1, 1_600_000_000_000_000_001))
    report = search.index([photos])
    assert (report.unchanged, watched.count) == (9, 9)
    (record,) = search.store.find(["00.jpg"])
    assert record is not None
    assert record.mtime_ns == 1_600_000_000_000_000_001


def test_changed_content_is_described_again(search: ImageSearch, photos: Path, watched: Watched) -> None:
    search.index([photos])
    before = contents(search)
    Image.new("RGB", (64, 48), (250, 20, 20)).save(photos / "00.jpg")
    report = search.index([photos])
    assert (report.described, report.unchanged, watched.count) == (1, 8, 10)
    after = contents(search)
    assert {name for name in after if after[name] != before[name]} == {"00.jpg"}


def test_moved_pictures_keep_vector_and_tags(search: ImageSearch, photos: Path, watched: Watched) -> None:
    search.index([photos])
    before = contents(search)
    search.tag(["00.jpg"], add=["mine"])
    (photos / "new").mkdir()
    (photos / "00.jpg").rename(photos / "new/name.jpg")
    (photos / "below").rename(photos / "elsewhere")
    report = search.index([photos])
    assert (report.moved, report.removed, report.described, watched.count) == (4, 0, 0, 9)
    after = contents(search)
    assert after["new/name.jpg"] == before["00.jpg"]
    assert after["elsewhere/02.jpg"] == before["below/02.jpg"]
    assert len(after) == 9
    (record,) = search.store.find(["new/name.jpg"])
    assert record is not None
    assert record.tags == {"mine"}
    assert search.index([photos]).unchanged == 9
    assert search.store.verify() == []


def test_copies_are_not_described(search: ImageSearch, photos: Path, watched: Watched) -> None:
    search.index([photos])
    shutil.copy(photos / "00.jpg", photos / "copy.jpg")
    one, two = (photos / "01.jpg").read_bytes(), (photos / "02.jpg").read_bytes()
    (photos / "01.jpg").write_bytes(two)  # they change places
    (photos / "02.jpg").write_bytes(one)
    before = contents(search)
    report = search.index([photos])
    assert (report.copied, report.described, watched.count) == (3, 0, 9)
    after = contents(search)
    assert (after["copy.jpg"], after["01.jpg"], after["02.jpg"]) == (
        before["00.jpg"],
        before["02.jpg"],
        before["01.jpg"],
    )


def test_vanished_pictures_go_unless_kept(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    (photos / "03.jpg").unlink()
    (photos / "below/01.jpg").unlink()
    assert search.index([photos], keep_missing=True).removed == 0
    assert len(search.store) == 9
    report = search.index([photos])
    assert (report.removed, report.unchanged) == (2, 7)
    assert {"03.jpg", "below/01.jpg"}.isdisjoint(paths(search))


def test_removed_pictures_get_their_tags_back_by_content(search: ImageSearch, photos: Path, tmp_path: Path) -> None:
    search.index([photos])
    search.tag(["00.jpg"], add=["mine"])
    search.tag(["01.jpg"], add=["yours"])
    content = (photos / "00.jpg").read_bytes()
    (photos / "00.jpg").unlink()
    (photos / "01.jpg").write_text("overwritten")  # its record goes, too
    report = search.index([photos])
    assert (report.removed, report.bad, len(search.store)) == (1, 1, 7)
    (photos / "other-name.jpg").write_bytes(content)
    report = search.index([photos])
    assert (report.described, report.moved) == (1, 0)
    write_photos(tmp_path / "again", 2)
    shutil.copy(tmp_path / "again/01.jpg", photos / "01.jpg")
    search.index([photos])
    tags = {record.path: set(record.tags) for record in search.store.records() if record.tags}
    assert tags == {"other-name.jpg": {"mine"}, "01.jpg": {"yours"}}


def test_one_folder_leaves_the_others_alone(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    (photos / "00.jpg").unlink()
    (photos / "below/00.jpg").unlink()
    assert search.index([photos / "below"]).removed == 1
    assert "00.jpg" in paths(search)


def test_folders_within_folders_are_walked_once(search: ImageSearch, photos: Path, watched: Watched) -> None:
    assert search.index([photos / "below", photos, photos]).found == 9
    assert watched.count == 9


def test_outside_the_root_is_refused(search: ImageSearch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="outside"):
        search.index([tmp_path])
    with pytest.raises(InputError, match="outside"):
        search.add([tmp_path / "photos/../other.jpg"])


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real/sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    assert relative_path(tmp_path / "real", "sub/../a.jpg") == "a.jpg"
    assert relative_path(tmp_path / "link", "a.jpg") == "a.jpg"
    assert relative_path(tmp_path / "real", tmp_path / "link/sub") == "sub"
    assert relative_path(tmp_path / "real", ".") == ""


# Bad files


def png_bomb(side: int = 100_000) -> bytes:
    """A few bytes that say they are ten gigapixels."""
    chunk = b"IHDR" + side.to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + chunk + zlib.crc32(chunk).to_bytes(4, "big") + b"\0\0\1\0IDAT" + bytes(260)


def corrupt_inputs(folder: Path, good: bytes) -> set[str]:
    """Everything that a folder of pictures may hold and that is none; the names of what must be reported."""
    for share in range(20):
        (folder / f"cut-{share:02}.jpg").write_bytes(good[: len(good) * share // 20])
    (folder / "text.jpg").write_text("no picture")
    (folder / "zeros.jpg").write_bytes(bytes(1000))
    (folder / "bomb.png").write_bytes(png_bomb())
    os.mkfifo(folder / "pipe.jpg")
    (folder / "loop").symlink_to(folder)
    (folder / "itself.jpg").symlink_to(folder / "itself.jpg")
    (folder / "nowhere.jpg").symlink_to(folder / "missing.jpg")
    return {f"cut-{share:02}.jpg" for share in range(20)} | {"text.jpg", "zeros.jpg", "bomb.png"}


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_inputs_are_reported_and_stop_nothing(
    search: ImageSearch, photos: Path, watched: Watched, workers: int
) -> None:
    wrong = corrupt_inputs(photos, (photos / "00.jpg").read_bytes())
    odd = photos / os.fsdecode(b"not-utf8-\xff\xfe.jpg"), photos / "line\nbreak.jpg"
    for number, path in enumerate(odd):
        Image.new("RGB", (48, 64), (200, 100 * number, 50)).save(path, "JPEG")
    report = search.index([photos], workers=workers)
    assert (report.described, report.bad) == (11, len(wrong))
    assert {path.name for path in odd} < set(paths(search))
    found = bad(search)
    assert found.keys() == wrong
    assert "empty" in found["cut-00.jpg"]
    assert "limit" in found["bomb.png"]
    assert all(len(reason) > 20 for reason in found.values())
    assert search.store.verify() == []

    again = search.index([photos])  # reported again, not tried again
    assert (again.unchanged, again.bad, watched.count) == (11, len(wrong), 11)
    shutil.copy(photos / "01.jpg", photos / "text.jpg")  # repaired
    (photos / "zeros.jpg").unlink()
    last = search.index([photos])
    assert (last.copied, last.bad) == (1, len(wrong) - 2)
    assert bad(search).keys() == wrong - {"text.jpg", "zeros.jpg"}


def test_following_links_ends(search: ImageSearch, photos: Path, tmp_path: Path) -> None:
    write_photos(tmp_path / "other", 2, seed=5)
    (photos / "linked").symlink_to(tmp_path / "other")
    (photos / "below/up").symlink_to(photos)
    (photos / "itself.jpg").symlink_to(photos / "itself.jpg")
    report = search.index([photos], follow=True)
    assert {"linked/00.jpg", "linked/01.jpg"} < set(paths(search))
    assert (report.described, len(search.store)) == (11, 11)
    assert set(bad(search)) == {"itself.jpg"}


def test_a_picture_that_went_bad_is_no_longer_found(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    (photos / "00.jpg").write_text("overwritten")
    assert search.index([photos]).bad == 1
    assert "00.jpg" not in paths(search)


def test_a_featureless_picture_is_reported_and_its_batch_is_not(photos: Path, tmp_path: Path) -> None:
    class Blind(Watched):
        def raw(self, images: Tensor) -> Tensor:
            return super().raw(images) * (images.amax(dim=(1, 2, 3)) > 0)[:, None]

    Image.new("RGB", (64, 48)).save(photos / "black.png")
    with ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=photos, descriptor=Blind()) as search:
        report = search.index([photos])
        assert (report.described, report.bad) == (9, 1)
        assert "one colour" in bad(search)["black.png"]


def test_a_picture_whose_vector_is_not_finite_is_reported_and_its_batch_is_not(photos: Path, tmp_path: Path) -> None:
    class Wild(Watched):
        def raw(self, images: Tensor) -> Tensor:
            return super().raw(images) / (images.amax(dim=(1, 2, 3)) > 0)[:, None]

    Image.new("RGB", (64, 48)).save(photos / "black.png")
    with ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=photos, descriptor=Wild()) as search:
        report = search.index([photos])
        assert (report.described, report.failed) == (9, 1)
        assert "NaN or infinity" in report.problems[0].reason
        assert bad(search) == {}  # weights or arithmetic are wrong, not the picture


def test_a_batch_that_fails_is_tried_one_by_one(photos: Path, tmp_path: Path) -> None:
    class Small(Watched):
        def raw(self, images: Tensor) -> Tensor:
            if len(images) > 1:
                raise RuntimeError("out of memory")
            return super().raw(images)

    with ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=photos, descriptor=Small()) as search:
        assert search.index([photos]).described == 9


def test_unreadable_folder(tmp_path: Path) -> None:
    """As another user, for root may read everything."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    user = os.geteuid()
    try:
        folder = base / "photos"
        write_photos(folder, 2)
        write_photos(folder / "secret", 2, seed=1)
        for path in (base, *base.rglob("*")):
            os.chown(path, 65534 if user == 0 else -1, -1)
        if user == 0:
            os.seteuid(65534)
        with ImageSearch.create(folder / ".cooc", recipe=RECIPE, descriptor=descriptor()) as search:
            search.index([folder])
            assert len(search.store) == 4
            (folder / "secret").chmod(0)
            (folder / "00.jpg").chmod(0)
            os.utime(folder / "00.jpg", (5, 5))
            report = search.index([folder])
            assert (report.removed, report.bad) == (0, 2)
            assert set(bad(search)) == {"secret", "00.jpg"}
            assert len(search.store) == 4  # what cannot be read may well be as it was
            (folder / "secret").chmod(0o700)
            (folder / "00.jpg").chmod(0o600)
            assert search.index([folder]).bad == 0
            assert bad(search) == {}
    finally:
        os.seteuid(user)
        shutil.rmtree(base)


def test_files_that_vanish_or_change_while_being_read(photos: Path, tmp_path: Path) -> None:
    def meanwhile() -> None:
        (photos / "00.jpg").unlink(missing_ok=True)
        with (photos / "01.jpg").open("ab") as stream:
            stream.write(b"more")

    watched = Watched(meanwhile)
    with ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=photos, descriptor=watched) as search:
        report = search.index([photos])
        assert (report.described, report.bad) == (7, 2)
        assert set(paths(search)).isdisjoint({"00.jpg", "01.jpg"})
        assert set(bad(search)) == {"01.jpg"}  # the other one is not there any more
        watched.meanwhile = lambda: None
        assert search.index([photos]).described == 1
        assert bad(search) == {}


# What stops a run


def test_ctrl_c_keeps_what_is_done(photos: Path, tmp_path: Path) -> None:
    watched = Watched()
    watched.meanwhile = lambda: os.kill(os.getpid(), signal.SIGINT) if watched.count else None
    with ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=photos, descriptor=watched) as search:
        report = search.index([photos])
        assert report.interrupted
        assert 0 < report.described < 9
        assert len(search.store) == report.described
        watched.meanwhile = lambda: None
        done = search.index([photos])
        assert (done.unchanged, done.described) == (report.described, 9 - report.described)


def test_stop_ends_a_run_early(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    (photos / "below/02.jpg").unlink()
    asked = iter([False, False, False, True])
    report = search.index([photos], stop=lambda: next(asked))
    assert report.interrupted
    assert (report.found, report.removed) == (3, 0)


def test_progress_counts(search: ImageSearch, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PROGRESS_SECONDS", 0)
    seen: list[tuple[int, int | None]] = []
    search.index([photos], progress=lambda report: seen.append((report.done, report.total)))
    assert seen[-1] == (9, 9)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_files_are_taken_as_there_is_room(search: ImageSearch, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory must not grow with the collection: how far the walk runs ahead of the network is bounded."""
    for module, name, value in ((sync, "CHUNK", 4), (examine, "AHEAD", 2), (engine, "FEW", 2)):
        monkeypatch.setattr(module, name, value)
    many = write_photos(photos / "many", 60, seed=3)
    taken = 0

    def walk() -> Iterator[Path]:
        nonlocal taken
        for path in many:
            taken += 1
            yield path

    ahead: list[int] = []
    search.descriptor.meanwhile = lambda: ahead.append(taken - search.descriptor.count)  # type: ignore[attr-defined]
    monkeypatch.setattr("cooc.stream.batch_pixels", lambda device: 2 * 64 * 48)
    assert search.add(walk()).described == 60
    assert max(ahead) < 40


def test_one_writer(search: ImageSearch, photos: Path) -> None:
    with pytest.raises(StoreLockedError):
        ImageSearch.open(photos / ".cooc", write=True)
    with ImageSearch.open(photos / ".cooc", descriptor=descriptor()) as reader:
        search.index([photos])
        assert len(reader.search(photos / "00.jpg").matches) == 9
        shutil.copy(photos / "00.jpg", photos / "new.jpg")
        with pytest.raises(StoreError, match="reading only"):
            reader.add([photos / "new.jpg"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[ImageSearch], None], Callable[[ImageSearch], None]]]:
    """A folder, and how to make its disk full and wide again: a real small disk where one may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if mounted:
        yield (
            place,
            lambda search: None,
            lambda search: subprocess.run(["mount", "-o", "remount,size=50m", str(place)], check=True) and None,
        )
        subprocess.run(["umount", str(place)], check=True)
        return

    def limit(search: ImageSearch, pages: int) -> None:
        connection: sqlite3.Connection = search.store._writer  # type: ignore[attr-defined]
        connection.execute(f"PRAGMA max_page_count = {pages}")

    yield place, lambda search: limit(search, 30), lambda search: limit(search, 1 << 30)


def test_full_disk(photos: Path, small_disk: tuple[Path, Callable[..., None], Callable[..., None]]) -> None:
    place, fill, widen = small_disk
    write_photos(photos / "many", 60, seed=7)
    with ImageSearch.create(place / "index", recipe=RECIPE, root=photos, descriptor=descriptor()) as search:
        search.add(sorted(photos.glob("*.jpg")))
        before = contents(search)
        fill(search)
        with pytest.raises(StoreError, match="full"):
            search.index([photos])
        assert search.store.verify() == []
        assert before.items() <= contents(search).items()
        assert search.search(photos / "00.jpg").matches[0].path == "00.jpg"
        widen(search)
        search.index([photos])
        assert len(search.store) == 69
        assert search.store.verify() == []


def test_kill_at_random_moments(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", 24)
    report = kill_and_resume(tmp_path / "photos", open_index, kills=5, seed=4, commit_images=2)
    assert report["problems"] == []
    assert report["killed before the end"] > 0
    assert report["largest difference of a vector"] <= 1e-5


def test_time_left_counts_what_takes_time() -> None:
    """A tenth of a second each for 20 of 100; a run that goes on has 500 behind it that took none."""
    assert Report(total=100, described=19, bad=1, seconds=2.0).left == pytest.approx(8.0)
    assert Report(total=600, described=20, unchanged=500, seconds=2.0).left == pytest.approx(8.0)
    assert Report(total=100, unchanged=50, seconds=2.0).left is None
    assert Report(described=20, seconds=2.0).as_dict()["left"] is None  # not counted yet
