"""Bring an index up to date with the pictures on disk, doing as little as possible.

    walk -> size and time differ? -> content differs? -> known elsewhere? -> decode, describe -> commit

Each step passes on only what it cannot settle: most files of a second run end at the first question, a touched file at
the second, moved and copied ones (known by their content) at the third. The steps are generators, so that memory does
not grow with the collection; changes are committed every few seconds, so that whatever stops the run loses no more.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cooc.descriptor import BATCH_PIXELS, BATCHES_AHEAD, NOT_FINITE, Descriptor
from cooc.errors import CoocError
from cooc.index.examine import CHANGED, Candidate, Examined, Reader, unreadable
from cooc.index.store import BadFile, Filter, Record, Store
from cooc.pictures import Collection, Entry, Folder
from cooc.pictures.batches import Bad, Item, default_workers, extract
from cooc.pictures.collection import Stamp

__all__ = ["Engine", "Report", "add_files", "synchronise"]

COMMIT_SECONDS = 3.0
COMMIT_IMAGES = 1000
CHUNK = 256  # files looked up at once
FEW = 32  # pictures: for no more than that, starting worker processes costs more time than they save
PROGRESS_SECONDS = 0.1

VANISHED = "It vanished while it was being read."
FEATURELESS = "The network finds nothing in it (a picture of one colour?). Remove it, or use another recipe."

log = logging.getLogger("cooc")

Vector = NDArray[np.float32]


@dataclass
class Report:
    """What a run did. Each picture found is unchanged, described, copied, moved or bad; folders may be bad too."""

    total: int | None = None  # pictures there are, once they have been counted
    found: int = 0
    unchanged: int = 0
    described: int = 0
    copied: int = 0  # same content as another picture: its vector was taken
    moved: int = 0
    removed: int = 0
    bad: int = 0  # left out; `store.bad_files()` says why
    interrupted: bool = False
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)  # what was not done, and why

    @property
    def done(self) -> int:
        return self.unchanged + self.described + self.copied + self.moved + self.bad


Progress = Callable[[Report], None]
Stop = Callable[[], bool]


Decide = Callable[[Examined], bool]  # must it be described?
Described = tuple[Examined, Vector | str]  # a vector, or why there is none


class Engine(Protocol):
    """What reads, decodes and describes: this process, or many machines (`cooc.index.ray`)."""

    def describe(self, collection: Collection, files: Iterable[Candidate], decide: Decide) -> Iterator[Described]:
        """Examine all files, ask about each, and describe those that must be; files are taken as there is room."""
        ...


def synchronise(
    store: Store,
    collection: Collection,
    engine: Engine,
    folders: Sequence[str | os.PathLike[str]],
    *,
    keep_missing: bool = False,
    follow: bool = False,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> Report:
    """Walk folders of the collection; add what is new, forget what is gone.

    Ctrl-C, or `stop` when it returns true, ends the run early with what is done committed, and the report says so.
    """
    run = _Run(store, collection, engine, progress, stop)
    names = _outermost([collection.name(folder) for folder in folders])
    walks = [run.walk(name, follow) for name in names]  # a folder that is not there is an error before any work
    with run.counting(names, follow), run.ending():
        run.add(itertools.chain.from_iterable(walks))
        if not run.report.interrupted:
            run.forget(names, keep_missing)
    return run.report


def add_files(
    store: Store,
    collection: Collection,
    engine: Engine,
    paths: Iterable[str | os.PathLike[str]],
    *,
    progress: Progress | None = None,
) -> Report:
    """Add or replace these files. One that is not there is left out, and reported."""
    run = _Run(store, collection, engine, progress, None)
    with run.ending():
        run.add(run.look(_once(collection.name(path) for path in paths)))
    return run.report


def _once(names: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    return (name for name in names if not (name in seen or seen.add(name)))  # type: ignore[func-returns-value]


def _outermost(names: list[str]) -> list[str]:
    """Without folders that lie in another one of them: nothing is walked twice."""

    def inside(name: str, other: str) -> bool:
        return name != other and (not other or name.startswith(other + "/"))

    return [name for name in dict.fromkeys(names) if not any(inside(name, other) for other in names)]


class _Run:
    """One run: the steps of the chain, and what waits for the next commit."""

    def __init__(
        self, store: Store, collection: Collection, engine: Engine, progress: Progress | None, stop: Stop | None
    ) -> None:
        self.store, self.collection, self.engine = store, collection, engine
        self.progress, self.stop = progress, stop
        self.report = Report()
        self.known_bad = {bad.path: (bad.size, bad.mtime_ns) for bad in store.bad_files()}
        self.unreadable: set[str] = set()
        self.reached: set[str] = set()  # the folders in which something was found
        self.started = self.committed = self.shown = time.monotonic()
        self._forget_pending()

    # the chain

    def walk(self, name: str, follow: bool) -> Iterator[Entry]:
        def unreadable(name: str, reason: str) -> None:
            self._leave_out(name, f"It cannot be read ({reason}).")
            self.unreadable.add(name)

        entries = self.collection.entries(name, follow=follow, on_error=unreadable)

        def walked() -> Iterator[Entry]:
            for entry in entries:
                self.reached.add(name)
                yield entry

        return walked()

    def look(self, names: Iterable[str]) -> Iterator[Entry]:
        for name in names:
            try:
                yield self.collection.look(name)
            except OSError as error:
                self.report.found += 1
                self._leave_out(name, unreadable(error))

    def add(self, files: Iterable[Entry]) -> None:
        for seen, result in self.engine.describe(self.collection, self._changed(files), self._decide):
            self._take(seen, result)
            self._tick()
            if self.stop is not None and self.stop():  # much has been read ahead by now, and describing takes long
                self.report.interrupted = True
                return

    def _changed(self, files: Iterable[Entry]) -> Iterator[Candidate]:
        """Without the files whose size and time are those that the index knows."""
        remaining = iter(files)
        while chunk := list(itertools.islice(remaining, CHUNK)):
            for file, known in zip(chunk, self.store.find([file.name for file in chunk]), strict=True):
                if self.stop is not None and self.stop():
                    self.report.interrupted = True
                    return
                self.report.found += 1
                if known is not None and file.stamp == (known.size, known.mtime_ns):
                    self.report.unchanged += 1
                    if file.name in self.known_bad:  # it was being written when a run saw it
                        self.clear.append(file.name)
                elif self.known_bad.get(file.name) == file.stamp:
                    self.report.bad += 1
                else:
                    yield Candidate(file, known)
            self._tick()

    def _decide(self, seen: Examined) -> bool:
        """Can nothing but the network settle it?"""
        file = seen.file
        describe = False
        if seen.problem:
            self._leave_out(file.name, seen.problem, seen)
        elif seen.known is not None and seen.known.sha256 == seen.sha256:
            self.report.unchanged += 1
            self.touches[file.name] = file.mtime_ns
        else:
            twins = [twin for twin in self.store.by_sha256(seen.sha256) if twin.path not in self.moves]
            gone = next((twin.path for twin in twins if self._is_missing(twin)), None)
            if gone is not None:
                self.report.moved += 1
                self.moves[gone] = file.name
                self.touches[file.name] = file.mtime_ns
            elif twins:
                self.report.copied += 1
                self.described.append((seen.record, self.store.vectors([twins[0].id])[0]))
            else:
                describe = True
        self._tick()
        return describe

    def _take(self, seen: Examined, result: Vector | str) -> None:
        if isinstance(result, str):
            self._leave_out(seen.file.name, result, replace(seen, gone=True))
        elif not self.collection.steady and self._stamp(seen.file) != seen.file.stamp:
            self._leave_out(seen.file.name, CHANGED, seen)
        else:
            self.report.described += 1
            self.described.append((seen.record, result))

    def _stamp(self, file: Entry) -> Stamp | None:
        try:
            return self.collection.stamp(file)
        except OSError:
            return None

    def _is_missing(self, twin: Record) -> bool:
        """Surely not there. What only cannot be reached (permission, a broken disk) may still be."""
        try:
            return self.collection.stamp(twin.entry) is None
        except OSError:
            return False

    def _leave_out(self, name: str, reason: str, seen: Examined | None = None) -> None:
        """Report a bad file. If its content is bad, it is tried again when it has changed; else by the next run."""
        self.report.bad += 1
        state = (-1, 0)
        if seen is not None:
            now = self._stamp(seen.file)
            if now != seen.file.stamp:
                reason = CHANGED if now else VANISHED
            elif seen.gone:
                state = now
                if seen.known is not None:
                    self.removals.append(name)
        self.bad.append(BadFile(name, *state, reason))
        log.info("%s: %s", name, reason)

    def forget(self, names: Sequence[str], keep_missing: bool) -> None:
        """Remove what is no longer on disk, unless a whole folder is empty: then its disk may not be mounted."""
        self.commit()  # moved pictures are known by their new names
        for name in names:
            where = Filter(prefix=name or None)
            if name not in self.reached:
                if next(self.store.records(where, limit=1), None) is not None:
                    self.report.notes.append(
                        f"There are no pictures in {self.collection.address(name)!r}, where the index knows some. "
                        "Nothing was removed: is the disk mounted? If they are gone for good: cooc remove FOLDER"
                    )
                continue
            for file in self.collection.absent(self._ticking(where)) if not keep_missing else ():
                self.removals.append(file.name)
                self.report.removed += 1
            below = (bad for bad in self.store.bad_files() if not name or bad.path.startswith(name + "/"))
            tried = (Entry(bad.path, bad.size, bad.mtime_ns) for bad in below if bad.path not in self.unreadable)
            self.clear += [file.name for file in self.collection.absent(tried)]

    def _ticking(self, where: Filter) -> Iterator[Entry]:
        for record in self.store.records(where):
            yield record.entry
            self._tick()

    # commits

    def _forget_pending(self) -> None:
        self.described: list[tuple[Record, Vector]] = []
        self.moves: dict[str, str] = {}
        self.touches: dict[str, int] = {}
        self.removals: list[str] = []
        self.bad: list[BadFile] = []
        self.clear: list[str] = []

    def commit(self) -> None:
        """Each of these is one transaction, and whatever comes between two of them the next run repairs."""
        if self.moves:
            self.store.rename(self.moves)
        if self.described:
            self.store.add([record for record, _ in self.described], np.stack([vector for _, vector in self.described]))
        if self.removals:
            self.store.remove(self.removals)
        if self.touches:
            self.store.touch(self.touches)
            self.clear += self.touches
        if self.clear:
            self.store.clear_bad(self.clear)
        if self.bad:
            self.store.report_bad(self.bad)
        self._forget_pending()
        self.committed = time.monotonic()

    def _tick(self) -> None:
        now = time.monotonic()
        waiting = len(self.described) + len(self.moves) + len(self.touches) + len(self.removals) + len(self.bad)
        if waiting >= COMMIT_IMAGES or now - self.committed >= COMMIT_SECONDS:
            self.commit()
        if self.progress is not None and now - self.shown >= PROGRESS_SECONDS:
            self.shown = now
            self.report.seconds = now - self.started
            self.progress(self.report)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Whether the run gets done or is interrupted: what waits is committed, and the report completed."""
        try:
            yield
        except KeyboardInterrupt:
            self.report.interrupted = True
        self.commit()
        self.report.seconds = time.monotonic() - self.started
        if self.progress is not None:
            self.progress(self.report)

    @contextmanager
    def counting(self, names: Sequence[str], follow: bool) -> Iterator[None]:
        """Count the pictures beside the run, for whoever wants to show how much is left."""
        over = threading.Event()

        def count() -> None:
            total = 0
            with suppress(CoocError):  # what cannot be listed now is told by the run itself
                for name in names:
                    for _ in self.collection.entries(name, follow=follow, on_error=lambda name, reason: None):
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


