"""What is special to Milvus. What every engine must do is in test_store.py, which runs on the server as well."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pymilvus import DataType, MilvusClient, MilvusException

pytest.importorskip("milvus", reason="pip install 'cooc[dev]'")

from cooc.errors import InputError, StoreError, StoreLockedError, StoreMissingError
from cooc.index import create_store, effort, open_store
from cooc.index.milvus import MilvusStore, searching
from cooc.index.milvus import store as milvus_store
from cooc.index.milvus.rows import FORGOTTEN, of_kind
from cooc.index.milvus.searching import Structure
from cooc.index.milvus.server import WRITER, Address, Server
from cooc.index.records import BadFile, Filter, Forgotten, Record
from cooc.index.store import Store
from tests import servers
from tests.index.test_store import META, assert_same_search, random_vectors, record
from tests.milvus_server import SETTINGS, Milvus, MilvusLite, connected
from tests.reference.store import Model

FORMER = Path(__file__).parents[1] / "fixtures" / "milvus-v2.json"


@pytest.fixture
def server() -> Milvus:
    started = servers.engine("milvus")
    assert isinstance(started, Milvus)
    return started


@pytest.fixture
def remote(server: Milvus, tmp_path: Path) -> Iterator[str]:
    yield server.address(tmp_path, META.dim)
    server.drop(tmp_path)


@pytest.fixture
def opened(remote: str) -> Iterator[MilvusStore]:
    with create_store(remote, META) as created:
        assert isinstance(created, MilvusStore)
        yield created


# addresses and errors


def test_addresses() -> None:
    plain = Address.parse("milvus://host/photos")
    assert (plain.uri, plain.name, plain.database, plain.lite) == ("http://host:19530", "photos", "", False)
    full = Address.parse("milvus://me:p%40ss@host:1/base/photos?secure=true&index=hnsw&shards=4&replicas=2&timeout=5")
    assert (full.uri, full.database, full.token) == ("https://host:1", "base", "me:p@ss")
    assert (full.index, full.shards, full.replicas, full.timeout) == ("hnsw", 4, 2, 5.0)
    assert "p%40ss" not in full.shown
    lite = Address.parse("milvus:///a/b.db/photos")
    assert (lite.uri, lite.name, lite.lite) == ("/a/b.db", "photos", True)


@pytest.mark.parametrize(
    "wrong",
    [
        "milvus://host",
        "milvus://host/no-dash",
        "milvus://host:port/name",
        "milvus://host/name?index=best",
        "milvus://host/name?unknown=1",
        "milvus://host/name?timeout=soon",
        "milvus:///a/b/photos",
        "milvus://me:secret@host/1",
    ],
)
def test_wrong_addresses(wrong: str) -> None:
    with pytest.raises(InputError, match="write milvus://host:19530/name") as caught:
        Address.parse(wrong)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1/photos.*see that the server runs") as caught:
        open_store("milvus://me:secret@127.0.0.1:1/photos?timeout=1")
    assert "secret" not in str(caught.value)


def test_a_server_that_asks_for_a_password(tmp_path: Path) -> None:
    """A server of its own: the one of the other tests lets everybody in."""
    strict = Milvus(SETTINGS | {"COMMON_SECURITY_AUTHORIZATIONENABLED": "true"}, token="root:Milvus")
    try:
        url = strict.url("photos").partition("://")[2]
        for who in ("", "root:secret@"):
            started = time.monotonic()
            with pytest.raises(StoreError, match="Put user:password@ before the host") as caught:
                open_store(f"milvus://{who}{url}")
            assert "secret" not in str(caught.value)
            assert time.monotonic() - started < 10  # said at once, not after the timeout
        with create_store(f"milvus://root:Milvus@{url}", META) as store:
            store.add([record("a.jpg")], random_vectors(1))
            assert len(store) == 1
    finally:
        strict.end()


@pytest.mark.parametrize(
    ("code", "asked", "error", "text"),
    [
        (65535, 2, None, "can't find collection name default:photos"),  # seen while another one was dropped
        (2200, 2, None, "inconsistent requery result"),
        (1100, 1, StoreError, "invalid flag: the collection lags, not found, permission"),
        (100, 1, StoreMissingError, "any text"),
    ],
)
def test_errors_are_told_apart_by_their_codes(
    opened: MilvusStore,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    asked: int,
    error: type[StoreError] | None,
    text: str,
) -> None:
    vectors, calls = random_vectors(3), list[str]()
    opened.add([record(f"{i}.jpg") for i in range(3)], vectors)
    client = opened._server._client
    assert client is not None
    query = client.query

    def fails_once(*arguments: Any, **options: Any) -> Any:
        calls.append("query")
        if len(calls) == 1:
            raise MilvusException(code, text)
        return query(*arguments, **options)

    monkeypatch.setattr(client, "query", fails_once)
    if error is None:
        assert opened.find(["1.jpg"]) == [record("1.jpg")]
    else:
        with pytest.raises(StoreError) as caught:
            opened.find(["1.jpg"])
        assert type(caught.value) is error
    assert len(calls) == asked


def test_a_collection_that_is_dropped(opened: MilvusStore, remote: str) -> None:
    with connected(remote) as (client, name):
        client.drop_collection(name)
    for question in (lambda: len(opened), lambda: opened.search(random_vectors(1), 1), opened.notes):
        with pytest.raises(StoreMissingError, match="cooc index"):
            question()


# what a change guarantees


BAD = [BadFile(f"{name}.jpg", 1, 2, "truncated", "2020-01-01T00:00:00+00:00") for name in ("new", "new2", "other")]


def start(store: Store | Model) -> None:
    store.add([record(f"{name}.jpg", tags=frozenset({name})) for name in "abcdefgh"], random_vectors(8))
    store.add([record("lost.jpg", "new", tags=frozenset({"kept"}))], random_vectors(1))
    store.remove(["lost.jpg"])
    store.report_bad(BAD)


def add(store: Store | Model) -> None:
    records = [record("a.jpg", "changed"), record("new.jpg", "new"), record("new2.jpg"), record("b.jpg", size=7)]
    store.add([*records, record("c.jpg", "changed")], random_vectors(5, seed=1))


def remove(store: Store | Model) -> None:
    store.remove([f"{name}.jpg" for name in "abcde"])


# a chain, a ring that is longer than a request, and one in another's place
MOVES = {"a": "b", "b": "c", "c": "x", "d": "e", "e": "h", "h": "d", "f": "g"}


def rename(store: Store | Model) -> None:
    """What is left of the moves, by content: that is how `cooc index` finds them."""
    contents = {one.path: one.sha256 for one in store.records()}
    moves = {f"{old}.jpg": f"{new}.jpg" for old, new in MOVES.items()}
    left = {old: new for old, new in moves.items() if contents.get(new) != record(old).sha256}
    store.rename(left)
    store.remove([old for old in moves if old not in moves.values() and old not in left])


def tag(store: Store | Model) -> None:
    store.tag([record(f"{name}.jpg").id for name in "abcde"], {"z"}, {"a"})


def report(store: Store | Model) -> None:
    store.report_bad([BadFile(f"{i}.jpg", i, i, "empty", "2021-01-01T00:00:00+00:00") for i in range(5)])


def clear(store: Store | Model) -> None:
    store.clear_bad([file.path for file in BAD])


class Cut(StoreError):
    pass


Images = dict[str, tuple[Record, bytes]]


def images(store: Store) -> Images:
    records = list(store.records())
    vectors = store.vectors([one.id for one in records])
    return {one.path: (one, vector.tobytes()) for one, vector in zip(records, vectors, strict=True)}


def of_model(model: Model) -> Images:
    return {path: (one, vector.tobytes()) for path, (one, vector) in model.images.items()}


def assert_completed(store: Store, before: Model, after: Model, change: Callable[[Store | Model], None]) -> None:
    """After a change was cut short, and once more after it was repeated."""
    found, old, new = images(store), of_model(before), of_model(after)
    assert all(image in (old.get(path), new.get(path)) for path, image in found.items())
    assert set(old) & set(new) <= set(found)  # nothing is lost that is there before and after,
    kept = {name for one in store.forgotten() for name in one.tags}
    kept |= {name for one, _ in found.values() for name in one.tags}
    assert {name for one, _ in old.values() for name in one.tags} - {"a" if change is tag else ""} <= kept  # and no tag
    described = {path for path, image in found.items() if image != old.get(path)}
    assert not described & {file.path for file in store.bad_files()}  # or its report would stay
    change(store)
    assert images(store) == new
    assert {file.path: file for file in store.bad_files()} == after.bad
    assert after.forgotten.keys() <= {(one.sha256, one.path) for one in store.forgotten()}
    assert store.verify() == []


@pytest.mark.parametrize("change", [add, remove, rename, tag, report, clear], ids=lambda change: change.__name__)
def test_a_change_that_is_cut_short_leaves_whole_images_and_is_completed_by_the_next(
    opened: MilvusStore, monkeypatch: pytest.MonkeyPatch, change: Callable[[Store | Model], None]
) -> None:
    """Two images in a request, and the writer is gone before the first, the second, ... request."""
    monkeypatch.setattr(opened._server, "block", 2)
    send, left = opened._server.change, [0]

    def cut(call: str, **request: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise Cut
        return send(call, **request)

    before, after = Model(), Model()
    for model in (before, after):
        start(model)
    change(after)
    for requests in range(20):
        opened.remove([one.path for one in opened.records()])
        opened.clear_bad([file.path for file in opened.bad_files()])
        opened._server.delete([row["key"] for row in opened._server.rows(of_kind(FORGOTTEN), ["key"])])
        start(opened)
        assert images(opened) == of_model(before)
        left[0] = requests
        with monkeypatch.context() as patch:
            patch.setattr(opened._server, "change", cut)
            with contextlib.suppress(Cut):
                change(opened)
                break
        assert_completed(opened, before, after, change)
    assert requests >= {clear: 1}.get(change, 3)  # so many it took


KILLED = """
import os, signal, sys
from cooc.index import open_store
from tests.index import test_milvus
with open_store(sys.argv[1], write=True) as store:
    server, left = store._server, int(sys.argv[3])
    send, server.block = server.change, 2
    def change(call, **rows):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(call, **rows)
    server.change = change
    getattr(test_milvus, sys.argv[2])(store)
