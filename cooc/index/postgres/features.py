"""Local features in PostgreSQL: a table of codes, by content, that is there when the index keeps any.

It is no part of the format, as in the embedded engine (`cooc.index.embedded.features`). Codes are dense, so they are
stored as they are (EXTERNAL): the server does not try to compress them, and tells their length without reading them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cooc.index.checks import checksum
from cooc.index.postgres.connections import Connection
from cooc.index.records import path_text
from cooc.index.sql import UNUSED
from cooc.index.store import Code

TABLES = """
CREATE TABLE features (sha256 bytea PRIMARY KEY, code bytea NOT NULL, checksum bytea NOT NULL);
ALTER TABLE features ALTER code SET STORAGE EXTERNAL;
CREATE TABLE feature_engines (names text NOT NULL);
"""
DAMAGED = "checksum <> substr(sha256(code), 1, 8)"  # by the server, which need not send the code for that


def read_engines(connection: Connection) -> str:
    """Of the features that are kept; empty where none are."""
    if connection.execute("SELECT to_regclass('feature_engines')").fetchone() == (None,):
        return ""
    row = connection.execute("SELECT names FROM feature_engines").fetchone()
    return str(row[0]) if row else ""


def set_engines(connection: Connection, engines: str) -> None:
    connection.execute(TABLES)
    connection.execute("INSERT INTO feature_engines VALUES (%s)", (engines,))


def put(connection: Connection, codes: Mapping[str, bytes]) -> None:
    """By content, sha256 -> code."""
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO features VALUES (%b, %b, %b) ON CONFLICT (sha256)"
            " DO UPDATE SET code = excluded.code, checksum = excluded.checksum",
            [(bytes.fromhex(sha256), code, checksum(code)) for sha256, code in codes.items()],
        )


def read(connection: Connection, ids: Iterable[bytes]) -> list[Code]:
    statement = "SELECT id, path, code, checksum FROM images JOIN features USING (sha256) WHERE id = ANY(%s)"
    rows = connection.execute(statement, (list(ids),), binary=True)
    return [Code(i.hex(), path_text(path), code if checksum(code) == kept else None) for i, path, code, kept in rows]


def drop_unused(connection: Connection, contents: Iterable[bytes] | None = None) -> None:
    """Of these contents, or of all: what belongs to no image any more."""
    if contents is None:
        connection.execute(f"DELETE FROM features WHERE {UNUSED}")
    else:
        connection.execute(f"DELETE FROM features WHERE sha256 = ANY(%s) AND {UNUSED}", (list(set(contents)),))
