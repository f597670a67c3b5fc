"""What every engine must do. To try another one, add it to ENGINES in tests/servers.py."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cooc.errors import (
    InputError,
    StoreError,
    StoreLockedError,
    StoreMismatchError,
    StoreMissingError,
    UnknownNameError,
    VectorDamagedError,
)
from cooc.index import create_store, open_store, without_password
from cooc.index.records import BadFile, Filter, Forgotten, Record, StoreMeta, check_same
from cooc.index.store import Store, Tally, intact
from tests import servers
from tests.reference.store import Model
from tests.servers import ENGINES, IN_ONE_PROCESS, SERVERS

DIM = 16
META = StoreMeta(
    "test-recipe", {"pooling": "sum", "radius": 4}, "c" * 64, "d" * 64, DIM, root="photos", cooc_version="0"
)


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def random_vectors(count: int, seed: int = 0, dim: int = DIM) -> np.ndarray:
    return unit(np.random.default_rng(seed).normal(size=(count, dim)))


def record(path: str, content: str | None = None, **fields: object) -> Record:
    digest = hashlib.sha256((content or path).encode("utf-8", "surrogateescape")).hexdigest()
    return replace(Record(path, 100, 1_700_000_000_000_000_001, digest, 640, 480), **fields)


@pytest.fixture(params=sorted(ENGINES))
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    engine = servers.engine(request.param)
    yield engine.address(tmp_path, DIM)
    engine.drop(tmp_path)


@pytest.fixture
def store(address: str) -> Iterator[Store]:
    with create_store(address, META) as opened:
        yield opened


@pytest.fixture
def filled(store: Store) -> tuple[Store, Model]:
    return fill(store)


@pytest.fixture(scope="module", params=sorted(IN_ONE_PROCESS))
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Model]]:
    """A filled one for tests that change nothing: on a server, making an index takes longer than most of them."""
    engine, folder = servers.engine(request.param), tmp_path_factory.mktemp("shared")
    with create_store(engine.address(folder, DIM), META) as opened:
        yield fill(opened)
    engine.drop(folder)


def fill(store: Store) -> tuple[Store, Model]:
    model = Model()
    records = [
        record(
            f"{'holiday' if i % 3 else 'home'}/{2019 + i % 4}/{i:03}.jpg",
            taken=None if i % 7 == 0 else f"{2019 + i % 4}-{1 + i % 12:02}-{1 + i % 28:02}" + "T12:30:00" * (i % 2),
            tags=frozenset({"good"} if i % 5 == 0 else ()) | frozenset({"family"} if i % 2 else ()),
        )
        for i in range(150)
    ]
    for target in (store, model):
        target.add(records, random_vectors(150))
    return store, model


def assert_same_search(store: Store, model: Model, queries: np.ndarray, k: int, where: Filter | None = None) -> None:
    scores, ids = store.search(queries, k, where=where, exact=True)
    assert scores.dtype == np.float32
    assert len(ids) == len(queries)
    for query, row, names in zip(queries, scores, ids, strict=True):
        expected = model.search(query, k, where)
        assert names == [name for _, name in expected]
        np.testing.assert_allclose(row, [score for score, _ in expected], rtol=0, atol=1e-5)


def test_empty(store: Store) -> None:
    assert len(store) == 0
    scores, ids = store.search(random_vectors(3), 5)
    assert scores.shape == (3, 0)
    assert ids == [[], [], []]
    assert list(store.records()) == list(store.bad_files()) == store.verify() == []
    assert store.remove(["nothing.jpg"]) == store.touch({}) == store.rename({}) == store.clear_bad([]) == 0
    store.add([], np.empty((0, DIM), np.float32))
    store.compact()
    assert len(store) == 0


@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize("k", [1, 10, 1000])
def test_search_is_the_matrix_product(shared: tuple[Store, Model], count: int, k: int) -> None:
    assert_same_search(*shared, random_vectors(count, seed=1), k)


def test_a_score_does_not_depend_on_its_batch(shared: tuple[Store, Model]) -> None:
    queries = random_vectors(30, seed=1)
    together = shared[0].search(queries, 7)
    alone = [shared[0].search(queries[i : i + 1], 7) for i in range(30)]
    np.testing.assert_array_equal(together.scores, np.concatenate([result.scores for result in alone]))
    assert together.ids == [result.ids[0] for result in alone]


@pytest.mark.parametrize("count", [1, 6])
def test_copies_of_a_picture_are_ordered_by_id(store: Store, count: int) -> None:
    vectors = random_vectors(60)
    vectors[:50] = vectors[0]
    model, records = Model(), [record(f"{i}.jpg") for i in range(60)]
    for target in (store, model):
        target.add(records, vectors)
    queries = np.repeat(vectors[:1], count, axis=0)
    for k in (1, 3, 49, 50, 55):
        assert_same_search(store, model, queries, k)


FILTERS = [
    Filter(),
    Filter(prefix="home"),
    Filter(prefix="/home/2019/"),
    Filter(prefix="hom"),
    Filter(prefix="."),
    Filter(taken_from="2020"),
    Filter(taken_to="2020"),
    Filter(taken_from="2020-05", taken_to="2021-03-17"),
    Filter(taken_to="2021-06-10T12:30"),
    Filter(taken_from="2022-01-01T12:30:01"),
    Filter(tags=frozenset({"good"})),
    Filter(tags=frozenset({"good", "family"})),
    Filter(tags=frozenset({"unknown"})),
    Filter("holiday", "2019-02", "2021", frozenset({"family"})),
]


@pytest.mark.parametrize("where", FILTERS, ids=range(len(FILTERS)))
@pytest.mark.parametrize("count", [1, 8])
def test_filters(shared: tuple[Store, Model], where: Filter, count: int) -> None:
    store, model = shared
    assert list(store.records(where)) == model.records(where)
    for k in (1, 10, 200):
        assert_same_search(store, model, random_vectors(count, seed=2), k, where)


def test_filters_select_something_each() -> None:
    taken = record("home/2019/1.jpg", taken="2019-12-31T23:59:59", tags=frozenset({"a"}))
    assert Filter("home", "2019-12-31", "2019-12-31", frozenset({"a"})).matches(taken)
    assert Filter(taken_to="2019").matches(taken)
    assert not Filter(taken_from="2020").matches(taken)
    assert not Filter(taken_to="2019-12-30").matches(taken)
    assert not Filter(taken_from="1900").matches(record("a.jpg"))
    assert not Filter(prefix="home/2019/1.jpg").matches(taken)


def test_records_in_pages(filled: tuple[Store, Model]) -> None:
    store, model = filled
    everything = model.records()
    assert list(store.records()) == everything
    assert list(store.records(limit=7)) == everything[:7]
    assert list(store.records(after=everything[6].path, limit=7)) == everything[7:14]
    assert list(store.records(Filter("home"), after=everything[-2].path)) == everything[-1:]
    assert list(store.records(limit=0)) == []
    for target in (store, model):
        target.remove([one.path for one in everything[:40]])
    left = model.records()
    assert store.tally() == Tally(
        Counter(one.path.rpartition("/")[0] for one in left),
        Counter((one.taken or "")[:7] for one in left),
        Counter(tag for one in left for tag in one.tags),
    )


def test_records_stay_readable_while_they_change(store: Store) -> None:
    store.add([record(f"{i:05}.jpg") for i in range(2500)], random_vectors(2500))
    listing = store.records()
    first = next(listing)
    store.remove([f"{i:05}.jpg" for i in range(2000, 2500)])
    assert [first, *listing] == list(store.records())


def test_questions_by_id_path_and_content(filled: tuple[Store, Model]) -> None:
    store, model = filled
    records = model.records()
    ids = [r.id for r in records]
    assert store.get([*ids[::-1], "0" * 32]) == [*records[::-1], None]
    assert store.find([records[3].path, "nowhere.jpg", records[3].path]) == [records[3], None, records[3]]
    np.testing.assert_array_equal(
        store.vectors([ids[5], ids[2], ids[5]]), [model.images[records[i].path][1] for i in (5, 2, 5)]
    )
    assert store.vectors([]).shape == (0, DIM)
    copy = record("copy.jpg", content=records[0].path)
    store.add([copy], random_vectors(1))
    assert store.by_sha256(records[0].sha256) == [copy, records[0]]
    assert store.by_sha256("0" * 64) == []
    with pytest.raises(InputError, match="search again"):
        store.vectors(["0" * 32])
    with pytest.raises(InputError, match="no id"):
        store.get(["not hex"])


def test_adding_a_path_again_replaces_it_and_keeps_its_tags(store: Store) -> None:
    vectors = random_vectors(3)
    store.add([record("a.jpg", tags=frozenset({"mine"})), record("b.jpg")], vectors[:2])
    store.add([record("a.jpg", "changed", size=7), record("a.jpg", "again", size=8)], vectors[[0, 2]])
    assert len(store) == 2
    (found,) = store.find(["a.jpg"])
    assert found == record("a.jpg", "again", size=8, tags=frozenset({"mine"}))
    np.testing.assert_array_equal(store.vectors([found.id]), vectors[2:])
    assert store.get([record("a.jpg").id]) == [None]


def test_moved_files_keep_vector_and_tags(store: Store) -> None:
    vectors = random_vectors(4)
    store.add([record(f"{name}.jpg", tags=frozenset({name})) for name in "abcd"], vectors)
    assert store.rename({"a.jpg": "b.jpg", "b.jpg": "a.jpg", "c.jpg": "d.jpg", "x.jpg": "y.jpg", "e": "e"}) == 3
    assert len(store) == 3
    found = list(store.records())
    assert [(r.path, r.sha256, r.tags) for r in found] == [
        ("a.jpg", record("b.jpg").sha256, {"b"}),
        ("b.jpg", record("a.jpg").sha256, {"a"}),
        ("d.jpg", record("c.jpg").sha256, {"c"}),
    ]
    np.testing.assert_array_equal(store.vectors([r.id for r in found]), vectors[[1, 0, 2]])
    assert store.search(vectors[:3], 1).ids == [[found[1].id], [found[0].id], [found[2].id]]
    with pytest.raises(InputError, match="one path"):
        store.rename({"a.jpg": "z.jpg", "b.jpg": "z.jpg"})
    assert store.verify() == []


def test_tags_and_times(store: Store) -> None:
    store.add([record("a.jpg"), record("b.jpg")], random_vectors(2))
    ids = [r.id for r in store.records()]
    assert store.tag(ids, add={"x", "y"}) == 2
    assert store.tag([ids[0], "0" * 32], add=["z", "x"], remove=["y"]) == 1
    assert [r.tags for r in store.records()] == [{"x", "z"}, {"x", "y"}]
    assert store.touch({"a.jpg": 5, "none.jpg": 6}) == 1
    assert [r.mtime_ns for r in store.records()] == [5, record("b.jpg").mtime_ns]
    assert store.remove(["a.jpg"]) == 1
    store.add([record("a.jpg", "another picture")], random_vectors(1))
    assert store.find(["a.jpg"]) == [record("a.jpg", "another picture")]
    for wrong in ("", "line\nbreak", "\udcff"):
        with pytest.raises(InputError, match="no tag"):
            store.tag(ids, add=[wrong])


def test_bad_files(store: Store) -> None:
    files = [BadFile(f"{i}.jpg", i, 2 * i, "truncated: é\n", f"2020-01-0{i + 1}T00:00:00+00:00") for i in range(3)]
    store.report_bad(files)
    store.report_bad([replace(files[1], reason="still", since="2021-01-01T00:00:00+00:00")])
    assert list(store.bad_files()) == [files[0], replace(files[1], reason="still"), files[2]]
    assert store.clear_bad(["0.jpg", "none.jpg"]) == 1
    store.add([record("1.jpg")], random_vectors(1))
    assert list(store.bad_files()) == [files[2]]


def test_since_when_a_file_is_bad(store: Store) -> None:
    """The first report's time, kept over other reasons; a file that was good in between begins again."""
    before = datetime.now(UTC).replace(microsecond=0)
    store.report_bad([BadFile("a.jpg", 1, 2, "truncated"), BadFile("b.jpg", 1, 2, "truncated", "2020-01-01T00:00:00")])
    first, second = store.bad_files()
    assert before <= datetime.fromisoformat(first.since) <= datetime.now(UTC)
    assert second.since == "2020-01-01T00:00:00"
    store.report_bad([BadFile("b.jpg", 3, 4, "no memory")])
    assert list(store.bad_files()) == [first, BadFile("b.jpg", 3, 4, "no memory", "2020-01-01T00:00:00")]
    store.clear_bad(["b.jpg"])
    store.report_bad([BadFile("b.jpg", 3, 4, "no memory")])
    assert before <= datetime.fromisoformat(list(store.bad_files())[1].since)


