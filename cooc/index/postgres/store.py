"""PostgreSQL with pgvector, for those who run one already: an index is a schema with five tables.

    meta        how the vectors were made (StoreMeta), as JSON
    state       one row: how many images there are, and what the graph for approximate search was built on
    images      one row for each image: id, path, size, ..., tags
    vectors     id, vector: float32, so that an exact search gives the scores that the embedded engine gives
    bad         files that could not be described

Searching is exact, one scan of `vectors`, until `compact` finds the index large enough for an HNSW graph. That is built
on half-precision copies of the vectors (pgvector holds no more than 4000 dimensions of them, and none of float32 beyond
2000), gives a few more candidates than asked for, and these are scored exactly. With a filter, the graph is walked on
until enough of what it gives passes; where few images pass, or it gives too few, they are scanned instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import psycopg
from psycopg import sql

from cooc.errors import CoocError, InputError, StoreError
from cooc.index.copying import copy_to_folder
from cooc.index.postgres.connections import Address, Connection, Query, Server
from cooc.index.store import (
    FORMAT,
    BadFile,
    Filter,
    Record,
    SearchResult,
    StoreMeta,
    Vectors,
    check_tags,
    check_vectors,
    id_bytes,
    path_bytes,
    path_text,
)

APPROXIMATE_FROM = 20_000  # images
MATCHING, MATCHING_SHARE = 20_000, 0.2  # images that pass a filter, and their share, up to which they are scanned
REBUILD_FROM = 0.2  # share of the graph's images that were removed
DIMENSIONS, GRAPH_DIMENSIONS, INLINE_DIMENSIONS = 16_000, 4000, 2000  # of a vector, in a graph, in the row itself
M, EF_CONSTRUCTION = 16, 100
EFFORTS = (40, 60, 100, 150, 200, 300, 400, 600, 1000)  # hnsw.ef_search; 1000 is the most that there is
RECALL, SAMPLE, NEIGHBOURS = 0.97, 32, 100  # to be had when a graph is built, for so many queries and results
GRAPH_MEMORY = 2 << 30  # bytes at most for building: a graph that does not fit takes many times longer
PGVECTOR = (0, 8)  # has iterative scans
PAGE = 1000  # records read at once

SCHEMA = """
CREATE TABLE meta (format int NOT NULL, json text NOT NULL);
CREATE TABLE state (images int8 NOT NULL, effort int NOT NULL, indexed int8 NOT NULL, removed int8 NOT NULL);
CREATE TABLE images (
    id bytea PRIMARY KEY, path bytea NOT NULL UNIQUE, size int8 NOT NULL, mtime_ns int8 NOT NULL, sha256 bytea NOT NULL,
    width int4 NOT NULL, height int4 NOT NULL, taken text COLLATE "C", tags text[] NOT NULL
);
CREATE INDEX images_sha256 ON images (sha256);
CREATE INDEX images_taken ON images (taken);
CREATE INDEX images_tags ON images USING gin (tags);
CREATE TABLE vectors (id bytea PRIMARY KEY, vector vector({dim}) NOT NULL);
CREATE TABLE bad (path bytea PRIMARY KEY, size int8 NOT NULL, mtime_ns int8 NOT NULL, reason text NOT NULL);
INSERT INTO state VALUES (0, 0, 0, 0);
"""
USUAL = (  # what a walk of the graph has set for its transaction, as the server has it
    "SELECT set_config(name, reset_val, true) FROM pg_settings"
    " WHERE name IN ('enable_seqscan', 'enable_hashjoin', 'enable_mergejoin')"
)
RECORD = "path, size, mtime_ns, sha256, width, height, taken, tags"
TYPES = ["bytea", "bytea", "int8", "int8", "bytea", "int4", "int4", "text", "text[]"]


_T = TypeVar("_T")


class State(NamedTuple):
    images: int
    effort: int  # hnsw.ef_search for 100 results; 0: there is no graph
    indexed: int  # images that there were when the graph was built
    removed: int  # since then


def open_store(address: str, *, write: bool = False) -> PostgresStore:
    return PostgresStore(Address.parse(address), write=write)


def create_store(address: str, meta: StoreMeta) -> PostgresStore:
    where = Address.parse(address)
    if meta.dim > DIMENSIONS:
        raise InputError(f"pgvector holds up to {DIMENSIONS} dimensions, not {meta.dim}: use another recipe or engine.")
    meta = replace(meta, storage="float32")  # whatever it comes from
    schema = sql.Identifier(where.schema)
    server = Server(where)
    try:
        server.read(_require_pgvector)
        with server.explained(), server.connect() as connection, connection.transaction():
            try:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
            except (psycopg.errors.DuplicateSchema, psycopg.errors.UniqueViolation) as error:
                text = f"There is an index at {where.shown} already: open it, or first DROP SCHEMA"
                raise StoreError(f"{text} {where.schema} CASCADE.") from error
            connection.execute(sql.SQL(SCHEMA).format(dim=sql.Literal(meta.dim)))
            storage = sql.SQL("PLAIN" if meta.dim <= INLINE_DIMENSIONS else "EXTERNAL")
            connection.execute(sql.SQL("ALTER TABLE vectors ALTER vector SET STORAGE {}").format(storage))
            connection.execute("INSERT INTO meta VALUES (%s, %s)", (meta.format, json.dumps(asdict(meta))))
    finally:
        server.close()
    return PostgresStore(where, write=True)


def _require_pgvector(connection: Connection) -> None:
    version = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    if (row := connection.execute(version).fetchone()) is None:
        try:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
        except psycopg.DatabaseError as error:
            raise StoreError(
                f"The server has no pgvector, or this user may not enable it ({error}). Install it (Debian: "
                "postgresql-NN-pgvector), and as the owner of the database: CREATE EXTENSION vector"
            ) from error
        row = connection.execute(version).fetchone()
    if row is None or tuple(map(int, row[0].split(".")[:2])) < PGVECTOR:
        raise StoreError(
            f"pgvector {row and row[0]} is too old: 0.8 is needed. Install it, then ALTER EXTENSION vector UPDATE."
        )


class PostgresStore:
    """`cooc.index.store.Store` in a schema of a database. Threads may share it."""

    def __init__(self, address: Address, *, write: bool = False) -> None:
        self.address = address
        self._server = Server(address)
        try:
            with self._server.explained(), self._server.connect() as connection:
                row = connection.execute("SELECT format, json FROM meta").fetchone()
            if row is None:
                raise self._server.missing()
            if row[0] > FORMAT:
                found = f"The index at {address.shown} has format {row[0]}"
                raise StoreError(f"{found}, and this cooc reads up to {FORMAT}: upgrade cooc.")
            self.meta = StoreMeta(**json.loads(row[1]))
            if write:
                self._server.become_writer()
        except BaseException:
            self._server.close()
            raise
        self._half = sql.SQL("halfvec({})").format(sql.Literal(self.meta.dim))

    def __len__(self) -> int:
        return self._read(_state).images

    # changes

    def add(self, records: Sequence[Record], vectors: Vectors) -> None:
        vectors = check_vectors(np.asarray(vectors), self.meta.dim)
        if len(records) != len(vectors):
            raise InputError(f"{len(records)} records came with {len(vectors)} vectors: one for each is needed.")
        latest = {path_bytes(record.path): row for row, record in enumerate(records)}

        def work(connection: Connection) -> None:
            had = _drop(connection, list(latest))
            kept = [
                replace(records[row], tags=records[row].tags | had.get(path, frozenset()))
                for path, row in latest.items()
            ]
            _insert(connection, kept, vectors[list(latest.values())])
            connection.execute("DELETE FROM bad WHERE path = ANY(%s)", (list(latest),))

        self._server.change(work)

    def remove(self, paths: Iterable[str]) -> int:
        names = [path_bytes(path) for path in paths]
        return self._server.change(lambda connection: len(_drop(connection, names)))

    def rename(self, moves: Mapping[str, str]) -> int:
        if len(set(moves.values())) < len(moves):
            raise InputError("Two images cannot be moved to one path.")
        wanted = {path_bytes(old): new for old, new in moves.items() if old != new}

        def work(connection: Connection) -> int:
            rows = connection.execute(
                f"SELECT {RECORD}, vector FROM images JOIN vectors USING (id) WHERE path = ANY(%s)",
                (list(wanted),),
                binary=True,
            ).fetchall()
            moved = [replace(_record(row[:-1]), path=wanted[row[0]]) for row in rows]
            _drop(connection, [row[0] for row in rows] + [path_bytes(record.path) for record in moved])
            _insert(connection, moved, self._vectors([row[-1] for row in rows]))
            return len(moved)

        return self._server.change(work)

    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        values = [path_bytes(path) for path in mtimes_ns], list(mtimes_ns.values())
        return self._count(
            "UPDATE images SET mtime_ns = time FROM unnest(%s::bytea[], %s::int8[]) new (name, time) WHERE path = name",
            *values,
        )

    def tag(self, ids: Iterable[str], add: Iterable[str] = (), remove: Iterable[str] = ()) -> int:
        add, remove = sorted(set(add)), sorted(set(remove))
        check_tags(add)
        return self._count(
            "UPDATE images SET tags = ARRAY(SELECT unnest(tags) EXCEPT SELECT unnest(%s::text[])"
            " UNION SELECT unnest(%s::text[])) WHERE id = ANY(%s)",
            [tag for tag in remove if tag.isprintable()],
            add,
            [id_bytes(name) for name in ids],
        )

    def report_bad(self, files: Iterable[BadFile]) -> None:
        latest = {path_bytes(file.path): (file.size, file.mtime_ns, _text(file.reason)) for file in files}
        columns = list(zip(*((path, *rest) for path, rest in latest.items()), strict=True)) or [(), (), (), ()]
        self._count(
            "INSERT INTO bad SELECT * FROM unnest(%s::bytea[], %s::int8[], %s::int8[], %s::text[]) ON CONFLICT (path)"
            " DO UPDATE SET size = excluded.size, mtime_ns = excluded.mtime_ns, reason = excluded.reason",
            *(list(column) for column in columns),
        )

    def clear_bad(self, paths: Iterable[str]) -> int:
        return self._count("DELETE FROM bad WHERE path = ANY(%s)", [path_bytes(path) for path in paths])

    def _count(self, statement: str, *values: object) -> int:
        return self._server.change(lambda connection: connection.execute(statement, values).rowcount)

    # questions

    def get(self, ids: Sequence[str]) -> list[Record | None]:
        found = {record.id: record for record in self._records("id = ANY(%s)", [id_bytes(name) for name in ids])}
        return [found.get(name) for name in ids]

    def find(self, paths: Sequence[str]) -> list[Record | None]:
        found = {r.path: r for r in self._records("path = ANY(%s)", [path_bytes(path) for path in paths])}
        return [found.get(path) for path in paths]

    def by_sha256(self, sha256: str) -> list[Record]:
        return self._records("sha256 = %s ORDER BY path", bytes.fromhex(sha256))

    def records(
        self, where: Filter | None = None, after: str | None = None, limit: int | None = None
    ) -> Iterator[Record]:
        condition, values = _matching(where)
        last = b"" if after is None else path_bytes(after)
        while limit is None or limit > 0:
            size = PAGE if limit is None else min(PAGE, limit)
            page = self._records(f"path > %s AND {condition} ORDER BY path LIMIT %s", last, *values, size)
            yield from page
            if len(page) < size:
                return
            last = path_bytes(page[-1].path)
            limit = None if limit is None else limit - size

    def bad_files(self) -> Iterator[BadFile]:
        yield from _pages(lambda last: self._read(lambda connection: _bad_page(connection, last)))

    def vectors(self, ids: Sequence[str]) -> Vectors:
        names = [id_bytes(name) for name in ids]
        found: dict[bytes, bytes] = dict(
            self._read(
                lambda connection: connection.execute(
                    "SELECT id, vector FROM vectors WHERE id = ANY(%s)", (list(set(names)),), binary=True
                ).fetchall()
            )
        )
        if missing := [name for name in names if name not in found]:
            raise InputError(
                f"There is no image {missing[0].hex()} in the index at {self.address.shown}: search again."
            )
        return self._vectors([found[name] for name in names])

    def search(
        self, queries: Vectors, k: int, *, where: Filter | None = None, exact: bool | None = None
    ) -> SearchResult:
        queries = check_vectors(np.asarray(queries), self.meta.dim)
        if k < 1:
            raise InputError(f"k must be at least 1, not {k}.")

        def work(connection: Connection) -> list[list[tuple[bytes, float]]]:
            with connection.transaction():
                effort = 0 if exact else self._effort(connection, where)
                found = self._approximate(connection, queries, k, where, effort) if effort else [[] for _ in queries]
                short = [row for row, hits in enumerate(found) if len(hits) < k]
                if effort and short:
                    connection.execute(USUAL)
                for row, hits in zip(short, self._exact(connection, queries[short], k, where), strict=True):
                    found[row] = hits
                return found

        found = self._read(work)
        scores = np.array([[-distance for _, distance in hits] for hits in found], np.float32)
        width = len(found[0]) if found else 0
        return SearchResult(scores.reshape(len(found), width), [[name.hex() for name, _ in hits] for hits in found])

    # how a search is done

    def _effort(self, connection: Connection, where: Filter | None) -> int:
        """0 where there is no graph, or so few images pass the filter that they are better scanned."""
        state = _state(connection)
        condition, values = _matching(where)
        if state.effort and values:
            few = min(MATCHING, int(MATCHING_SHARE * state.images))
            count = f"SELECT count(*) FROM (SELECT FROM images WHERE {condition} LIMIT %s) passing"
            if connection.execute(count, (*values, few)).fetchone() != (few,):
                return 0
        return state.effort

    def _exact(
        self, connection: Connection, queries: Vectors, k: int, where: Filter | None
    ) -> Iterator[list[tuple[bytes, float]]]:
        condition, values = _matching(where)
        joined = " JOIN images USING (id)" if values else ""
        statement = (
            f"SELECT id, vector <#> %s::vector AS distance FROM vectors{joined} WHERE {condition}"
            " ORDER BY distance, id LIMIT %s"
        )
        return _each(connection, sql.SQL(statement), ((query.view(Query), *values, k) for query in queries))

    def _approximate(
        self, connection: Connection, queries: Vectors, k: int, where: Filter | None, effort: int
    ) -> list[list[tuple[bytes, float]]]:
        condition, values = _matching(where)
        joined = " JOIN images USING (id)" if values else ""
        candidates = k + k // 4 + 8  # the order of half-precision distances is not quite that of the true ones
        connection.execute(
            "SELECT set_config('hnsw.ef_search', %s, true), set_config('hnsw.iterative_scan', 'relaxed_order', true),"
            " set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),"
            " set_config('enable_mergejoin', 'off', true)",
            (str(min(EFFORTS[-1], max(effort * max(k, NEIGHBOURS) // NEIGHBOURS, EFFORTS[0]))),),
        )
        statement = sql.SQL(
            f"WITH near AS MATERIALIZED (SELECT id, vector FROM vectors{joined} WHERE {condition}"
            " ORDER BY vector::{half} <#> %s::vector::{half} LIMIT %s)"
            " SELECT id, vector <#> %s::vector AS distance FROM near ORDER BY distance, id LIMIT %s"
        ).format(half=self._half)
        asked = (query.view(Query) for query in queries)
        return list(_each(connection, statement, ((*values, query, candidates, query, k) for query in asked)))

    # upkeep

    def snapshot(self, dest: str) -> None:
        """An index in a folder, for the embedded engine."""

        def images(connection: Connection) -> Iterator[tuple[list[Record], Vectors]]:
            statement = (
                f"SELECT {RECORD}, vector FROM images JOIN vectors USING (id) WHERE path > %s ORDER BY path LIMIT %s"
            )
            last = b""
            while rows := connection.execute(statement, (last, PAGE), binary=True).fetchall():
                yield [_record(row[:-1]) for row in rows], self._vectors([row[-1] for row in rows])
                last = rows[-1][0]

        with self._server.explained(), self._server.connect() as connection, connection.transaction():
            bad = _pages(lambda last: _bad_page(connection, last))
            copy_to_folder(dest, self.meta, images(connection), bad)

    def verify(self) -> list[str]:
        try:
            return self._read(self._verify)
        except CoocError as error:
            return [str(error)]

    def _verify(self, connection: Connection) -> list[str]:
        repair = "remove the image and index it again"
        with connection.transaction():
            expected, problems = _state(connection).images, list[str]()
            for table in ("images", "vectors"):
                ((count,),) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
                if count != expected:
                    problems.append(f"{count} {table} are kept, {expected} are expected")
            checks = {
                f"there is no vector; {repair}": "vectors.id IS NULL",
                f"the vector is damaged; {repair}": "NOT abs(vector_norm(vector) - 1) <= 1e-3",
                f"the id does not fit content and path; {repair}": "id <> substr(sha256(sha256 || path), 1, 16)",
            }
            for problem, condition in checks.items():
                rows = connection.execute(
                    f"SELECT path FROM images LEFT JOIN vectors USING (id) WHERE {condition} ORDER BY path", binary=True
                )
                problems += [f"{path.decode('utf-8', 'backslashreplace')}: {problem}" for (path,) in rows]
            lost = "SELECT id FROM vectors WHERE NOT EXISTS (SELECT FROM images WHERE images.id = vectors.id)"
            problems += [f"vectors: {name.hex()} belongs to no image" for (name,) in connection.execute(lost)]
            return problems

    def compact(self) -> None:
        self._server.change(self._renew_graph)
        self._server.change(_drop_old_graphs)
        self._server.vacuum(["images", "vectors", "bad", "state"])

    def _renew_graph(self, connection: Connection) -> None:
        """Build the graph when the index is large enough, again when much was removed; find out what it takes."""
        state = _state(connection)
        if state.images < APPROXIMATE_FROM or self.meta.dim > GRAPH_DIMENSIONS:
            return
        worn = state.removed >= REBUILD_FROM * state.indexed
        if state.effort and not worn and state.images < 2 * state.indexed:
            return
        if not state.effort or worn:
            self._build_graph(connection, state.images)
        effort = self._calibrated(connection)
        connection.execute("UPDATE state SET effort = %s, indexed = images, removed = 0", (effort,))

    def _build_graph(self, connection: Connection, count: int) -> None:
        """Readers go on meanwhile. Memory for it all, if that may be: 16-bit numbers, and neighbours on every level."""
        memory = min(GRAPH_MEMORY, count * (2 * self.meta.dim + 1024) + (64 << 20))
        connection.execute(
            "SELECT set_config(name, greatest(setting::int8, %s)::text, true) FROM pg_settings WHERE name = %s",
            (memory >> 10, "maintenance_work_mem"),
        )
        build = sql.SQL(
            "CREATE INDEX ON vectors USING hnsw ((vector::{half}) halfvec_ip_ops)"
            " WITH (m = {m}, ef_construction = {ef})"
        ).format(half=self._half, m=sql.Literal(M), ef=sql.Literal(EF_CONSTRUCTION))
        try:
            with connection.transaction():
                connection.execute(build)
        except psycopg.errors.DiskFull:  # of shared memory, which a container may have little of: with one process
            connection.execute("SELECT set_config('max_parallel_maintenance_workers', '0', true)")
            connection.execute(build)

    def _calibrated(self, connection: Connection) -> int:
        """The least effort that finds what a scan finds in *these* vectors: sets differ tenfold in what they take."""
        rng = np.random.default_rng(0)
        rows = connection.execute(  # ids are as good as random
            "SELECT vector FROM vectors WHERE id >= %s ORDER BY id LIMIT %s", (b"\x40", SAMPLE), binary=True
        ).fetchall()
        near = self._vectors([row[0] for row in rows])
        queries = _unit(near + _unit(rng.normal(size=near.shape)) / 2)  # as another picture of the same thing might be
        expected = [{name for name, _ in hits} for hits in self._exact(connection, queries, NEIGHBOURS, None)]
        for effort in EFFORTS:
            found = self._approximate(connection, queries, NEIGHBOURS, None, effort)
            hits = [
                len(true & {name for name, _ in row}) / len(true) for true, row in zip(expected, found, strict=True)
            ]
            if np.mean(hits) >= RECALL:
                break
        return effort

    def disk_bytes(self) -> int:
        size = (
            "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::int8 FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = relnamespace WHERE relkind = 'r' AND nspname = %s"
        )
        ((found,),) = self._read(lambda connection: connection.execute(size, (self.address.schema,)).fetchall())
        return int(found)

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # how it works

    def _read(self, work: Callable[[Connection], _T]) -> _T:
        return self._server.read(work)

    def _records(self, condition: str, *values: object) -> list[Record]:
        rows = self._read(
            lambda connection: connection.execute(
                f"SELECT {RECORD} FROM images WHERE {condition}", values, binary=True
            ).fetchall()
        )
        return [_record(row) for row in rows]

    def _vectors(self, rows: list[bytes]) -> Vectors:
        """From pgvector's binary format: four bytes of header each."""
        data = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), 4 + 4 * self.meta.dim)
        return np.ascontiguousarray(data[:, 4:]).view(">f4").astype(np.float32)


