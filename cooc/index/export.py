"""An index as files that other programs read, and back.

    vectors.npy + vectors.jsonl      (N, D) float32; first line: how the vectors were made; then a record for each row
    vectors.parquet                  the same as one table (needs pyarrow: the extra "parquet")

Both are written and read in blocks: an index may be larger than memory.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, NoReturn
from uuid import uuid4

import numpy as np

from cooc.errors import InputError
from cooc.index.store import Filter, Record, Store, StoreMeta, Vectors, path_bytes, path_text

__all__ = ["FORMATS", "export_index", "import_index", "read_meta"]

FORMATS = (".npy", ".parquet")
BLOCK = 1000  # images at a time

Block = tuple[list[Record], Vectors]


def export_index(store: Store, file: Path, where: Filter | None = None) -> int:
    """Write vectors and records; how many there are. Files appear when they are complete."""
    _check_format(file)
    writing = _write_npy if file.suffix == ".npy" else _write_parquet
    try:
        return writing(store.meta, _blocks(store, where), file)
    except OSError as error:
        raise InputError(
            f"{str(file)!r} cannot be written ({error.strerror}). Make room, or write elsewhere."
        ) from error


def read_meta(file: Path) -> StoreMeta:
    """How the vectors of an exported file were made."""
    _check_format(file)
    try:
        if file.suffix == ".npy":
            with file.with_suffix(".jsonl").open(encoding="utf-8") as lines:
                values = json.loads(lines.readline())
        else:
            values = json.loads(_parquet().ParquetFile(file).schema_arrow.metadata[b"cooc"])
        return StoreMeta(**{field.name: values[field.name] for field in fields(StoreMeta) if field.name in values})
    except (OSError, KeyError, TypeError, ValueError) as error:
        _not_ours(file, error)


def import_index(store: Store, file: Path) -> int:
    """Add what was exported; how many images. That the vectors are comparable is for the caller to check."""
    _check_format(file)
    count = 0
    try:
        for records, vectors in _read_npy(file) if file.suffix == ".npy" else _read_parquet(file):
            store.add(records, vectors)
            count += len(records)
    except InputError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        _not_ours(file, error)
    return count


def _check_format(file: Path) -> None:
    if file.suffix not in FORMATS:
        raise InputError(f"{str(file)!r}: the name must end in {' or '.join(FORMATS)}.")


def _not_ours(file: Path, error: Exception) -> NoReturn:
    raise InputError(f"{str(file)!r} is not a complete export of an index ({error}). Export it again.") from error


def _blocks(store: Store, where: Filter | None) -> Iterator[Block]:
    records = store.records(where)
    while block := list(itertools.islice(records, BLOCK)):
        yield block, store.vectors([record.id for record in block])


def _temporary(file: Path) -> Path:
    return file.with_name(f".{file.name}.{uuid4().hex}.tmp")


# npy + jsonl


def _write_npy(meta: StoreMeta, blocks: Iterable[Block], file: Path) -> int:
    table = file.with_suffix(".jsonl")
    new_file, new_table = _temporary(file), _temporary(table)
    count = 0
    with ExitStack() as stack:
        stack.callback(new_file.unlink, missing_ok=True)
        stack.callback(new_table.unlink, missing_ok=True)
        data = stack.enter_context(new_file.open("wb"))
        lines = stack.enter_context(new_table.open("w", encoding="utf-8"))
        lines.write(json.dumps(asdict(meta)) + "\n")
        _npy_header(data, 0, meta.dim)
        for records, vectors in blocks:
            data.write(vectors.astype("<f4", copy=False).tobytes())
            lines.writelines(json.dumps(_row(record)) + "\n" for record in records)
            count += len(records)
        data.seek(0)
        _npy_header(data, count, meta.dim)  # now that the number is known
        data.close()
        lines.close()
        new_table.replace(table)
        new_file.replace(file)
    return count


def _npy_header(stream: IO[bytes], rows: int, dim: int) -> None:
    """Version 1.0 of numpy's format, always 128 bytes long."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {dim}), }}"
    stream.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + text.ljust(117).encode() + b"\n")


def _read_npy(file: Path) -> Iterator[Block]:
    vectors = np.load(file, mmap_mode="r", allow_pickle=False)
    with file.with_suffix(".jsonl").open(encoding="utf-8") as lines:
        next(lines)
        records = (_record(json.loads(line)) for line in lines)
        for start in range(0, len(vectors), BLOCK):
            rows = np.array(vectors[start : start + BLOCK])
            block = list(itertools.islice(records, len(rows)))
            if len(block) < len(rows):
                raise ValueError(f"{len(vectors)} vectors, {start + len(block)} records")
            yield block, rows
        if next(records, None) is not None:
            raise ValueError("more records than vectors")


def _row(record: Record) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {"id": record.id, **values, "tags": sorted(record.tags)}


def _record(values: dict[str, Any]) -> Record:
    given = {field.name: values[field.name] for field in fields(Record)}
    return Record(**given | {"tags": frozenset(given["tags"] or ())})


# parquet


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError("Parquet files need pyarrow: pip install 'cooc[parquet]'. Or use a name in .npy.") from error
    return pyarrow.parquet


def _write_parquet(meta: StoreMeta, blocks: Iterable[Block], file: Path) -> int:
    parquet = _parquet()
    import pyarrow as pa

    schema = pa.schema(
        [
            ("id", pa.string()),
            ("path", pa.string()),  # to read
            ("path_bytes", pa.binary()),  # to find the file: a name need not be text
            ("size", pa.int64()),
            ("mtime_ns", pa.int64()),
            ("sha256", pa.string()),
            ("width", pa.int32()),
            ("height", pa.int32()),
            ("taken", pa.string()),
            ("tags", pa.list_(pa.string())),
            ("vector", pa.list_(pa.float32(), meta.dim)),
        ],
        metadata={"cooc": json.dumps(asdict(meta))},
    )
    new, count = _temporary(file), 0
    try:
        with parquet.ParquetWriter(new, schema) as writer:
            for records, vectors in blocks:
                rows = [_row(record) for record in records]
                for row in rows:
                    row["path_bytes"] = path_bytes(row["path"])
                    row["path"] = row["path_bytes"].decode("utf-8", "replace")
                columns = [pa.array([row[name] for row in rows], schema.field(name).type) for name in schema.names[:-1]]
                columns.append(pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), meta.dim))
                writer.write_batch(pa.record_batch(columns, schema=schema))
                count += len(records)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    return count


def _read_parquet(file: Path) -> Iterator[Block]:
    for batch in _parquet().ParquetFile(file).iter_batches(BLOCK):
        vectors = batch.column("vector").flatten().to_numpy().reshape(len(batch), -1)
        rows = batch.drop_columns(["vector"]).to_pylist()
        yield [_record(row | {"path": path_text(row["path_bytes"])}) for row in rows], vectors