def test_notes(address: str) -> None:
    with create_store(address, META) as store:
        assert store.notes() == {}
        store.note("away", {"photos/disk2": "2024-01-01", "ü": None})
        store.note("curve", [1, 2.5, "x", True])
        store.note("gone", "soon")
        store.note("gone", None)
        store.note("never", None)
        store.note("curve", [])
    with open_store(address) as store:
        assert store.notes() == {"away": {"photos/disk2": "2024-01-01", "ü": None}, "curve": []}
        with pytest.raises(StoreError, match="write=True"):
            store.note("more", 1)


# tags of what was removed


def test_tags_come_back_with_the_content(address: str) -> None:
    """An unmounted disk whose pictures come back, to their paths or to others."""
    pictures = [record(f"disk/{i}.jpg", f"picture {i}", tags=frozenset({f"tag {i}"})) for i in range(3)]
    with create_store(address, META) as store:
        store.add([*pictures, record("disk/plain.jpg")], random_vectors(4))
        store.remove([picture.path for picture in pictures] + ["disk/plain.jpg"])
        assert [(one.sha256, one.path, one.tags) for one in store.forgotten()] == sorted(
            (picture.sha256, picture.path, picture.tags) for picture in pictures
        )
    with open_store(address, write=True) as store:
        store.add([replace(pictures[0], tags=frozenset())], random_vectors(1))
        store.add([record("elsewhere.jpg", "picture 1", tags=frozenset({"own"}))], random_vectors(1))
        assert [r.tags for r in store.records()] == [{"tag 0"}, {"own", "tag 1"}]
        assert [one.path for one in store.forgotten()] == ["disk/2.jpg"]
        store.add([record("another.jpg", "picture 1")], random_vectors(1))
        assert store.find(["another.jpg"])[0] == record("another.jpg", "picture 1")


