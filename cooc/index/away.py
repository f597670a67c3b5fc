"""Pictures that are not there any more: were they deleted, or is their disk not mounted?

A file that is gone from a folder which has others was deleted. A folder that had pictures and has none now, that is
missing, or that is not the disk which it was, may come back: its pictures are *away*. They stay in the index and can be
found, and when the folder is back nothing is described again; `--prune` says that they are gone for good.

The store's notes keep two things: `away`, folder -> since when, and `mounts`, the folders that were disks of their own
when their pictures were indexed. A disk is known to be the same one when a single picture on it is as it was.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

from cooc.errors import counted
from cooc.index.records import now
from cooc.index.store import Store
from cooc.pictures import Collection, Entry

AWAY, MOUNTS = "away", "mounts"
JUDGED = 1000  # folders whose state is held: absent files come in the order of their names


def away_folders(store: Store) -> dict[str, str]:
    """Folders whose pictures are away, and since when; "" is the whole collection."""
    return dict(store.notes().get(AWAY, {}))


def forget_marks(store: Store) -> None:
    """Of folders that the index knows no picture of: they were removed."""
    marks = away_folders(store)
    left = {folder: since for folder, since in marks.items() if store.holds(folder)}
    if left != marks:
        store.note(AWAY, left or None)


def which_are_away(store: Store, collection: Collection, files: Iterable[Entry]) -> set[str]:
    """The names of those that are away: in a folder with a mark, and not there now."""
    folders = away_folders(store)
    marked = sorted(file for file in files if any(inside(file.name, folder) for folder in folders))
    return {file.name for file in collection.absent(marked)} if marked else set()


def inside(name: str, folder: str) -> bool:
    """Is it that folder, or below it?"""
    return not folder or name == folder or name.startswith(folder + "/")


class Absence:
    """What one run finds out: `saw` and `recognise` while it walks, then `away` for each file that is absent."""

    def __init__(self, store: Store, collection: Collection, follow: bool = False) -> None:
        self.store, self.collection, self.follow = store, collection, follow
        notes = store.notes()
        self.marks: dict[str, str] = notes.get(AWAY, {})
        self.mounts = set[str](notes.get(MOUNTS, ()))
        self.found = Counter[str]()  # pictures that are away, by folder
        self._seen: set[str] = set()  # disks that hold pictures now,
        self._strange: set[str] = set()  # and those of them on which nothing is as it was
        self._folder: str | None = None
        self._vacant = lru_cache(JUDGED)(self._is_vacant)

    def saw(self, name: str) -> None:
        """A picture, in the order of the walk: each folder is asked once whether it is a disk."""
        folder = name.rpartition("/")[0]
        if folder == self._folder:
            return
        for one in _path_to(folder):
            known = self._folder is not None and inside(self._folder, one)
            if not known and one not in self._seen and self.collection.mounted(one):
                self._seen.add(one)
                self._strange.add(one)
        self._folder = folder

    def recognise(self, *names: str) -> None:
        """A picture that is as the index knows it; or with both its names, one that has only moved."""
        if self._strange:
            self._strange -= {one for one in self._strange if all(inside(name, one) for name in names)}

    def unmounted(self, name: str) -> bool:
        """Does it lie on a disk that surely is not there?"""
        return any(inside(name, one) and not self.collection.mounted(one) for one in self.mounts)

    def away(self, name: str, top: str) -> str | None:
        """The outermost folder with which an absent file is away; None: it was deleted. `top` is what was walked."""
        for folder in _path_to(name.rpartition("/")[0]):
            if self._is_another_disk(folder) or (inside(folder, top) and self._vacant(folder)):
                return folder
        return None

    def _is_another_disk(self, folder: str) -> bool:
        return folder in self._strange or (folder in self.mounts and not self.collection.mounted(folder))

    def _is_vacant(self, folder: str) -> bool:
        try:
            return self.collection.vacant(folder, follow=self.follow)
        except OSError:  # it cannot be listed now: nothing below it is given up
            return True

    def settle(self, names: Iterable[str], reached: Iterable[str]) -> None:
        """Keep what was found out about the folders that were walked; `reached` are those with pictures in them."""
        names, reached = list(names), list(reached)
        marks = {
            folder: since
            for folder, since in self.marks.items()
            if not any(inside(folder, name) for name in names) and not any(inside(name, folder) for name in reached)
        }
        for folder in self.found:
            before = [since for one, since in self.marks.items() if inside(one, folder)]
            marks[folder] = min(before, default=now())
        given_up = {  # pictures are kept in the folder itself now, or were pruned
            one
            for one in self.mounts - self._seen
            if any(inside(one, name) for name in names)
            and not any(inside(folder, one) or inside(one, folder) for folder in self.found)
        }
        mounts = (self.mounts | self._seen) - given_up
        if marks != self.marks:
            self.store.note(AWAY, marks or None)
        if mounts != self.mounts:
            self.store.note(MOUNTS, sorted(mounts) or None)

    def notes(self, most: int) -> Iterator[str]:
        """For whoever ran it."""
        for folder, count in sorted(self.found.items())[:most]:
            where = self.collection.address(folder)
            why = "it is not the disk that it was" if self._is_another_disk(folder) else "it holds no picture now"
            yield (
                f"{counted(count, 'picture')} of {where!r} {'is' if count == 1 else 'are'} away: {why}. Is its disk "
                "mounted? The index keeps what is away, and describes nothing again when it is back. If it is gone for "
                "good: cooc index ... --prune"
            )
        if len(self.found) > most:
            yield f"... and of {len(self.found) - most} more folders: cooc status"


def _path_to(folder: str) -> Iterator[str]:
    """The collection itself, then the folders on the way down: "a/b" -> "", "a", "a/b"."""
    yield ""
    yield from itertools.accumulate(folder.split("/") if folder else [], "{}/{}".format)