def _state(connection: Connection) -> State:
    row = connection.execute("SELECT images, effort, indexed, removed FROM state").fetchone()
    assert row is not None
    return State(*row)


def _record(row: tuple[Any, ...]) -> Record:
    path, size, mtime_ns, sha256, width, height, taken, tags = row
    return Record(path_text(path), size, mtime_ns, sha256.hex(), width, height, taken, frozenset(tags))


def _matching(where: Filter | None) -> tuple[str, list[object]]:
    """`Filter.matches` in SQL. A tilde is after everything that a date holds, "0" right after "/"."""
    clauses, values = ["TRUE"], list[object]()
    if where is not None and where.folder:
        clauses.append("path >= %s AND path < %s")
        values += [where.folder, where.folder[:-1] + b"0"]
    if where is not None and where.taken_from is not None:
        clauses.append("taken >= %s")
        values.append(where.taken_from)
    if where is not None and where.taken_to is not None:
        clauses.append("taken < %s")
        values.append(where.taken_to + "~")
    if where is not None and where.tags:
        clauses.append("tags @> %s::text[]")
        values.append(sorted(where.tags))
    return " AND ".join(clauses), values


def _drop(connection: Connection, paths: list[bytes]) -> dict[bytes, frozenset[str]]:
    """Remove images; return the tags of those that there were."""
    rows = connection.execute(
        "DELETE FROM images WHERE path = ANY(%s) RETURNING id, path, tags", (paths,), binary=True
    ).fetchall()
    if rows:
        connection.execute("DELETE FROM vectors WHERE id = ANY(%s)", ([row[0] for row in rows],))
        connection.execute("UPDATE state SET images = images - %(n)s, removed = removed + %(n)s", {"n": len(rows)})
    return {path: frozenset(tags) for _, path, tags in rows}