def test_copies_get_their_own_tags_back(store: Store) -> None:
    copies = [record(f"{name}.jpg", "same", tags=frozenset({name})) for name in "abc"]
    store.add(copies, random_vectors(3))
    store.remove([copy.path for copy in copies])
    store.add([record("new.jpg", "same"), record("a.jpg", "same"), record("new2.jpg", "same")], random_vectors(3))
    store.add([record("b.jpg", "same")], random_vectors(1))
    assert {r.path: r.tags for r in store.records()} == {
        "a.jpg": {"a"},
        "b.jpg": set(),
        "new.jpg": {"b", "c"},
        "new2.jpg": {"b", "c"},
    }
    assert list(store.forgotten()) == []


def test_what_a_moved_file_overwrites_is_remembered(store: Store) -> None:
    store.add([record("a.jpg", tags=frozenset("a")), record("b.jpg", tags=frozenset("b"))], random_vectors(2))
    store.rename({"a.jpg": "b.jpg"})
    store.add([record("c.jpg", "b.jpg")], random_vectors(1))
    assert [(r.path, r.tags) for r in store.records()] == [("b.jpg", {"a"}), ("c.jpg", {"b"})]


def test_tags_are_forgotten_in_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    long_ago = (datetime.now(UTC) - timedelta(days=91)).isoformat(timespec="seconds")
    recently = (datetime.now(UTC) - timedelta(days=89)).isoformat(timespec="seconds")
    kept = [
        Forgotten(record(name).sha256, name, frozenset({"x", "ü"}), time)
        for name, time in (("caf\udce9.jpg", long_ago), ("b.jpg", recently))
    ]
    store.remember(kept)
    assert set(store.forgotten()) == set(kept)
    store.compact()
    assert list(store.forgotten()) == kept[1:]


