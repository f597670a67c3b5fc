"""Put another database in the place of an index that others may be reading.

SQLite keeps what was committed last in `index.sqlite-wal`. Such a file must never meet another database than its own:
its pages would replace pages there, and nothing would notice (seen: a snapshot of 120 pictures, copied over an index
whose writer had been killed, became one of 71, and `cooc verify` found it in order). So the old database gets its WAL
back first, and takes along what is left of it. Readers hold the old files open, and notice that there is a new one.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import closing, suppress
from pathlib import Path

from cooc.errors import StoreDamagedError, StoreLockedError
from cooc.index.checks import FEATURES_DAMAGED, VECTOR_DAMAGED
from cooc.index.embedded.database import connect, database, explained, require
from cooc.index.embedded.locks import WriterLock
from cooc.index.embedded.reading import Reading
from cooc.index.embedded.rows import read_state
from cooc.index.embedded.upkeep import problems, snapshot
from cooc.index.records import show

log = logging.getLogger("cooc")

LEFT_OVERS = ("-wal", "-shm")


def put_in_place(source: Path, folder: Path) -> int:
    """A copy of the index in `source` becomes the one in `folder`; how many images it has.

    What was there is kept in `folder/replaced`, an index of its own, until the new one is in place and verified.
    """
    new, old = folder / "restored", folder / "replaced"
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(folder)  # refuses while another process writes
        try:
            shutil.rmtree(new, ignore_errors=True)
            with closing(Reading(source)) as read:
                snapshot(read, new)
            count = _verified(new)
            shutil.rmtree(old, ignore_errors=True)
            old.mkdir()
            _take_aside(folder, old)
            database(new).replace(database(folder))
            try:
                _opened(folder, count)
            except BaseException:
                _put_back(folder, old)
                raise
            shutil.rmtree(folder / "cache", ignore_errors=True)  # of the old one; readers have theirs in memory
            with suppress(OSError):
                (new / "cache").replace(folder / "cache")
            shutil.rmtree(old)
            return count
        finally:
            shutil.rmtree(new, ignore_errors=True)
            lock.release()


def _verified(folder: Path) -> int:
    with closing(Reading(folder)) as read:
        found = read(lambda connection, file: list(problems(folder, connection, file)))
        worse = [problem for problem in found if not problem.endswith((VECTOR_DAMAGED, FEATURES_DAMAGED))]
        if worse:
            raise StoreDamagedError(f"What should be put in place is damaged itself; nothing was changed. {worse[0]}")
        for problem in found:
            log.warning(problem)
        return read(lambda connection, _: read_state(connection)).images


def _opened(folder: Path, count: int) -> None:
    """Does it open as what it should be?"""
    with closing(Reading(folder)) as read:
        if read(lambda connection, _: read_state(connection)).images != count:
            raise StoreDamagedError(f"What was put into {show(folder)} has changed on the way. The old index is back.")


def _take_aside(folder: Path, old: Path) -> None:
    """The old database under a second name, with its WAL; under its first name it stays until it is replaced."""
    path = database(folder)
    if not path.exists():
        return
    with suppress(StoreDamagedError):
        require(folder)
        with explained(folder), closing(connect(folder, write=True)) as connection:
            ((busy, *_),) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if busy:
                raise StoreLockedError(f"The index in {show(folder)} is being read without a pause: try again.")
    for end in LEFT_OVERS:
        with suppress(FileNotFoundError):
            path.with_name(path.name + end).replace(old / (path.name + end))
    try:
        os.link(path, database(old))
    except OSError:  # a file system without a second name for a file
        path.replace(database(old))


def _put_back(folder: Path, old: Path) -> None:
    path = database(folder)
    for end in ("", *LEFT_OVERS):
        with suppress(FileNotFoundError):
            path.with_name(path.name + end).unlink()
        with suppress(FileNotFoundError):
            (old / (path.name + end)).replace(path.with_name(path.name + end))
