"""The tables of an index in PostgreSQL: how they are made and upgraded, and images as their rows.

    meta        the format, and how the vectors were made (StoreMeta), as JSON
    state       one row: how many images there are, and what the graph for approximate search was built on
    images      one row for each image: id, path, size, ..., tags
    vectors     id, vector: float32, so that an exact search gives the scores that the embedded engine gives; checksum
    bad         files that could not be described
    notes       small JSON values about the index
    forgotten   tags of what was removed, by content
    features    local features, by content: see `features.py`

A checksum is the first 8 bytes of the sha256 of the vector as it is sent, which server and client can both compute: who
gets a vector checks it here, who looks for damage in all of them need not send them. Rows of an older cooc have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from psycopg import sql

from cooc.index.checks import checksum
from cooc.index.postgres.connections import Connection
from cooc.index.records import FORMAT, Forgotten, Record, id_bytes, in_words, now, path_bytes
from cooc.index.sql import FORGOTTEN, forgotten
from cooc.index.store import Vectors

INLINE_DIMENSIONS = 2000  # of a vector that is kept in the row itself
SINCE_FORMAT_3 = """
CREATE TABLE notes (name text PRIMARY KEY, json text NOT NULL);
CREATE TABLE forgotten (
    sha256 bytea, path bytea, tags text[] NOT NULL, removed text COLLATE "C" NOT NULL, PRIMARY KEY (sha256, path)
);
"""
SCHEMA = f"""
CREATE TABLE meta (format int NOT NULL, json text NOT NULL);
CREATE TABLE state (images int8 NOT NULL, effort int NOT NULL, indexed int8 NOT NULL, removed int8 NOT NULL);
CREATE TABLE images (
    id bytea PRIMARY KEY, path bytea NOT NULL UNIQUE, size int8 NOT NULL, mtime_ns int8 NOT NULL, sha256 bytea NOT NULL,
    width int4 NOT NULL, height int4 NOT NULL, taken text COLLATE "C", tags text[] NOT NULL
);
CREATE INDEX images_sha256 ON images (sha256);
CREATE INDEX images_taken ON images (taken);
CREATE INDEX images_tags ON images USING gin (tags);
CREATE TABLE vectors (id bytea PRIMARY KEY, vector vector({{dim}}) NOT NULL, checksum bytea);
CREATE TABLE bad (
    path bytea PRIMARY KEY, size int8 NOT NULL, mtime_ns int8 NOT NULL, reason text NOT NULL,
    since text NOT NULL DEFAULT ''
);
INSERT INTO state VALUES (0, 0, 0, 0);
{SINCE_FORMAT_3}"""
UPGRADE = f"""
ALTER TABLE vectors ADD COLUMN checksum bytea;
ALTER TABLE bad ADD COLUMN since text NOT NULL DEFAULT '';
UPDATE meta SET format = {FORMAT}, json = jsonb_set(json::jsonb, '{{format}}', '{FORMAT}')::text;
{SINCE_FORMAT_3}"""
RECORD = "path, size, mtime_ns, sha256, width, height, taken, tags"
TYPES = ["bytea", "bytea", "int8", "int8", "bytea", "int4", "int4", "text", "text[]"]
WHOLE = "(checksum IS NULL OR checksum = substr(sha256(vector_send(vector)), 1, 8))"


class Counts(NamedTuple):
    images: int
    effort: int  # hnsw.ef_search for 100 results; 0: there is no graph
    indexed: int  # images that there were when the graph was built
    removed: int  # since then


def make(connection: Connection, dim: int, meta: str) -> None:
    connection.execute(sql.SQL(SCHEMA).format(dim=sql.Literal(dim)))
    storage = sql.SQL("PLAIN" if dim <= INLINE_DIMENSIONS else "EXTERNAL")
    connection.execute(sql.SQL("ALTER TABLE vectors ALTER vector SET STORAGE {}").format(storage))
    connection.execute("INSERT INTO meta VALUES (%s, %s)", (FORMAT, meta))


def upgrade(connection: Connection) -> None:
    """To format 3, unless it is that already."""
    if connection.execute("SELECT format FROM meta").fetchall() != [(FORMAT,)]:
        connection.execute(UPGRADE)


def read_state(connection: Connection) -> Counts:
    row = connection.execute("SELECT images, effort, indexed, removed FROM state").fetchone()
    assert row is not None
    return Counts(*row)


matching = partial(in_words, value="%s", tagged="tags @> ARRAY[%s]")

# vectors, in pgvector's binary format: dimensions and zero, two bytes each, then the values, all big-endian


def whole(data: bytes, kept: bytes | None) -> bool:
    """Is it what was written? An older cooc kept no checksum."""
    return kept is None or checksum(data) == kept


def decoded(rows: Sequence[bytes], dim: int) -> Vectors:
    data = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), 4 + 4 * dim)
    return np.ascontiguousarray(data[:, 4:]).view(">f4").astype(np.float32)


def encoded(vectors: Vectors) -> list[bytes]:
    head = vectors.shape[1].to_bytes(2, "big") + b"\0\0"
    return [head + row.tobytes() for row in vectors.astype(">f4")]


# changes


def drop(connection: Connection, paths: list[bytes]) -> list[Forgotten]:
    """Remove images; what there is to `keep` of those that there were."""
    rows = connection.execute(
        "DELETE FROM images WHERE path = ANY(%s) RETURNING id, sha256, path, tags", (paths,), binary=True
    ).fetchall()
    if rows:
        connection.execute("DELETE FROM vectors WHERE id = ANY(%s)", ([row[0] for row in rows],))
        connection.execute("UPDATE state SET images = images - %(n)s, removed = removed + %(n)s", {"n": len(rows)})
    time = now()
    return [forgotten((*row[1:], time)) for row in rows]


def keep(connection: Connection, gone: Iterable[Forgotten]) -> None:
    """The tags of images, by content, where they had any."""
    tagged = (one for one in gone if one.tags)
    rows = [(bytes.fromhex(one.sha256), path_bytes(one.path), sorted(one.tags), one.removed) for one in tagged]
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO forgotten VALUES (%s, %s, %s::text[], %s) ON CONFLICT (sha256, path)"
            " DO UPDATE SET tags = excluded.tags, removed = excluded.removed",
            rows,
        )


def recall(connection: Connection, contents: set[str]) -> list[Forgotten]:
    values = ([bytes.fromhex(content) for content in contents],)
    rows = connection.execute(f"{FORGOTTEN} WHERE sha256 = ANY(%s)", values, binary=True)
    return [forgotten(row) for row in rows]


def forget(connection: Connection, used: set[tuple[str, str]]) -> None:
    values = [bytes.fromhex(content) for content, _ in used], [path_bytes(path) for _, path in used]
    connection.execute(
        "DELETE FROM forgotten USING unnest(%s::bytea[], %s::bytea[]) used (content, place)"
        " WHERE sha256 = content AND path = place",
        values,
    )


def insert(connection: Connection, records: Sequence[Record], vectors: Sequence[bytes], sums: Sequence[bytes]) -> None:
    """Vectors and their checksums as they are kept; of a vector that is only moved, the sum is the old one."""
    ids = [id_bytes(one.id) for one in records]
    with connection.cursor() as cursor:
        with cursor.copy(f"COPY images (id, {RECORD}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(TYPES)
            for name, r in zip(ids, records, strict=True):
                where = path_bytes(r.path), r.size, r.mtime_ns, bytes.fromhex(r.sha256)
                copy.write_row((name, *where, r.width, r.height, r.taken, sorted(r.tags)))
        with cursor.copy("COPY vectors (id, vector, checksum) FROM STDIN (FORMAT BINARY)") as copy:
            copy.write(_copied(zip(ids, vectors, sums, strict=True)))
    connection.execute("UPDATE state SET images = images + %s", (len(records),))


def _copied(rows: Iterable[tuple[bytes, ...]]) -> bytes:
    """Rows as COPY's binary format has them, in one piece: by far faster than one by one."""
    parts = [b"PGCOPY\n\xff\r\n\0" + bytes(8)]
    for row in rows:
        parts.append(len(row).to_bytes(2, "big"))
        for column in row:
            parts += len(column).to_bytes(4, "big"), column
    return b"".join([*parts, b"\xff\xff"])
