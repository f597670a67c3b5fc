"""Local features follow the pictures through everything that happens to files, and to the machine that makes them."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cooc.errors import InputError, MachineError
from cooc.image_search import ImageSearch
from cooc.index import run
from cooc.index.export import export_index
from cooc.pictures.decode import load_image
from cooc.verification.engines import extract
from cooc.verification.extraction import Extraction
from cooc.verification.features import pack, unpack
from tests.index.test_old_index import FIXTURE
from tests.tiny import RECIPE, Watched, descriptor, write_photos


def write_rough(folder: Path, count: int, seed: int = 5) -> list[Path]:
    """Pictures with texture, larger than the network's 64 pixels; the last is larger than features want."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, paths = np.random.default_rng(seed), [folder / f"{i:02}.jpg" for i in range(count)]
    for i, path in enumerate(paths):
        size = (1500, 900) if i == count - 1 else (160, 120)
        Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).resize(size).save(path)
    return paths


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_rough(tmp_path / "photos", 5)
    return tmp_path / "photos"


def kept(search: ImageSearch) -> dict[str, bytes | None]:
    records = list(search.store.records())
    return dict(zip([r.path for r in records], search.store.features([r.id for r in records]), strict=True))


def expected(path: Path) -> bytes:
    """Decoded for features alone."""
    with Image.open(path) as image:
        size = image.size
    return pack(extract("sift", load_image(path, size=1024), size=size))


@pytest.mark.parametrize("workers", [0, 2])
def test_features_are_made_with_the_vector(search: ImageSearch, photos: Path, workers: int) -> None:
    report = search.index([photos], workers=workers)
    assert (report.described, report.completed) == (5, 0)
    assert kept(search) == {path.name: expected(path) for path in sorted(photos.glob("*.jpg"))}
    (features,) = unpack(kept(search)["04.jpg"] or b"")
    assert features.size == (1500, 900)
    assert len(features) > 100
    vectors = search.vectors([r.id for r in search.store.records()])
    np.testing.assert_allclose(vectors, descriptor()(sorted(photos.glob("*.jpg"))).numpy(), atol=1e-5)
    status = search.status()
    assert (status.features, status.with_features) == ("sift", 5)
    assert status.feature_bytes == sum(len(code or b"") for code in kept(search).values())


def test_what_happens_to_files_happens_to_features(search: ImageSearch, photos: Path, watched: Watched) -> None:
    search.index([photos])
    before = kept(search)
    shutil.copy(photos / "00.jpg", photos / "copy.jpg")
    (photos / "01.jpg").rename(photos / "moved.jpg")
    write_rough(photos / "new", 1, seed=9)[0].replace(photos / "02.jpg")
    (photos / "03.jpg").unlink()
    report = search.index([photos])
    assert (report.copied, report.moved, report.described, report.removed, report.completed) == (1, 1, 1, 1, 0)
    after = kept(search)
    assert after["copy.jpg"] == after["00.jpg"] == before["00.jpg"]
    assert after["moved.jpg"] == before["01.jpg"]
    assert after["02.jpg"] == expected(photos / "02.jpg") != before["02.jpg"]
    assert "03.jpg" not in after
    assert search.store.verify() == []


def test_no_texture_is_an_empty_set(search: ImageSearch, photos: Path) -> None:
    for path in photos.glob("*.jpg"):
        path.unlink()
    smooth = write_photos(photos, 2)  # the network sees something in these, SIFT may not
    Image.new("RGB", (70, 50), (90, 120, 30)).resize((1, 3)).save(photos / "tiny.png")
    search.index([photos])
    for path, code in kept(search).items():
        assert code is not None, path
        assert all(one.engine == "sift" for one in unpack(code))
    assert set(kept(search)) >= {path.name for path in smooth}