"""


def kill_in(address: str, change: Callable[..., None], requests: int) -> None:
    """Another process makes the change, and is killed before its next request after so many."""
    command = [sys.executable, "-c", KILLED, address, change.__name__, str(requests)]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize(("change", "requests"), [(add, 2), (remove, 4), (rename, 3)])
def test_kill_9_between_the_steps_of_a_change(
    remote: str, change: Callable[[Store | Model], None], requests: int
) -> None:
    """Whoever opens the index next may write at once, finds whole images, and completes the change by repeating it."""
    before, after = Model(), Model()
    with create_store(remote, META) as store:
        for target in (store, before, after):
            start(target)
    change(after)
    kill_in(remote, change, requests)
    with open_store(remote, write=True) as store:
        assert images(store) not in (of_model(before), of_model(after))  # it was in the middle
        assert_completed(store, before, after, change)


def describe(store: Store) -> None:
    records = [record(f"{name}.jpg") for name in "abcd"]
    store.add(records, random_vectors(4), [one.path.encode() for one in records])


def test_kill_9_between_features_and_their_rows(remote: str, tmp_path: Path) -> None:
    """Files come first: those that no row speaks of are not seen, and compacting removes them."""
    address = f"{remote}&features={tmp_path / 'features'}"
    create_store(address, replace(META, features="sift")).close()
    ids, codes = [record(f"{name}.jpg").id for name in "abcd"], [f"{name}.jpg".encode() for name in "abcd"]
    kill_in(address, describe, 1)
    with open_store(address, write=True) as store:
        there = [one is not None for one in store.get(ids)]
        assert there.count(True) == 2
        assert store.features(ids) == [code if found else None for code, found in zip(codes, there, strict=True)]
        assert len([file for file in (tmp_path / "features").rglob("*") if file.is_file()]) == 4
        store.compact()
        assert len([file for file in (tmp_path / "features").rglob("*") if file.is_file()]) == 2
        assert store.verify() == []
        describe(store)
        assert store.features(ids) == codes
        assert (list(store.without_features()), store.verify()) == ([], [])


def test_features_of_many_copies(remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More images of one content than a request gives: none is missed, and the code stays until the last one goes."""
    address = f"{remote}&features={tmp_path / 'features'}"
    copies = [record(f"{i}.jpg", "same") for i in range(7)]
    with create_store(address, replace(META, features="sift")) as store:
        assert isinstance(store, MilvusStore)
        monkeypatch.setattr(store._server, "block", 3)
        store.add(copies, random_vectors(7))
        assert store.set_features({copies[6].id: b"code"}) == 1
        assert store.features([one.id for one in copies]) == [b"code"] * 7
        assert store.by_sha256(copies[0].sha256) == copies
        store.remove([one.path for one in copies[:6]])
        assert store.features([copies[6].id]) == [b"code"]


