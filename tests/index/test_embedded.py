"""The embedded engine's own promises: its files, its cache, kill -9, full and read-only disks, damage."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cooc.errors import StoreDamagedError, StoreError, StoreLockedError, StoreMissingError
from cooc.index.embedded import store as embedded
from cooc.index.embedded.store import EmbeddedStore, create_store, open_store
from cooc.index.records import Filter, StoreMeta
from tests.index.test_store import META, assert_same_search, random_vectors, record, unit
from tests.reference.store import Model

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "index-v1"


@pytest.fixture(autouse=True)
def _filed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What small indexes do not need is tried on small indexes."""
    monkeypatch.setattr("cooc.index.embedded.cache.FILED_FROM", 1)
    monkeypatch.setattr("cooc.index.embedded.store.FOLLOW", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An index of 300 images, 40 of them removed, closed; see `model`."""
    with create_store(str(tmp_path / "index"), META) as store:
        fill(store)
    return tmp_path / "index"


@pytest.fixture
def model() -> Model:
    model = Model()
    fill(model)
    return model


def fill(target: EmbeddedStore | Model) -> None:
    for batch in range(3):
        target.add([record(f"{batch}/{i}.jpg") for i in range(100)], random_vectors(100, seed=batch))
    target.remove([f"1/{i}.jpg" for i in range(40)])


def cache_files(folder: Path, pattern: str) -> list[Path]:
    return sorted((folder / "cache").glob(pattern))


def assert_whole(folder: Path, model: Model, write: bool = False) -> None:
    with open_store(str(folder), write=write) as store:
        assert_same_search(store, model, random_vectors(3, seed=50), 20)
        assert_same_search(store, model, random_vectors(9, seed=51), 20)
        assert store.verify() == []


def test_version_1_opens(tmp_path: Path) -> None:
    """Never make this fixture again: it is what users have on their disks."""
    shutil.copytree(FIXTURE, tmp_path / "index")
    vectors = unit(np.add.outer(np.arange(5), np.arange(8)) % 5 + 1.0)
    for write in (False, True):
        with open_store(str(tmp_path / "index"), write=write) as store:
            assert store.meta == StoreMeta(
                "fixture",
                {"radius": 4},
                "a" * 64,
                "b" * 64,
                8,
                "photos",
                "0.1.0",
                "2026-01-01T00:00:00+00:00",
                3 if write else 1,
            )
            records = list(store.records())
            assert [r.path for r in records] == ["a/0.jpg", "a/1.jpg", "b/2.jpg", "b/3.jpg", "b/caf\udce9.jpg"]
            assert [r.taken for r in records] == ["2020-01-01", None, "2020-01-03", None, "2020-01-05"]
            assert records[4].tags == {"good"}
            np.testing.assert_array_equal(store.vectors([r.id for r in records]), vectors)
            assert store.search(vectors, 1).ids == [[r.id] for r in records]
            assert [(bad.reason, bad.since) for bad in store.bad_files()] == [("truncated", "")]
            assert store.notes() == {}
            assert list(store.forgotten()) == list(store.damaged()) == store.verify() == []
            if write:
                (bad,) = store.bad_files()
                store.report_bad([bad])
                assert next(store.bad_files()).since  # the first that is known
                store.note("x", 1)
                store.remove(["b/caf\udce9.jpg"])
                assert next(store.forgotten()).tags == {"good"}


def test_verify_finds_damage(folder: Path) -> None:
    with sqlite3.connect(folder / "index.sqlite") as connection:
        connection.execute("UPDATE vectors SET vector = zeroblob(64) WHERE slot = 7")
        connection.execute("UPDATE images SET sha256 = zeroblob(32) WHERE slot = 8")
        connection.execute("DELETE FROM vectors WHERE slot = 9")
        connection.execute("DELETE FROM images WHERE slot = 10")
    connection.close()
    with open_store(str(folder)) as store:
        problems = "\n".join(store.verify())
    for expected in ("0/7.jpg: the vector", "0/8.jpg: the id", "0/9.jpg: the vector", "row 10 belongs", "259 images"):
        assert expected in problems


def test_compacting_gives_space_back(tmp_path: Path) -> None:
    model, database = Model(), tmp_path / "index" / "index.sqlite"
    with create_store(str(tmp_path / "index"), META) as store:
        for target in (store, model):
            target.add([record(f"{i}.jpg") for i in range(4000)], random_vectors(4000))
    before = database.stat().st_size
    with open_store(str(tmp_path / "index"), write=True) as store:
        for target in (store, model):
            target.remove([f"{i}.jpg" for i in range(4000) if i % 8])
        store.compact()
        assert database.stat().st_size < before / 2
        (file,) = cache_files(store.folder, "rows-*")
        assert file.stat().st_size == 4 + 500 * (16 + META.dim * 4)
        assert_same_search(store, model, random_vectors(2, seed=3), 10)
        assert store.verify() == []


def test_a_reader_goes_on_over_compaction(folder: Path, model: Model) -> None:
    with open_store(str(folder)) as reader, open_store(str(folder), write=True) as store:
        assert_same_search(reader, model, random_vectors(2), 5)
        store.compact()
        assert len(cache_files(folder, "rows-*")) == 1
        assert_same_search(reader, model, random_vectors(2), 5)
        for target in (store, model):
            target.add([record("new.jpg")], random_vectors(1, seed=60))
        assert_same_search(reader, model, random_vectors(2, seed=60), 5)


# approximate search


@pytest.fixture(scope="module")
def clustered() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(100, 64))
    vectors = unit(centres[rng.integers(0, 100, 8_000)] + 0.6 * rng.normal(size=(8_000, 64)))
    queries = unit(vectors[rng.integers(0, 8_000, 100)] + 0.3 * rng.normal(size=(100, 64)) / 8)
    return vectors, queries


@pytest.fixture(scope="module")
def large(
    tmp_path_factory: pytest.TempPathFactory, clustered: tuple[np.ndarray, np.ndarray]
) -> Iterator[EmbeddedStore]:
    """7000 vectors in the graph, 1000 added after it was built, 400 of them all removed."""
    meta = StoreMeta("test", {}, "c" * 64, "d" * 64, 64)
    vectors, _ = clustered
    with create_store(str(tmp_path_factory.mktemp("large") / "index"), meta) as store:
        records = [record(f"{'even' if i % 2 else 'odd'}/{i}.jpg") for i in range(8_000)]
        store.add(records[:7_000], vectors[:7_000])
        store.build_graph()
        store.add(records[7_000:], vectors[7_000:])
        store.remove([r.path for r in records[::20]])
        yield store


def recall(store: EmbeddedStore, queries: np.ndarray, where: Filter | None = None) -> float:
    exact = store.search(queries, 100, where=where, exact=True)
    found = store.search(queries, 100, where=where, exact=False)
    assert found.scores.shape == exact.scores.shape
    assert (np.diff(found.scores, axis=1) <= 0).all()
    return float(np.mean([len(set(a) & set(b)) / 100 for a, b in zip(exact.ids, found.ids, strict=True)]))


@pytest.mark.parametrize("where", [None, Filter("even"), Filter("odd")], ids=str)
def test_graph_finds_what_a_scan_finds(
    large: EmbeddedStore, clustered: tuple[np.ndarray, np.ndarray], where: Filter
) -> None:
    queries = clustered[1]
    result = large.search(queries, 100, where=where, exact=True)
    live = np.array([i for i in range(8_000) if i % 20 and (where is None or (i % 2 == 1) == (where.prefix == "even"))])
    expected = -np.sort(-(queries @ clustered[0][live].T), axis=1)[:, :100]
    np.testing.assert_allclose(result.scores, expected, atol=1e-6)
    assert recall(large, queries, where) >= 0.95


def test_graph_is_extended_shared_and_survives(large: EmbeddedStore, clustered: tuple[np.ndarray, np.ndarray]) -> None:
    with open_store(str(large.folder)) as reader:
        assert recall(reader, clustered[1]) >= 0.95
        large.build_graph()
        assert [path.name.split("-")[2] for path in cache_files(large.folder, "graph-*")] == ["8000.hnsw"]
        assert recall(reader, clustered[1]) >= 0.95
        large.build_graph()
    assert large.verify() == []


DAMAGES = {
    "missing": Path.unlink,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_graph_is_done_without_and_built_again(
    folder: Path, model: Model, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(str(folder), write=True) as store:
        store.build_graph()
    DAMAGES[damage](cache_files(folder, "graph-*")[0])
    with open_store(str(folder), write=True) as store:
        with caplog.at_level(logging.WARNING, "cooc"):
            ids = store.search(random_vectors(1), 10, exact=False).ids[0]
        assert "done without" in caplog.text
        assert ids == [name for _, name in model.search(random_vectors(1)[0], 10)]
        store.build_graph()
    with open_store(str(folder)) as store:
        assert store.search(random_vectors(1), 10, exact=False).ids[0] == ids


def test_size_decides_when_nobody_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "APPROXIMATE_FROM", 200)
    with open_store(str(folder), write=True) as store:
        store.compact()
        assert cache_files(folder, "graph-*")
        assert store.search(random_vectors(1), 5).ids == store.search(random_vectors(1), 5, exact=True).ids
        store.remove([f"2/{i}.jpg" for i in range(3)])
        store.compact()  # too few to be worth another graph
        assert cache_files(folder, "graph-*-260.hnsw")
        store.remove([f"0/{i}.jpg" for i in range(50)])
        store.compact()
        assert cache_files(folder, "graph-*-207.hnsw")
        assert store.verify() == []


# kill -9

KILLED = """
import os, signal, sys
from cooc.index.embedded import cache, rowfile
from cooc.index.embedded.store import open_store
from tests.index.test_store import random_vectors, record

def work(folder, moment, where):
    store = open_store(folder, write=True)
    left = [moment]
    def tick(last=lambda: None):
        left[0] -= 1
        if left[0] < 0:
            last()
            os.kill(os.getpid(), signal.SIGKILL)
    cache.FILED_FROM = 1
    if where == "sql":
        store._writer.set_progress_handler(tick, 50)
    else:
        real = rowfile.write_whole
        def by_half(path, data):
            tick(lambda: path.with_name(f".{path.name}.tmp").write_bytes(data[: len(data) // 2]))
            real(path, data)
        rowfile.write_whole = by_half
    for batch in range(1, 100):
        store.add([record(f"{batch}/{i}.jpg") for i in range(20)], random_vectors(20, seed=batch))
        store.remove([f"{batch - 1}/{i}.jpg" for i in range(0, 20, 4)])
        len(store) and store.search(random_vectors(1), 5)
        if batch % 5 == 0:
            store.compact()
    os.kill(os.getpid(), signal.SIGKILL)

for number, (where, moment) in enumerate(eval(sys.argv[2])):
    if os.fork() == 0:
        work(f"{sys.argv[1]}/{number}", moment, where)
    assert os.wait()[1] == signal.SIGKILL
"""


def test_kill_9_leaves_whole_batches(tmp_path: Path) -> None:
    """Killed inside SQL statements, and in the middle of writes to the cache; the same moments in every run."""
    rng = np.random.default_rng(3)
    moments = [("sql", int(m)) for m in rng.integers(0, 800, 8)]
    moments += [("cache", int(m)) for m in rng.integers(0, 40, 8)]
    for number in range(len(moments)):
        create_store(str(tmp_path / str(number)), META).close()
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), repr(moments)], cwd=ROOT, check=True)
    sizes = set()
    for number in range(len(moments)):
        with open_store(str(tmp_path / str(number)), write=True) as store:
            assert store.verify() == []
            paths = {r.path for r in store.records()}
            sizes.add(len(paths))
            last = max([int(path.split("/")[0]) for path in paths], default=0)
            whole = {f"{batch}/{i}.jpg" for batch in range(1, last + 1) for i in range(20)}
            removed = {f"{batch}/{i}.jpg" for batch in range(1, last) for i in range(0, 20, 4)}
            undone = {path for path in removed if path.startswith(f"{last - 1}/")}
            assert paths in (whole - removed, whole - (removed - undone))
            model = Model()
            model.add(list(store.records()), store.vectors([r.id for r in store.records()]))
            assert_same_search(store, model, random_vectors(2, seed=8), 30)
            store.add([record("after.jpg")], random_vectors(1, seed=9))
            store.compact()
            assert store.verify() == []
    assert len(sizes) > 5  # the moments were different ones


def test_forked_workers_do_not_keep_the_lock(folder: Path) -> None:
    script = (
        "import os, sys\nfrom cooc.index.embedded.store import open_store\n"
        "store = open_store(sys.argv[1], write=True)\n"
        "if os.fork():\n    sys.stdin.readline()\n"
        "os.kill(os.getppid(), 9)\nprint(os.getpid(), flush=True)\nsys.stdin.readline()\nos._exit(0)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.wait()
        os.kill(worker, 0)  # it lives
        open_store(str(folder), write=True).close()
        process.communicate("end\n")


# disks


def test_full_disk_loses_only_the_last_batch(folder: Path, model: Model) -> None:
    with open_store(str(folder), write=True) as store:
        assert store._writer is not None
        (pages,) = store._writer.execute("PRAGMA page_count").fetchone()
        store._writer.execute(f"PRAGMA max_page_count = {pages + 5}")
        with pytest.raises(StoreError, match=r"disk is full.*free some space"):
            store.add([record(f"new/{i}.jpg") for i in range(5000)], random_vectors(5000, seed=70))
        assert_same_search(store, model, random_vectors(2), 5)
        assert len(store) == 260
        store._writer.execute("PRAGMA max_page_count = 1000000")
        for target in (store, model):
            target.add([record("new/0.jpg")], random_vectors(1, seed=70))
        assert_same_search(store, model, random_vectors(2), 5)
        assert store.verify() == []


AS_NOBODY = """
import os, sys
from cooc.errors import StoreError
from cooc.index.embedded.store import open_store
from tests.index.test_store import random_vectors
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
with open_store(sys.argv[1]) as store:
    assert store.verify() == []
    print(len(store), len(store.search(random_vectors(1), 1000).ids[0]))
try:
    open_store(sys.argv[1], write=True)
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize("cache", [True, False])
def test_read_only_folder(folder: Path, cache: bool) -> None:
    if not cache:
        shutil.rmtree(folder / "cache")
    with tempfile.TemporaryDirectory() as place:  # nobody may enter pytest's own
        Path(place).chmod(0o755)
        copy = Path(shutil.copytree(folder, Path(place) / "index"))
        for entry in [copy, *copy.rglob("*")]:
            entry.chmod(0o555 if entry.is_dir() else 0o444)
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", AS_NOBODY, str(copy)], cwd=ROOT, capture_output=True, text=True
        )
        copy.chmod(0o755)
    assert done.stdout.startswith("260 260\nThe index in"), done.stderr
    assert "read and written" in done.stdout


# what is not an index


def test_not_an_index(tmp_path: Path) -> None:
    for write in (False, True):
        with pytest.raises(StoreMissingError, match="cooc index"):
            open_store(str(tmp_path), write=write)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="could not be used"):
        create_store(str(tmp_path / "file" / "index"), META)


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()


NO_INDEX: dict[str, tuple[Callable[[Path], object], type[StoreError], str]] = {
    "emptied": (lambda path: path.write_bytes(b""), StoreDamagedError, "is empty.*cooc restore SNAPSHOT"),
    "zeros": (lambda path: path.write_bytes(bytes(50_000)), StoreDamagedError, "not a database.*cooc restore SNAPSHOT"),
    "text": (lambda path: path.write_text("x" * 20_000), StoreDamagedError, "not a database.*cooc restore SNAPSHOT"),
    "of another program": (foreign, StoreError, "another program's database.*--index"),
}


@pytest.mark.parametrize("kind", NO_INDEX)
def test_whoever_opens_it_is_told_the_same(kind: str, tmp_path: Path) -> None:
    """To read, to write or to make one: none takes it for an index, for a free place, or changes it."""
    make, error, message = NO_INDEX[kind]
    make(tmp_path / "index.sqlite")
    before = (tmp_path / "index.sqlite").read_bytes()
    said = set()
    for use in (
        lambda: open_store(str(tmp_path)),
        lambda: open_store(str(tmp_path), write=True),
        lambda: create_store(str(tmp_path), META),
    ):
        with pytest.raises(error, match=message) as caught:
            use()
        assert type(caught.value) is error
        said.add(str(caught.value))
    assert len(said) == 1
    assert (tmp_path / "index.sqlite").read_bytes() == before


def test_newer_format(folder: Path) -> None:
    with sqlite3.connect(folder / "index.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match=r"format 99.*upgrade cooc"):
        open_store(str(folder))


@pytest.mark.parametrize("write", [False, True])
def test_damaged_database(folder: Path, write: bool) -> None:
    path = folder / "index.sqlite"
    whole = path.read_bytes()
    path.write_bytes(bytes(16) + whole[16:])
    with pytest.raises(StoreDamagedError, match="snapshot"):
        open_store(str(folder), write=write)
    for page in range(1, len(whole) // 16384):  # one page after another; each is found, by whatever uses it first
        path.write_bytes(whole[: page * 16384] + b"\xee" * 16384 + whole[(page + 1) * 16384 :])
        try:
            with open_store(str(folder), write=write) as store:
                problems = store.verify()
        except StoreDamagedError as error:
            problems = [str(error)]
        assert problems
    path.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(StoreDamagedError, match="snapshot"):
        use(folder, write)


def use(folder: Path, write: bool) -> None:
    with open_store(str(folder), write=write) as store:
        store.search(random_vectors(1), 5)
        list(store.records())


def test_two_stores_in_one_process(folder: Path) -> None:
    with open_store(str(folder), write=True), pytest.raises(StoreLockedError, match=str(os.getpid())):
        open_store(str(folder), write=True)
    open_store(str(folder), write=True).close()


def test_an_interrupted_creation_leaves_no_index(tmp_path: Path) -> None:
    (tmp_path / "index.new").write_bytes(b"half")
    with create_store(str(tmp_path), META) as store:
        assert len(store) == 0


@pytest.mark.parametrize("many", [1, 10, 5000])
def test_lists_of_a_time_are_the_same_by_any_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr("cooc.index.embedded.rows.MANY", many)
    records = [record(f"{i % 3}/{i:03}.jpg", taken=f"20{10 + i % 7}-01-01" if i % 5 else None) for i in range(200)]
    with create_store(str(tmp_path / "index"), META) as store:
        store.add(records, random_vectors(200))
        for where in (
            Filter(None, "2012"),
            Filter(None, None, "2013"),
            Filter("1", "2012", "2014"),
            Filter("1"),
            Filter(None, "2030"),
        ):
            expected = sorted((r for r in records if where.matches(r)), key=lambda r: r.path)
            assert list(store.records(where)) == expected
            pages, after = list[str](), None
            while page := list(store.records(where, after=after, limit=7)):
                pages += [r.path for r in page]
                after = page[-1].path
            assert pages == [r.path for r in expected]


def test_a_filter_that_is_remembered_follows_changes(tmp_path: Path) -> None:
    model, where = Model(), Filter("a")
    with create_store(str(tmp_path / "index"), META) as store:
        for batch in range(3):
            for target in (store, model):
                target.add(
                    [record(f"{name}/{batch}-{i}.jpg") for name in "ab" for i in range(20)], random_vectors(40, batch)
                )
                target.remove([f"a/{batch}-3.jpg"])
            for _ in range(2):
                assert_same_search(store, model, random_vectors(2, seed=60), 10, where=where)
        chosen = [r.id for r in store.records(where, limit=4)]
        tagged = Filter("a", tags=frozenset({"good"}))
        for count in (1, 4):
            store.tag(chosen[:count], add=["good"])
            assert len(store.search(random_vectors(1), 10, where=tagged).ids[0]) == count
        for n in range(100):
            store.search(random_vectors(1), 5, where=Filter(f"x{n}"))
        assert len(store.search(random_vectors(1), 100, where=where).ids[0]) == 57
