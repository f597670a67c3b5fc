"""The SQLite file of an embedded index: its tables, how it is opened, who may write, and what its errors mean.

WAL mode with synchronous=FULL: a commit is on disk when the call returns, so kill -9 and a power cut lose nothing that
was committed. (NORMAL would save one fsync for each batch, and batches are seconds apart.)
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from cooc.errors import CoocError, StoreDamagedError, StoreError, StoreLockedError
from cooc.index.checks import check_format, missing
from cooc.index.records import FORMAT, show
from cooc.index.store import kept_open

APPLICATION_ID = 0x636F6F63  # "cooc"
CACHE = 1 << 16  # kB for who writes: ids come in any order, and SQLite's own 2 MB wrote a page to disk for each of them

# A slot is the row of an image in the vector cache. It never changes what it holds: whatever changes a vector or an id
# takes a new slot and leaves the old one in `removed`, until compacting gives all slots out again under a new epoch.
# Paths are BLOBs: they need not be UTF-8. Pages of 16 kB hold seven vectors of 512 dimensions; 4 kB would waste half.
SINCE_FORMAT_3 = """\
CREATE TABLE notes (name TEXT PRIMARY KEY, json TEXT NOT NULL);
CREATE TABLE forgotten (
    sha256 BLOB NOT NULL, path BLOB NOT NULL, tags TEXT NOT NULL, removed TEXT NOT NULL, PRIMARY KEY (sha256, path)
) WITHOUT ROWID;
"""
SCHEMA = f"""
PRAGMA page_size = 16384;
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
CREATE TABLE meta (json TEXT NOT NULL);
CREATE TABLE state (
    epoch TEXT NOT NULL, next_slot INTEGER NOT NULL,
    graph INTEGER NOT NULL, graph_crc INTEGER NOT NULL, graph_ef INTEGER NOT NULL
);
CREATE TABLE images (
    slot INTEGER PRIMARY KEY, path BLOB NOT NULL UNIQUE, id BLOB NOT NULL UNIQUE, size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL, sha256 BLOB NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL, taken TEXT
);
CREATE INDEX images_sha256 ON images (sha256);
CREATE INDEX images_taken ON images (taken);
CREATE TABLE vectors (slot INTEGER PRIMARY KEY, vector BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE tags (tag TEXT NOT NULL, slot INTEGER NOT NULL, PRIMARY KEY (tag, slot)) WITHOUT ROWID;
CREATE INDEX tags_slot ON tags (slot);
CREATE TABLE removed (slot INTEGER PRIMARY KEY);
CREATE TABLE bad (
    path BLOB PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, reason TEXT NOT NULL,
    since TEXT NOT NULL DEFAULT ''
);
{SINCE_FORMAT_3}"""

UPGRADE = f"""
BEGIN IMMEDIATE;
ALTER TABLE bad ADD COLUMN since TEXT NOT NULL DEFAULT '';
{SINCE_FORMAT_3}UPDATE meta SET json = json_set(json, '$.format', {FORMAT});
PRAGMA user_version = {FORMAT};
COMMIT;
"""


def database(folder: Path) -> Path:
    return folder / "index.sqlite"


def require(folder: Path) -> None:
    """Is there a file that may be an index? (`connect` looks whether it is one.)"""
    path = database(folder)
    if not path.is_file():
        raise missing(f"in {show(folder)}")
    if path.stat().st_size == 0:
        raise damaged(folder, "index.sqlite is empty, as a full disk or a copy that broke off leaves it")


def damaged(folder: Path, why: object) -> StoreDamagedError:
    shown = show(folder)
    return StoreDamagedError(
        f"The index in {shown} is damaged ({why}). Put a snapshot in its place: cooc restore SNAPSHOT {shown}. Or save "
        f"the tags that can still be read, and describe the pictures again: cooc rebuild --index {shown}. If neither "
        "helps, delete the folder and run cooc index again."
    )


class Connection(sqlite3.Connection):
    """A connection that knows which file it was opened on."""

    path: Path
    stamp: Stamp
    frozen = False  # opened as a file that nobody changes

    def moved(self) -> bool:
        """Does another file lie there now? Of a frozen one: or has it changed? (A file that is gone is still read.)"""
        now = _stamp(self.path)
        return now is not None and (now != self.stamp if self.frozen else now[:2] != self.stamp[:2])


Stamp = tuple[int, ...]  # device, inode, size, times of content and of anything, bytes in the WAL


def _stamp(path: Path) -> Stamp | None:
    """By its looks alone. SQLite's change counter is no better (not every commit to a WAL moves it), and to open the
    file beside SQLite would be worse: POSIX systems drop all locks of a process when it closes *any* handle of a file.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, _wal_bytes(path)


def _wal_bytes(path: Path) -> int:
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        return 0


def connect(folder: Path, *, write: bool = False) -> Connection:
    """A connection to the index in `folder`, checked to be one. It may be used from any thread, one at a time."""
    with explained(folder):
        try:
            return _checked(folder, "mode=rw" if write else "mode=ro", write)
        except sqlite3.OperationalError as error:
            refused = _code(error) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
            if write or os.access(folder, os.W_OK) or _wal_bytes(database(folder)) or not refused:
                raise
        # A folder that this process may not write to, and nothing half-way in it: SQLite cannot coordinate with others
        # there, and need not, for as long as the file stays as it is. `reading.py` looks after that.
        connection = _checked(folder, "mode=ro&immutable=1")
        connection.frozen = True
        return connection


def _checked(folder: Path, options: str, write: bool = False) -> Connection:
    connection = _connect(database(folder), options)
    with kept_open(connection):
        _check(connection, folder)
        if write:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA cache_size = -{CACHE}")
            if version(connection) < FORMAT:
                connection.executescript(UPGRADE)
    return connection


def create(path: Path) -> Connection:
    connection = _connect(path, "mode=rwc")
    connection.executescript(SCHEMA)
    return connection


def _connect(path: Path, options: str) -> Connection:
    uri = f"file:{quote(os.fsencode(path.absolute()))}?{options}"
    stamp = _stamp(path)  # before it is opened: what happens in between is noticed
    connection = sqlite3.connect(
        uri, uri=True, timeout=60, isolation_level=None, check_same_thread=False, factory=Connection
    )
    connection.path, connection.stamp = path, stamp or ()
    return connection


def _check(connection: sqlite3.Connection, folder: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise StoreError(
            f"{show(database(folder))} is another program's database, no index of cooc. Name another folder with "
            "--index, or move the file away."
        )
    check_format(f"in {show(folder)}", version(connection))


def version(connection: sqlite3.Connection) -> int:
    """The format of the index. One of 1 or 2 is read as it is; who opens it for writing makes it one of 3."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    return int(found)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """What SQLite and the system say, as errors of cooc that name the index and the repair."""
    try:
        yield
    except CoocError:
        raise
    except sqlite3.Error as error:
        code, index = _code(error), show(folder)
        if code == sqlite3.SQLITE_FULL:
            raise _full(index) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise damaged(folder, error) from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise StoreError(
                f"The index in {index} cannot be opened or written ({error}): make the folder writable, or copy it "
                "elsewhere."
            ) from error
        if code == sqlite3.SQLITE_BUSY:
            raise StoreLockedError(f"The index in {index} is held by another process ({error}): try again.") from error
        raise StoreError(
            f"The index in {index} could not be used ({error}). What was committed is kept: check the disk, try again."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(show(folder)) from error
        raise StoreError(
            f"The index in {show(folder)} could not be used ({error.strerror}): check that the folder can be read and "
            "written, try again."
        ) from error


def _full(index: str) -> StoreError:
    return StoreError(
        f"The disk is full, in {index}. What was committed is kept, the last batch is not: free some space, run again."
    )