def test_readers_see_each_image_as_it_was_or_as_it_is(opened: MilvusStore, remote: str) -> None:
    """While another thread replaces all of them again and again."""
    versions, count = 25, 40
    known = {}  # id -> its vector
    for version in range(versions):
        for i, vector in enumerate(random_vectors(count, seed=version)):
            known[record(f"{i:02}.jpg", f"{i} {version}", size=version).id] = vector

    def write(version: int) -> None:
        records = [record(f"{i:02}.jpg", f"{i} {version}", size=version) for i in range(count)]
        opened.add(records, random_vectors(count, seed=version))

    def write_all() -> None:
        for version in range(1, versions):
            write(version)

    write(0)
    writer = threading.Thread(target=write_all)
    writer.start()
    with open_store(remote) as reader:
        while writer.is_alive():
            listed = list(reader.records())
            assert [one.path for one in listed] == [f"{i:02}.jpg" for i in range(count)]
            assert [one.sha256 for one in listed] == [
                record(one.path, f"{i} {one.size}").sha256 for i, one in enumerate(listed)
            ]
            query = random_vectors(1, seed=99)
            found = reader.search(query, 10)
            np.testing.assert_allclose(found.scores[0], [known[name] @ query[0] for name in found.ids[0]], atol=1e-6)
        writer.join()
        time.sleep(5)  # others' changes are seen after that, at the latest
        assert {one.size for one in reader.records()} == {versions - 1}
        assert len(reader) == count