# many blocks as one change


def test_all_or_nothing(filled: tuple[Store, Model]) -> None:
    store, model = filled
    before = list(store.records())
    blocks = [([record(f"{n}/{i}.jpg") for i in range(50)], random_vectors(50, seed=n)) for n in range(3)]
    spoiled = [*blocks, ([record("bad.jpg")], np.zeros((1, DIM), np.float32))]
    with pytest.raises(InputError, match="L2 norm"):
        store.add_all(spoiled)
    assert list(store.records()) == before
    assert_same_search(store, model, random_vectors(3, seed=4), 10)
    assert store.verify() == []
    assert store.add_all(blocks) == 150
    for records, vectors in blocks:
        model.add(records, vectors)
    assert list(store.records()) == model.records()
    assert_same_search(store, model, random_vectors(3, seed=4), 10)
    assert store.add_all([]) == 0


# damage


def flip(*bits: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        array = bytearray(data)
        for bit in bits:
            array[bit // 8] ^= 1 << bit % 8
        return bytes(array)

    return change


DAMAGE = {"one bit": flip(30), "a small one": flip(32), "length 1 still": lambda data: data[4:] + data[:4]}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", sorted(IN_ONE_PROCESS))
def test_a_damaged_vector_is_never_given_out(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, model = servers.engine(name), Model()
    address = engine.address(tmp_path, DIM)
    with create_store(address, META) as store:
        fill(store)
        fill(model)
        assert list(store.damaged()) == []
    harmed = [model.records()[i] for i in (3, 60)]
    for image in harmed:
        engine.harm(tmp_path, image, DAMAGE[kind])
    whole = Model()
    whole.images = {path: image for path, image in model.images.items() if path not in {r.path for r in harmed}}
    with open_store(address, write=True) as store, caplog.at_level(logging.WARNING, "cooc"):
        assert list(store.damaged()) == [image.path for image in harmed]
        assert len(store) == 150
        assert_same_search(store, whole, random_vectors(3, seed=4), 200)
        assert_same_search(store, whole, random_vectors(3, seed=4), 20, Filter("home"))
        assert len([entry for entry in caplog.records if "damaged" in entry.message]) == 1
        ids = [image.id for image in model.records()]
        with pytest.raises(VectorDamagedError, match=harmed[0].path) as caught:
            store.vectors([ids[2], harmed[0].id, ids[5]])
        assert caught.value.ids == {harmed[0].id}
        kept, vectors = intact(store, ids)
        assert kept == [image.id for image in whole.records()]
        np.testing.assert_array_equal(vectors, [whole.images[r.path][1] for r in whole.records()])
        problems = store.verify()
        assert len(problems) == 2
        assert harmed[0].path in problems[0]
        assert "cooc index" in problems[0]
        store.add(harmed, np.stack([model.images[r.path][1] for r in harmed]))
        assert list(store.damaged()) == store.verify() == []
        assert_same_search(store, model, random_vectors(3, seed=4), 200)


STRANGE = ["caf\udce9/\udcff.jpg", "new\nline.jpg", "spaß 🎈.jpg", "-rf *.jpg", "a\\b'\";--.jpg", "\ufffd.jpg"]


def test_any_name_that_a_file_can_have(address: str) -> None:
    records = [record(name) for name in STRANGE]
    with create_store(address, META) as store:
        store.add(records, random_vectors(len(STRANGE)))
        store.report_bad([BadFile(name + ".bad", 1, 2, "reason") for name in STRANGE])
    with open_store(address, write=True) as store:
        assert {r.path for r in store.records()} == set(STRANGE)
        assert store.find(STRANGE) == records
        assert store.get([r.id for r in records]) == records
        assert [r.path for r in store.records(Filter(prefix="caf\udce9"))] == STRANGE[:1]
        assert {bad.path for bad in store.bad_files()} == {name + ".bad" for name in STRANGE}
        assert store.remove(STRANGE) == len(STRANGE)
        assert store.verify() == []


def test_ids_are_the_same_everywhere() -> None:
    assert (
        record("a/ü.jpg").id
        == hashlib.sha256(bytes.fromhex(record("a/ü.jpg").sha256) + "a/ü.jpg".encode()).hexdigest()[:32]
    )
    assert record("a.jpg", "x").id != record("b.jpg", "x").id != record("b.jpg", "y").id


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": ""},
        {"path": "a\0b"},
        {"path": "\ud800"},
        {"sha256": "xyz"},
        {"taken": "yesterday"},
        {"taken": "2020"},
        {"tags": frozenset({""})},
    ],
    ids=str,
)
def test_wrong_records_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        replace(record("a.jpg"), **wrong)


def test_wrong_filters_are_refused() -> None:
    for wrong in ("20", "2020-1", "2020-01-01 12:00", "last week"):
        with pytest.raises(InputError, match="no date"):
            Filter(taken_from=wrong)
        with pytest.raises(InputError, match="no date"):
            Filter(taken_to=wrong)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.zeros((2, DIM), np.float32), "L2 norm"),
        (random_vectors(2) * np.float32(1.01), "L2 norm"),
        (random_vectors(2) * np.float32("nan"), "L2 norm"),
        (random_vectors(2) * np.float32("inf"), "L2 norm"),
        (random_vectors(2).astype(np.float64), "float32"),
        (random_vectors(2, dim=DIM + 1), "float32"),
        (random_vectors(2)[0], "float32"),
        (random_vectors(3), "one for each"),
    ],
)
def test_wrong_vectors_change_nothing(shared: tuple[Store, Model], vectors: np.ndarray, message: str) -> None:
    store, model = shared
    with pytest.raises(InputError, match=message):
        store.add([record("a.jpg"), record("b.jpg")], vectors)
    assert len(store) == len(model.images)
    if message != "one for each":
        with pytest.raises(InputError, match=message):
            store.search(vectors, 3)
    with pytest.raises(InputError, match="k must be"):
        store.search(random_vectors(1), 0)


