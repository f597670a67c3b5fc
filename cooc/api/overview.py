"""How many pictures each folder, tag and month has: what a person chooses from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cooc.index.store import Store, Tally


def overview(store: Store) -> Tally:
    """Folders with all below each."""
    found, folders = store.tally(), Counter[str]()
    for folder, count in found.folders.items():
        while folder:
            folders[folder] += count
            folder = folder.rpartition("/")[0]
    return found._replace(folders=folders)


def below(folders: Mapping[str, int], parent: str) -> dict[str, int]:
    """Those directly below one, in order."""
    start = f"{parent}/" if parent else ""
    return {name: folders[name] for name in sorted(folders) if name.startswith(start) and "/" not in name[len(start) :]}
