"""Copies of an index: as a snapshot in a folder, put back from there, and the tags that a rebuilt one takes over."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cooc.errors import InputError, StoreDamagedError
from cooc.index import create_store, is_folder, open_store, without_password
from cooc.index.embedded import store as embedded
from cooc.index.embedded.swapping import put_in_place
from cooc.index.embedded.upkeep import appearing
from cooc.index.records import Filter, Forgotten, now, show
from cooc.index.store import Block, Store, blocks, intact

BLOCK = 1000  # images at a time

log = logging.getLogger("cooc")


def copy_to_folder(dest: str, store: Store) -> None:
    """Write all of a store to a new index in `dest`, which appears when it is complete."""
    with appearing(Path(dest)) as new, embedded.create_store(str(new), store.meta) as copy:
        _fill(copy, store)


def _fill(copy: Store, store: Store) -> None:
    for block in intact_blocks(store, features=True):
        copy.add(*block)
    copy.report_bad(store.bad_files())  # after the images: adding one of that path would end the report,
    copy.remember(store.forgotten())  # and adding one of that content would use the tags up
    for name, value in store.notes().items():
        copy.note(name, value)
    copy.compact()


def intact_blocks(store: Store, where: Filter | None = None, *, features: bool = False) -> Iterator[Block]:
    """All images with their vectors, but for those whose vector is damaged: a warning says which."""
    for block in blocks(store.records(where), BLOCK):
        ids, vectors = intact(store, [record.id for record in block])
        good = set(ids)
        left = [record.id for record in block if record.id not in good]
        for record in filter(None, store.get(left)):  # others have been removed meanwhile
            log.warning("%s is left out: its vector is damaged.", show(record.path))
        records = [record for record in block if record.id in good]
        yield Block(records, vectors, store.features(ids) if features else None)


def restore(snapshot: str, index: str, *, root: str | None = None) -> int:
    """Put what `Store.snapshot` wrote in the place of an index; how many images it has.

    In a folder, what is there is replaced, under the eyes of those who read it. On a server, an index is made where
    there is none; its `root` must be said if the snapshot was taken of an index in a folder, which knows it from there.
    """
    if not is_folder(snapshot):
        raise InputError(f"{without_password(snapshot)} is no snapshot: that is a folder, as cooc snapshot writes it.")
    source, target = Path(snapshot), Path(index)
    if is_folder(index):
        if source.exists() and target.exists() and source.samefile(target):
            raise InputError(f"{show(source)} is that index itself: name a snapshot of it.")
        if root is not None:
            raise InputError("--root is for an index on a server: one in a folder keeps the root that it had.")
        return put_in_place(source, target)
    with open_store(source) as copy:
        kept = copy.meta.root
        if root is None and (kept is None or not ("://" in kept or Path(kept).is_absolute())):
            raise InputError(
                f"An index on a server needs to know the folder of its pictures: --root FOLDER ({kept!r}?)"
            )
        meta = replace(copy.meta, root=root or kept, storage="float32")
        with create_store(index, meta) as new:
            _fill(new, copy)
            return len(new)


def take_over(old: Store, new: Store) -> Iterator[str]:
    """Paths of the pictures of an old index; their tags, and all notes, are in the new one when they are through.

    The new index gives the tags back as pictures of that content are added to it.
    """
    with suppress(StoreDamagedError):  # what matters more may still be readable
        for name, value in old.notes().items():
            new.note(name, value)
        new.remember(old.forgotten())
    records = old.salvaged() if isinstance(old, embedded.EmbeddedStore) else old.records()
    for block in blocks(records, BLOCK):
        there = new.find([record.path for record in block])
        time = now()
        new.remember(
            Forgotten(record.sha256, record.path, record.tags, time)
            for record, known in zip(block, there, strict=True)
            if record.tags and (known is None or known.sha256 != record.sha256)
        )
        yield from (record.path for record in block)
