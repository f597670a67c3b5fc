"""Local features for pictures that are in an index without them: it was made before, or they are damaged, or imported.

Nothing is described again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing

from cooc.errors import CoocError
from cooc.index.engine import FEW, Extraction
from cooc.index.records import Record
from cooc.index.report import Progress, Report, Stop
from cooc.index.run import Run
from cooc.index.store import Store
from cooc.pictures import Collection
from cooc.pictures.batches import Item, decode, default_workers
from cooc.pictures.faults import blame

CHECKED = 10_000  # pictures: the codes of so many are read in every run, to find damaged ones
TOGETHER = 1000  # contents that are looked out for at once
STEP = "given local features"


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
    run = Run(store, collection, report, progress, stop)
    items = (Item(one, collection.picture(one.entry)) for one in itertools.chain(first, wanted))
    decoded = decode(items, size=extraction.size, workers=workers, beside=extraction)
    with run.ending(), closing(decoded):
        for item, found in decoded:
            record: Record = item.key
            try:
                if isinstance(found, CoocError):
                    raise found
                code = extraction.finish(item.aside, device)
                if _unchanged(collection, record):
                    run.pending.features[record.id] = code
                    report.completed += 1
                run.in_a_row[STEP] = 0
            except (CoocError, OSError) as error:
                if not run.leave_out(STEP, record.path, blame(error, repr(collection.address(record.path)))):
                    run.in_a_row[STEP] = 0
            run.tick()
            if run.failure is not None:
                raise run.failure
            if run.stopped():
                return


def _there(store: Store, collection: Collection, check: bool) -> Iterator[Record]:
    """Pictures of one content count once, as far as they come in one block: the others have its features by then."""
    recent = set[str]()
    for record in store.without_features(check=check):
        if record.sha256 not in recent and _unchanged(collection, record):
            recent.add(record.sha256)
            yield record
        if len(recent) >= TOGETHER:
            recent.clear()


def _unchanged(collection: Collection, record: Record) -> bool:
    try:
        return collection.stamp(record.entry) == record.entry.stamp
    except OSError:
        return False
