"""What is searched, and the files that keep it for the next process: damaged, cut short, foreign, or too large."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cooc.index.embedded import cache, rowfile
from cooc.index.embedded.store import create_store, open_store
from cooc.index.records import Filter
from tests.index.test_embedded import ROOT, _filed, assert_whole, cache_files, fill, folder, model  # noqa: F401
from tests.index.test_store import META, assert_same_search, flip, random_vectors, record
from tests.reference.store import Model

HEAD, ROW = 4, 16 + 4 * META.dim  # bytes of a file's checksum, of a row


@pytest.fixture
def file(folder: Path) -> Path:  # noqa: F811
    """The second of three, of 100 rows each."""
    found = cache_files(folder, "rows-*")
    assert [path.stem.split("-")[2:] for path in found] == [["0", "100"], ["100", "200"], ["200", "300"]]
    assert {path.stat().st_size for path in found} == {HEAD + 100 * ROW}
    return found[1]


def flipped(at: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(flip(8 * at + 3)(path.read_bytes()))


def renamed(path: Path, slots: str) -> Path:
    return path.with_name(path.name.replace("-100-200", slots))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "a bit of the checksum": flipped(2),
    "a bit of an id": flipped(HEAD + 5 * 16),
    "a bit of a vector": flipped(HEAD + 100 * 16 + 7 * META.dim * 4 + 3),
    "a bit of the last vector": lambda path: flipped(path.stat().st_size - 2)(path),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another's name": lambda path: path.write_bytes(
        path.with_name(path.name.replace("-100-200", "-0-100")).read_bytes()
    ),
    "a name of other slots": lambda path: path.rename(path.with_name(path.name.replace("-100-200", "-100-900"))),
    "garbage behind it": lambda path: path.write_bytes(path.read_bytes() + b"\1" * 5000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("write", [False, True])
def test_damage_never_changes_an_answer(
    folder: Path,  # noqa: F811
    model: Model,  # noqa: F811
    file: Path,
    damage: str,
    write: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    DAMAGES[damage](file)
    with caplog.at_level(logging.WARNING, "cooc"):
        assert_whole(folder, model, write)
    assert ("damaged, and made again" in caplog.text) == (damage not in ("missing", "a folder"))
    if damage != "a folder":
        loaded = rowfile.Rows(file.name[5:37], open_coding(folder), 1000)
        assert rowfile.RowFiles(folder / "cache", loaded.epoch, open_coding(folder)).load(loaded, 300) is None
        assert loaded.count == 300  # it has been mended
    assert_whole(folder, model)


def open_coding(folder: Path) -> rowfile.Coding:  # noqa: F811
    with open_store(str(folder)) as store:
        return store._coding


def test_the_cache_may_be_deleted(folder: Path, model: Model) -> None:  # noqa: F811
    with open_store(str(folder)) as store:
        shutil.rmtree(folder / "cache")
        assert_same_search(store, model, random_vectors(2), 5)
    assert_whole(folder, model)
    assert len(cache_files(folder, "rows-*")) == 1  # all in one, now


def test_small_indexes_need_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FILED_FROM", 301)
    model = Model()  # noqa: F811
    with create_store(str(tmp_path / "index"), META) as store:
        fill(store)
        fill(model)
        assert_same_search(store, model, random_vectors(2), 5)
        store.compact()
    assert not (tmp_path / "index" / "cache").exists()
    with open_store(str(tmp_path / "index"), write=True) as store:
        store.add([record(f"x/{i}.jpg") for i in range(100)], random_vectors(100))
    assert len(cache_files(tmp_path / "index", "rows-*")) == 1


def test_cache_of_another_history_is_not_believed(folder: Path, model: Model, tmp_path: Path) -> None:  # noqa: F811
    """The database alone is put back from a copy and goes another way; the cache still has the first one's future."""
    with open_store(str(folder), write=True) as store:
        store.compact()
    shutil.copytree(folder, tmp_path / "other")
    with open_store(str(folder), write=True) as store:
        store.add([record("x.jpg")], random_vectors(1, seed=90))
    shutil.rmtree(tmp_path / "other" / "cache")
    with open_store(str(tmp_path / "other"), write=True) as store:
        store.add([record("y.jpg")], random_vectors(1, seed=91))
    shutil.copy(tmp_path / "other" / "index.sqlite", folder / "index.sqlite")
    model.add([record("y.jpg")], random_vectors(1, seed=91))
    assert_whole(folder, model)


CUT = """
import os, sys
from cooc.index.embedded.store import open_store
from tests.index.test_store import random_vectors
with open_store(sys.argv[1]) as store:
    before = store.search(random_vectors(3), 50)
    for path in sys.argv[2:]:
        os.truncate(path, 0)
    after = store.search(random_vectors(3), 50)
    assert after.ids == before.ids
    assert store.search(random_vectors(300), 50, exact=True).ids[:3] == before.ids
    assert store.search(random_vectors(3), 50, exact=False).ids == before.ids
"""


