"""The PostgreSQL engine beyond what every engine must do: its graph, its addresses, commits that nobody heard of."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cooc.errors import InputError, StoreError
from cooc.index import create_store, open_store, without_password
from cooc.index.records import BadFile, Filter
from tests import servers
from tests.index.test_store import META, flip, random_vectors, record, unit

postgres = pytest.importorskip("cooc.index.postgres.store", reason="pip install 'cooc[dev]'")
nearest = pytest.importorskip("cooc.index.postgres.nearest", reason="pip install 'cooc[dev]'")


@pytest.fixture
def server() -> servers.Postgres:
    running = servers.engine("postgresql")
    assert isinstance(running, servers.Postgres)
    return running


def clustered(count: int, dim: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return unit(rng.normal(size=(40, dim))[np.arange(count) % 40] + 0.5 * rng.normal(size=(count, dim)))


def recall(store: postgres.PostgresStore, queries: np.ndarray, k: int, where: Filter | None = None) -> float:
    """Of a search that need not be exact; its scores must be."""
    exact = store.search(queries, k, where=where, exact=True)
    found = store.search(queries, k, where=where)
    for row, query in enumerate(queries):
        np.testing.assert_allclose(found.scores[row], store.vectors(found.ids[row]) @ query, atol=1e-6)
        assert sorted(found.scores[row], reverse=True) == list(found.scores[row])
    return float(np.mean([len(set(a) & set(b)) / len(a) for a, b in zip(exact.ids, found.ids, strict=True)]))


def test_the_graph(server: servers.Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built when there are enough images, used, kept up, found out to be worn, and no filter makes it forget."""
    monkeypatch.setattr(nearest, "APPROXIMATE_FROM", 2000)
    monkeypatch.setattr(nearest, "MATCHING", 100)
    vectors, queries = clustered(3000, 32), clustered(3020, 32)[3000:]
    records = [
        record(f"{'ab'[i % 2]}/{i:04}.jpg", tags=frozenset({"1%"} if i % 100 == 0 else {"5%"} if i % 20 == 1 else ()))
        for i in range(3000)
    ]
    with create_store(server.address(tmp_path), replace(META, dim=32)) as store:
        assert isinstance(store, postgres.PostgresStore)
        store.add(records[:1999], vectors[:1999])
        store.compact()
        assert graphs(store) == []
        store.add(records[1999:], vectors[1999:])
        store.compact()
        ((first, before),) = graphs(store)
        assert recall(store, queries, 50) >= 0.95
        assert recall(store, queries, 50, Filter("a")) >= 0.95
        assert recall(store, queries, 50, Filter(tags=frozenset({"5%"}))) >= 0.95
        assert recall(store, queries, 20, Filter(tags=frozenset({"1%"}))) == 1
        assert recall(store, queries, 2900) == 1
        assert graphs(store)[0][1] > before  # it was asked
        store.add([record("new.jpg")], queries[:1])
        assert store.search(queries[:1], 1).ids == [[record("new.jpg").id]]
        store.remove([r.path for r in records[:900]])
        assert recall(store, queries, 50) >= 0.95
        store.compact()
        ((second, _),) = graphs(store)
        assert second != first
        assert recall(store, queries, 50) >= 0.95
        assert store.verify() == []


def graphs(store: postgres.PostgresStore) -> list[tuple[int, int]]:
    """Number, and how often it was used."""

    def work(connection: postgres.Connection) -> list[tuple[int, int]]:
        connection.execute("SELECT pg_stat_force_next_flush()")  # of this connection, which has done the searching
        return connection.execute(
            "SELECT indexrelid::int8, idx_scan FROM pg_stat_user_indexes JOIN pg_class i ON i.oid = indexrelid"
            " JOIN pg_am a ON a.oid = relam WHERE amname = 'hnsw' AND schemaname = %s",
            (store.address.schema,),
        ).fetchall()

    return store._server.read(work)


