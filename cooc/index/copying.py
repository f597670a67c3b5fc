"""A copy of an index on a server, as a folder for the embedded engine: what `Store.snapshot` of such an index makes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from cooc.errors import StoreError
from cooc.index.embedded import store
from cooc.index.embedded.database import explained, show
from cooc.index.store import BadFile, Record, StoreMeta, Vectors


def copy_to_folder(
    dest: str, meta: StoreMeta, images: Iterable[tuple[list[Record], Vectors]], bad: Iterable[BadFile]
) -> None:
    """Write blocks of images to a new index in `dest`, which appears when it is complete."""
    target = Path(dest)
    if target.exists():
        raise StoreError(f"{show(target)} exists already: name a folder that does not.")
    new = target.with_name(target.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        with store.create_store(str(new), meta) as copy:
            copy.report_bad(bad)
            for records, vectors in images:
                copy.add(records, vectors)
            copy.compact()
        with explained(target):
            new.replace(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
