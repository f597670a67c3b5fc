"""Files in an object store, or in whatever else fsspec reads."""

from __future__ import annotations

import errno
import hashlib
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

from cooc.errors import CoocError, InputError, UnreadableError
from cooc.pictures.collection import Entry, Fetched, OnError, Stamp, below, fail, outside
from cooc.pictures.decode import EXTENSIONS, Picture
from cooc.pictures.faults import is_machine

LARGEST = 512 << 20  # bytes of a picture that is read over a network
KEPT = 4 << 20  # a larger one is not held in memory until it is decoded, but read twice
LISTINGS = 16  # folders whose names are held while looking for what has vanished
BLOCK = 512  # of a tar, in bytes
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Part:
    """A part of a remote file, read when a decoder asks for it: all that `images` wants of a stream."""

    files: Any  # fsspec's file system: small when pickled, it connects again wherever it arrives
    path: str
    start: int
    size: int
    name: str
    header: bool = False  # of a tar, in the block before: it tells whether the tar is still the same
    content: bytes | None = None

    def seekable(self) -> bool:
        return False

    def read(self) -> bytes:
        if self.content is not None:
            return self.content
        if self.size > LARGEST:
            raise OSError(errno.EFBIG, f"it is larger than {LARGEST >> 20} MB")
        before = BLOCK if self.header else 0
        if not self.size + before:
            return b""
        with as_os_errors():
            data = self.files.cat_file(self.path, start=self.start - before, end=self.start + self.size)
        if before and not _is_header(data[:before], self.size):
            raise OSError(errno.ESTALE, "its tar has changed")
        data = bytes(data[before : before + self.size])
        if len(data) != self.size:
            raise OSError(errno.ESTALE, "it has changed")
        return data


def _is_header(block: bytes, size: int) -> bool:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape").size == size
    except tarfile.HeaderError:
        return False


class InParts(ABC):
    """A collection whose pictures are parts of remote files."""

    url: str
    steady = True

    def address(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    link = address

    @abstractmethod
    def _part(self, file: Entry) -> Part:
        """Where the picture lies."""

    def fetch(self, file: Entry) -> Fetched:
        part = self._part(file)
        content = part.read()
        whole = replace(part, content=content)
        later = whole if len(content) <= KEPT else part
        return Fetched(hashlib.sha256(content).hexdigest(), cast(BinaryIO, whole), cast(BinaryIO, later))

    def picture(self, file: Entry) -> Picture:
        return cast(BinaryIO, self._part(file))


class Objects(InParts):
    cheap = True

    def __init__(self, url: str, endings: frozenset[str] = EXTENSIONS) -> None:
        self.url, self._endings = url.rstrip("/"), endings
        self.files, self.base = file_system(self.url)

    def name(self, address: str | os.PathLike[str]) -> str:
        text = os.fsdecode(address).rstrip("/")
        if (name := below(self.url, text)) is None or ".." in name.split("/"):
            raise outside(address, self.url)
        return name

    def entries(self, folder: str, *, follow: bool = False, on_error: OnError) -> Iterator[Entry]:
        try:
            first = self._scan(folder)
        except OSError as error:
            raise InputError(
                f"{self.address(folder)!r} cannot be listed ({reason(error)}). Check the address, and the keys and "
                "the endpoint in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)."
            ) from error
        return self._walk(first, on_error)

    def _walk(self, first: list[tuple[str, Entry | None]], on_error: OnError) -> Iterator[Entry]:
        folders = [iter(first)]
        while folders:
            name, entry = next(folders[-1], ("", None))
            if entry is not None:
                yield entry
            elif not name:
                folders.pop()
            else:
                try:
                    folders.append(iter(self._scan(name)))
                except OSError as error:
                    on_error(name, error)

    def vacant(self, folder: str, *, follow: bool = False) -> bool:
        try:
            return next(self._walk(self._scan(folder), fail), None) is None
        except FileNotFoundError:
            return True

    def mounted(self, folder: str) -> bool:
        return False

    def _scan(self, folder: str) -> list[tuple[str, Entry | None]]:
        """(name, the file, or None for a folder) of what the walk has to visit, sorted."""
        path = self.path(folder)
        with as_os_errors():
            infos = self.files.ls(path, detail=True)
        found: list[tuple[str, Entry | None]] = []
        for info in infos:
            name = info["name"].strip("/").removeprefix(self.base.strip("/")).strip("/")
            last = name.rpartition("/")[2]
            if name in ("", folder) or last.startswith("."):  # the mark of an empty folder; hidden
                continue
            if info["type"] == "directory":
                found.append((name, None))
            elif PurePosixPath(last).suffix.lower() in self._endings and self._is_file(info):
                found.append((name, _entry(name, info)))
        return sorted(found, key=lambda one: one[0])

    def _is_file(self, info: dict[str, Any]) -> bool:
        """No pipe, which would be waited for. A listing says nothing of what a link leads to."""
        return info["type"] == "file" or (bool(info.get("islink")) and self.files.isfile(info["name"]))

    def look(self, name: str) -> Entry:
        with as_os_errors():
            info = self.files.info(self.path(name))
        if info["type"] != "file":
            raise UnreadableError(f"{self.address(name)!r} is not a file. Give one.")
        return _entry(name, info)

    def stamp(self, file: Entry) -> Stamp | None:
        try:
            return self.look(file.name).stamp
        except (FileNotFoundError, UnreadableError):
            return None

    def absent(self, files: Iterable[Entry]) -> Iterator[Entry]:
        """By listing folders, a thousand names for each request, instead of asking for each file."""
        listed = lru_cache(LISTINGS)(self._names)
        for file in files:
            names = listed(file.name.rpartition("/")[0])
            if names is not None and file.name not in names:
                yield file

    def _names(self, folder: str) -> set[str] | None:
        try:
            return {name for name, entry in self._scan(folder) if entry is not None}
        except FileNotFoundError:
            return set()
        except OSError:
            return None

    def _part(self, file: Entry) -> Part:
        return Part(self.files, self.path(file.name), 0, file.size, self.address(file.name))

    def path(self, name: str) -> str:
        return f"{self.base}/{name}" if name else self.base


def file_system(url: str) -> tuple[Any, str]:
    import fsspec  # comes with torch; the stores' own packages do not

    try:
        files, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise InputError(f"{url!r} needs a package that is not here ({error}). pip install 'cooc[cloud]'") from error
    except ValueError as error:
        raise InputError(f"{url!r} is no address of pictures or of their features ({error}).") from error
    return files, path.rstrip("/")


def _entry(name: str, info: dict[str, Any]) -> Entry:
    return Entry(name, int(info["size"] or 0), _stamp(info))


def _stamp(info: dict[str, Any]) -> int:
    """The time to the second, and the ETag, or where there is none the rest of the time, in the nanoseconds."""
    keys = ("LastModified", "last_modified", "updated", "mtime", "created")
    time = next((info[key] for key in keys if info.get(key) is not None), 0)
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    if isinstance(time, datetime):
        time = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    tag = info.get("ETag") or info.get("etag")
    rest = int.from_bytes(hashlib.sha256(str(tag).encode()).digest()[:8]) if tag else int(time % 1 * SECOND)
    return int(time) * SECOND + rest % SECOND


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Clients of object stores have exceptions of their own for a server that is away or a key that is wrong, and
    OSErrors without errno, which elsewhere come from Pillow alone and blame the file."""
    try:
        yield
    except (CoocError, MemoryError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and (error.errno is not None or is_machine(error)):
            raise
        raise OSError(errno.EIO, str(error) or type(error).__name__) from error


def reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
