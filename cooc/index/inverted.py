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
AT_ONCE = 1 << 10  # words whose lists are merged at once
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
        return cls([_one(parts) for parts in _together([], pictures)])

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
        joined.append(segment if there.all() else _only(segment, there))
    made = _made(store, [name.hex() for name in sorted(wanted - known)])
    first = next(made, None)
    if first is None and not worn and len(joined) < 2:
        return 0
    added = 0
    for parts in _together(joined, itertools.chain([first] if first else [], made)):
        added += _write(folder, parts)
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


def _together(kept: Iterable[Segment], new: Iterable[tuple[bytes, Signature]]) -> Iterator[list[Segment]]:
    """What makes one segment of about `SEGMENT` pictures: parts of it, a list at a time."""
    parts, count = list[Segment](), 0
    for part in itertools.chain(kept, (_segment(block) for block in blocks(new, PART))):
        parts.append(part)
        count += len(part.ids)
        if count >= SEGMENT - PART:
            yield parts
            parts.clear()  # whoever took the list need not hold its arrays while the next one grows
            count = 0
    if count:
        yield parts


def _segment(pictures: Sequence[tuple[bytes, Signature]]) -> Segment:
    ids = np.frombuffer(b"".join(name for name, _ in pictures), ID)
    lengths = np.array([len(signature.words) for _, signature in pictures], np.int64)
    words = np.concatenate([np.zeros(0, np.uint16), *(signature.words for _, signature in pictures)])
    bits = np.concatenate([np.zeros(0, np.uint64), *(signature.bits for _, signature in pictures)])
    order = np.argsort(words, kind="stable")
    numbers = np.repeat(np.arange(len(ids), dtype=np.uint16), lengths)
    return Segment(ids, np.searchsorted(words[order], np.arange(WORDS + 1)), numbers[order], bits[order], lengths)


def _only(segment: Segment, there: NDArray[np.bool_]) -> Segment:
    """The same, without the pictures that are not `there`."""
    good = there[segment.pictures]
    starts = np.append(0, np.cumsum(good, dtype=np.uint32))[segment.starts].astype(np.int64)
    number = (np.cumsum(there) - 1).astype(np.uint16)
    lengths = segment.lengths[there]
    return Segment(segment.ids[there], starts, number[segment.pictures[good]], np.asarray(segment.bits[good]), lengths)


def _merged(parts: Sequence[Segment]) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.uint64]]]:
    """Pictures and bits of the lists of some words at a time: only those are in memory."""
    first = np.cumsum([0, *(len(part.ids) for part in parts)]).astype(np.uint16)
    for low in range(0, WORDS, AT_ONCE):
        ends = [part.starts[low : low + AT_ONCE + 1] for part in parts]
        some = [slice(*own[[0, -1]].tolist()) for own in ends]
        order = np.argsort(np.concatenate([np.repeat(np.arange(AT_ONCE), np.diff(own)) for own in ends]), kind="stable")
        numbers = [part.pictures[own] + start for part, own, start in zip(parts, some, first, strict=False)]
        bits = [part.bits[own] for part, own in zip(parts, some, strict=True)]
        yield np.concatenate(numbers)[order], np.concatenate(bits)[order]


def _heads(parts: Sequence[Segment]) -> dict[str, NDArray[Any]]:
    """What is short of the segment that the parts make."""
    return {
        "ids": np.concatenate([part.ids for part in parts]),
        "starts": np.stack([part.starts for part in parts]).sum(0),
        "lengths": np.concatenate([part.lengths for part in parts]),
    }


def _one(parts: Sequence[Segment]) -> Segment:
    pictures, bits = map(np.concatenate, zip(*_merged(parts), strict=True))
    return Segment(pictures=pictures, bits=bits, **_heads(parts))


def _write(folder: Path, parts: Sequence[Segment]) -> int:
    """The segment that the parts make; how many pictures it has."""
    made = folder / f"{uuid.uuid4().hex}.new"
    made.mkdir(parents=True)
    try:
        heads = _heads(parts)
        for name, array in heads.items():
            np.save(made / f"{name}.npy", array)
        with (made / "pictures.npy").open("wb") as pictures, (made / "bits.npy").open("wb") as bits:
            for file, kind in ((pictures, np.uint16), (bits, np.uint64)):
                about = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": (int(heads["starts"][-1]),)}
                np.lib.format.write_array_header_1_0(file, about)
            for numbers, residuals in _merged(parts):
                pictures.write(numbers.tobytes())
                bits.write(residuals.tobytes())
        made.rename(made.with_suffix(""))
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return len(heads["ids"])


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
