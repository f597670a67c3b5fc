"""Bring an index up to date with the pictures on disk, doing as little as possible.

    walk -> size and time differ? -> content differs? -> known elsewhere? -> decode, describe -> commit

Each step passes on only what it cannot settle: most files of a second run end at the first question, a touched file at
the second, moved and copied ones (known by their content) at the third. The steps are generators, so that memory does
not grow with the collection; changes are committed every few seconds, so that whatever stops the run loses no more.

What is wrong with a file's content is remembered, and takes its old record away. What this machine cannot do (memory, a
disk) says nothing about the file: what is known of it stays, the next run tries again, and a machine that fails again
and again ends the run. Files that are gone were deleted, or are away with their disk: see `away.py`.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from cooc.errors import CoocError, ImageError, InputError, MachineError, UnreadableError
from cooc.index.away import Absence, inside
from cooc.index.engine import Engine, Made
from cooc.index.examine import CHANGED, Candidate, Examined
from cooc.index.records import BadFile, Filter, Record
from cooc.index.report import Problem, Progress, Report, Stop
from cooc.index.run import FAILURES, Run
from cooc.index.store import Store, blocks, intact
from cooc.pictures import Collection, Entry
from cooc.pictures.faults import blame

CHUNK = 256  # files looked up at once
SAID = 10  # folders that are away and named in the report
FAILED, MOST_FAILED = "failed", 1000  # the store's note of files that a machine failed on, and how many it names

VANISHED = "It vanished while it was being read."


def synchronise(
    store: Store,
    collection: Collection,
    engine: Engine,
    folders: Sequence[str | os.PathLike[str]],
    *,
    keep_missing: bool = False,
    prune: bool = False,
    retry: bool = False,
    follow: bool = False,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> Report:
    """Walk folders of the collection; add what is new, forget what is gone.

    `keep_missing` forgets nothing; `prune` also what may be away with its folder. `retry` tries files again that were
    found bad and have not changed. Ctrl-C, or `stop` when it returns true, ends the run early with what is done
    committed, and the report says so; so does a failing machine, with a `MachineError`.
    """
    if keep_missing and prune:
        raise InputError("Keep what is missing, or forget it: not both.")
    run = _Run(store, collection, engine, progress, stop, retry=retry, follow=follow)
    run.damaged.update(store.damaged())
    names = _outermost([collection.name(folder) for folder in folders])
    walks = [run.walk(name) for name in names]  # a folder that is not there is an error before any work
    with run.counting(names), run.ending():
        run.add(itertools.chain.from_iterable(walks))
        if not run.report.interrupted:
            run.forget(names, keep_missing, prune)
    return run.report


def add_files(
    store: Store,
    collection: Collection,
    engine: Engine,
    paths: Iterable[str | os.PathLike[str]],
    *,
    progress: Progress | None = None,
) -> Report:
    """Add or replace these files, those that were bad too. One that is not there is left out, and reported."""
    run = _Run(store, collection, engine, progress, None, retry=True)
    with run.ending():
        run.add(run.look(_once(collection.name(path) for path in paths)))
    return run.report


def failed(store: Store) -> int:
    """Files that a machine failed on in the last run: the next one tries them again, after all others."""
    return len(store.notes().get(FAILED, ()))


def _once(names: Iterable[str]) -> Iterator[str]:
    """As they come: there may be millions."""
    seen: set[str] = set()
    return (name for name in names if not (name in seen or seen.add(name)))  # type: ignore[func-returns-value]


def _outermost(names: list[str]) -> list[str]:
    """Without folders that lie in another one of them: nothing is walked twice."""
    return [name for name in dict.fromkeys(names) if not any(name != other and inside(name, other) for other in names)]


class _Run(Run):
    """The steps of the chain."""

    def __init__(
        self,
        store: Store,
        collection: Collection,
        engine: Engine,
        progress: Progress | None,
        stop: Stop | None,
        *,
        retry: bool,
        follow: bool = False,
    ) -> None:
        super().__init__(store, collection, Report(), progress, stop)
        self.engine, self.retry, self.follow = engine, retry, follow
        self.absence = Absence(store, collection, follow)
        self.known_bad = {bad.path: bad for bad in store.bad_files()}
        self.damaged: set[str] = set()  # whose vectors are not what was written
        self.unreadable: set[str] = set()
        self.reached: set[str] = set()  # the walked folders in which something was found
        self.failed_before = dict.fromkeys(store.notes().get(FAILED, ()))  # in their order
        self.failed: dict[str, None] = {}

    # the chain

    def walk(self, name: str) -> Iterator[Entry]:
        def unreadable(name: str, error: Exception) -> None:
            self.unreadable.add(name)
            self._without("listed", name, blame(error, repr(self.collection.address(name))))

        try:
            entries = self.collection.entries(name, follow=self.follow, on_error=unreadable)
        except InputError:
            if not self._is_known_and_gone(name):
                raise
            entries = iter(())

        def walked() -> Iterator[Entry]:
            for entry in entries:
                self.reached.add(name)
                self.in_a_row["listed"] = 0
                self.absence.saw(entry.name)
                yield entry

        return walked()

    def _is_known_and_gone(self, name: str) -> bool:
        """A folder that had pictures and is surely not there: they are away, and other folders are gone through."""
        try:
            return self.store.holds(name) and self.collection.vacant(name, follow=self.follow)
        except OSError:
            return False

    def look(self, names: Iterable[str]) -> Iterator[Entry]:
        for name in names:
            try:
                entry = self.collection.look(name)
            except (OSError, UnreadableError) as error:
                self.report.found += 1
                self._without("read", name, blame(error, repr(self.collection.address(name))))
            else:
                yield entry

    def add(self, files: Iterable[Entry]) -> None:
        described = self.engine.describe(self.collection, self._changed(files), self._decide)
        try:
            for seen, result in described:
                self._take(seen, result)
                self.tick()
                if self.in_a_row["described"] >= FAILURES:
                    break
                if self.stopped():  # much has been read ahead by now, and describing takes long
                    return
        finally:
            if isinstance(described, Generator):  # ends its processes at once, whatever ended the run
                described.close()
        if self.failure is not None:
            raise self.failure

    def _changed(self, files: Iterable[Entry]) -> Iterator[Candidate]:
        """Without the files whose size and time are those that the index knows."""
        last: list[Candidate] = []  # what a machine failed on in an earlier run: may others come before it fails again
        for chunk in blocks(files, CHUNK):
            for file, known in zip(chunk, self.store.find([file.name for file in chunk]), strict=True):
                if self.stopped() or self.failure is not None:  # what was read before is described still
                    return
                self.report.found += 1
                bad, damaged = self.known_bad.get(file.name), file.name in self.damaged
                if known is not None and file.stamp == known.entry.stamp and not damaged:
                    self.report.unchanged += 1
                    self.absence.recognise(file.name)
                    if bad is not None:  # it was being written when a run saw it
                        self.pending.clear.append(file.name)
                elif bad is not None and (bad.size, bad.mtime_ns) == file.stamp and not self.retry:
                    self.report.bad += 1
                    self.report.problems.append(Problem(file.name, bad.reason))
                elif file.name in self.failed_before:
                    last.append(Candidate(file, known, damaged))
                else:
                    yield Candidate(file, known, damaged)
            self.tick()
        for candidate in last:
            if self.failure is not None:
                return
            del self.failed_before[candidate.file.name]
            yield candidate

    def _decide(self, seen: Examined) -> bool:
        """Can nothing but the network settle it?"""
        file = seen.file
        describe = False
        if seen.error is not None:
            self._without("read", file.name, seen.error, seen)
        elif seen.known is not None and seen.known.sha256 == seen.sha256 and not seen.damaged:
            self.report.unchanged += 1
            self.absence.recognise(file.name)
            self.pending.touches[file.name] = file.mtime_ns
        else:
            describe = not self._is_known_elsewhere(seen)
        if not isinstance(seen.error, MachineError):
            self.in_a_row["read"] = 0
        self.tick()
        return describe

    def _is_known_elsewhere(self, seen: Examined) -> bool:
        """By its content: then it has moved, or is a copy."""
        name = seen.file.name
        twins = [
            one for one in self.store.by_sha256(seen.sha256) if one.path not in self.pending.moves and one.path != name
        ]
        missing = [twin for twin in twins if self._is_missing(twin)]
        away = [twin for twin in missing if self.absence.unmounted(twin.path)]
        gone = next((twin.path for twin in missing if twin not in away), None)
        if gone is not None:
            self.pending.moves[gone] = name
            if gone not in self.damaged:
                self.report.moved += 1
                self.pending.touches[name] = seen.file.mtime_ns
                self.absence.recognise(name, gone)
                return True
        good, vectors = intact(self.store, [twin.id for twin in twins])
        if not good:
            return False
        self.report.copied += 1
        tags = frozenset[str]().union(*(twin.tags for twin in away))  # perhaps its disk has another name now
        self.pending.described.append((replace(seen.record, tags=tags), Made(vectors[0])))  # features go by content
        return True

    def _is_missing(self, twin: Record) -> bool:
        """Surely not there. What only cannot be reached (permission, a broken disk) may still be."""
        try:
            return self.collection.stamp(twin.entry) is None
        except OSError:
            return False

    def _take(self, seen: Examined, result: Made | CoocError) -> None:
        if isinstance(result, CoocError):
            self._without("described", seen.file.name, result, seen)
            return
        self.in_a_row["described"] = 0
        if not self.collection.steady and (changed := self._changed_since(seen)):
            self._without("described", seen.file.name, changed, seen)
            return
        self.report.described += 1
        self.pending.described.append((seen.record, result))

    def _changed_since(self, seen: Examined) -> CoocError | None:
        """Is what was examined no longer what lies there?"""
        try:
            now = self.collection.stamp(seen.file)
        except OSError as error:
            return blame(error, repr(self.collection.address(seen.file.name)))
        return None if now == seen.file.stamp else UnreadableError(CHANGED if now else VANISHED)

    def _without(self, step: str, name: str, error: CoocError, seen: Examined | None = None) -> None:
        """Report a file. If its content is bad, it is tried again when it has changed; else by the next run."""
        state = (-1, 0)
        if seen is not None:
            error = self._changed_since(seen) or error
        if self.leave_out(step, name, error):
            self.failed[name] = None
            return
        self.report.bad += 1
        if seen is not None and isinstance(error, ImageError) and not isinstance(error, UnreadableError):
            state = seen.file.stamp
            if seen.known is not None:
                self.pending.removals.append(name)
        self.pending.bad.append(BadFile(name, *state, str(error)))

    def forget(self, names: Sequence[str], keep_missing: bool, prune: bool) -> None:
        """Remove what is no longer on disk, unless it may be away with its folder."""
        self.commit()  # moved pictures are known by their new names
        found = self.absence.found
        for name in names:
            for file in self.collection.absent(self._ticking(Filter(prefix=name or None))):
                folder = None if prune else self.absence.away(file.name, name)
                if folder is not None:
                    self.report.away += 1
                    found[folder] += 1
                elif not keep_missing:
                    self.pending.removals.append(file.name)
                    self.report.removed += 1
            below = (bad for bad in self.store.bad_files() if inside(bad.path, name))
            tried = (Entry(bad.path, bad.size, bad.mtime_ns) for bad in below if bad.path not in self.unreadable)
            for file in self.collection.absent(tried):
                if self.absence.away(file.name, name) not in found:
                    self.pending.clear.append(file.name)
        self.absence.settle(names, self.reached)
        self.report.notes += self.absence.notes(SAID)
        self.failed_before = {
            path: None for path in self.failed_before if not any(inside(path, name) for name in names)
        }

    def _ticking(self, where: Filter) -> Iterator[Entry]:
        for record in self.store.records(where):
            yield record.entry
            self.tick()

    def conclude(self) -> None:
        names = [*self.failed, *self.failed_before][:MOST_FAILED]
        if names != self.store.notes().get(FAILED, []):
            self.store.note(FAILED, names or None)

    @contextmanager
    def counting(self, names: Sequence[str]) -> Iterator[None]:
        """Count the pictures beside the run, for whoever wants to show how much is left."""
        over = threading.Event()

        def count() -> None:
            total = 0
            for name in names:
                with suppress(CoocError, OSError, MemoryError):  # the run itself tells what cannot be listed
                    for _ in self.collection.entries(name, follow=self.follow, on_error=lambda name, error: None):
                        total += 1
                        if over.is_set():
                            return
            self.report.total = total

        if self.progress is not None and self.collection.cheap:
            threading.Thread(target=count, daemon=True).start()
        try:
            yield
        finally:
            over.set()
