"""Read what `cooc export` wrote, or another program in its place: one schema for both formats, and nothing unchecked.

All of a file is checked before anything is written, and then it is one change of the index: all or nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cooc.errors import CoocError, InputError
from cooc.index.checks import check_vectors
from cooc.index.export import check_format, parquet
from cooc.index.records import FORMAT, STORAGES, Record, StoreMeta, path_text
from cooc.index.store import Block, Vectors

BLOCK = 1000  # images at a time
DIMENSIONS = 1 << 16
INT32, INT64 = 2**31 - 1, 2**63 - 1

Check = Callable[[Any], bool]


class Exported:
    """An exported file: what it says of its vectors, and its images in blocks. It may be walked again and again."""

    def __init__(self, file: Path) -> None:
        check_format(file)
        self.file = file
        self.meta = self._meta()

    def check(self) -> int:
        """Read everything; how many images there are. An InputError says what is wrong, and where."""
        seen = set[str]()
        for records, *_ in self:
            for record in records:
                if record.path in seen:
                    self._wrong(f"the path {_shown(record.path)} is there twice")
                seen.add(record.path)
        return len(seen)

    def __iter__(self) -> Iterator[Block]:
        first = 0
        with self._explained():
            for rows, vectors in self._npy() if self.file.suffix == ".npy" else self._parquet():
                records = [self._record(number, row) for number, row in enumerate(rows, first)]
                yield Block(records, self._vectors(first, vectors))
                first += len(records)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever a reader of one of the formats says of a malformed file, as one kind of error."""
        try:
            yield
        except (CoocError, MemoryError):
            raise
        except OSError as error:
            if error.errno:  # of the system; pyarrow's have none
                name = _shown(error.filename or str(self.file))
                raise InputError(f"{name} cannot be read ({error.strerror}). Nothing was imported.") from error
            self._wrong(_shown(str(error)), error)
        except Exception as error:  # numpy, json and pyarrow have many
            self._wrong(_shown(str(error) or type(error).__name__), error)

    def _wrong(self, why: str, error: Exception | None = None) -> NoReturn:
        raise InputError(
            f"{_shown(str(self.file))} is not a complete export of an index: {why}. Nothing was imported; export it "
            "again."
        ) from error

    # what must be there

    def _meta(self) -> StoreMeta:
        with self._explained():
            if self.file.suffix == ".npy":
                with self.file.with_suffix(".jsonl").open("rb") as lines:
                    values = json.loads(lines.readline())
            else:
                values = json.loads((self._table().schema_arrow.metadata or {}).get(b"cooc", b"null"))
        if not isinstance(values, dict):
            self._wrong("it does not say how its vectors were made")
        if _integer(FORMAT + 1, INT32)(values.get("format")):
            raise InputError(f"{_shown(str(self.file))} has format {values['format']}, and this cooc reads {FORMAT}.")
        for field in fields(StoreMeta):
            if field.name in values:
                self._check("meta", field.name, values[field.name], META[field.name])
            elif field.default is MISSING and field.default_factory is MISSING:
                self._wrong(f"meta.{field.name} is missing")
        return StoreMeta(**{field.name: values[field.name] for field in fields(StoreMeta) if field.name in values})

    def _record(self, number: int, values: Any) -> Record:
        where = f"row {number}"
        if not isinstance(values, Mapping):
            self._wrong(f"{where} is no record but {_shown(values)}")
        for name, rule in RECORD.items():
            if name not in values:
                self._wrong(f"{where}: {name} is missing")
            self._check(where, name, values[name], rule)
        given = {field.name: values[field.name] for field in fields(Record)}
        try:
            record = Record(**given | {"tags": frozenset(given["tags"] or ())})
        except InputError as error:
            self._wrong(f"{where}: {error}".rstrip("."), error)
        if values.get("id", record.id) != record.id:
            self._wrong(f"{where}: the id {_shown(values['id'])} does not fit content and path")
        return record

    def _check(self, where: str, name: str, value: Any, rule: tuple[Check, str]) -> None:
        fits, expected = rule
        if not fits(value):
            self._wrong(f"{where}: {name} must be {expected}, not {_shown(value)}")

    def _vectors(self, first: int, vectors: Vectors) -> Vectors:
        try:
            return check_vectors(vectors, self.meta.dim)
        except InputError as error:
            self._wrong(f"rows from {first} on: {error}".rstrip("."), error)

    # the two formats

    def _npy(self) -> Iterator[tuple[list[Any], Vectors]]:
        dim = self.meta.dim
        with self.file.open("rb") as data, self.file.with_suffix(".jsonl").open("rb") as lines:
            next(lines)
            rows = _npy_rows(data, dim)
            for start in range(0, rows, BLOCK):
                block = list(map(json.loads, itertools.islice(lines, min(BLOCK, rows - start))))
                if len(block) < min(BLOCK, rows - start):
                    self._wrong(f"it has {rows} vectors, but {start + len(block)} records")
                content = data.read(len(block) * dim * 4)
                if len(content) != len(block) * dim * 4:
                    self._wrong("its end is missing")
                yield block, np.frombuffer(content, "<f4").reshape(-1, dim).astype(np.float32, copy=False)
            if next(lines, None) is not None:
                self._wrong(f"it has {rows} vectors, but more records")

    def _table(self) -> Any:
        with self.file.open("rb"):  # what the system says of a file that cannot be read is clearer
            return parquet().ParquetFile(self.file)

    def _parquet(self) -> Iterator[tuple[list[Any], Vectors]]:
        columns = ["id", "path_bytes", *(name for name in RECORD if name != "path"), "vector"]
        table = self._table()
        for name in columns:
            if name not in table.schema_arrow.names:
                self._wrong(f"the column {name} is missing")
        for batch in table.iter_batches(BLOCK, columns=columns):
            vectors = batch.column("vector")
            flat = vectors.flatten().to_numpy(zero_copy_only=False)
            if flat.dtype != np.float32 or len(flat) != len(batch) * self.meta.dim or vectors.null_count:
                self._wrong(f"its vectors are not lists of {self.meta.dim} float32, as it says they are")
            rows = batch.drop_columns(["vector"]).to_pylist()
            for row in rows:
                if isinstance(row["path_bytes"], bytes):
                    row["path"] = path_text(row["path_bytes"])
            yield rows, flat.reshape(len(batch), self.meta.dim)


