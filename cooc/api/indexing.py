"""One indexing run at a time, started and stopped by request, with progress for whoever listens."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Literal

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from cooc.api.schemas import Out, shown
from cooc.api.writing import Writer
from cooc.errors import CoocError
from cooc.image_search import ImageSearch
from cooc.index.report import Report
from cooc.pictures import Folder
from cooc.pictures.batches import default_workers

log = logging.getLogger("cooc.api")
REMEMBERED = 20  # runs
PROBLEMS = 50  # of a run that are told
PERIOD, HEARTBEAT = 0.2, 15.0  # seconds


class Job(BaseModel):
    folder: str = Field(
        default="", max_length=1000, description="Relative to the root of the collection; empty is all of it."
    )
    retry: bool = Field(default=False, description="Try files again that were bad.")


class FileProblem(Out):
    path: str
    reason: str


class IndexingOut(Out):
    state: Literal["idle", "running", "stopping", "done", "stopped", "failed"]
    folder: str | None = None
    total: int | None = Field(default=None, description="Pictures there are; null until they have been counted.")
    done: int = 0
    described: int = 0
    unchanged: int = 0
    moved: int = 0
    removed: int = 0
    copied: int = 0
    bad: int = 0
    failed: int = Field(default=0, description="Files that this machine failed on: the next run tries them again.")
    seconds: float = 0.0
    job: int = Field(default=0, description="Number of the run, from 1.")
    problems: list[FileProblem] = Field(default=[], description=f"Files that were left out, the last {PROBLEMS}.")
    message: str | None = Field(default=None, description="What went wrong, or what was not done.")

    def progressed(self, report: Report) -> IndexingOut:
        names = ("total", "done", "described", "unchanged", "moved", "copied", "removed", "bad", "failed", "seconds")
        notes = "\n".join(report.notes) or None
        left_out = [FileProblem(path=shown(one.path), reason=shown(one.reason)) for one in report.problems[-PROBLEMS:]]
        values = {name: getattr(report, name) for name in names}
        return self.model_copy(update={**values, "message": notes, "problems": left_out})


class Indexing:
    def __init__(self, search: ImageSearch, writer: Writer) -> None:
        self.search, self.writer = search, writer
        self.state = IndexingOut(state="idle")
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._listeners = 0
        self.jobs: deque[IndexingOut] = deque(maxlen=REMEMBERED)  # that have ended, the oldest first

    def folder(self, name: str) -> str:
        """The folder of that name, if it may be indexed."""
        name, collection = name.strip("/"), self.search.collection
        if isinstance(collection, Folder):
            try:
                (self.search.root / name).resolve(strict=True)
            except (OSError, RuntimeError, ValueError):
                raise HTTPException(404, f"There is no folder {name!r} in the collection.") from None
        if not self.writer.allowed(name):
            raise HTTPException(403, f"{name!r} may not be indexed by request; `cooc serve --allow FOLDER` allows it.")
        return collection.address(name)

    def start(self, name: str, retry: bool = False) -> IndexingOut:
        folder = self.folder(name)
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise HTTPException(409, "An indexing run is under way: wait for it, or stop it.")
            opened = ExitStack()
            index = opened.enter_context(self.writer.open())  # now: who cannot have it is told
            self._stop.clear()
            self.state = IndexingOut(state="running", folder=name, job=self.state.job + 1)
            self._thread = threading.Thread(
                target=self._run, args=(opened, index, folder, retry), name="indexing", daemon=True
            )
            self._thread.start()
            return self.state

    def _run(self, opened: ExitStack, index: ImageSearch, folder: str, retry: bool) -> None:
        def progress(report: Report) -> None:
            self.state = self.state.progressed(report)

        try:
            with opened:
                workers = default_workers(self.search.descriptor.device.type)  # even for a few: not in this process
                report = index.index([folder], workers=workers, retry=retry, progress=progress, stop=self._stop.is_set)
            end = "stopped" if report.interrupted else "done"
            self.state = self.state.progressed(report).model_copy(update={"state": end})
        except CoocError as error:
            self.state = self.state.model_copy(update={"state": "failed", "message": str(error)})
        except Exception:
            log.exception("indexing")
            problem = "Something went wrong; the server's log says what."
            self.state = self.state.model_copy(update={"state": "failed", "message": problem})
        self.jobs.append(self.state)

    def stop(self) -> IndexingOut:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                raise HTTPException(409, "No indexing run is under way.")
            self._stop.set()
            if self.state.state == "running":
                self.state = self.state.model_copy(update={"state": "stopping"})
            return self.state

    def stop_for_good(self) -> None:
        self._stop.set()

    def close(self, until: float) -> bool:
        """Has the run ended by then? What is committed stays, and the next run goes on from there."""
        if self._thread is None:
            return True
        self._thread.join(max(until - time.monotonic(), 0))
        return not self._thread.is_alive()

    def listen(self) -> AsyncIterator[str]:
        """Server-sent events: the state now, then whenever it has changed, until there is nothing to wait for."""
        if self._listeners >= self.writer.settings.streams:
            raise HTTPException(503, "Too many are listening: try again later.", {"Retry-After": "5"})
        self._listeners += 1
        return self._events()

    async def _events(self) -> AsyncIterator[str]:
        try:
            last, silent = None, 0.0
            while True:
                state = self.state
                if state is not last:
                    last, silent = state, 0.0
                    yield f"event: progress\ndata: {state.model_dump_json()}\n\n"
                elif silent >= HEARTBEAT:
                    silent = 0.0
                    yield ": still there\n\n"
                if state.state not in ("running", "stopping"):
                    return
                await asyncio.sleep(PERIOD)
                silent += PERIOD
        finally:
            self._listeners -= 1
