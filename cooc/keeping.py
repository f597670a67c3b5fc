"""Of a group of copies, the one to keep, and why.

    choice = choose(group, collection)      # group: records, as ImageSearch.duplicates() gives them
    choice.keep.path, choice.why            # "photo.jpg", "the largest"

In this order, until one is left: can be read; more pixels, if there is more to see in them (an enlarged copy has only
pixels); sharper; knows when it was taken; has tags; less compressed; first by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from cooc.errors import ImageError
from cooc.index.records import Record
from cooc.pictures import Collection
from cooc.pictures.decode import Picture
from cooc.pictures.sharpness import sharpness

LONGEST = 4096  # pixels, at which copies are compared; of two that are larger, the larger has more to see
AS_LARGE, AS_SHARP, AS_HEAVY = 0.98, 0.85, 0.98  # of the best: what counts as equal
MORE_DETAIL = 1.1  # sharpness of a larger picture, against a smaller one that is enlarged to its size


@dataclass(frozen=True)
class Choice:
    keep: Record
    rest: tuple[Record, ...]  # in the order of the group
    why: str
    unread: frozenset[str]  # paths of those that could not be read now


def choose(
    group: Sequence[Record], collection: Collection, look: Callable[[Picture, int], float] = sharpness
) -> Choice:
    """`look`: how sharp a picture is at a size; for who decodes in another process."""
    side = min(LONGEST, max(max(record.width, record.height) for record in group))
    sharp = dict[str, float]()
    for record in group:
        with suppress(ImageError):
            sharp[record.path] = look(collection.picture(record.entry), side)

    def pixels(record: Record) -> int:
        return record.width * record.height

    def largest(some: list[Record]) -> list[Record]:
        most = max(map(pixels, some))
        large = [record for record in some if pixels(record) >= AS_LARGE * most]
        small = [
            sharp[record.path] for record in some if record not in large and max(record.width, record.height) < LONGEST
        ]
        detailed = max(sharp[record.path] for record in large) >= MORE_DETAIL * max(small, default=0)
        return large if detailed else some

    def best(value: Callable[[Record], float], share: float) -> Callable[[list[Record]], list[Record]]:
        return lambda some: [record for record in some if value(record) >= share * max(map(value, some))]

    tests: tuple[tuple[str, Callable[[list[Record]], list[Record]]], ...] = (
        ("the only one that can be read", lambda some: [record for record in some if record.path in sharp] or some),
        ("the largest", lambda some: largest(some) if sharp else some),
        ("the sharpest", best(lambda record: sharp.get(record.path, 0), AS_SHARP)),
        ("knows when it was taken", lambda some: [record for record in some if record.taken] or some),
        ("has tags", lambda some: [record for record in some if record.tags] or some),
        ("the least compressed", best(lambda record: record.size / pixels(record), AS_HEAVY)),
        ("the first by name", lambda some: [min(some, key=lambda record: record.path)]),
    )
    left, why = list(group), ""
    for reason, test in tests:
        narrowed = test(left)
        why = reason if len(narrowed) < len(left) else why
        left = narrowed
        if len(left) == 1:
            break
    rest = tuple(record for record in group if record is not left[0])
    return Choice(left[0], rest, why, frozenset(record.path for record in group if record.path not in sharp))
