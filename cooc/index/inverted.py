"""Pictures by their visual words (`cooc.verification.words`): an inverted file beside an index.

    inverted.update(folder, store)           after a run: what is new is added, what is gone is left out in time
    Inverted.open(folder).search(signature, 50)   ids, best first

It is made from the local features that the index keeps, may be deleted at any time, and need not be complete: what it
does not know is found by its vector alone. It lies in segments of up to 32,768 pictures, each a folder with five arrays
that are mapped, not read: a search touches the lists of the query's words.

    ids       (N, 16)   of the pictures
    starts    (words+1) where the list of each word begins
    pictures  (E,)      the lists: numbers of pictures
    bits      (E,)      and their residuals
    lengths   (N,)      how many words each picture has
"""

from __future__ import annotations

import itertools
import logging
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError
from cooc.index.records import id_bytes
from cooc.index.store import Store, blocks
from cooc.verification.features import unpack
from cooc.verification.words import WORDS, Signature, signatures, similarity

SEGMENT = 1 << 15  # pictures
PART = 1 << 12  # pictures that join a segment at once
WORN = 0.8  # of a segment's pictures, without which it is written again
TOGETHER = 64  # pictures whose words are found at once
MOST = 20_000_000  # entries of lists that a search looks at: of the rarest words first

Ids = NDArray[np.void]  # 16 bytes each
ID = np.dtype("V16")

_log = logging.getLogger("cooc")


class Segment(NamedTuple):
    ids: Ids
    starts: NDArray[np.int64]
    pictures: NDArray[np.uint16]
    bits: NDArray[np.uint64]
    lengths: NDArray[np.int64]

    @property
    def words(self) -> NDArray[np.uint16]:
        """Of each entry."""
        return np.repeat(np.arange(WORDS, dtype=np.uint16), np.diff(self.starts))


class Inverted:
    """Segments, open for searching."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._norms = [np.sqrt(np.maximum(segment.lengths, 1)) for segment in self.segments]

    @classmethod
    def open(cls, folder: Path) -> Inverted:
        """What lies in the folder now."""
        return cls([segment for _, segment in _read(folder)])

    @classmethod
    def of(cls, pictures: Iterable[tuple[bytes, Signature]]) -> Inverted:
        """Made in memory, of ids (16 bytes) and what they have."""
        return cls(list(_joined([], pictures)))

    def __len__(self) -> int:
        return sum(len(segment.ids) for segment in self.segments)

    def search(self, query: Signature, k: int) -> list[str]:
        """The ids of the k pictures that share most with the query; fewer, if fewer share anything."""
        words = query.words.astype(np.int64)
        counts = [np.asarray(segment.starts[words + 1] - segment.starts[words]) for segment in self.segments]
        rare = np.argsort(sum(counts, np.zeros(len(words), np.int64)), kind="stable")
        seen = np.cumsum(sum(counts, np.zeros(len(words), np.int64))[rare])
        chosen = np.sort(rare[: max(1, int(np.searchsorted(seen, MOST)))])
        best: dict[bytes, float] = {}
        for segment, norms, count in zip(self.segments, self._norms, counts, strict=True):
            scores = _scores(segment, words[chosen], query.bits[chosen], count[chosen]) / norms
            for number in np.argsort(-scores, kind="stable")[:k].tolist():
                if scores[number] > 0:
                    name = segment.ids[number].tobytes()
                    best[name] = max(best.get(name, 0.0), float(scores[number]))
        order = sorted(best, key=lambda name: (-best[name], name))
        return [name.hex() for name in order[:k]]


def _scores(
    segment: Segment, words: NDArray[np.int64], own: NDArray[np.uint64], count: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For each picture of the segment the sum over the words that it shares."""
    lists = [
        slice(*ends) for ends in zip(segment.starts[words].tolist(), segment.starts[words + 1].tolist(), strict=True)
    ]
    bits, pictures = (
        np.concatenate([part[:0], *(part[one] for one in lists)]) for part in (segment.bits, segment.pictures)
    )
    alike = similarity(np.repeat(own, count), bits)
    return np.asarray(np.bincount(pictures, alike, minlength=len(segment.ids))[: len(segment.ids)], np.float64)


def update(folder: Path, store: Store) -> int:
    """Add the pictures of the store that have local features and are not there yet; how many.

    Small segments, and those of which much is gone, are joined with what is new. What is there goes only when what
    takes its place has been written.
    """
    before = list(folder.iterdir()) if folder.is_dir() else []
    wanted = {id_bytes(record.id) for record in store.records()}
    known, stay, joined = set[bytes](), set[Path](), list[Segment]()
    worn = False
    for path, segment in _read(folder):
        names = [name.tobytes() for name in segment.ids]
        there = np.array([name in wanted and name not in known for name in names], bool)
        known |= {name for name, good in zip(names, there.tolist(), strict=True) if good}
        if there.sum() < WORN * len(names):
            worn = True
        elif len(names) > SEGMENT // 2:
            stay.add(path)
            continue
        joined.append(_only(segment, there))
    made = _made(store, [name.hex() for name in sorted(wanted - known)])
    first = next(made, None)
    if first is None and not worn and len(joined) < 2:
        return 0
    added = 0
    for segment in _joined(joined, itertools.chain([first] if first else [], made)):
        _write(folder, segment)
        added += len(segment.ids)
    for path in before:
        if path not in stay:
            shutil.rmtree(path, ignore_errors=True)
    return added - sum(len(segment.ids) for segment in joined)


