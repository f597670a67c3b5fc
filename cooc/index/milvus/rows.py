"""What a row of the collection is, to and from what the rest of cooc speaks of.

key         primary key: a letter for the kind of row, then in hex what it is about. Milvus lists rows in this
            order, so images come in the order of their paths, and an upsert replaces what was at a path
    i       an image: its path. The fields of `Record`, its id, its vector and the crc32 of that; `text` says whether
            there are local features of its content (`features.py`)
    b       a file that could not be described: its path; `text` says why and since when
    f       tags of a removed image: its content, then its path; `text` says when it was removed
image       is it an image? Only these are searched; other rows have a vector because Milvus wants one in each
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from cooc.errors import InputError
from cooc.index.milvus.server import Row
from cooc.index.records import BadFile, Filter, Forgotten, Record, in_words, path_bytes, path_text
from cooc.index.store import Vectors

IMAGE, BAD, FORGOTTEN = "i", "b", "f"
PATH, TAG, TAGS, REASON = 4096, 1024, 1024, 8192  # bytes of a path and of a tag, tags, characters of a reason

TEXTS = {"id": 32, "sha256": 64, "taken": 19, "text": 65_535}  # fields, and how many bytes they hold
NUMBERS = ["size", "mtime_ns", "width", "height", "crc"]
RECORD = ["size", "mtime_ns", "sha256", "width", "height", "taken", "tags"]
PLAIN = ["key", "image", "tags", *TEXTS, *NUMBERS]  # what is quickly sent
ALL = [*PLAIN, "vector"]
FEATURES = "features"  # `text` of an image that has them


def schema(dim: int) -> Any:
    made = MilvusClient.create_schema()
    made.add_field("key", DataType.VARCHAR, is_primary=True, max_length=16_384)
    made.add_field("image", DataType.BOOL)
    for name, length in TEXTS.items():
        made.add_field(name, DataType.VARCHAR, max_length=length)
    for name in NUMBERS:
        made.add_field(name, DataType.INT64)
    made.add_field("tags", DataType.ARRAY, element_type=DataType.VARCHAR, max_capacity=TAGS, max_length=TAG)
    made.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    return made


def images(where: Filter | None = None) -> str:
    condition, values = in_words(where, value="{}", tagged="array_contains(tags, {})", path="key")
    texts = (IMAGE + value.hex() if isinstance(value, bytes) else value for value in values)
    written = condition.format(*(json.dumps(text, ensure_ascii=False) for text in texts))
    return f"image == true and {written}" if values else "image == true"


def with_features(has: bool = True) -> str:
    return f'{images()} and text {"==" if has else "!="} "{FEATURES}"'


def of_kind(kind: str) -> str:
    return f'key >= "{kind}" and key < "{chr(ord(kind) + 1)}"'


def key(kind: str, path: str, content: str = "") -> str:
    return kind + content + path_bytes(path).hex()


def path(row: Row) -> str:
    return path_text(bytes.fromhex(row["key"][65 if row["key"][0] == FORGOTTEN else 1 :]))


def of_record(one: Record, vector: Vectors, crc: int | None = None, text: str = "") -> Row:
    """An error where Milvus could not hold it."""
    name = key(IMAGE, one.path)
    if len(name) > 2 * PATH + 1 or len(one.tags) > TAGS or any(len(tag.encode()) > TAG for tag in one.tags):
        limits = f"{PATH} bytes, {TAGS} tags of {TAG} bytes"
        raise InputError(f"{one.path!r} has a path or tags too long for Milvus: {limits}.")
    said = {field: getattr(one, field) for field in ("id", *RECORD)} | {"tags": sorted(one.tags)}
    crc = _checksum(vector) if crc is None else crc
    return said | {"key": name, "image": True, "taken": one.taken or "", "vector": vector, "crc": crc, "text": text}


def record(row: Row) -> Record:
    fields = {name: row[name] for name in RECORD} | {"taken": row["taken"] or None, "tags": frozenset(row["tags"])}
    return Record(path(row), **fields)


def vector(row: Row) -> Vectors | None:
    """(D,), unless it is not what was written."""
    found = np.array(row["vector"], np.float32)
    return found if _checksum(found) == row["crc"] else None


def _checksum(vector: Vectors) -> int:
    return zlib.crc32(vector.astype("<f4").tobytes())


def of_bad(file: BadFile, dim: int) -> Row:
    text = json.dumps({"reason": file.reason[:REASON], "since": file.since})
    return _aside(dim, key=key(BAD, file.path), size=file.size, mtime_ns=file.mtime_ns, text=text)


def bad_file(row: Row) -> BadFile:
    return BadFile(path(row), row["size"], row["mtime_ns"], **json.loads(row["text"]))


def of_forgotten(one: Forgotten, dim: int) -> Row:
    name = key(FORGOTTEN, one.path, one.sha256)
    return _aside(dim, key=name, sha256=one.sha256, tags=sorted(one.tags), text=one.removed)


def forgotten(row: Row) -> Forgotten:
    return Forgotten(row["sha256"], path(row), frozenset(row["tags"]), row["text"])


def _aside(dim: int, **fields: Any) -> Row:
    empty = {"image": False, "tags": []} | dict.fromkeys(TEXTS, "") | dict.fromkeys(NUMBERS, 0)
    return empty | {"vector": np.eye(1, dim, dtype=np.float32)[0]} | fields