def test_a_writer_on_another_machine(opened: MilvusStore, remote: str) -> None:
    opened.close()
    away = {"token": "t", "pid": 1, "machine": "elsewhere boot ns"}
    with open_store(remote) as reader, closing(Server(Address.parse(remote))) as elsewhere:
        elsewhere.put({WRITER: json.dumps(away | {"beat": time.time()})})
        with pytest.raises(StoreLockedError, match="process 1 on elsewhere"):
            open_store(remote, write=True)
        elsewhere.put({WRITER: json.dumps(away | {"beat": time.time() - 1000})})
        with open_store(remote, write=True) as writer:
            writer.add([record("a.jpg")], random_vectors(1))
            elsewhere.put({WRITER: json.dumps(away | {"beat": time.time()})})
            with pytest.raises(StoreLockedError, match="elsewhere"):  # it was taken for dead, and came back
                writer.add([record("b.jpg")], random_vectors(1))
        assert len(reader) == 1


# search structures


@pytest.mark.parametrize(("index", "least"), [("hnsw", 9.5), ("ivf_pq", 8.0)])
def test_a_search_structure_and_an_exact_search_beside_it(
    opened: MilvusStore, remote: str, index: str, least: float
) -> None:
    """So many, because Milvus builds no graph of less than 1024."""
    count = 6000
    model, records = Model(), [record(f"{'a' if i % 12 else 'b'}/{i:04}.jpg") for i in range(count)]
    for target in (opened, model):
        target.add(records, random_vectors(count))
    opened.report_bad([BadFile("a/bad.jpg", 1, 2, "no picture")])
    opened.close()
    with open_store(f"{remote}&index={index}", write=True) as graph:
        assert isinstance(graph, MilvusStore)
        graph.compact()
        found = Structure.of(graph._server)
        assert found.kind == index.upper()
        assert found.effort in searching.KINDS[found.kind].efforts
        queries = random_vectors(5, seed=3)
        for where in (None, Filter("a")):
            assert_same_search(graph, model, queries, 10, where)
            near = graph.search(queries, 10, where=where)
            expected = [[name for _, name in model.search(query, 10, where)] for query in queries]
            hits = [len(set(a) & set(b)) for a, b in zip(near.ids, expected, strict=True)]
            assert np.mean(hits) >= least