def test_a_file_that_is_cut_short_under_a_server_does_not_end_it(folder: Path, file: Path) -> None:  # noqa: F811
    """As `cp backup/* index/` does. Mapped memory that is no longer there would be a SIGBUS."""
    with open_store(str(folder), write=True) as store:
        store.build_graph()
    files = [str(path) for path in (folder / "cache").iterdir()]
    assert len(files) == 4
    done = subprocess.run([sys.executable, "-c", CUT, str(folder), *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_good_copy_outlives_a_damaged_original(folder: Path, model: Model, file: Path) -> None:  # noqa: F811
    """The vector in SQLite is harmed after the cache was written: searching goes on, nobody is given the vector."""
    import sqlite3

    connection = sqlite3.connect(folder / "index.sqlite")
    with connection:
        connection.execute("UPDATE vectors SET vector = zeroblob(64) WHERE slot = 7")
    connection.close()
    with open_store(str(folder)) as store:
        assert_same_search(store, model, random_vectors(3, seed=50), 20)
        assert list(store.damaged()) == ["0/7.jpg"]


@pytest.mark.parametrize("graph", [False, True])
def test_more_than_memory_holds(folder: Path, model: Model, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Then the copy is a file, that has no name."""
    monkeypatch.setattr(rowfile, "_machine", lambda: 0)
    with open_store(str(folder), write=True) as store:
        if graph:
            store.build_graph()
            assert store.search(random_vectors(1), 10, exact=False).ids[0] == [
                name for _, name in model.search(random_vectors(1)[0], 10)
            ]
        assert_same_search(store, model, random_vectors(3, seed=50), 20)
        assert "(deleted)" in Path("/proc/self/maps").read_text()
        for target in (store, model):
            target.add([record("new.jpg")], random_vectors(1, seed=60))
        assert_same_search(store, model, random_vectors(3, seed=50), 20)


def test_a_server_sees_an_index_grow_beyond_its_memory(
    folder: Path,  # noqa: F811
    model: Model,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "CHUNK", 8)  # what is kept free beyond a quarter
    with open_store(str(folder)) as reader, open_store(str(folder), write=True) as store:
        store.build_graph()
        for batch in range(3, 12):
            for target in (store, model):
                target.add([record(f"{batch}/{i}.jpg") for i in range(50)], random_vectors(50, seed=batch))
            assert_same_search(reader, model, random_vectors(2, seed=batch), 5)
            assert_same_search(reader, model, random_vectors(2, seed=batch), 5, Filter("3"))
            found = reader.search(random_vectors(1, seed=batch), 5, exact=False)
            assert found.ids[0] == [name for _, name in model.search(random_vectors(1, seed=batch)[0], 5)]


def test_many_processes_write_it_at_once(folder: Path, model: Model) -> None:  # noqa: F811
    script = (
        "import sys\nfrom cooc.index.embedded import cache\nfrom cooc.index.embedded.store import open_store\n"
        "from tests.index.test_store import random_vectors\ncache.FILED_FROM = 1\nsys.stdin.readline()\n"
        "with open_store(sys.argv[1]) as store:\n    store.search(random_vectors(1), 5)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, str(folder)]
    for _ in range(2):
        shutil.rmtree(folder / "cache")
        processes = [subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) for _ in range(4)]
        for process in processes:
            process.communicate(b"go\n")
        assert [process.returncode for process in processes] == [0] * 4
        assert_whole(folder, model)


def test_searching_goes_on_when_the_cache_cannot_grow(
    folder: Path,  # noqa: F811
    model: Model,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.rmtree(folder / "cache")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_store(str(folder)) as store:
        len(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))  # a real failure to write, of any file beyond 8 kB
        try:
            with caplog.at_level(logging.WARNING, "cooc"):
                assert_same_search(store, model, random_vectors(2), 5)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "done without" in caplog.text
    assert_whole(folder, model)


def test_rows_by_blocks(tmp_path: Path) -> None:
    """The files against plain arrays, written in any steps and read by others in between."""
    from cooc.index.embedded.coding import Coding

    coding, rng = Coding("float16", 6), np.random.default_rng(0)
    codes = rng.integers(0, 256, (500, coding.width), dtype=np.uint8)
    ids = rng.integers(0, 256, (500, 16), dtype=np.uint8)
    written = rowfile.RowFiles(tmp_path, "e" * 32, coding)
    assert written.count == 0
    for last in (1, 2, 2, 100, 99, 500):
        written.extend(lambda a, b: (codes[a:b], ids[a:b]), last)
        rows = rowfile.Rows("e" * 32, coding, 500)
        assert rowfile.RowFiles(tmp_path, "e" * 32, coding).load(rows, 500) is None
        assert rows.count == written.count == max(last, 100 if last == 99 else 0)
        np.testing.assert_array_equal(rows.codes[: rows.count], codes[: rows.count])
        np.testing.assert_array_equal(rows.ids[: rows.count], ids[: rows.count])
    assert rowfile.RowFiles(tmp_path, "f" * 32, coding).count == 0
