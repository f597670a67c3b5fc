"""What is special to Milvus. What every engine must do is in test_store.py, which runs on the server as well."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pymilvus import MilvusException

pytest.importorskip("milvus", reason="pip install 'cooc[dev]'")

from cooc.index.milvus.collection import GAP, STATE, WRITER, Address, State

from cooc.errors import InputError, StoreError, StoreLockedError, StoreMissingError
from cooc.index import create_store, open_store
from cooc.index.milvus import store as milvus
from cooc.index.store import BadFile, Filter, Store
from tests import servers
from tests.index.test_store import (  # a part of the suite that needs one process only: it is run on milvus-lite here
    META,
    assert_same_search,
    random_vectors,
    record,
)
from tests.milvus_server import Milvus, MilvusLite
from tests.reference.store import Model


@pytest.fixture
def address(tmp_path: Path) -> str:
    return MilvusLite().address(tmp_path)


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
def opened(remote: str) -> Iterator[milvus.MilvusStore]:
    with milvus.create_store(remote, META) as created:
        yield created


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


def test_a_state_says_which_rows_count() -> None:
    state = State(next=10).without([3, 1, 2, 7])
    assert [entry[:2] for entry in state.dead] == [(1, 4), (7, 8)]
    assert state.condition == "row < 10 and (row < 1 or row >= 4) and row not in [7]"
    assert [entry[:2] for entry in state.skipping().dead][-1] == (10, 10 + GAP)
    assert State.parse(json.dumps(state.__dict__)) == state


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1/photos.*see that the server runs") as caught:
        open_store("milvus://me:secret@127.0.0.1:1/photos?timeout=1")
    assert "secret" not in str(caught.value)


def test_rows_without_a_commit_never_count(opened: milvus.MilvusStore, remote: str) -> None:
    """As a writer leaves them that is killed between its rows and its commit."""
    opened.add([record("a.jpg")], random_vectors(1))
    lost = opened._server.state().next
    opened._server.insert([milvus._row(record("b.jpg"), lost, random_vectors(1, seed=1)[0], META.dim)])
    opened._server._doubt = False  # it did not live to know
    opened.close()
    with milvus.open_store(remote, write=True) as again:
        assert again.find(["b.jpg"]) == [None]
        assert again.search(random_vectors(1, seed=1), 5).ids == [[record("a.jpg").id]]
        again.add([record("c.jpg")], random_vectors(1, seed=2))
        assert again._server.state().next > lost + GAP
        assert [r.path for r in again.records()] == ["a.jpg", "c.jpg"]
        assert again.verify() == []


def test_a_change_that_fails_leaves_nothing(opened: milvus.MilvusStore, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.add([record("a.jpg")], random_vectors(1))
    before = opened._server.state()
    with monkeypatch.context() as patch:
        patch.setattr(opened._server, "_put", lambda *_: (_ for _ in ()).throw(OSError("cable pulled")))
        with pytest.raises(StoreError, match="could not do it"):
            opened.add([record("a.jpg", "new"), record("b.jpg")], random_vectors(2))
    with monkeypatch.context() as patch:  # as when the server is killed before the change is on its disk
        patch.setattr(opened._server, "_put", lambda *_: None)
        with pytest.raises(StoreError, match="started anew"):
            opened.add([record("a.jpg", "new"), record("b.jpg")], random_vectors(2))
    assert opened._server.state() == before
    assert list(opened.records()) == [record("a.jpg")]
    opened.add([record("b.jpg")], random_vectors(1))
    assert len(opened) == 2
    assert opened.verify() == []


def test_rows_that_no_longer_count_are_deleted_later(
    opened: milvus.MilvusStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.add([record(f"{i}.jpg") for i in range(20)], random_vectors(20))
    opened.remove([f"{i}.jpg" for i in range(0, 20, 2)])

    def rows() -> int:
        late = replace(opened._server.state(), time=opened._server.now())
        return len(opened._query(late, "row >= 0", ["row"]))

    opened.compact()
    assert rows() == 20  # somebody may be reading them
    monkeypatch.setattr(milvus, "GRACE", -1.0)
    opened.compact()
    assert rows() == len(opened) == 10
    assert opened._server.state().dead == ()
    assert opened.verify() == []


def test_a_writer_on_another_machine(opened: milvus.MilvusStore, remote: str) -> None:
    opened.close()
    away = {"token": "t", "pid": 1, "started": "1", "machine": "elsewhere boot ns"}
    with open_store(remote) as reader:
        assert isinstance(reader, milvus.MilvusStore)
        reader._server._put({WRITER: json.dumps(away | {"beat": time.time()})})
        with pytest.raises(StoreLockedError, match="process 1 on elsewhere"):
            open_store(remote, write=True)
        reader._server._put({WRITER: json.dumps(away | {"beat": time.time() - 100})})
        with open_store(remote, write=True) as writer:
            writer.add([record("a.jpg")], random_vectors(1))
            reader._server._put({WRITER: json.dumps(away | {"beat": time.time()})})
            with pytest.raises(StoreLockedError, match="elsewhere"):  # it was taken for dead, and came back
                writer.add([record("b.jpg")], random_vectors(1))
        assert len(reader) == 1


@pytest.mark.parametrize(("index", "least"), [("hnsw", 9.5), ("ivf_pq", 8.0)])
def test_a_search_structure_and_an_exact_search_beside_it(
    opened: milvus.MilvusStore, remote: str, index: str, least: float
) -> None:
    """So many, because Milvus builds no graph of less than 1024 and, from 5000 in a folder, may do without one."""
    count = 6000
    model, records = Model(), [record(f"{'a' if i % 12 else 'b'}/{i:04}.jpg") for i in range(count)]
    for target in (opened, model):
        target.add(records, random_vectors(count))
    opened.report_bad([BadFile("a/bad.jpg", 1, 2, "no picture")])
    opened.close()
    with open_store(f"{remote}&index={index}", write=True) as graph:
        graph.compact()
        assert isinstance(graph, milvus.MilvusStore)
        assert json.loads(graph._server.properties()[STATE])["index"] == index.upper()
        queries = random_vectors(5, seed=3)
        for where in (None, Filter("a")):
            assert_same_search(graph, model, queries, 10, where)
            near = graph.search(queries, 10, where=where)
            expected = [[name for _, name in model.search(query, 10, where)] for query in queries]
            hits = [len(set(a) & set(b)) for a, b in zip(near.ids, expected, strict=True)]
            assert np.mean(hits) >= least


def test_a_collection_that_the_server_cannot_find_for_a_moment(
    opened: milvus.MilvusStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen once, while another collection was being dropped. One that is gone for good is said to be so at once."""
    vectors = random_vectors(3)
    opened.add([record(f"{i}.jpg") for i in range(3)], vectors)
    client, failed = opened._server.client, []
    query = client.query

    def fails_once(*arguments: Any, **options: Any) -> Any:
        if not failed:
            failed.append(True)
            raise MilvusException(65535, "can't find collection name default:photos")
        return query(*arguments, **options)

    monkeypatch.setattr(client, "query", fails_once)
    np.testing.assert_allclose(opened.search(vectors, 1).scores[:, 0], 1, atol=1e-6)
    assert failed
    client.drop_collection(opened.address.name)
    with pytest.raises(StoreMissingError):
        opened.search(vectors, 1)


def test_8192_dimensions(server: Milvus) -> None:
    meta, vectors = replace(META, dim=8192), random_vectors(30, dim=8192)
    with create_store(server.url("wide"), meta) as wide:
        wide.add([record(f"{i}.jpg") for i in range(30)], vectors)
        found = wide.search(vectors, 3)
        np.testing.assert_allclose(found.scores[:, 0], 1, atol=1e-6)
        np.testing.assert_array_equal(wide.vectors([names[0] for names in found.ids]), vectors)


def test_collections_of_others(server: Milvus, remote: str) -> None:
    with pytest.raises(StoreError, match="another collection"):
        create_store(remote, replace(META, dim=META.dim + 1))
    with pytest.raises(InputError, match="32768 dimensions"):
        create_store(server.url("too_wide"), replace(META, dim=40_000))
    with pytest.raises(InputError, match="float32 vectors"):
        create_store(server.url("small"), replace(META, storage="int8"))


def test_what_milvus_cannot_hold(opened: Store) -> None:
    with pytest.raises(InputError, match="too long"):
        opened.add([record("a.jpg", tags=frozenset({"x" * 2000}))], random_vectors(1))
    assert len(opened) == 0
