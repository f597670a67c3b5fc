"""Bring an index up to date with the pictures on disk, doing as little as possible.

    walk -> size and time differ? -> content differs? -> known elsewhere? -> decode, describe -> commit

Each step passes on only what it cannot settle: most files of a second run end at the first question, a touched file at
the second, moved and copied ones (known by their content) at the third. The steps are generators, so that memory does
not grow with the collection; changes are committed every few seconds, so that whatever stops the run loses no more.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cooc.descriptor import BATCH_PIXELS, Descriptor
from cooc.errors import CoocError, InputError
from cooc.extraction import Bad, Batch, Item, default_workers, extract
from cooc.images import ImageInfo, image_info, list_images
from cooc.store import BadFile, Filter, Record, Store

__all__ = ["Report", "add_files", "relative_path", "synchronise"]

COMMIT_SECONDS = 3.0
COMMIT_IMAGES = 1000
CHUNK = 256  # files looked up at once
AHEAD = 64  # files whose content is read ahead of the decoder
READERS = 4  # threads that do so; hashing and reading let others run
FEW = 32  # pictures: for no more than that, starting worker processes costs more time than they save
PROGRESS_SECONDS = 0.1

CHANGED = "It changed while it was being read. The next run tries again."
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


@dataclass(frozen=True)
class Candidate:
    """A file that is new, or not as the index knows it."""

    path: Path
    name: str  # relative to the root
    size: int
    mtime_ns: int
    known: Record | None


@dataclass(frozen=True)
class Examined:
    """The same after its content was read: the header of the picture, or the reason why there is none."""

    file: Candidate
    sha256: str = ""
    info: ImageInfo | None = None
    problem: str = ""
    gone: bool = False  # its content is no picture: what the index knows under this name is not true any more

    @property
    def record(self) -> Record:
        assert self.info is not None
        size = self.info.width, self.info.height
        return Record(self.file.name, self.file.size, self.file.mtime_ns, self.sha256, *size, self.info.taken)


def synchronise(
    store: Store,
    root: Path,
    descriptor: Callable[[], Descriptor],
    folders: Sequence[str | os.PathLike[str]],
    *,
    workers: int | None = None,
    keep_missing: bool = False,
    follow: bool = False,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> Report:
    """Walk folders below the root; add what is new, forget what is gone. `descriptor` is called if it is needed.

    Ctrl-C, or `stop` when it returns true, ends the run early with what is done committed, and the report says so.
    """
    run = _Run(store, root, descriptor, workers, progress, stop)
    names = _outermost([relative_path(root, folder) for folder in folders])
    walks = [run.walk(name, follow) for name in names]  # a folder that is not there is an error before any work
    with run.counting(names, follow), run.ending():
        run.add(itertools.chain.from_iterable(walks))
        if not run.report.interrupted:
            run.forget(names, keep_missing)
    return run.report


def add_files(
    store: Store,
    root: Path,
    descriptor: Callable[[], Descriptor],
    paths: Iterable[str | os.PathLike[str]],
    *,
    workers: int | None = 0,
    progress: Progress | None = None,
) -> Report:
    """Add or replace these files. One that is not there is left out, and reported."""
    run = _Run(store, root, descriptor, workers, progress, None)
    with run.ending():
        run.add(root / name for name in _once(relative_path(root, path) for path in paths))
    return run.report


def relative_path(root: Path, path: str | os.PathLike[str]) -> str:
    """How the index names a path: relative to its root, "/" between the parts; "" is the root itself."""
    given = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (resolve() would follow a link to another name)
    if (name := _below(str(root), given)) is not None:
        return name
    place = Path(given)
    if (name := _below(str(root.resolve()), str(place.parent.resolve() / place.name))) is not None:
        return name
    raise InputError(
        f"{os.fspath(path)!r} lies outside {str(root)!r}, the root of this index. Make an index whose root holds both: "
        "cooc index FOLDER ... --root ROOT --index INDEX"
    )


def _below(base: str, path: str) -> str | None:
    """As text: pathlib takes longer than all the rest of what is done for a file that has not changed."""
    prefix = base.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else "" if path == base else None


def is_missing(path: Path) -> bool:
    """Surely not there. What only cannot be reached (permission, a broken disk) may still be."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)


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
        self,
        store: Store,
        root: Path,
        descriptor: Callable[[], Descriptor],
        workers: int | None,
        progress: Progress | None,
        stop: Stop | None,
    ) -> None:
        self.store, self.root, self.descriptor, self.workers = store, root, descriptor, workers
        self.progress, self.stop = progress, stop
        self.report = Report()
        self.known_bad = {bad.path: (bad.size, bad.mtime_ns) for bad in store.bad_files()}
        self.unreadable: set[str] = set()
        self.reached: set[str] = set()  # the folders in which something was found
        self.started = self.committed = self.shown = time.monotonic()
        self._forget_pending()

    # the chain

    def walk(self, name: str, follow: bool) -> Iterator[Path]:
        def unreadable(path: Path, reason: str) -> None:
            self._leave_out(relative_path(self.root, path), f"It cannot be read ({reason}).")
            self.unreadable.add(relative_path(self.root, path))

        paths = list_images(self.root / name, follow_symlinks=follow, on_error=unreadable)

        def walked() -> Iterator[Path]:
            for path in paths:
                self.reached.add(name)
                yield path

        return walked()

    def add(self, paths: Iterable[Path]) -> None:
        items = self._to_describe(paths)
        first = list(itertools.islice(items, FEW + 1))
        if not first:
            return
        descriptor = self.descriptor()
        kind, workers = descriptor.device.type, self.workers
        if workers is None:
            workers = default_workers(kind) if len(first) > FEW else 0
        for done in extract(
            itertools.chain(first, items),
            _describer(descriptor),
            size=descriptor.config.size,
            min_side=descriptor.backbone.stride,
            workers=workers,
            batch_pixels=BATCH_PIXELS[kind],
        ):
            self._take(done)
            self._tick()
            if self.stop is not None and self.stop():  # much has been read ahead by now, and describing takes long
                self.report.interrupted = True
                return

    def _to_describe(self, paths: Iterable[Path]) -> Iterator[Item]:
        """The files that nothing but the network can settle."""
        running: deque[Future[Examined]] = deque()
        with ThreadPoolExecutor(READERS) as pool:
            for candidate in self._changed(paths):
                running.append(pool.submit(_examine, candidate))
                if len(running) >= AHEAD:
                    yield from self._decide(running.popleft().result())
            while running:
                yield from self._decide(running.popleft().result())

    def _changed(self, paths: Iterable[Path]) -> Iterator[Candidate]:
        """Without the files whose size and time are those that the index knows."""
        remaining = iter(paths)
        while chunk := list(itertools.islice(remaining, CHUNK)):
            names = [relative_path(self.root, path) for path in chunk]
            for path, name, known in zip(chunk, names, self.store.find(names), strict=True):
                if self.stop is not None and self.stop():
                    self.report.interrupted = True
                    return
                self.report.found += 1
                try:
                    status = path.stat()
                except OSError as error:
                    self._leave_out(name, f"It cannot be read ({error.strerror}).")
                    continue
                state = status.st_size, status.st_mtime_ns
                if known is not None and state == (known.size, known.mtime_ns):
                    self.report.unchanged += 1
                    if name in self.known_bad:  # it was being written when a run saw it
                        self.clear.append(name)
                elif self.known_bad.get(name) == state:
                    self.report.bad += 1
                else:
                    yield Candidate(path, name, *state, known)
            self._tick()

    def _decide(self, seen: Examined) -> Iterator[Item]:
        file = seen.file
        if seen.problem:
            self._leave_out(file.name, seen.problem, seen)
        elif file.known is not None and file.known.sha256 == seen.sha256:
            self.report.unchanged += 1
            self.touches[file.name] = file.mtime_ns
        else:
            twins = [twin for twin in self.store.by_sha256(seen.sha256) if twin.path not in self.moves]
            gone = next((twin for twin in twins if is_missing(self.root / twin.path)), None)
            if gone is not None:
                self.report.moved += 1
                self.moves[gone.path] = file.name
                self.touches[file.name] = file.mtime_ns
            elif twins:
                self.report.copied += 1
                self.described.append((seen.record, self.store.vectors([twins[0].id])[0]))
            else:
                yield Item(seen, file.path)
        self._tick()

    def _take(self, done: Batch[list[Vector | str]] | Bad) -> None:
        if isinstance(done, Bad):
            self._leave_out(done.item.key.file.name, done.reason, replace(done.item.key, gone=True))
            return
        for item, result in zip(done.items, done.result, strict=True):
            seen: Examined = item.key
            if isinstance(result, str):
                self._leave_out(seen.file.name, result, replace(seen, gone=True))
            elif _state(seen.file.path) != (seen.file.size, seen.file.mtime_ns):
                self._leave_out(seen.file.name, CHANGED, seen)
            else:
                self.report.described += 1
                self.described.append((seen.record, result))

    def _leave_out(self, name: str, reason: str, seen: Examined | None = None) -> None:
        """Report a bad file. If its content is bad, it is tried again when it has changed; else by the next run."""
        self.report.bad += 1
        state = (-1, 0)
        if seen is not None:
            now = _state(seen.file.path)
            if now != (seen.file.size, seen.file.mtime_ns):
                reason = CHANGED if now else VANISHED
            elif seen.gone:
                state = now
                if seen.file.known is not None:
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
                        f"There are no pictures in {str(self.root / name)!r}, where the index knows some. Nothing was "
                        "removed: is the disk mounted? If they are gone for good: cooc remove FOLDER"
                    )
                continue
            for record in () if keep_missing else self.store.records(where):
                if is_missing(self.root / record.path):
                    self.removals.append(record.path)
                    self.report.removed += 1
                self._tick()
            below = [bad.path for bad in self.store.bad_files() if not name or bad.path.startswith(name + "/")]
            self.clear += [path for path in below if path not in self.unreadable and not (self.root / path).is_file()]

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
            for name in names:
                for _ in list_images(self.root / name, follow_symlinks=follow, on_error=lambda path, reason: None):
                    total += 1
                    if over.is_set():
                        return
            self.report.total = total

        if self.progress is not None:
            threading.Thread(target=count, daemon=True).start()
        try:
            yield
        finally:
            over.set()


