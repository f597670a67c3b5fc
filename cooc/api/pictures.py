"""Files of the index, by id alone, and small versions of them.

A file is served if the index knows it and it lies, links resolved, below the index's root: a link that leads out of
there, put in after indexing, leads nowhere. From an object store or a tar it is read when it is asked for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import quote

from PIL import Image
from starlette.exceptions import HTTPException

from cooc.api.schemas import shown
from cooc.errors import ImageError
from cooc.image_search import ImageSearch
from cooc.index.records import Record
from cooc.pictures import Folder
from cooc.pictures.decode import Picture, image_info
from cooc.pictures.decoders import Decoders
from cooc.pictures.thumbnails import thumbnail

log = logging.getLogger("cooc.api")

SHOWN = {"AVIF", "BMP", "GIF", "JPEG", "PNG", "WEBP"}  # what browsers show; the rest is offered as a download


@dataclass(frozen=True)
class StoredFile:
    picture: Picture
    size: int
    mtime_ns: int
    record: Record
    status: os.stat_result | None = None  # of a file on this machine

    def etag(self, kind: str = "") -> str:
        """Changes when the file does."""
        state = f"{self.record.id} {self.size} {self.mtime_ns} {kind}"
        return f'"{hashlib.sha256(state.encode()).hexdigest()[:32]}"'


class Pictures:
    def __init__(self, search: ImageSearch, decoders: Decoders, keep_bytes: int) -> None:
        self.search, self.decoders, self._keep = search, decoders, keep_bytes
        self._small: OrderedDict[str, bytes] = OrderedDict()  # ETag -> JPEG, the one not used for longest first
        self._size = 0
        self._lock = threading.Lock()

    def record(self, id: str) -> Record:
        (record,) = self.search.store.get([id])
        if record is None:
            raise HTTPException(404, "There is no such picture in the index: search again.")
        return record

    def find(self, id: str) -> StoredFile:
        record = self.record(id)
        if not isinstance(self.search.collection, Folder):  # there are no links in there, and asking takes a while
            file = record.entry
            return StoredFile(self.search.collection.picture(file), file.size, file.mtime_ns, record)
        try:
            root = self.search.root.resolve(strict=True)
            path = (root / record.path).resolve(strict=True)
            status = path.lstat()
        except (OSError, RuntimeError):
            raise HTTPException(404, "The file of this picture is gone: index its folder again.") from None
        if not path.is_relative_to(root) or not stat.S_ISREG(status.st_mode):
            raise HTTPException(404, "The file of this picture does not lie in the collection's folder.")
        return StoredFile(path, status.st_size, status.st_mtime_ns, record, status)

    def delete(self, records: Iterable[Record]) -> None:
        """The files themselves; a link, not what it leads to. One that is gone already is none that fails."""
        if not isinstance(self.search.collection, Folder):
            raise HTTPException(
                403, "Files are deleted in a folder of this machine only, not in an object store or tar."
            )
        for record in records:
            try:
                (self.search.root / record.path).unlink(missing_ok=True)
            except OSError as error:
                name = shown(record.path)
                raise HTTPException(409, f"{name} cannot be deleted ({error.strerror}): nothing more was.") from None

    def content(self, file: StoredFile) -> Path | bytes:
        """A path, or the bytes of a file that lies elsewhere: what is not there any more is told apart."""
        if isinstance(file.picture, Path):
            return file.picture
        try:
            return cast(BinaryIO, file.picture).read()
        except FileNotFoundError:
            raise HTTPException(404, "The file of this picture is gone: index its folder again.") from None
        except OSError as error:
            log.warning("%s: %s", file.record.path, error)
            problem = "This picture cannot be read where it lies: try again later, or index its folder again."
            raise HTTPException(503, problem, {"Retry-After": "10"}) from None

    def headers(self, file: StoredFile, content: Path | bytes) -> dict[str, str]:
        """Type by content, never by name."""
        try:
            form = self.decoders.run(image_info, content).format or ""
        except ImageError:
            form = ""
        kind = Image.MIME.get(form) or ("image/heic" if form == "HEIF" else "application/octet-stream")
        where = "inline" if form in SHOWN else "attachment"
        name = quote(os.fsencode(Path(file.record.path).name))
        return {"Content-Type": kind, "Content-Disposition": f"{where}; filename*=UTF-8''{name}"}

    def thumbnail(self, file: StoredFile, side: int) -> bytes:
        """A JPEG, upright, whose longest side is `side`, unless the picture is smaller."""
        key = file.etag(str(side))
        with self._lock:
            if key in self._small:
                self._small.move_to_end(key)
                return self._small[key]
        data = self.decoders.run(thumbnail, self.content(file), side)
        with self._lock:
            if key not in self._small:
                self._small[key] = data
                self._size += len(data)
            while self._size > self._keep:
                self._size -= len(self._small.popitem(last=False)[1])
        return data