@pytest.mark.parametrize("dim", [2001, 4001, 16_000])
def test_long_vectors(server: servers.Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    monkeypatch.setattr(nearest, "APPROXIMATE_FROM", 10)
    vectors = random_vectors(20, dim=dim)
    with create_store(server.address(tmp_path), replace(META, dim=dim)) as store:
        assert isinstance(store, postgres.PostgresStore)
        store.add([record(f"{i}.jpg") for i in range(20)], vectors)
        store.compact()
        assert len(graphs(store)) == (dim <= 4000)
        found = store.search(vectors[:2], 20, exact=True)
        np.testing.assert_allclose(found.scores[0], sorted(vectors @ vectors[0], reverse=True), atol=1e-5)
        np.testing.assert_array_equal(store.vectors([record("3.jpg").id]), vectors[3:4])
        assert recall(store, vectors, 5) == 1
        assert store.verify() == []


def test_too_long_vectors_are_refused(server: servers.Postgres, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="16000"):
        create_store(server.address(tmp_path), replace(META, dim=16_001))


def test_several_indexes_in_one_database(server: servers.Postgres) -> None:
    base = server.url("x").partition("?")[0]
    addresses = [base, f"{base}?index=one", f"{base}?application_name=me&index=two-2"]
    for number, address in enumerate(addresses):
        with create_store(address, META) as store:
            store.add([record(f"{i}.jpg") for i in range(number)], random_vectors(number))
    for number, address in enumerate(addresses):
        with open_store(address.replace("postgresql://", "postgres://")) as store:
            assert len(store) == number


@pytest.mark.parametrize("name", ["A", "a'b", 'a"; DROP SCHEMA public; --', "", "x" * 49, "a&index=b"])
def test_names_that_are_refused(server: servers.Postgres, name: str) -> None:
    with pytest.raises(InputError, match=r"\?index=photos") as caught:
        open_store(server.url(name))
    assert server.password not in str(caught.value)


def test_passwords_are_not_shown(server: servers.Postgres) -> None:
    port = servers.free_port()
    for address in (
        server.url("none").replace(str(server.port), str(port)),
        f"postgresql://cooc@127.0.0.1:{port}/postgres?password=secret&index=none",
        f"postgresql://cooc:secret@127.0.0.1:{port}/postgres?nosuch=option",
        "postgresql://cooc:secret@127.0.0.1:x/postgres",
        "postgresql://cooc:sec?ret@127.0.0.1:1/postgres",
        server.url("none").replace("cooc:", "cooc:secret"),
    ):
        with pytest.raises((InputError, StoreError), match="postgres") as caught:
            open_store(address)
        assert "sec" not in str(caught.value)
        assert server.password not in str(caught.value)
    assert without_password("postgresql://me:pw@host:1/db?index=a&sslpassword=b") == "postgresql://me@host:1/db?index=a"
    assert without_password("milvus://host:19530/name") == "milvus://host:19530/name"
    assert without_password("/some:folder/with@sign") == "/some:folder/with@sign"


class Cutting:
    """Between client and server: passes everything on, but on the word hangs up before the server's answer is told."""

    def __init__(self, port: int, word: bytes) -> None:
        self.target, self.word, self.cuts = port, word, 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listening.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                cut = threading.Event()
                threading.Thread(target=self._pass, args=(client, server, cut, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, cut, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, cut: threading.Event, asking: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if asking and self.word and self.word in data:
                    self.word, self.cuts = b"", self.cuts + 1
                    cut.set()
                if not asking and cut.is_set():  # the server has done it
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def cutting(server: servers.Postgres) -> Iterator[Cutting]:
    proxy = Cutting(server.port, b"")
    yield proxy
    proxy.listening.close()


def test_a_commit_that_nobody_heard_of_is_not_made_twice(
    server: servers.Postgres, cutting: Cutting, tmp_path: Path
) -> None:
    address = server.address(tmp_path).replace(f":{server.port}/", f":{cutting.port}/") + "&sslmode=disable"
    with create_store(address, META) as store:
        for word in (b"COMMIT", b"DELETE FROM images", b"pg_current_xact_id"):
            cutting.word = word
            store.add([record("a.jpg"), record("b.jpg")], random_vectors(2))
            cutting.word = word
            assert store.rename({"a.jpg": "c.jpg"}) == 1  # a second time, there would be nothing to move
            assert [r.path for r in store.records()] == ["b.jpg", "c.jpg"]
            cutting.word = word
            assert store.remove(["b.jpg", "c.jpg"]) == 2
        assert cutting.cuts == 9
        assert store.verify() == []


def test_a_writer_that_lost_its_place_says_so(server: servers.Postgres, cutting: Cutting, tmp_path: Path) -> None:
    """While its connection was lost, another one has begun to write."""
    address = server.address(tmp_path)
    create_store(address, META).close()
    through = address.replace(f":{server.port}/", f":{cutting.port}/") + "&sslmode=disable"
    with open_store(through, write=True) as store:
        assert isinstance(store, postgres.PostgresStore)
        number = store._server.writer().info.backend_pid
        with open_store(address) as other:
            assert isinstance(other, postgres.PostgresStore)
            other._server.read(
                lambda connection: connection.execute("SELECT pg_terminate_backend(%s, 5000)", (number,))
            )
        with open_store(address, write=True) as other:
            with pytest.raises(StoreError, match="Another process is writing"):
                store.add([record("a.jpg")], random_vectors(1))
            other.add([record("b.jpg")], random_vectors(1))
        store.add([record("a.jpg")], random_vectors(1))
        assert len(store) == 2


def test_damage_is_found(server: servers.Postgres, tmp_path: Path) -> None:
    with create_store(server.address(tmp_path), META) as store:
        assert isinstance(store, postgres.PostgresStore)
        store.add([record(f"{name}.jpg") for name in "abcd"], random_vectors(4))
        ids = [record(f"{name}.jpg").id for name in "abcd"]

        def harm(statement: str, *values: object) -> None:
            store._server.change(lambda connection: connection.execute(statement, values))

        harm("UPDATE vectors SET vector = vector + vector WHERE id = %s", bytes.fromhex(ids[0]))
        harm("DELETE FROM vectors WHERE id = %s", bytes.fromhex(ids[1]))
        harm("UPDATE images SET path = 'x.jpg' WHERE id = %s", bytes.fromhex(ids[2]))
        harm("DELETE FROM images WHERE id = %s", bytes.fromhex(ids[3]))
        found = " ".join(store.verify())
        for problem in (
            "a.jpg: the vector",
            "b.jpg: there is no vector",
            "x.jpg: the id",
            f"{ids[3]} belongs",
            "3 images",
        ):
            assert problem in found


# What format 2 had, by taking away what it had not.
DOWNGRADE = """
ALTER TABLE vectors DROP COLUMN checksum; ALTER TABLE bad DROP COLUMN since; DROP TABLE notes; DROP TABLE forgotten;
UPDATE meta SET format = 2, json = jsonb_set(json::jsonb, '{format}', '2')::text;
"""


def test_an_index_of_format_2_is_read_as_it_is_and_upgraded_by_who_writes(
    server: servers.Postgres, tmp_path: Path
) -> None:
    address, vectors = server.address(tmp_path), random_vectors(3)
    with create_store(address, META) as store:
        assert isinstance(store, postgres.PostgresStore)
        store.add([record(f"{name}.jpg", tags=frozenset(name)) for name in "abc"], vectors)
        store.report_bad([BadFile("bad.jpg", 1, 2, "truncated")])
        store._server.change(lambda connection: connection.execute(DOWNGRADE))
    ids = [record(f"{name}.jpg").id for name in "abc"]
    with open_store(address) as store:
        assert store.meta.format == 2
        np.testing.assert_array_equal(store.vectors(ids), vectors)
        assert store.search(vectors, 1).ids == [[name] for name in ids]
        assert list(store.bad_files()) == [BadFile("bad.jpg", 1, 2, "truncated")]
        assert store.notes() == {}
        assert list(store.forgotten()) == list(store.damaged()) == store.verify() == []
        store.snapshot(str(tmp_path / "copy"))
        with open_store(address, write=True) as writer:
            assert writer.meta == META
            writer.note("x", 1)
            writer.remove(["a.jpg"])
            writer.rename({"b.jpg": "moved.jpg"})
            writer.add([record("a.jpg")], vectors[:1])
            assert writer.find(["a.jpg"]) == [record("a.jpg", tags=frozenset("a"))]
            assert writer.verify() == []
            np.testing.assert_array_equal(writer.vectors([ids[0], ids[2]]), vectors[[0, 2]])
        assert store.search(vectors[:1], 1).ids == [ids[:1]]  # who has opened it before goes on


def test_a_moved_picture_keeps_its_checksum(server: servers.Postgres, tmp_path: Path) -> None:
    with create_store(server.address(tmp_path), META) as store:
        store.add([record("a.jpg"), record("b.jpg")], random_vectors(2))
        server.harm(tmp_path, record("a.jpg"), flip(30))
        store.rename({"a.jpg": "c.jpg"})
        assert list(store.damaged()) == ["c.jpg"]
        store.snapshot(str(tmp_path / "copy"))
    with open_store(str(tmp_path / "copy")) as copy:
        assert [r.path for r in copy.records()] == ["b.jpg"]