def test_vectors_in_any_memory_layout(store: Store) -> None:
    vectors = random_vectors(20)
    store.add([record(f"{i}.jpg") for i in range(10)], vectors[::2])
    store.add([record(f"{i}.jpg") for i in range(10, 20)], np.asfortranarray(vectors[1::2]))
    found = store.search(np.asfortranarray(vectors), 1)
    np.testing.assert_allclose(found.scores, 1, atol=1e-6)


def test_opening(address: str) -> None:
    with pytest.raises(StoreMissingError, match="cooc index"):
        open_store(address)
    with pytest.raises(StoreMissingError, match="cooc index"):
        open_store(address, write=True)
    with create_store(address, META) as store:
        store.add([record("a.jpg")], random_vectors(1))
    with pytest.raises(StoreError, match="already"):
        create_store(address, META)
    with open_store(address) as store:
        assert store.meta == META
        assert len(store) == 1
        for change in (
            lambda: store.add([record("b.jpg")], random_vectors(1)),
            lambda: store.remove(["a.jpg"]),
            store.compact,
        ):
            with pytest.raises(StoreError, match="write=True"):
                change()
    with pytest.raises(StoreError, match="closed"):
        len(store)
    store.close()
    with pytest.raises(UnknownNameError, match="kind of index"):
        open_store("nosuch://host/name")


