"""Groups of copies, page by page.

All pictures are compared once, which may take minutes: whoever asks meanwhile is told how far it is. The files of a
page are looked at when it is asked for, to tell which one to keep.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from cooc.api.kept import Kept
from cooc.api.limits import Pool
from cooc.api.schemas import GroupOut, GroupsOut
from cooc.api.writing import Writer
from cooc.errors import InputError, UnreadableError
from cooc.image_search import ImageSearch
from cooc.index.records import Filter
from cooc.keeping import choose
from cooc.pictures.decode import Picture
from cooc.pictures.decoders import Decoders
from cooc.pictures.sharpness import sharpness

COMPARED = 5000  # pictures that one request may compare with one another
PATIENCE = 5.0  # seconds after which it is told how far the comparison is
ENOUGH = 10.0  # seconds for which groups are good in any case: or who asks again would never see them

Question = tuple[Filter | None, float | None]  # which pictures, and the least similarity
Groups = list[list[str]]  # ids


class Copies:
    def __init__(self, search: ImageSearch, writer: Writer, decoders: Decoders, comparing: Pool, showing: Pool) -> None:
        self.search, self.decoders, self.comparing, self.showing = search, decoders, comparing, showing
        self._groups = Kept(writer, self._compare, least=ENOUGH)
        self._tasks: dict[Question, asyncio.Task[Groups]] = {}
        self._shares: dict[Question, float] = {}  # of the pictures that were compared

    async def page(self, question: Question, offset: int, limit: int) -> GroupsOut:
        """Groups as they were when the first page was asked for, less what has been removed."""
        task = self._tasks.get(question)
        if task is None:
            work = self.comparing.run(partial(self._groups, *question, old=offset > 0))
            task = self._tasks[question] = asyncio.ensure_future(work)
            task.add_done_callback(lambda done: self._ended(question, done))
        try:
            groups = await asyncio.wait_for(asyncio.shield(task), PATIENCE)
        except TimeoutError:
            return GroupsOut(groups=[], next_offset=offset, compared=self._shares.get(question, 0.0))
        chosen = await self.showing.run(self._choose, groups[offset : offset + limit])
        following = offset + limit
        return GroupsOut(groups=chosen, next_offset=following if following < len(groups) else None, compared=1)

    def _ended(self, question: Question, task: asyncio.Task[Groups]) -> None:
        del self._tasks[question]
        self._shares.pop(question, None)
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more

    def _compare(self, where: Filter | None, threshold: float | None) -> Groups:
        count = sum(1 for _ in self.search.store.records(where, limit=COMPARED + 1))
        if count > COMPARED:
            raise InputError(
                f"More than {COMPARED:,} pictures: choose a folder or a time, or use `cooc duplicates --html`."
            )

        def progress(done: int) -> None:
            self._shares[where, threshold] = min(done / count, 0.99)

        found = self.search.duplicates(threshold, where=where, progress=progress)
        return [[record.id for record in group] for group in found]

    def _choose(self, groups: Groups) -> list[GroupOut]:
        found = ([record for record in self.search.store.get(ids) if record is not None] for ids in groups)
        return [GroupOut.of(choose(left, self.search.collection, self._look)) for left in found if len(left) > 1]

    def _look(self, picture: Picture, side: int) -> float:
        if not isinstance(picture, Path):  # it lies elsewhere, and is read here
            try:
                picture = cast(BinaryIO, picture).read()
            except OSError as error:
                raise UnreadableError(str(error)) from error
        return self.decoders.run(sharpness, picture, side)