class Failing(Extraction):
    """A machine that fails on pictures of 160 pixels, wherever they are decoded."""

    def __call__(self, pixels: Any, size: tuple[int, int]) -> Any:
        if size == (160, 120):
            raise MemoryError("no memory for it")
        return super().__call__(pixels, size)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_machine_that_fails_on_features_says_nothing_of_the_file(
    search: ImageSearch, photos: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing("sift")
    monkeypatch.setattr(ImageSearch, "extraction", property(lambda self: failing))
    report = search.index([photos], workers=workers)
    assert (report.described, report.failed, report.bad) == (1, 4, 0)
    assert all("local features could not be made" in problem.reason for problem in report.problems)
    assert list(kept(search)) == ["04.jpg"]
    monkeypatch.undo()
    report = search.index([photos])
    assert (report.described, report.failed) == (4, 0)
    assert None not in kept(search).values()


# indexes that have none


@pytest.fixture
def old(photos: Path, watched: Watched) -> Iterator[ImageSearch]:
    with ImageSearch.create(photos / ".cooc", recipe=RECIPE, descriptor=watched, features="") as made:
        made.index([photos])
        yield made


@pytest.mark.parametrize("workers", [0, 2])
def test_features_for_what_is_there(old: ImageSearch, photos: Path, watched: Watched, workers: int) -> None:
    shutil.copy(photos / "00.jpg", photos / "copy.jpg")
    report = old.index([photos])
    assert (report.completed, set(kept(old).values())) == (0, {None})
    old.keep_features("sift")
    report = old.index([photos], workers=workers)
    assert (report.unchanged, report.completed, report.described) == (6, 5, 0)
    assert watched.count == 5  # nothing was described again
    assert kept(old) == {path.name: expected(path) for path in sorted(photos.glob("*.jpg"))}
    assert old.index([photos]).completed == 0
    with pytest.raises(InputError, match=r"cooc rebuild --verify sift\+xfeat"):
        old.keep_features("sift+xfeat")


def test_a_file_that_is_not_what_was_described_gets_no_features(old: ImageSearch, photos: Path) -> None:
    old.keep_features("sift")
    (photos / "00.jpg").rename(photos.parent / "away.jpg")
    write_rough(photos / "other", 1, seed=3)[0].replace(photos / "01.jpg")
    old.index([photos], keep_missing=True)
    assert [path for path, code in kept(old).items() if code is None] == ["00.jpg"]
    assert kept(old)["01.jpg"] == expected(photos / "01.jpg")


def test_damaged_features_are_made_again(search: ImageSearch, photos: Path, watched: Watched) -> None:
    search.index([photos])
    before = kept(search)
    with closing(sqlite3.connect(photos / ".cooc" / "index.sqlite")) as connection, connection:
        connection.execute("UPDATE features SET code = zeroblob(length(code))")
    assert len(search.store.verify()) == 5
    report = search.index([photos])
    assert (report.completed, report.described, watched.count) == (5, 0, 5)
    assert kept(search) == before
    assert search.store.verify() == []


def test_failing_again_and_again_ends_the_run(old: ImageSearch, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FAILURES", 3)
    old.keep_features("sift")
    failing = Failing("sift")
    monkeypatch.setattr(ImageSearch, "extraction", property(lambda self: failing))
    with pytest.raises(MachineError, match="3 files in a row could not be given local features"):
        old.index([photos])
    monkeypatch.undo()
    assert old.index([photos]).completed == 5


def test_an_index_of_format_2_gets_features(tmp_path: Path) -> None:
    photos = write_photos(tmp_path, 6)
    shutil.copytree(FIXTURE, tmp_path / ".cooc")
    with ImageSearch.open(tmp_path / ".cooc", descriptor=descriptor()) as search:  # read as it is
        assert (search.meta.features, set(kept(search).values())) == ("", {None})
    with ImageSearch.open(tmp_path / ".cooc", write=True, descriptor=descriptor()) as search:
        search.keep_features()
        search.index([tmp_path])
        assert None not in [kept(search)[path.name] for path in photos]
        assert search.search(photos[2], k=1).matches[0].path == "02.jpg"
        assert search.store.verify() == []


COMPLETE = """
import sys
from cooc.image_search import ImageSearch
from cooc.index import run
from tests.tiny import descriptor
run.COMMIT_IMAGES = 1
with ImageSearch.open(sys.argv[1] + "/.cooc", write=True, descriptor=descriptor()) as search:
    search.keep_features("sift")
    print("ready", flush=True)
    search.index([sys.argv[1]], workers=0)
"""


def test_kill_9_while_features_are_added(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    write_rough(folder, 60)
    with ImageSearch.create(folder / ".cooc", recipe=RECIPE, descriptor=descriptor(), features="") as made:
        made.index([folder])
    command = [sys.executable, "-c", COMPLETE, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with ImageSearch.open(folder / ".cooc", descriptor=descriptor()) as search:
            while search.store.count_features().images < 3:
                time.sleep(0.002)
        process.kill()
    with ImageSearch.open(folder / ".cooc", write=True, descriptor=descriptor()) as search:
        done = search.store.count_features().images
        assert 3 <= done < 60
        assert search.store.verify() == []
        report = search.index([folder])
        assert (report.described, report.completed) == (0, 60 - done)
        assert kept(search) == {path.name: expected(path) for path in sorted(folder.glob("*.jpg"))}


# copies of an index


def test_rebuilding_makes_them_again(search: ImageSearch, photos: Path) -> None:
    search.index([photos])
    before = kept(search)
    search.close()
    ImageSearch.rebuild(photos / ".cooc", descriptor=descriptor())
    with ImageSearch.open(photos / ".cooc", descriptor=descriptor()) as rebuilt:
        assert (rebuilt.meta.features, kept(rebuilt)) == ("sift", before)
    ImageSearch.rebuild(photos / ".cooc", descriptor=descriptor(), features="")
    with ImageSearch.open(photos / ".cooc", descriptor=descriptor()) as rebuilt:
        assert (rebuilt.meta.features, set(kept(rebuilt).values())) == ("", {None})


def test_an_imported_index_gets_them_in_the_next_run(search: ImageSearch, photos: Path, tmp_path: Path) -> None:
    """Exported files are for other programs: they hold no features."""
    search.index([photos])
    export_index(search.store, tmp_path / "all.npy")
    with ImageSearch.import_from(tmp_path / "all.npy", tmp_path / "imported", root=photos) as imported:
        assert (imported.meta.features, set(kept(imported).values())) == ("sift", {None})
        assert imported.index([photos]).completed == 5
        assert kept(imported) == kept(search)


def test_engines_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'activations'"):
        ImageSearch.create(tmp_path / "index", root=tmp_path, features="sift+activation", descriptor=descriptor())
    assert not (tmp_path / "index").exists()
