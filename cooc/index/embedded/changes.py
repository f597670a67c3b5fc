"""Changes of an embedded index, as statements inside a transaction that the store has begun."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from uuid import uuid4

from cooc.index.checks import moving
from cooc.index.embedded import features
from cooc.index.embedded.coding import Codes
from cooc.index.embedded.rows import RECORD, State, each, read_state
from cooc.index.records import Forgotten, Record, given_back, now, path_bytes, path_text
from cooc.index.sql import FORGOTTEN, forgotten, record


def add(connection: sqlite3.Connection, records: Sequence[Record], codes: Codes, made: Mapping[str, bytes]) -> int:
    """Each in a new slot, with the features `made` of its content."""
    before = drop(connection, [path_bytes(r.path) for r in records])
    had = {r.path: r.tags for r in before}
    kept = each(connection, f"{FORGOTTEN} WHERE sha256 IN", {bytes.fromhex(r.sha256) for r in records})
    tagged, used = given_back(records, map(forgotten, kept), had)
    first = read_state(connection).slots
    coded = zip(tagged, codes, strict=True)
    rows = [(slot, path_bytes(r.path), r, code.tobytes()) for slot, (r, code) in enumerate(coded, first)]
    images = (
        (s, path, bytes.fromhex(r.id), r.size, r.mtime_ns, bytes.fromhex(r.sha256), r.width, r.height, r.taken)
        for s, path, r, _ in rows
    )
    tags = ((tag, slot) for slot, _, r, _ in rows for tag in r.tags)
    connection.executemany("INSERT INTO images VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", images)
    connection.executemany("INSERT INTO vectors VALUES (?, ?, ?)", ((s, v, zlib.crc32(v)) for s, _, _, v in rows))
    connection.executemany("INSERT INTO tags VALUES (?, ?)", tags)
    connection.executemany("DELETE FROM bad WHERE path = ?", ((path,) for _, path, _, _ in rows))
    connection.executemany(
        "DELETE FROM forgotten WHERE sha256 = ? AND path = ?", ((bytes.fromhex(s), path_bytes(p)) for s, p in used)
    )
    connection.execute("UPDATE state SET next_slot = ?", (first + len(rows),))
    features.put(connection, made)
    features.drop_unused(connection, {bytes.fromhex(r.sha256) for r in before})
    return len(rows)


def remove(connection: sqlite3.Connection, paths: list[bytes]) -> int:
    """Their tags are kept by content."""
    gone, time = drop(connection, paths), now()
    keep(connection, (Forgotten(r.sha256, r.path, r.tags, time) for r in gone if r.tags))
    features.drop_unused(connection, {bytes.fromhex(r.sha256) for r in gone})
    return len(gone)


def drop(connection: sqlite3.Connection, paths: list[bytes]) -> list[Record]:
    """Those that there were."""
    rows = list(each(connection, f"{RECORD} WHERE path IN", paths))
    for table in ("images", "vectors", "tags"):
        connection.executemany(f"DELETE FROM {table} WHERE slot = ?", ((row[-1],) for row in rows))
    connection.executemany("INSERT INTO removed VALUES (?)", ((row[-1],) for row in rows))
    return [record(row) for row in rows]


def keep(connection: sqlite3.Connection, tags: Iterable[Forgotten]) -> None:
    rows = ((bytes.fromhex(f.sha256), path_bytes(f.path), json.dumps(sorted(f.tags)), f.removed) for f in tags)
    connection.executemany("INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?, ?)", rows)


def rename(connection: sqlite3.Connection, moves: Mapping[str, str]) -> int:
    wanted = {path_bytes(old): path_bytes(new) for old, new in moving(moves).items()}
    rows = each(connection, "SELECT path, slot, sha256 FROM images WHERE path IN", wanted)
    found = {path: (slot, sha256) for path, slot, sha256 in rows}
    remove(connection, [wanted[path] for path in found if wanted[path] not in found])
    # Through names that no file can have, so that images may change places.
    connection.executemany(
        "UPDATE images SET path = ? WHERE slot = ?", ((b"\0%d" % slot, slot) for slot, _ in found.values())
    )
    first = read_state(connection).slots
    for path, (slot, sha256) in found.items():
        name = Record(path_text(wanted[path]), 0, 0, sha256.hex(), 0, 0).id
        connection.execute(
            "UPDATE images SET path = ?, id = ? WHERE slot = ?", (wanted[path], bytes.fromhex(name), slot)
        )
    _renumber(connection, [(old, slot) for slot, (old, _) in enumerate(found.values(), first)])
    connection.executemany("INSERT INTO removed VALUES (?)", ((old,) for old, _ in found.values()))
    connection.execute("UPDATE state SET next_slot = ?", (first + len(found),))
    return len(found)


def tag(connection: sqlite3.Connection, ids: Iterable[bytes], add: Iterable[str], remove: Iterable[str]) -> int:
    slots = [slot for (slot,) in each(connection, "SELECT slot FROM images WHERE id IN", ids)]
    connection.executemany("DELETE FROM tags WHERE tag = ? AND slot = ?", ((t, s) for t in remove for s in slots))
    connection.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?)", ((t, s) for t in add for s in slots))
    return len(slots)


def fill_holes(connection: sqlite3.Connection, state: State) -> None:
    """Move the last images into the slots of removed ones: work for what was removed, not for what is kept."""
    holes = connection.execute("SELECT slot FROM removed WHERE slot < ? ORDER BY slot", (state.images,)).fetchall()
    last = connection.execute("SELECT slot FROM images WHERE slot >= ? ORDER BY slot", (state.images,)).fetchall()
    _renumber(connection, [(old, new) for (old,), (new,) in zip(last, holes, strict=True)])
    connection.execute("DELETE FROM removed")
    connection.execute(
        "UPDATE state SET epoch = ?, next_slot = ?, graph = 0, graph_crc = 0, graph_ef = 0", (uuid4().hex, state.images)
    )


def _renumber(connection: sqlite3.Connection, moves: list[tuple[int, int]]) -> None:
    for table in ("images", "vectors", "tags"):
        connection.executemany(f"UPDATE {table} SET slot = ? WHERE slot = ?", ((new, old) for old, new in moves))