# On this machine


class Here:
    """The engine of one machine: threads or processes read ahead, others decode, the network describes."""

    def __init__(self, descriptor: Callable[[], Descriptor], workers: int | None = None) -> None:
        """The descriptor is loaded if there is something to describe."""
        self.descriptor, self.workers = descriptor, workers

    def describe(self, collection: Collection, files: Iterable[Candidate], decide: Decide) -> Iterator[Described]:
        reader = Reader(collection)
        items = (seen for seen in reader.examined(files) if decide(seen))
        first = list(itertools.islice(items, FEW + 1))
        if not first:
            return
        descriptor = self.descriptor()
        workers = self.workers
        if workers is None:
            workers = default_workers(descriptor.device.type) if len(first) > FEW else 0
        if workers > 1 and isinstance(collection, Folder):  # of others a connection is shared
            reader.use_processes()
        yield from describe_items(descriptor, itertools.chain(first, items), workers)


def describe_items(descriptor: Descriptor, seen: Iterable[Examined], workers: int) -> Iterator[Described]:
    """Decode and describe, batched by shape."""
    for done in extract(
        (Item(one, one.picture) for one in seen if one.picture is not None),
        _describer(descriptor),
        size=descriptor.config.size,
        min_side=descriptor.backbone.stride,
        workers=workers,
        batch_pixels=BATCH_PIXELS[descriptor.device.type],
        ahead=BATCHES_AHEAD[descriptor.device.type],
    ):
        if isinstance(done, Bad):
            yield done.item.key, done.reason
        else:
            yield from ((item.key, result) for item, result in zip(done.items, done.result(), strict=True))


def _describer(descriptor: Descriptor) -> Callable[[Tensor], Callable[[], list[Vector | str]]]:
    """A batch -> a call that waits until each picture has its vector, or the reason why it has none."""

    def begin(images: Tensor) -> Callable[[], list[Vector | str]]:
        try:
            vectors = descriptor.begin(images)
        except (CoocError, RuntimeError) as error:  # RuntimeError: out of memory
            problem = error
            return lambda: one_by_one(images, problem)

        def wait() -> list[Vector | str]:
            try:
                return [v if abs(np.linalg.norm(v) - 1) <= 1e-3 else _why_none(v) for v in vectors()]
            except RuntimeError as error:
                return one_by_one(images, error)

        return wait

    def one_by_one(images: Tensor, error: Exception) -> list[Vector | str]:
        if len(images) == 1:
            return [f"It cannot be described ({error})."]
        return [one for image in images for one in begin(image[None])()]

    return begin


def _why_none(vector: Vector) -> str:
    return FEATURELESS if np.isfinite(vector).all() else f"It cannot be described ({NOT_FINITE})"
