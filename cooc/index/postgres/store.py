"""PostgreSQL with pgvector, for those who run one already: an index is a schema with a few tables (`tables.py`).

`opening.py` makes one; `connections.py` has the server's address, connections that come back and the one writer;
`nearest.py` the search.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cooc.index.checks import FEATURES_DAMAGED, VECTOR_DAMAGED, WRONG_ID, check_format, checksum, missing, moving
from cooc.index.copying import copy_to_folder
from cooc.index.postgres import features, tables
from cooc.index.postgres.connections import Address, Connection, Server
from cooc.index.postgres.nearest import Nearest, drop_old_graphs
from cooc.index.postgres.tables import RECORD, WHOLE, decoded, encoded, matching, whole
from cooc.index.records import (
    FORMAT,
    BadFile,
    Filter,
    Forgotten,
    Record,
    StoreMeta,
    given_back,
    long_ago,
    now,
    path_bytes,
    path_text,
    show,
)
from cooc.index.sql import SqlStore, record
from cooc.index.store import Block, Code, SearchResult, Vectors, kept_open, pages


class PostgresStore(SqlStore):
    """`cooc.index.store.Store` in a schema of a database. Threads may share it."""

    def __init__(self, address: Address, *, write: bool = False) -> None:
        self.address, self.shown = address, f"the index {address.place}"
        self._server = Server(address)
        with kept_open(self._server):
            self._format, self._meta = self._read_meta()
            if write:
                self._server.become_writer()
                if self._format < FORMAT:
                    self._server.change(tables.upgrade)
                    self._format, self._meta = self._read_meta()
        self._nearest = Nearest(self.meta.dim, checked=self._format >= 3)

    def _read_meta(self) -> tuple[int, StoreMeta]:
        with self._server.explained(), self._server.connect() as connection:
            row = connection.execute("SELECT format, json FROM meta").fetchone()
            engines = features.read_engines(connection)
        if row is None:
            raise missing(self.address.place)
        check_format(self.address.place, row[0])
        return row[0], replace(StoreMeta(**json.loads(row[1])), features=engines)

    def __len__(self) -> int:
        return self._server.read(tables.read_state).images

    # changes

    def add_all(self, blocks: Iterable[Block]) -> int:
        return self._server.change(lambda connection: sum(self._add(connection, block) for block in blocks))

    def _add(self, connection: Connection, block: Block) -> int:
        records, vectors, codes = self._checked(block)
        paths = [path_bytes(one.path) for one in records]
        before = tables.drop(connection, paths)
        had = {one.path: one.tags for one in before}
        kept, used = given_back(records, tables.recall(connection, {one.sha256 for one in records}), had)
        data = encoded(vectors)
        tables.insert(connection, kept, data, [checksum(one) for one in data])
        tables.forget(connection, used)
        connection.execute("DELETE FROM bad WHERE path = ANY(%s)", (paths,))
        if self.meta.features:
            features.put(connection, codes)
        self._drop_features(connection, before)
        return len(kept)

    def _drop_features(self, connection: Connection, gone: Iterable[Forgotten]) -> None:
        """Of these images, unless another one has that content."""
        if self.meta.features:
            features.drop_unused(connection, [bytes.fromhex(one.sha256) for one in gone])

    def remove(self, paths: Iterable[str]) -> int:
        names = [path_bytes(path) for path in paths]

        def work(connection: Connection) -> int:
            gone = tables.drop(connection, names)
            tables.keep(connection, gone)
            self._drop_features(connection, gone)
            return len(gone)

        return self._server.change(work)

    def rename(self, moves: Mapping[str, str]) -> int:
        wanted = {path_bytes(old): new for old, new in moving(moves).items()}

        def work(connection: Connection) -> int:
            rows = connection.execute(
                f"SELECT {RECORD}, vector, checksum FROM images JOIN vectors USING (id) WHERE path = ANY(%s)",
                (list(wanted),),
                binary=True,
            ).fetchall()
            moved = [replace(record(row), path=wanted[row[0]]) for row in rows]
            tables.drop(connection, [row[0] for row in rows])
            gone = tables.drop(connection, [path_bytes(one.path) for one in moved])
            tables.keep(connection, gone)
            tables.insert(connection, moved, [row[-2] for row in rows], [row[-1] or checksum(row[-2]) for row in rows])
            self._drop_features(connection, gone)
            return len(moved)

        return self._server.change(work)

    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        values = [path_bytes(path) for path in mtimes_ns], list(mtimes_ns.values())
        return self._change(
            "UPDATE images SET mtime_ns = time FROM unnest(%s::bytea[], %s::int8[]) new (name, time) WHERE path = name",
            *values,
        )

    def _tag(self, ids: list[bytes], add: frozenset[str], remove: frozenset[str]) -> int:
        return self._change(
            "UPDATE images SET tags = ARRAY(SELECT unnest(tags) EXCEPT SELECT unnest(%s::text[])"
            " UNION SELECT unnest(%s::text[])) WHERE id = ANY(%s)",
            sorted(tag for tag in remove if tag.isprintable()),
            sorted(add),
            ids,
        )

    def report_bad(self, files: Iterable[BadFile]) -> None:
        time = now()
        latest = {path_bytes(f.path): (f.size, f.mtime_ns, _text(f.reason), f.since or time) for f in files}
        columns = list(zip(*((path, *rest) for path, rest in latest.items()), strict=True)) or [()] * 5
        self._change(
            "INSERT INTO bad SELECT * FROM unnest(%s::bytea[], %s::int8[], %s::int8[], %s::text[], %s::text[])"
            " ON CONFLICT (path) DO UPDATE SET size = excluded.size, mtime_ns = excluded.mtime_ns,"
            " reason = excluded.reason, since = coalesce(nullif(bad.since, ''), excluded.since)",
            *(list(column) for column in columns),
        )

    def clear_bad(self, paths: Iterable[str]) -> int:
        return self._change("DELETE FROM bad WHERE path = ANY(%s)", [path_bytes(path) for path in paths])

    def remember(self, tags: Iterable[Forgotten]) -> None:
        kept = list(tags)
        self._server.change(lambda connection: tables.keep(connection, kept))

    def _set_engines(self, engines: str) -> None:
        self._server.change(lambda connection: features.set_engines(connection, engines))
        self._meta = replace(self.meta, features=engines)

    def _set_features(self, codes: Mapping[str, bytes]) -> None:
        self._server.change(lambda connection: features.put(connection, codes))

    # questions

    def _images(self, field: str, values: list[bytes]) -> list[Record]:
        return self._records(f"{field} = ANY(%s)", values)

    def records(
        self, where: Filter | None = None, after: str | None = None, limit: int | None = None
    ) -> Iterator[Record]:
        def page(last: bytes, size: int) -> list[Record]:
            condition, values = matching(where, last)
            return self._records(f"{condition} ORDER BY path LIMIT %s", *values, size)

        return pages(page, after, limit)

    def damaged(self) -> Iterator[str]:
        """By the server, which need not send the vectors for that."""
        condition = f"vectors.id IS NULL OR NOT {WHOLE}" if self._format >= 3 else "vectors.id IS NULL"
        rows = self._rows(f"SELECT path FROM images LEFT JOIN vectors USING (id) WHERE {condition} ORDER BY path")
        return (path_text(path) for (path,) in rows)

    def _vectors(self, ids: set[bytes]) -> dict[str, tuple[str, Vectors | None]]:
        kept = "checksum" if self._format >= 3 else "NULL"
        statement = f"SELECT id, path, vector, {kept} FROM images LEFT JOIN vectors USING (id) WHERE id = ANY(%s)"
        found = self._rows(statement, list(ids))
        good = {name: data for name, _, data, kept in found if data and whole(data, kept)}
        vectors = dict(zip(good, decoded(list(good.values()), self.meta.dim), strict=True))
        return {name.hex(): (path_text(path), vectors.get(name)) for name, path, *_ in found}

    def _codes(self, ids: set[bytes]) -> list[Code]:
        return self._server.read(lambda connection: features.read(connection, ids))

    def _features_damaged(self) -> list[Record]:
        return self._records(f"sha256 IN (SELECT sha256 FROM features WHERE {features.DAMAGED}) ORDER BY path")

    def _search(self, queries: Vectors, k: int, where: Filter | None, exact: bool | None) -> SearchResult:
        def work(connection: Connection) -> Any:
            with connection.transaction():
                return self._nearest.search(connection, queries, k, where, bool(exact))

        found, damaged = self._server.read(work)
        self._left_out(damaged)
        scores = np.array([[-distance for _, distance, _ in hits] for hits in found], np.float32)
        width = len(found[0]) if found else 0
        return SearchResult(scores.reshape(len(found), width), [[name.hex() for name, *_ in hits] for hits in found])

    # upkeep

    def snapshot(self, dest: str) -> None:
        """An index in a folder, for the embedded engine."""
        with self._server.one_state():
            copy_to_folder(dest, self)

    def _problems(self) -> list[str]:
        return self._server.read(self._problems_seen)

    def _problems_seen(self, connection: Connection) -> list[str]:
        harmed = f"NOT {WHOLE} OR " if self._format >= 3 else ""
        with connection.transaction():
            expected, problems = tables.read_state(connection).images, list[str]()
            for table in ("images", "vectors"):
                ((count,),) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
                if count != expected:
                    problems.append(f"{count} {table} are kept, {expected} are expected")
            checks = {
                "there is no vector; the next `cooc index` describes the picture again": "vectors.id IS NULL",
                VECTOR_DAMAGED: f"{harmed}NOT abs(vector_norm(vector) - 1) <= 1e-3",
                WRONG_ID: "id <> substr(sha256(sha256 || path), 1, 16)",
            }
            for problem, condition in checks.items():
                rows = connection.execute(
                    f"SELECT path FROM images LEFT JOIN vectors USING (id) WHERE {condition} ORDER BY path", binary=True
                )
                problems += [f"{show(path)}: {problem}" for (path,) in rows]
            lost = "SELECT id FROM vectors WHERE NOT EXISTS (SELECT FROM images WHERE images.id = vectors.id)"
            problems += [f"vectors: {name.hex()} belongs to no image" for (name,) in connection.execute(lost)]
            if self.meta.features:
                harmed = f"SELECT path FROM images JOIN features USING (sha256) WHERE {features.DAMAGED} ORDER BY path"
                rows = connection.execute(harmed, binary=True)
                problems += [f"{show(path)}: {FEATURES_DAMAGED}" for (path,) in rows]
            return problems

    def compact(self) -> None:
        self._change("DELETE FROM forgotten WHERE removed < %s", long_ago())
        self._server.change(self._nearest.renew_graph)
        self._server.change(drop_old_graphs)
        if self.meta.features:
            self._server.change(features.drop_unused)
            self._server.vacuum(["features"])
        self._server.vacuum(["images", "vectors", "bad", "state", "forgotten"])

    def disk_bytes(self) -> int:
        size = (
            "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8 FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = relnamespace WHERE relkind = 'r' AND nspname = %s"
        )
        ((found,),) = self._rows(size, self.address.schema)
        return int(found)

    def close(self) -> None:
        self._server.close()

    # how it works

    def _rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return self._server.read(lambda connection: connection.execute(statement, values, binary=True).fetchall())

    def _rows_since_3(self, statement: str) -> list[tuple[Any, ...]]:
        return self._rows(statement) if self._format >= 3 else []

    def _records(self, condition: str, *values: object) -> list[Record]:
        return [record(row) for row in self._rows(f"SELECT {RECORD} FROM images WHERE {condition}", *values)]

    def _change(self, statement: str, *values: object) -> int:
        return self._server.change(lambda connection: connection.execute(statement, values).rowcount)


def _text(reason: str) -> str:
    """What the server can keep: a message may hold pieces of names that are not UTF-8."""
    return reason.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