def _made(store: Store, ids: Sequence[str]) -> Iterator[tuple[bytes, Signature]]:
    for block in blocks(ids, TOGETHER):
        codes = {name: code for name, code in zip(block, store.features(block), strict=True) if code is not None}
        try:
            found = signatures([unpack(code) for code in codes.values()])
        except InputError:  # damaged: the next run of `cooc index` makes the features again
            continue
        yield from zip((id_bytes(name) for name in codes), found, strict=True)


def _joined(kept: Sequence[Segment], new: Iterable[tuple[bytes, Signature]]) -> Iterator[Segment]:
    """In segments of about `SEGMENT` pictures."""
    parts, count = list[Segment](), 0
    for part in itertools.chain(kept, (_segment(block) for block in blocks(new, PART))):
        parts.append(part)
        count += len(part.ids)
        if count >= SEGMENT - PART:
            yield _one(parts)
            parts, count = [], 0
    if count:
        yield _one(parts)


def _segment(pictures: Sequence[tuple[bytes, Signature]]) -> Segment:
    ids = np.frombuffer(b"".join(name for name, _ in pictures), ID)
    lengths = [len(signature.words) for _, signature in pictures]
    none = np.zeros(0, np.uint16), np.zeros(0, np.uint64)
    words = np.concatenate([none[0], *(signature.words for _, signature in pictures)])
    bits = np.concatenate([none[1], *(signature.bits for _, signature in pictures)])
    return _sorted(ids, words, np.repeat(np.arange(len(ids)), lengths), bits)


def _one(parts: Sequence[Segment]) -> Segment:
    first = np.cumsum([0, *(len(part.ids) for part in parts)])
    numbers = [part.pictures.astype(np.int64) + start for part, start in zip(parts, first.tolist(), strict=False)]
    return _sorted(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.words for part in parts]),
        np.concatenate(numbers),
        np.concatenate([part.bits for part in parts]),
    )


def _only(segment: Segment, there: NDArray[np.bool_]) -> Segment:
    number = np.cumsum(there) - 1
    good = there[segment.pictures]
    return _sorted(
        segment.ids[there], segment.words[good], number[segment.pictures[good]], np.asarray(segment.bits[good])
    )


def _sorted(ids: Ids, words: NDArray[np.uint16], pictures: NDArray[np.int64], bits: NDArray[np.uint64]) -> Segment:
    order = np.argsort(words, kind="stable")
    starts = np.searchsorted(words[order], np.arange(WORDS + 1)).astype(np.int64)
    lengths = np.bincount(pictures, minlength=len(ids))
    return Segment(ids, starts, pictures[order].astype(np.uint16), bits[order], lengths)


def _write(folder: Path, segment: Segment) -> None:
    made = folder / f"{uuid.uuid4().hex}.new"
    made.mkdir(parents=True)
    try:
        for name, array in segment._asdict().items():
            np.save(made / f"{name}.npy", array)
        made.rename(made.with_suffix(""))
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _read(folder: Path) -> Iterator[tuple[Path, Segment]]:
    """The segments that are whole; a damaged one is left out, and made again by the next update.

    OSError where this machine cannot read them now, which says nothing about them.
    """
    for path in sorted(folder.glob("?" * 32)):
        try:
            segment = _mapped(path)
            whole = (
                segment.ids.dtype == ID
                and segment.starts.shape == (WORDS + 1,)
                and segment.starts[0] == 0
                and bool((np.diff(segment.starts) >= 0).all())
                and segment.starts[-1] == len(segment.pictures) == len(segment.bits)
                and segment.lengths.shape == (len(segment.ids),)
            )
        except (FileNotFoundError, ValueError, EOFError, IndexError, TypeError):
            whole = False
        if whole:
            yield path, segment
        else:
            _log.warning("%s is damaged, and is not used. The next `cooc index` makes it again.", path)


def _mapped(path: Path) -> Segment:
    def array(name: str) -> Any:
        return np.asarray(np.load(path / f"{name}.npy", mmap_mode="r"))

    ids, starts, pictures, bits = map(array, ("ids", "starts", "pictures", "bits"))
    try:
        lengths = array("lengths")
    except FileNotFoundError:  # written before these were kept
        lengths = np.bincount(pictures, minlength=len(ids))
    return Segment(ids, starts, pictures, bits, lengths)