def _state(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _examine(file: Candidate) -> Examined:
    """Read the content once: its hash, and what the header says if the hash is not the known one."""
    try:
        with file.path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                return Examined(file, problem="It is not a regular file.")
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        if file.known is not None and file.known.sha256 == sha256:
            return Examined(file, sha256)
        info = image_info(file.path)
    except OSError as error:
        return Examined(file, problem=f"It cannot be read ({error.strerror}).")
    except CoocError as error:
        return Examined(file, problem=str(error), gone=True)
    if _state(file.path) != (file.size, file.mtime_ns):
        return Examined(file, problem=CHANGED)
    return Examined(file, sha256, info)


def _describer(descriptor: Descriptor) -> Callable[[Tensor], list[Vector | str]]:
    """A batch -> for each picture its vector, or why it has none. What a batch cannot do is tried one by one."""

    def describe(images: Tensor) -> list[Vector | str]:
        try:
            vectors = descriptor.whiten(descriptor.describe(images)).float().cpu().numpy()
        except (CoocError, RuntimeError) as error:  # RuntimeError: out of memory
            if len(images) == 1:
                return [f"It cannot be described ({error})."]
            return [one for image in images for one in describe(image[None])]
        norms = np.linalg.norm(vectors, axis=1)
        return [v if abs(norm - 1) <= 1e-3 else FEATURELESS for v, norm in zip(vectors, norms, strict=True)]

    return describe
