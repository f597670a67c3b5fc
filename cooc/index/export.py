"""An index as files that other programs read; `importing.py` reads them back.

    vectors.npy + vectors.jsonl      (N, D) float32; first line: how the vectors were made; then a record for each row
    vectors.parquet                  the same as one table (needs pyarrow: the extra "parquet")

Both are written in blocks: an index may be larger than memory. A picture whose vector is damaged is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from cooc.errors import InputError
from cooc.files import replacing
from cooc.index.copying import intact_blocks
from cooc.index.records import Filter, Record, StoreMeta, path_bytes
from cooc.index.store import Block, Store

FORMATS = (".npy", ".parquet")


def export_index(store: Store, file: Path, where: Filter | None = None) -> int:
    """Write vectors and records; how many there are. Files appear when they are complete."""
    check_format(file)
    writing = _write_npy if file.suffix == ".npy" else _write_parquet
    try:
        return writing(store.meta, intact_blocks(store, where), file)
    except OSError as error:
        raise InputError(
            f"{str(file)!r} cannot be written ({error.strerror}). Make room, or write elsewhere."
        ) from error


def check_format(file: Path) -> None:
    if file.suffix not in FORMATS:
        raise InputError(f"{str(file)!r}: the name must end in {' or '.join(FORMATS)}.")


def parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError("Parquet files need pyarrow: pip install 'cooc[parquet]'. Or use a name in .npy.") from error
    return pyarrow.parquet


def _write_npy(meta: StoreMeta, blocks: Iterable[Block], file: Path) -> int:
    count = 0
    with replacing(file) as data, replacing(file.with_suffix(".jsonl")) as lines:  # the last takes its place first
        lines.write(json.dumps(asdict(meta)).encode() + b"\n")
        _npy_header(data, 0, meta.dim)
        for records, vectors, _ in blocks:
            data.write(vectors.astype("<f4", copy=False).tobytes())
            lines.writelines(json.dumps(_row(record)).encode() + b"\n" for record in records)
            count += len(records)
        data.seek(0)
        _npy_header(data, count, meta.dim)  # now that the number is known
    return count


def _npy_header(stream: IO[bytes], rows: int, dim: int) -> None:
    """As long for any number of rows: numpy leaves room for it to grow."""
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)})


def _row(record: Record) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {"id": record.id, **values, "tags": sorted(record.tags)}


def _write_parquet(meta: StoreMeta, blocks: Iterable[Block], file: Path) -> int:
    writing = parquet().ParquetWriter
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
    count = 0
    with replacing(file) as stream, writing(stream, schema) as writer:
        for records, vectors, _ in blocks:
            rows = [_row(record) for record in records]
            for row in rows:
                row["path_bytes"] = path_bytes(row["path"])
                row["path"] = row["path_bytes"].decode("utf-8", "replace")
            columns = [pa.array([row[name] for row in rows], schema.field(name).type) for name in schema.names[:-1]]
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), meta.dim))
            writer.write_batch(pa.record_batch(columns, schema=schema))
            count += len(records)
    return count
