"""A copy of an index on a server, as a folder for the embedded engine: what `Store.snapshot` of such an index makes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cooc.errors import StoreError
from cooc.index.embedded import store
from cooc.index.embedded.database import explained, show
from cooc.index.store import BadFile, Block, Forgotten, StoreMeta


def copy_to_folder(
    dest: str,
    meta: StoreMeta,
    images: Iterable[Block],
    bad: Iterable[BadFile],
    notes: Mapping[str, Any] | None = None,
    forgotten: Iterable[Forgotten] = (),
) -> None:
    """Write blocks of images to a new index in `dest`, which appears when it is complete."""
    target = Path(dest)
    if target.exists():
        raise StoreError(f"{show(target)} exists already: name a folder that does not.")
    new = target.with_name(target.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        with store.create_store(str(new), meta) as copy:
            for records, vectors in images:
                copy.add(records, vectors)
            copy.report_bad(bad)  # after the images: adding one of that path would end the report,
            copy.remember(forgotten)  # and adding one of that content would use the tags up
            for name, value in (notes or {}).items():
                copy.note(name, value)
            copy.compact()
        with explained(target):
            new.replace(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