def test_foreign_vectors_are_refused() -> None:
    check_same(META, replace(META, recipe="another name", root=None, created="now"))
    others = {"recipe": {"config_hash": "e" * 64}, "weights": {"weights_hash": "e" * 64}, "dimension": {"dim": 7}}
    for name, change in others.items():
        with pytest.raises(StoreMismatchError, match=f"{name} .* there.*cooc index photos --index NEW") as caught:
            check_same(META, replace(META, **change), "photos/.cooc")
        found = str(caught.value).partition("Use recipe")[0]
        assert [other for other in others if f"{other} " in found] == [name]


def test_what_an_index_says_of_its_vectors_is_kept(address: str) -> None:
    create_store(address, META).close()
    with open_store(address) as store:
        check_same(store.meta, META, address)
        with pytest.raises(StoreMismatchError, match="weights"):
            check_same(store.meta, replace(META, weights_hash="e" * 64), address)
        assert (store.disk_bytes() or 1) > 0


def test_snapshot(filled: tuple[Store, Model], tmp_path: Path) -> None:
    store, model = filled
    store.remove([model.records()[0].path])
    model.remove([model.records()[0].path])
    store.note("curve", {"a": 1})
    store.report_bad([BadFile("bad.jpg", 1, 2, "truncated", "2020-01-01T00:00:00+00:00")])
    copy = str(tmp_path / "copy")
    store.snapshot(copy)
    with pytest.raises(StoreError, match="exists already"):
        store.snapshot(copy)
    store.remove([r.path for r in model.records()])
    with open_store(copy, write=True) as opened:
        assert opened.meta == META
        assert list(opened.records()) == model.records()
        assert opened.verify() == []
        assert opened.notes() == {"curve": {"a": 1}}
        assert list(opened.bad_files()) == list(store.bad_files())
        assert {(f.sha256, f.path): f.tags for f in opened.forgotten()} == model.forgotten
        assert_same_search(opened, model, random_vectors(3, seed=4), 10)
        opened.remove([model.records()[0].path])
    assert len(store) == 0


def test_threads_share_a_store(filled: tuple[Store, Model]) -> None:
    store, model = filled
    queries = random_vectors(40, seed=5)
    expected = [[name for _, name in model.search(query, 5)] for query in queries]

    def work(i: int) -> list[str]:
        if i % 8 == 0:
            store.touch({model.records()[i].path: i})
        return store.search(queries[i : i + 1], 5).ids[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(40))) == expected


