"""Local features in an embedded index: a table of codes, by content, that is there when the index keeps any.

It is no part of the format: a cooc that does not know the table reads and writes the index as ever. Since a code
belongs to a content, not to a slot or a path, whatever such a cooc moves or replaces, no picture gets another one's.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Mapping

from cooc.index.sql import UNUSED

TABLES = (
    "CREATE TABLE features (sha256 BLOB PRIMARY KEY, code BLOB NOT NULL, crc INTEGER NOT NULL)",
    "CREATE TABLE feature_engines (names TEXT NOT NULL)",
)


def read_engines(connection: sqlite3.Connection) -> str:
    """Of the features that are kept; empty where none are."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'feature_engines'").fetchone():
        return ""
    return str(connection.execute("SELECT names FROM feature_engines").fetchone()[0])


def set_engines(connection: sqlite3.Connection, engines: str) -> None:
    for table in TABLES:
        connection.execute(table)
    connection.execute("INSERT INTO feature_engines VALUES (?)", (engines,))


def put(connection: sqlite3.Connection, codes: Mapping[str, bytes]) -> None:
    """By content, sha256 -> code."""
    if not codes:  # there may be no table
        return
    rows = ((bytes.fromhex(sha256), code, zlib.crc32(code)) for sha256, code in codes.items())
    connection.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?)", rows)


def drop_unused(connection: sqlite3.Connection, contents: Iterable[bytes] | None = None) -> None:
    """Of these contents, or of all: what belongs to no image any more."""
    if not read_engines(connection):
        return
    if contents is None:
        connection.execute(f"DELETE FROM features WHERE {UNUSED}")
    else:
        connection.executemany(f"DELETE FROM features WHERE sha256 = ? AND {UNUSED}", ((one,) for one in contents))


def damaged(connection: sqlite3.Connection) -> list[bytes]:
    """Contents (sha256) whose features are not what was written; all are read for that."""
    rows = connection.execute("SELECT sha256, code, crc FROM features")
    return [sha256 for sha256, code, crc in rows if zlib.crc32(code) != crc]