def test_how_far_to_look_is_measured(opened: MilvusStore, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least effort that finds what a scan finds, and no more."""
    opened.add([record(f"{i:04}.jpg") for i in range(3000)], random_vectors(3000))
    queries, tried = effort.views(random_vectors(20, seed=5)), dict[int, float]()
    exact = opened.search(queries, effort.NEIGHBOURS).ids
    tried_out = searching.KINDS["HNSW"]._replace(efforts=(100, 110, 120, 150, 200, 300, 600))
    monkeypatch.setitem(searching.KINDS, "HNSW", tried_out)
    opened.close()
    with open_store(f"{remote}&index=hnsw", write=True) as graph:
        assert isinstance(graph, MilvusStore)
        graph.compact()
        kind, level = Structure.of(graph._server)
        for far in (100, level):
            found = graph._search(queries, effort.NEIGHBOURS, None, False, Structure(kind, far)).ids
            tried[far] = float(np.mean([len(set(a) & set(b)) / 100 for a, b in zip(exact, found, strict=True)]))
        assert tried[level] >= effort.RECALL - 0.02  # these are other queries


def test_a_structure_that_was_not_built_to_the_end(
    opened: MilvusStore, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the old one was dropped: who opens it for writing next has all there is, and a search."""
    vectors = random_vectors(20)
    opened.add([record(f"{i}.jpg") for i in range(20)], vectors)
    opened.close()
    with open_store(f"{remote}&index=hnsw", write=True) as graph, monkeypatch.context() as patch:
        patch.setattr(milvus_store, "build", lambda *_: (_ for _ in ()).throw(StoreError("killed")))
        with pytest.raises(StoreError, match="killed"):
            graph.compact()
    with open_store(remote, write=True) as again:
        np.testing.assert_allclose(again.search(vectors, 1).scores[:, 0], 1, atol=1e-6)
        assert len(again) == 20


def test_to_another_structure_and_back(opened: MilvusStore, remote: str) -> None:
    """Of an index without pictures, too: there is nothing to measure then."""
    opened.close()
    for index in ("hnsw", "flat"):
        with open_store(f"{remote}&index={index}", write=True) as store:
            assert isinstance(store, MilvusStore)
            store.compact()
            assert Structure.of(store._server).kind == index.upper()
            store.add([record(f"{index}.jpg")], random_vectors(1))
            assert store.search(random_vectors(1), 1).scores[0, 0] == pytest.approx(1)


# what others have made


def write_former(address: str, harmed: str | None = None) -> None:
    """The collection that the cooc before format 3 made of eleven changes; never write the fixture again."""
    kept = json.loads(FORMER.read_text())
    schema = MilvusClient.create_schema(partition_key_field="folder", num_partitions=16)
    for field in kept["fields"]:
        options = field["params"] | {"is_primary": field.get("is_primary", False)}
        if "element_type" in field:
            options["element_type"] = DataType[field["element_type"]]
        schema.add_field(field["name"], DataType[field["type"]], **options)
    for row in kept["rows"]:
        if harmed is not None and row["id"] == harmed:
            row["vector"][0] += 0.001
    with connected(address) as (client, name):
        client.create_collection(name, schema=schema, consistency_level="Strong")
        params = client.prepare_index_params()
        params.add_index("vector", index_type="FLAT", metric_type="IP", index_name="vector")
        client.create_index(name, params)
        client.load_collection(name)
        client.insert(name, kept["rows"])
        for _ in range(2):  # the first alone would not survive the server (milvus#30144)
            client.alter_collection_properties(name, kept["properties"])


def assert_moved(store: Store, damaged: Record | None = None) -> None:
    def tagged(*tags: str) -> frozenset[str]:
        return frozenset(tags)

    vectors = random_vectors(8)
    expected = [
        (record("a/0.jpg", tags=tagged("blue", "red")), vectors[0]),
        (record("a/1.jpg", tags=tagged("blue", "ü"), taken="2023-07-14"), vectors[1]),
        (record("b/2.jpg", "changed", size=7), vectors[6]),
        (record("c/3.jpg", "b/3.jpg", taken="2023-07-14"), vectors[3]),
        (record("caf\udce9/4.jpg"), vectors[4]),
    ]
    assert list(store.records()) == [one for one, _ in expected]
    sound = [(one, vector) for one, vector in expected if damaged is None or one.id != damaged.id]
    np.testing.assert_array_equal(store.vectors([one.id for one, _ in sound]), [vector for _, vector in sound])
    (bad,) = store.bad_files()
    assert replace(bad, since="") == BadFile("bad.jpg", 3, 4, "truncated: é\n")
    assert bad.since
    assert store.search(vectors[6:7], 1).ids == [[record("b/2.jpg", "changed").id]]
    assert store.meta == replace(META, created="2024-05-31T12:00:00+00:00")
    assert list(store.damaged()) == ([] if damaged is None else [damaged.path])
    assert len(store.verify()) == len(list(store.damaged()))


def test_an_index_of_the_former_layout_is_moved(server: Milvus) -> None:
    address = server.url("former")
    write_former(address)
    with pytest.raises(StoreError, match=r"cooc compact --index .*former"):
        open_store(address)
    with pytest.raises(StoreError, match="already"):
        create_store(address, META)
    with open_store(address, write=True) as store:
        assert_moved(store)
        store.add([record("new.jpg")], random_vectors(1))
    with open_store(address) as store:
        assert len(store) == 6
    with connected(address) as (client, name):
        assert not client.has_collection(f"{name}_cooc3")
        client.drop_collection(name)


@pytest.mark.parametrize("step", ["copy", "drop", "rename"])
def test_a_move_that_is_cut_short_is_taken_up(server: Milvus, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = server.url("former_" + step)
    write_former(address)

    def stop(*_: object, **__: object) -> None:
        raise StoreError("killed")

    with monkeypatch.context() as patch:
        if step == "copy":
            patch.setattr(MilvusClient, "upsert", stop)
        else:
            patch.setattr(MilvusClient, f"{step}_collection", stop)
        with pytest.raises(StoreError, match="killed"):
            open_store(address, write=True)
    with open_store(address, write=step != "rename") as store:
        assert_moved(store)
    with connected(address) as (client, name):
        client.drop_collection(name)


def test_an_index_that_has_the_name_of_a_copy_is_left_alone(server: Milvus) -> None:
    address = server.url("former_own")
    own = address.replace("former_own", "former_own_cooc3")
    with create_store(own, META) as store:
        store.add([record("own.jpg")], random_vectors(1))
    with pytest.raises(StoreMissingError):
        open_store(address)
    write_former(address)
    with pytest.raises(StoreError, match=r"former_own.*already"):
        open_store(address, write=True)
    with open_store(own) as store:
        assert [one.path for one in store.records()] == ["own.jpg"]
    for one in (address, own):
        with connected(one) as (client, name):
            client.drop_collection(name)


def test_a_damaged_vector_is_known_as_such_after_a_move(server: Milvus) -> None:
    address, harmed = server.url("former_harmed"), record("a/0.jpg")
    write_former(address, harmed=harmed.id)
    with open_store(address, write=True) as store:
        assert_moved(store, damaged=harmed)
        assert store.search(random_vectors(1), 5).ids[0].count(harmed.id) == 0
        store.add([harmed], random_vectors(1))  # as the next run describes it
        assert [one.tags for one in store.records(Filter("a"), limit=1)] == [{"blue", "red"}]
        assert store.search(random_vectors(1), 1).ids == [[harmed.id]]
        assert store.verify() == []
    with connected(address) as (client, name):
        client.drop_collection(name)


def test_an_index_of_the_former_layout_in_a_file(tmp_path: Path) -> None:
    address = MilvusLite().address(tmp_path)
    write_former(address)
    with open_store(address, write=True) as store:
        assert_moved(store)


def test_collections_of_others(server: Milvus, remote: str) -> None:
    with pytest.raises(StoreError, match="another collection"):
        create_store(remote, replace(META, dim=META.dim + 1))
    with pytest.raises(InputError, match="32768 dimensions"):
        create_store(server.url("too_wide"), replace(META, dim=40_000))
    with pytest.raises(InputError, match="float32 vectors"):
        create_store(server.url("small"), replace(META, storage="int8"))
    with connected(remote) as (client, name):
        client.create_collection(f"{name}_other", dimension=4)
        with pytest.raises(StoreMissingError):
            open_store(remote.replace(name, f"{name}_other"))


def test_what_milvus_cannot_hold(opened: MilvusStore) -> None:
    long = frozenset({"x" * 2000})
    with pytest.raises(InputError, match="too long"):
        opened.add_all([([record("a.jpg")], random_vectors(1)), ([record("b.jpg", tags=long)], random_vectors(1))])
    assert len(opened) == 0
    opened.add([record("a.jpg")], random_vectors(1))
    for change in (
        lambda: opened.tag([record("a.jpg").id], add=long),
        lambda: opened.rename({"a.jpg": "x" * 5000}),
        lambda: opened.add([record("a.jpg", "new", tags=frozenset(map(str, range(2000))))], random_vectors(1)),
    ):
        with pytest.raises(InputError, match="too long"):
            change()
    assert list(opened.records()) == [record("a.jpg")]


def test_8192_dimensions(server: Milvus) -> None:
    meta, vectors = replace(META, dim=8192), random_vectors(30, dim=8192)
    with create_store(server.url("wide"), meta) as wide:
        wide.add([record(f"{i}.jpg") for i in range(30)], vectors)
        found = wide.search(vectors, 3)
        np.testing.assert_allclose(found.scores[:, 0], 1, atol=1e-6)
        np.testing.assert_array_equal(wide.vectors([names[0] for names in found.ids]), vectors)


def test_a_file_that_another_process_has_open(tmp_path: Path) -> None:
    folder = tmp_path / "index.db"
    folder.mkdir()
    with (folder / "LOCK").open("w") as lock:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="Another process may have the file open"):
            open_store(MilvusLite().address(tmp_path) + "?timeout=1")


def test_kept_tags_are_listed_with_their_paths(opened: MilvusStore) -> None:
    kept = Forgotten(record("a.jpg").sha256, "caf\udce9/a.jpg", frozenset({"ü"}), "2024-01-01T00:00:00+00:00")
    opened.remember([kept])
    assert list(opened.forgotten()) == [kept]