class Changes(RuleBasedStateMachine):
    """Any history of changes leaves what the dict has after the same history."""

    engine = ""
    paths = st.sampled_from([f"{folder}/{i}.jpg" for folder in "ab" for i in range(6)])
    seeds = st.integers(0, 5)  # few: so that vectors and contents repeat

    @initialize()
    def create(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.address = servers.engine(self.engine).address(self.folder, DIM)
        if self.engine == "milvus":
            self.address += f"&features={self.folder / 'features'}"
        self.store, self.model = create_store(self.address, replace(META, features="sift")), Model()
        self.features: dict[str, bytes] = {}  # by content

    @rule(items=st.lists(st.tuples(paths, seeds, st.booleans()), max_size=8), round=st.integers(0, 255))
    def add(self, items: list[tuple[str, int, bool]], round: int) -> None:
        records = [record(path, str(seed)) for path, seed, _ in items]
        vectors = random_vectors(6, seed=9)[[seed for _, seed, _ in items]]
        codes = [bytes([round, seed]) if features else None for _, seed, features in items]
        self.store.add(records, vectors, codes)
        self.model.add(records, vectors)
        added = {record.sha256: code for record, code in zip(records, codes, strict=True) if code is not None}
        latest = {record.path: record.sha256 for record in records}.values()  # of one path the last counts
        self.features |= {content: code for content, code in added.items() if content in latest}

    @rule(path=paths, round=st.integers(0, 255))
    def set_features(self, path: str, round: int) -> None:
        if path in self.model.images:
            image = self.model.images[path][0]
            self.store.set_features({image.id: bytes([round])})
            self.features[image.sha256] = bytes([round])

    @rule(names=st.lists(paths, max_size=5))
    def remove(self, names: list[str]) -> None:
        assert self.store.remove(names) == self.model.remove(names)

    @rule(old=st.lists(paths, max_size=4, unique=True), new=st.lists(paths, min_size=4, max_size=4, unique=True))
    def rename(self, old: list[str], new: list[str]) -> None:
        moves = dict(zip(old, new, strict=False))
        assert self.store.rename(moves) == self.model.rename(moves)

    @rule(path=paths, add=st.sets(st.sampled_from("xyz")), remove=st.sets(st.sampled_from("xyz")))
    def tag(self, path: str, add: set[str], remove: set[str]) -> None:
        if path in self.model.images:
            name = self.model.images[path][0].id
            self.store.tag([name], add, remove)
            self.model.tag([name], add, remove)

    @rule(path=paths, name=st.sampled_from("pq"), seed=seeds)
    def report(self, path: str, name: str, seed: int) -> None:
        files = [BadFile(path, seed, 1, name, f"2020-01-0{seed + 1}T00:00:00+00:00")]
        self.store.report_bad(files)
        self.model.report_bad(files)

    @rule(path=paths)
    def clear(self, path: str) -> None:
        assert self.store.clear_bad([path]) == self.model.clear_bad([path])

    @rule(name=st.sampled_from("pq"), value=st.sampled_from([None, 1, ["x"]]))
    def note(self, name: str, value: object) -> None:
        self.store.note(name, value)
        self.model.note(name, value)

    @rule()
    def compact(self) -> None:
        self.store.compact()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = open_store(self.address, write=True)

    @rule(seed=seeds, k=st.integers(1, 14), where=st.sampled_from([None, Filter("a"), Filter(tags=frozenset("x"))]))
    def search(self, seed: int, k: int, where: Filter | None) -> None:
        assert_same_search(self.store, self.model, random_vectors(6, seed=9)[seed : seed + 2], k, where)

    @invariant()
    def same_records(self) -> None:
        assert list(self.store.records()) == self.model.records()
        assert len(self.store) == len(self.model.images)
        assert list(self.store.bad_files()) == [self.model.bad[path] for path in sorted(self.model.bad)]
        assert self.store.notes() == self.model.notes
        assert {(f.sha256, f.path): f.tags for f in self.store.forgotten()} == self.model.forgotten

    @invariant()
    def same_features(self) -> None:
        records = self.model.records()
        self.features = {r.sha256: self.features[r.sha256] for r in records if r.sha256 in self.features}
        assert self.store.features([r.id for r in records]) == [self.features.get(r.sha256) for r in records]
        assert list(self.store.without_features()) == [r for r in records if r.sha256 not in self.features]
        assert self.store.count_features().bytes == sum(map(len, self.features.values()))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert self.store.verify() == []
            self.store.close()
            servers.engine(self.engine).drop(self.folder)
            shutil.rmtree(self.folder)


EXAMPLES = {"milvus": 3}  # a change and the questions after it take this one half a second


@pytest.mark.parametrize("engine", sorted(IN_ONE_PROCESS))
def test_any_history(engine: str) -> None:
    servers.engine(engine)  # skips, where it is not installed
    machine = type("EngineChanges", (Changes,), {"engine": engine})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES.get(engine, 15),
            stateful_step_count=16,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


WRITER = """
import sys
from cooc.index import open_store
from tests.index.test_store import random_vectors, record
with open_store(sys.argv[1], write=True) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for batch in range(int(sys.argv[2])):
        store.add([record(f"{batch}/{i}.jpg") for i in range(10)], random_vectors(10, seed=batch))
    print("done", flush=True)
    sys.stdin.readline()
"""


def writer(address: str, batches: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, address, str(batches)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_reading_while_another_process_writes(address: str) -> None:
    create_store(address, META).close()
    process, seen = writer(address, 30), set()
    assert process.stdin is not None
    with process, open_store(address) as store:
        process.stdin.write("go\n")
        process.stdin.flush()
        while len(store) < 300:
            ids = store.search(random_vectors(1, seed=77), 1000).ids[0]
            seen.add(len(ids))
            assert None not in store.get(ids)
            listed = [r.id for r in store.records()]
            assert set(ids) <= set(listed)
        process.communicate("end\n")
        assert all(count % 10 == 0 for count in seen)  # whole batches only (on Milvus, a batch that is one request)
        assert sorted(store.search(random_vectors(1), 1000).ids[0]) == sorted(r.id for r in store.records())
        assert store.verify() == []


def test_one_writer_at_a_time(address: str) -> None:
    create_store(address, META).close()
    process = writer(address, 1)
    with process:
        with pytest.raises(StoreLockedError, match=str(process.pid)):
            open_store(address, write=True)
        with open_store(address) as store:
            assert len(store) == 0
        process.kill()
        process.wait()
        with open_store(address, write=True) as store:
            store.add([record("a.jpg")], random_vectors(1))
            with pytest.raises(StoreLockedError):
                open_store(address, write=True)


def test_a_killed_writer_leaves_whole_batches(address: str) -> None:
    create_store(address, META).close()
    process = writer(address, 100_000)
    assert process.stdin is not None
    with process, open_store(address) as store:
        process.stdin.write("go\n")
        process.stdin.flush()
        while len(store) < 100:
            time.sleep(0.01)
        process.kill()
        process.wait()
    with open_store(address, write=True) as store:
        kept = len(store)
        assert kept >= 100
        assert kept % 10 == 0
        assert store.verify() == []
        assert {r.path for r in store.records()} == {
            f"{batch}/{i}.jpg" for batch in range(kept // 10) for i in range(10)
        }
        store.add([record("one more.jpg")], random_vectors(1))
        assert len(store) == kept + 1


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[servers.Server]:
    """One that the test may kill: it runs again afterwards."""
    running = servers.engine(request.param)
    assert isinstance(running, servers.Server)
    yield running
    if running.process.poll() is not None:
        running.start()


def test_a_server_that_comes_back_is_not_missed(server: servers.Server, tmp_path: Path) -> None:
    vectors = random_vectors(20)
    address = server.address(tmp_path, DIM).replace("timeout=10", "timeout=60")  # a busy machine starts one slowly
    with create_store(address, META) as store:
        store.add([record(f"{i}.jpg") for i in range(10)], vectors[:10])
        expected = store.search(vectors[:3], 5)
        server.kill()
        server.start()
        found = store.search(vectors[:3], 5)
        assert found.ids == expected.ids
        server.kill()
        server.start()
        store.add([record(f"{i}.jpg") for i in range(10, 20)], vectors[10:])
        assert len(store) == 20
        assert store.verify() == []


def test_a_server_that_is_gone_is_named(server: servers.Server, tmp_path: Path) -> None:
    """In the middle of searches and changes: a clear error, nothing by halves, and all goes on when it is back."""
    address, model = server.address(tmp_path, DIM), Model()
    begun, errors = threading.Barrier(3), list[StoreError]()
    with create_store(address, META) as store, open_store(address) as reader:
        store.add([record("first.jpg")], random_vectors(1))

        def work(call: Callable[[int], object]) -> int:
            begun.wait()
            for number in range(100_000):
                try:
                    call(number)
                except StoreError as error:
                    errors.append(error)
                    return number
            raise AssertionError("the server is still there")

        def add(number: int) -> None:
            records = [record(f"{number}/{i}.jpg") for i in range(10)]
            store.add(records, random_vectors(10, seed=number))
            model.add(records, random_vectors(10, seed=number))

        with ThreadPoolExecutor(2) as pool:
            searching = pool.submit(work, lambda number: reader.search(random_vectors(1, seed=number), 5))
            adding = pool.submit(work, add)
            begun.wait()
            while len(model.images) < 50:
                time.sleep(0.01)
            server.kill()
            last = adding.result()
            searching.result()
        assert len(errors) == 2
        for error in errors:
            assert without_password(address) in str(error)
            assert "not:to@be/shown" not in str(error)
        server.start()
        kept = {r.path for r in reader.records()} - {"first.jpg"}
        assert kept - set(model.images) in (set(), {f"{last}/{i}.jpg" for i in range(10)})
        assert set(model.images) <= kept
        assert reader.verify() == []
        add(last)
        assert len(store) == len(model.images) + 1
        assert store.verify() == []
