"""A folder of this machine."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from cooc.images import list_images
from cooc.sources.files import Entry, Fetched, OnError, Picture, State, below, outside

__all__ = ["Folder", "relative_path"]


class Folder:
    cheap = True
    steady = False

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 (links keep the names that they have)
        self.url = str(self.root)

    def name(self, address: str | os.PathLike[str]) -> str:
        return relative_path(self.root, address)

    def address(self, name: str) -> str:
        return str(self.root / name)

    def link(self, name: str) -> str:
        return (self.root / name).as_uri()

    def entries(self, folder: str, *, follow: bool, on_error: OnError) -> Iterator[Entry]:
        def unreadable(path: Path, reason: str) -> None:
            on_error(relative_path(self.root, path), reason)

        return self._stated(list_images(self.root / folder, follow_symlinks=follow, on_error=unreadable), on_error)

    def _stated(self, paths: Iterable[Path], on_error: OnError) -> Iterator[Entry]:
        start = len(str(self.root).rstrip("/")) + 1
        for path in paths:
            text = str(path)
            try:
                status = os.stat(text)  # noqa: PTH116 (a third of the time of Path's)
            except FileNotFoundError:  # gone since the folder was read
                continue
            except OSError as error:
                on_error(text[start:], error.strerror or str(error))
                continue
            yield Entry(text[start:], status.st_size, status.st_mtime_ns)

    def look(self, name: str) -> Entry:
        status = (self.root / name).stat()
        return Entry(name, status.st_size, status.st_mtime_ns)

    def state(self, file: Entry) -> State | None:
        try:
            status = os.stat(f"{self.url}/{file.name}")  # noqa: PTH116
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise
        return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None

    def absent(self, files: Iterable[Entry]) -> Iterator[Entry]:
        """What only cannot be reached (permission, a broken disk) may still be there."""
        for file in files:
            try:
                if self.state(file) is None:
                    yield file
            except OSError:
                continue

    def fetch(self, file: Entry) -> Fetched:
        path = self.root / file.name
        with path.open("rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            return Fetched(hashlib.file_digest(stream, "sha256").hexdigest(), path, path)

    def picture(self, file: Entry) -> Picture:
        return self.root / file.name


def relative_path(root: Path, path: str | os.PathLike[str]) -> str:
    """How an index names a path: relative to its root, "/" between the parts; "" is the root itself."""
    given = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (resolve() would follow a link to another name)
    if (name := below(str(root), given)) is not None:
        return name
    place = Path(given)
    if (name := below(str(root.resolve()), str(place.parent.resolve() / place.name))) is not None:
        return name
    raise outside(path, str(root))
