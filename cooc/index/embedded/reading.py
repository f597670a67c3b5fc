"""Reading an index that others change, replace or put back meanwhile.

A connection is checked before each use: is `index.sqlite` still the file that it was opened on? A server goes on with
the index that lies there now, without a restart. Where this process may not write, SQLite can only be told that nobody
changes the file (immutable=1), and is then wrong as soon as someone does: such a connection is looked at before *and*
after each use, and what it said is asked again of a new one if anything about the file has moved.

Nothing is called damaged before a new connection says so too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cooc.errors import StoreDamagedError, StoreError, StoreLockedError, StoreMismatchError
from cooc.index.checks import closed
from cooc.index.embedded.cache import Cache
from cooc.index.embedded.coding import Coding
from cooc.index.embedded.database import Connection, connect, explained
from cooc.index.embedded.rows import read_meta
from cooc.index.records import check_same, show
from cooc.index.store import kept_open

_T = TypeVar("_T")

PAUSES = (0.0, 0.01, 0.05, 0.2, 1.0)  # seconds before an answer that may be torn is asked for again


class IndexFile:
    """What belongs to one file `index.sqlite`: what it says of its vectors, and their cache."""

    def __init__(self, folder: Path, connection: Connection) -> None:
        self.identity = connection.stamp[:2]
        with explained(folder):
            self.meta = read_meta(connection)
        self.coding = Coding(self.meta.storage, self.meta.dim)
        self.cache = Cache(folder / "cache", self.coding)


class Reading:
    """Connections of one store for reading. Any number of threads may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._idle: deque[Connection] = deque()
        self._mutex = threading.Lock()
        self._closed = False
        connection = connect(folder)
        with kept_open(connection):
            self.file = IndexFile(folder, connection)
        self._idle.append(connection)

    def __call__(self, work: Callable[[Connection, IndexFile], _T]) -> _T:
        """What `work` returns: of one committed state of the index that lies there now."""
        for pause in (*PAUSES, None):
            try:
                connection, file = self._take()
            except StoreError as error:  # it may be in the middle of being replaced: looked at again, not judged
                if pause is None or self._closed or isinstance(error, (StoreMismatchError, StoreLockedError)):
                    raise
                time.sleep(pause)
                continue
            try:
                with explained(self.folder):
                    connection.execute("BEGIN")
                    try:
                        result = work(connection, file)
                    finally:
                        connection.rollback()
            except Exception as error:
                damaged = isinstance(error, StoreDamagedError)
                again = pause is not None and (connection.moved() or (damaged and pause == PAUSES[0]))
                self._put_back(connection, drop=again or damaged)
                if not again:
                    raise
            except BaseException:
                self._put_back(connection)
                raise
            else:
                torn = connection.frozen and connection.moved()
                self._put_back(connection, drop=torn)
                if not torn:
                    return result
            if pause:
                time.sleep(pause)
        raise StoreLockedError(f"The index in {show(self.folder)} is being changed all the time: try again.")

    def close(self) -> None:
        self._closed = True
        self.file.cache.close()
        self._close_idle()

    def _take(self) -> tuple[Connection, IndexFile]:
        """A connection that nobody else uses meanwhile, and the file that it is of."""
        if self._closed:
            raise closed(f"in {show(self.folder)}")
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = connect(self.folder)
            if not connection.moved():
                break
            connection.close()
        with kept_open(connection):
            return connection, self._file_of(connection)

    def _file_of(self, connection: Connection) -> IndexFile:
        with self._mutex:
            if connection.stamp[:2] != self.file.identity:
                new = IndexFile(self.folder, connection)
                try:
                    check_same(self.file.meta, new.meta, "the old one")
                except StoreMismatchError as error:
                    raise StoreMismatchError(
                        f"Another index was put in place of the one in {show(self.folder)}: start this program again. "
                        f"({error})"
                    ) from error
                self.file = new  # who still searches in the old one's cache holds it
            return self.file

    def _put_back(self, connection: Connection, drop: bool = False) -> None:
        if drop:
            connection.close()
        else:
            self._idle.append(connection)
        if self._closed:  # by another thread, meanwhile
            self._close_idle()

    def _close_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return
