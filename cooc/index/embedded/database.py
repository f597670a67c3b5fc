"""The SQLite file of an embedded index: its tables, how it is opened, who may write, and what its errors mean.

WAL mode with synchronous=FULL: a commit is on disk when the call returns, so kill -9 and a power cut lose nothing that
was committed. (NORMAL would save one fsync for each batch, and batches are seconds apart.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from cooc.errors import CoocError, StoreDamagedError, StoreError, StoreLockedError, StoreMissingError
from cooc.index.store import FORMAT

APPLICATION_ID = 0x636F6F63  # "cooc"
CACHE = 1 << 16  # kB for who writes: ids come in any order, and SQLite's own 2 MB wrote a page to disk for each of them

# A slot is the row of an image in the vector cache. It never changes what it holds: whatever changes a vector or an id
# takes a new slot and leaves the old one in `removed`, until compacting gives all slots out anew under a new epoch.
# Paths are BLOBs: they need not be UTF-8. Pages of 16 kB hold seven vectors of 512 numbers; 4 kB would waste half.
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
CREATE TABLE bad (path BLOB PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, reason TEXT NOT NULL);
"""


def database(folder: Path) -> Path:
    return folder / "index.sqlite"


def require(folder: Path) -> None:
    if not database(folder).is_file():
        raise StoreMissingError(
            f"There is no index in {show(folder)}. Make one: cooc index FOLDER --index {show(folder)}"
        )


def connect(folder: Path, *, write: bool = False) -> sqlite3.Connection:
    """A connection to the index in `folder`, checked to be one. It may be used from any thread, one at a time."""
    with explained(folder):
        connection = _connect(database(folder), "mode=rw" if write else "mode=ro")
        try:
            _check(connection, folder)
            if write:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute(f"PRAGMA cache_size = -{CACHE}")
            return connection
        except sqlite3.OperationalError as error:
            connection.close()
            wal = database(folder).with_name("index.sqlite-wal")
            if write or os.access(folder, os.W_OK) or (wal.exists() and wal.stat().st_size) or not _cannot_open(error):
                raise
        except BaseException:
            connection.close()
            raise
        # A folder that nobody here may write to, and nothing half-way in it: SQLite need not coordinate with anyone.
        connection = _connect(database(folder), "mode=ro&immutable=1")
        _check(connection, folder)
        return connection


def create(path: Path) -> sqlite3.Connection:
    connection = _connect(path, "mode=rwc")
    connection.executescript(SCHEMA)
    return connection


def _connect(path: Path, options: str) -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path.absolute()))}?{options}"
    return sqlite3.connect(uri, uri=True, timeout=60, isolation_level=None, check_same_thread=False)


def _check(connection: sqlite3.Connection, folder: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StoreMissingError(f"{show(database(folder))} is not an index of cooc. Name another folder with --index.")
    if version > FORMAT:
        raise StoreError(
            f"The index in {show(folder)} has format {version}, and this cooc reads up to {FORMAT}: upgrade cooc."
        )


def _cannot_open(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def show(path: Path) -> str:
    """A path that can be printed whatever bytes it holds."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


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
            raise StoreDamagedError(
                f"The index in {index} is damaged ({error}). Put a snapshot back in its place, or delete the folder "
                "and index the pictures again."
            ) from error
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


class WriterLock:
    """Held by the one process that writes. The system lets go of it when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        path = folder / "writer.lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            self.release()
            raise StoreLockedError(
                f"Another process is writing to the index in {show(folder)}: {holder or 'it has just begun'}. "
                "Wait until it is done, or stop it; reading is possible meanwhile."
            ) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child: its copy of the file would keep the lock after the parent was killed."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go)
