"""Groups of copies, page by page. The pictures are compared once; the files of a page are looked at when it is asked
for, to tell which one to keep."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, cast

from cooc.api.kept import Kept
from cooc.api.writing import Writer
from cooc.errors import InputError, UnreadableError
from cooc.image_search import ImageSearch
from cooc.index.records import Filter
from cooc.keeping import Choice, choose
from cooc.pictures.decode import Picture
from cooc.pictures.decoders import Decoders
from cooc.pictures.sharpness import sharpness

__all__ = ["COMPARED", "Copies"]

COMPARED = 5000  # pictures that one request may compare with one another


class Copies:
    def __init__(self, search: ImageSearch, writer: Writer, decoders: Decoders) -> None:
        self.search, self.decoders = search, decoders
        self._groups = Kept(writer, self._compare)

    def _compare(self, where: Filter | None, threshold: float | None) -> list[list[str]]:
        count = sum(1 for _ in self.search.store.records(where, limit=COMPARED + 1))
        if count > COMPARED:
            raise InputError(
                f"More than {COMPARED:,} pictures: choose a folder or a time, or use `cooc duplicates --html`."
            )
        return [[record.id for record in group] for group in self.search.duplicates(threshold, where=where)]

    def page(
        self, where: Filter | None, threshold: float | None, offset: int, limit: int
    ) -> tuple[list[Choice], int | None]:
        """Groups as they were when the first page was asked for, less what has been removed; where the next begin."""
        groups, choices = self._groups(where, threshold, old=offset > 0), list[Choice]()
        for ids in groups[offset : offset + limit]:
            left = [record for record in self.search.store.get(ids) if record is not None]
            if len(left) > 1:
                choices.append(choose(left, self.search.collection, self._look))
        following = offset + limit
        return choices, following if following < len(groups) else None

    def _look(self, picture: Picture, side: int) -> float:
        if not isinstance(picture, Path):  # it lies elsewhere, and is read here
            try:
                picture = cast(BinaryIO, picture).read()
            except OSError as error:
                raise UnreadableError(str(error)) from error
        return self.decoders.run(sharpness, picture, side)
