"""Changes by request: who may make them, where, and the opening of the index that all of them share."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from starlette.exceptions import HTTPException

from cooc.api.settings import Settings
from cooc.image_search import ImageSearch
from cooc.index.records import Record
from cooc.pictures import Folder


def check_change(settings: Settings, client: str) -> None:
    """May this client change anything? Without a token it must be on this machine, wherever the server listens."""
    if not settings.folders:
        raise HTTPException(403, "This server changes nothing: `cooc serve --allow FOLDER` lets it.")
    if settings.token is None and not _is_here(client):
        raise HTTPException(403, "Without a token only this machine may change the collection: `cooc serve --token`.")


def _is_here(client: str) -> bool:
    try:
        number = ipaddress.ip_address(client)
    except ValueError:
        return False
    return (getattr(number, "ipv4_mapped", None) or number).is_loopback


class Writer:
    """The index, open for changes while anybody changes it: indexing and small changes do not lock one another out.

    It is another opening than the one that is searched, so that searching goes on undisturbed.
    """

    def __init__(self, search: ImageSearch, settings: Settings) -> None:
        self.search, self.settings = search, settings
        self.changes = 0  # openings that have ended: whoever keeps something of the index knows that it may be old
        self.in_turn = threading.Lock()
        self._lock = threading.Lock()
        self._opened: ImageSearch | None = None
        self._users = 0

    @contextmanager
    def open(self) -> Iterator[ImageSearch]:
        with self._lock:
            if self._opened is None:
                self._opened = ImageSearch.open(self.search.index_path, write=True, descriptor=self.search.descriptor)
            self._users += 1
            opened = self._opened
        try:
            yield opened
        finally:
            with self._lock:
                self._users -= 1
                self.changes += 1
                if not self._users:
                    self._opened = None
                    opened.close()

    def allowed(self, name: str) -> bool:
        """May what lies there be changed by request? Links are resolved before that is decided."""
        if not isinstance(self.search.collection, Folder):
            wanted = PurePosixPath(name)
            return ".." not in wanted.parts and any(wanted.is_relative_to(one) for one in self.settings.folders)
        root = self.search.root.resolve()
        try:
            found = (root / name).resolve()
        except (OSError, RuntimeError, ValueError):
            return False
        return found.is_relative_to(root) and any(
            found.is_relative_to((root / one).resolve()) for one in self.settings.folders
        )

    def records(self, ids: Iterable[str]) -> list[Record]:
        """Pictures that may be changed. All of them, or none: who asks for one of another folder is told so."""
        wanted = list(dict.fromkeys(ids))
        found = [record for record in self.search.store.get(wanted) if record is not None]
        if len(found) < len(wanted):
            missing = len(wanted) - len(found)
            raise HTTPException(404, f"{missing} of these pictures are not in the index: search again.")
        if any(not self.allowed(record.path) for record in found):
            raise HTTPException(
                403, "Some of these pictures lie where requests change nothing: see `cooc serve --allow`."
            )
        return found