def _insert(connection: Connection, records: list[Record], vectors: Vectors) -> None:
    ids = [id_bytes(record.id) for record in records]
    with connection.cursor() as cursor:
        with cursor.copy(f"COPY images (id, {RECORD}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(TYPES)
            for name, r in zip(ids, records, strict=True):
                where = path_bytes(r.path), r.size, r.mtime_ns, bytes.fromhex(r.sha256)
                copy.write_row((name, *where, r.width, r.height, r.taken, sorted(r.tags)))
        with cursor.copy("COPY vectors (id, vector) FROM STDIN (FORMAT BINARY)") as copy:
            copy.write(_copied(ids, vectors))
    connection.execute("UPDATE state SET images = images + %s", (len(records),))


def _copied(ids: list[bytes], vectors: Vectors) -> bytes:
    """Rows (id, vector) as COPY's binary format has them, in one piece: by far faster than one by one."""
    count, dim = vectors.shape
    rows = np.empty(
        count,
        [
            ("columns", ">i2"),
            ("id_bytes", ">i4"),
            ("id", "V16"),
            ("vector_bytes", ">i4"),
            ("dim", ">i2"),
            ("zero", ">i2"),
            ("vector", ">f4", (dim,)),
        ],
    )
    rows["columns"], rows["id_bytes"], rows["vector_bytes"], rows["dim"], rows["zero"] = 2, 16, 4 + 4 * dim, dim, 0
    rows["id"], rows["vector"] = np.frombuffer(b"".join(ids), "V16"), vectors
    return b"PGCOPY\n\xff\r\n\0" + bytes(8) + rows.tobytes() + b"\xff\xff"


def _each(
    connection: Connection, statement: sql.SQL | sql.Composed, values: Iterable[Sequence[object]]
) -> Iterator[list[tuple[bytes, float]]]:
    """The rows of one statement for each tuple of values; all are on their way before the first has come back."""
    asked = list(values)
    if not asked:
        return
    with connection.cursor(binary=True) as cursor:
        cursor.executemany(statement, asked, returning=True)
        yield cursor.fetchall()
        while cursor.nextset():
            yield cursor.fetchall()


def _bad_page(connection: Connection, last: bytes) -> list[BadFile]:
    statement = "SELECT path, size, mtime_ns, reason FROM bad WHERE path > %s ORDER BY path LIMIT %s"
    rows = connection.execute(statement, (last, PAGE), binary=True)
    return [BadFile(path_text(path), size, mtime_ns, reason) for path, size, mtime_ns, reason in rows]


def _pages(page: Callable[[bytes], list[BadFile]]) -> Iterator[BadFile]:
    last = b""
    while files := page(last):
        yield from files
        last = path_bytes(files[-1].path)


def _drop_old_graphs(connection: Connection) -> None:
    """All but the newest. This waits for searches that use them, for a moment."""
    graphs = connection.execute(
        "SELECT i.relname FROM pg_index JOIN pg_class i ON i.oid = indexrelid JOIN pg_am a ON a.oid = i.relam"
        " WHERE indrelid = 'vectors'::regclass AND amname = 'hnsw' ORDER BY i.oid"
    ).fetchall()
    for (name,) in graphs[:-1]:
        connection.execute(sql.SQL("DROP INDEX {}").format(sql.Identifier(name)))


def _text(reason: str) -> str:
    """What the server can keep: a message may hold pieces of names that are not UTF-8."""
    return reason.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _unit(rows: Any) -> Vectors:
    unit: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit
