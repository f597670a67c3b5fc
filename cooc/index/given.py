"""Vectors that another program made: an .npy file (N, D), and a text file with the picture of each row on a line.

    engine = Given(Path("mine.npy"), Path("names.txt"), collection)
    add_files(store, collection, engine, engine.paths)

An engine like the one that runs a network: files are examined, and bad ones reported, in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from cooc.errors import InputError, counted
from cooc.index.engine import Decide, Described, Made
from cooc.index.examine import Candidate, Reader
from cooc.pictures import Collection, is_url
from cooc.vectors import read_vectors, unit_rows


class Given:
    """All is checked before anything is done with it."""

    def __init__(self, vectors: Path, paths: Path, collection: Collection) -> None:
        self.vectors = read_vectors(vectors, "r")
        self.dim = int(self.vectors.shape[1])
        self.paths = _lines(paths, collection)
        if len(self.paths) != len(self.vectors):
            count = counted(len(self.vectors), "row")
            raise InputError(
                f"{vectors} has {count}, and {paths} {counted(len(self.paths), 'line')}: one each is needed."
            )
        self.rows: dict[str, int] = {}
        for row, path in enumerate(self.paths):
            if (first := self.rows.setdefault(collection.name(path), row)) != row:
                raise InputError(f"{paths} names {path!r} twice, in lines {first + 1} and {row + 1}.")

    def describe(self, collection: Collection, files: Iterable[Candidate], decide: Decide) -> Iterator[Described]:
        for seen in Reader(collection).examined(files):
            if decide(seen):
                yield seen, Made(unit_rows(self.vectors[self.rows[seen.file.name]][None].astype(np.float32))[0])


def _lines(file: Path, collection: Collection) -> list[str]:
    """As they would be typed: relative to the root of the index, or from the root of the disk."""
    try:
        lines = file.read_text("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror}): a text file with a path on each line is wanted."
        ) from error
    return [line if Path(line).is_absolute() or is_url(line) else collection.address(line) for line in lines]
