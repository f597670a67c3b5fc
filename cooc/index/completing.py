"""Local features for pictures that are in an index without them: it was made before, or they are damaged, or imported.

Nothing is described again. Codes are written every few seconds, so whatever stops the run, the next one goes on.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator

from cooc.errors import CoocError, MachineError
from cooc.index.engine import FEW, Extraction
from cooc.index.report import Problem, Progress, Report, Stop
from cooc.index.store import Record, Store
from cooc.pictures import Collection
from cooc.pictures.batches import Item, decode, default_workers
from cooc.pictures.faults import blame

COMMIT_SECONDS, COMMIT_IMAGES = 3.0, 1000
CHECKED = 10_000  # pictures: the codes of so many are read in every run, to find damaged ones
FAILURES = 8  # in a row, after which it is no use to go on

log = logging.getLogger("cooc")


def complete_features(
    store: Store,
    collection: Collection,
    extraction: Extraction,
    report: Report,
    *,
    workers: int | None = None,
    device: str = "cpu",
    check: bool = False,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> None:
    """For each picture without features whose file is there, unchanged. To `check` is to look for damaged ones too,
    which takes reading them all; in a small index it is done anyway. What was done is added to the report."""
    check = check or store.count_features().images <= CHECKED
    wanted = _there(store, collection, check)
    first = list(itertools.islice(wanted, FEW + 1))
    if not first:
        return
    if workers is None:
        workers = default_workers(device) if len(first) > FEW else 0
    codes, committed, in_a_row = dict[str, bytes](), time.monotonic(), 0
    began = committed - report.seconds
    items = (Item(one, collection.picture(one.entry)) for one in itertools.chain(first, wanted))
    decoded = decode(items, size=extraction.size, workers=workers, beside=extraction)
    try:
        for item, found in decoded:
            record: Record = item.key
            error = found if isinstance(found, CoocError) else None
            try:
                if error is None:
                    code = extraction.finish(item.aside, device)
                    if _unchanged(collection, record):
                        codes[record.id] = code
                        report.completed += 1
                    in_a_row = 0
            except (CoocError, OSError) as failure:
                error = blame(failure, repr(collection.address(record.path)))
            if error is not None:
                in_a_row = in_a_row + 1 if isinstance(error, MachineError) else 0
                _leave_out(report, record, error)
            now = time.monotonic()
            if len(codes) >= COMMIT_IMAGES or now - committed >= COMMIT_SECONDS:
                store.set_features(codes)
                codes, committed = {}, now
                report.seconds = now - began
                if progress is not None:
                    progress(report)
            if in_a_row >= FAILURES:
                raise MachineError(
                    f"{FAILURES} pictures in a row got no local features on this machine, so the run was ended. What "
                    f"was done is kept: run it again when the machine is well. The last one: {error}"
                )
            if stop is not None and stop():
                report.interrupted = True
                return
    except KeyboardInterrupt:
        report.interrupted = True
    except (OSError, MemoryError) as failure:
        raise MachineError(
            f"This machine failed ({failure}), so no further local features were made. Free memory or file handles, "
            "and run it again."
        ) from failure
    finally:
        decoded.close()  # type: ignore[attr-defined]
        if codes:
            store.set_features(codes)
        report.seconds = time.monotonic() - began


def _there(store: Store, collection: Collection, check: bool) -> Iterator[Record]:
    """Pictures of one content count once, as far as they come in one block: the others have its features by then."""
    recent = set[str]()
    for record in store.without_features(check=check):
        if record.sha256 not in recent and _unchanged(collection, record):
            recent.add(record.sha256)
            yield record
        if len(recent) >= COMMIT_IMAGES:
            recent.clear()


def _unchanged(collection: Collection, record: Record) -> bool:
    try:
        return collection.stamp(record.entry) == record.entry.stamp
    except OSError:
        return False


def _leave_out(report: Report, record: Record, error: CoocError) -> None:
    log.info("%s: %s", record.path, error)
    report.problems.append(Problem(record.path, str(error), isinstance(error, MachineError)))
    if isinstance(error, MachineError):
        report.failed += 1
