"""What a run over an index does beside its work: changes are committed every few seconds, so that whatever stops it
loses no more; it tells how far it is; and a machine that fails again and again ends it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from cooc.errors import CoocError, MachineError, StoreError
from cooc.index.engine import Made
from cooc.index.records import BadFile, Record
from cooc.index.report import Problem, Progress, Report, Stop
from cooc.index.store import Store
from cooc.pictures import Collection
from cooc.pictures.faults import is_machine

COMMIT_SECONDS, COMMIT_IMAGES = 3.0, 1000
PROGRESS_SECONDS = 0.1
FAILURES = 8  # in a row, after which it is no use to go on

log = logging.getLogger("cooc")


@dataclass
class Changes:
    """What waits to be committed together."""

    described: list[tuple[Record, Made]] = field(default_factory=list)
    moves: dict[str, str] = field(default_factory=dict)  # old path -> new
    touches: dict[str, int] = field(default_factory=dict)  # path -> time
    removals: list[str] = field(default_factory=list)
    bad: list[BadFile] = field(default_factory=list)
    clear: list[str] = field(default_factory=list)  # bad files that are not bad any more, or not there
    features: dict[str, bytes] = field(default_factory=dict)  # id -> local features of what is there without

    def __len__(self) -> int:
        parts = (self.described, self.moves, self.touches, self.removals, self.bad, self.features)
        return sum(map(len, parts))

    def commit(self, store: Store) -> None:
        """Each of these is one transaction, and whatever comes between two of them the next run repairs."""
        if self.moves:
            store.rename(self.moves)
        if self.described:
            records, made = zip(*self.described, strict=True)
            store.add(records, np.stack([one.vector for one in made]), [one.features for one in made])
        if self.features:
            store.set_features(self.features)
        if self.removals:
            store.remove(self.removals)
        if self.touches:
            store.touch(self.touches)
        if cleared := [*self.clear, *self.touches]:
            store.clear_bad(cleared)
        if self.bad:
            store.report_bad(self.bad)


class Run:
    def __init__(
        self, store: Store, collection: Collection, report: Report, progress: Progress | None, stop: Stop | None
    ) -> None:
        self.store, self.collection, self.report = store, collection, report
        self.progress, self.stop = progress, stop
        self.in_a_row = Counter[str]()  # failures of this machine, by what it was to do
        self.failure: MachineError | None = None  # after too many: no further file is taken
        self.pending = Changes()
        self.committed = self.shown = time.monotonic()
        self.started = self.committed - report.seconds

    def stopped(self) -> bool:
        """Has somebody asked for an early end?"""
        if self.stop is not None and self.stop():
            self.report.interrupted = True
        return self.report.interrupted

    def leave_out(self, step: str, name: str, error: CoocError) -> bool:
        """Report a file. Is it this machine that failed, not the file?"""
        log.info("%s: %s", name, error)
        failed = isinstance(error, MachineError)
        self.report.problems.append(Problem(name, str(error), failed))
        if failed:
            self.report.failed += 1
            self.in_a_row[step] += 1
            if self.in_a_row[step] >= FAILURES and self.failure is None:
                self.failure = MachineError(
                    f"{FAILURES} files in a row could not be {step} on this machine, so the run was ended. What was "
                    "done before is kept, nothing was forgotten: run it again when the machine is well. The last one: "
                    f"{error}"
                )
        return failed

    def commit(self) -> None:
        self.pending.commit(self.store)
        self.pending = Changes()
        self.committed = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        if len(self.pending) >= COMMIT_IMAGES or now - self.committed >= COMMIT_SECONDS:
            self.commit()
        if now - self.shown >= PROGRESS_SECONDS:
            self.show(now)

    def show(self, now: float) -> None:
        self.shown, self.report.seconds = now, now - self.started
        if self.progress is not None:
            self.progress(self.report)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Whether the run gets done, is interrupted or fails: what waits is committed, and the report completed."""
        failure: Exception | None = None
        try:
            yield
        except KeyboardInterrupt:
            self.report.interrupted = True
        except StoreError:  # what could not be written will not be now
            raise
        except Exception as error:
            failure = error
        self.commit()
        self.conclude()
        self.show(time.monotonic())
        if failure is None:
            return
        if isinstance(failure, CoocError) or not is_machine(failure):
            raise failure
        raise MachineError(
            f"This machine failed ({failure}), so the run was ended. What was done before is kept. Free memory or file "
            "handles, check the disk, and run it again."
        ) from failure

    def conclude(self) -> None:
        """What is kept of the run for the next one."""
