"""Files of the index as one ZIP, written while it is read: no copy of it is ever made, on disk or in memory."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.exceptions import HTTPException

from cooc.api.pictures import Pictures, StoredFile
from cooc.api.schemas import shown

BLOCK = 1 << 18  # bytes
MISSING = "missing.txt"


def check_size(files: Sequence[StoredFile], most: int) -> None:
    size = sum(file.size for file in files)
    if size > most:
        raise HTTPException(413, f"These files have {size / 1e6:.0f} MB, and at most {most / 1e6:.0f} MB are packed.")


def archive(pictures: Pictures, files: Sequence[StoredFile], missing: Sequence[str]) -> Iterator[bytes]:
    """Blocks of a ZIP with all files under their paths. What cannot be read is named in a text beside them."""
    sink = _Sink()
    lost = list(missing)
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as packed:  # pictures are compressed already
        for file in files:
            name = shown(file.record.path)
            try:
                content = pictures.content(file)
                with (
                    content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as stream,
                    packed.open(_entry(file, name), "w", force_zip64=True) as entry,
                ):
                    while block := stream.read(BLOCK):
                        entry.write(block)
                        yield from sink.take()
            except (OSError, HTTPException):
                lost.append(name)
        if lost:
            packed.writestr(MISSING, "These files could not be read:\n" + "".join(f"{name}\n" for name in lost))
    yield from sink.take()


def _entry(file: StoredFile, name: str) -> zipfile.ZipInfo:
    with suppress(ValueError, OverflowError, OSError):  # of a time that is none; a ZIP knows 1980 to 2107
        when = time.localtime(file.mtime_ns / 1e9)[:6]
        return zipfile.ZipInfo(name, (min(max(when[0], 1980), 2107), *when[1:]))
    return zipfile.ZipInfo(name)


class _Sink(io.RawIOBase):
    """What zipfile writes to: it cannot be sought in, so that entries end with their sizes instead."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.blocks.append(bytes(data))
        return len(data)

    def take(self) -> Iterator[bytes]:
        blocks, self.blocks = self.blocks, []
        if blocks:
            yield b"".join(blocks)