def _npy_rows(data: Any, dim: int) -> int:
    """How many vectors an .npy file has, by its head and by its size; its vectors come next."""
    heads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(data)
    if version not in heads:
        raise ValueError(f"version {version} of numpy's format is not known")
    shape, fortran, dtype = heads[version](data)
    if dtype != np.dtype("<f4") or fortran or len(shape) != 2 or shape[1] != dim:
        raise ValueError(f"its vectors are {shape} {dtype}{', in columns' * fortran}, not (N, {dim}) float32")
    size = os.fstat(data.fileno()).st_size - data.tell()
    if not 0 <= shape[0] == size / (4 * dim):
        raise ValueError(f"{shape[0]} vectors of {dim} dimensions take {math.prod(shape) * 4} bytes, not {size}")
    return int(shape[0])


# the schema


def _integer(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _path(value: Any) -> bool:
    """Of a picture below the root: nothing that leads out of it."""
    if not isinstance(value, str) or os.path.isabs(value):  # noqa: PTH117
        return False
    return not {"", ".", ".."} & set(re.split(r"[/\\]" if os.sep == "\\" else "/", value)) and "\0" not in value


def _matches(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _tags(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(_text(tag) and tag for tag in value))


def _time(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(datetime.fromisoformat(value))
    except ValueError:
        return False


def _root(value: Any) -> bool:
    try:
        return value is None or (isinstance(value, str) and b"\0" not in value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return False


HASH = _matches(r"[0-9a-f]{8,64}"), "8 to 64 digits 0-9a-f"
META: dict[str, tuple[Check, str]] = {
    "recipe": (lambda value: _text(value) and bool(value), "a name"),
    "config": (lambda value: isinstance(value, dict), "the settings of a descriptor"),
    "config_hash": HASH,
    "weights_hash": HASH,
    "dim": (_integer(1, DIMENSIONS), f"1 to {DIMENSIONS}"),
    "root": (_root, "a folder or an address"),
    "cooc_version": (_text, "a version"),
    "created": (_time, "a time such as 2024-05-31T12:00:00+00:00"),
    "format": (_integer(1, FORMAT), f"1 to {FORMAT}"),
    "features": (_text, "names of engines"),
    "storage": (lambda value: value in STORAGES, f"one of {', '.join(STORAGES)}"),
}
RECORD: dict[str, tuple[Check, str]] = {
    "path": (_path, "a path below the root, without empty parts, '.' and '..'"),
    "size": (_integer(0, INT64), "a number of bytes"),
    "mtime_ns": (_integer(-INT64 - 1, INT64), "a time in nanoseconds"),
    "sha256": (_matches(r"[0-9a-f]{64}"), "64 digits 0-9a-f"),
    "width": (_integer(1, INT32), "a number of pixels"),
    "height": (_integer(1, INT32), "a number of pixels"),
    "taken": (lambda value: value is None or _time(value), "a date such as 2024-05-31T12:00:00, or nothing"),
    "tags": (_tags, "a list of texts that can be printed"),
}


def _shown(value: Any) -> str:
    """What strangers wrote, short and on one line."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return repr(text if len(text) <= 80 else f"{text[:80]}...") if isinstance(value, str) else text[:80]
