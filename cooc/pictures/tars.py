"""The tars of a WebDataset as folders of pictures."""

from __future__ import annotations

import errno
import itertools
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from cooc.errors import InputError, UnreadableError
from cooc.pictures.collection import Entry, OnError, Stamp, below, fail, is_url, outside
from cooc.pictures.decode import EXTENSIONS
from cooc.pictures.objects import BLOCK, SECOND, InParts, Objects, Part, as_os_errors, reason

SCANNED = 256 << 10  # bytes that are read at once where a tar's headers are looked for


class Tars(InParts):
    """A WebDataset: only its pictures count, whatever else belongs to a sample. Compressed tars cannot be read here."""

    cheap = False  # to list a tar is to hop through all of it

    def __init__(self, url: str) -> None:
        place = url.removeprefix("tar+")
        if not is_url(place):
            place = str(Path(os.path.abspath(place)))  # noqa: PTH100
        self.url = "tar+" + place.rstrip("/")
        self._shards = Objects(place if is_url(place) else f"file://{place}", frozenset({".tar"}))

    def name(self, address: str | os.PathLike[str]) -> str:
        text = os.fsdecode(address).removeprefix("tar+")
        if not is_url(text):
            text = os.path.abspath(text)  # noqa: PTH100
        if (name := below(self.url.removeprefix("tar+"), text.rstrip("/"))) is None:
            raise outside(address, self.url)
        return name

    def entries(self, folder: str, *, follow: bool = False, on_error: OnError) -> Iterator[Entry]:
        shard, inside, rest = _split(folder)
        if not inside:
            return self._pictures(self._shards.entries(folder, on_error=on_error), "", on_error)
        try:
            found = self._shards.look(shard)
        except OSError as error:
            raise InputError(f"{self.address(shard)!r} cannot be read ({reason(error)}). Check the address.") from error
        return self._pictures([found], rest, on_error)

    def _pictures(self, shards: Iterable[Entry], below: str, on_error: OnError) -> Iterator[Entry]:
        prefix = below + "/" if below else ""
        for shard in shards:
            try:
                for member in self._members(shard, on_error):
                    if member.name.startswith(f"{shard.name}/{prefix}"):
                        yield member
            except OSError as error:
                on_error(shard.name, error)

    def vacant(self, folder: str, *, follow: bool = False) -> bool:
        shard, inside, rest = _split(folder)
        try:
            found = [self._shards.look(shard)] if inside else self._shards.entries(folder, on_error=fail)
        except FileNotFoundError:
            return True
        except InputError:
            return self._shards.vacant(folder)
        return next(self._pictures(found, rest, fail), None) is None

    def mounted(self, folder: str) -> bool:
        place = self.address(folder).removeprefix("tar+")
        return not is_url(place) and os.path.ismount(place)

    def _members(self, shard: Entry, on_error: OnError) -> Iterator[Entry]:
        seconds = shard.mtime_ns // SECOND
        seen: set[str] = set()
        with (
            as_os_errors(),
            _damage(),
            self._shards.files.open(self._shards.path(shard.name), "rb", block_size=SCANNED) as stream,
            tarfile.open(fileobj=stream, mode="r:") as tar,
        ):
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                name = member.name.removeprefix("./")
                parts = name.split("/")
                if not member.isreg() or PurePosixPath(name).suffix.lower() not in EXTENSIONS:
                    continue
                if any(part in ("", "..") or part.startswith(".") for part in parts):
                    continue
                if name in seen:
                    twice = UnreadableError(f"{shard.name!r} holds two pictures called {name!r}. Rename one of them.")
                    on_error(f"{shard.name}/{name}", twice)
                    continue
                seen.add(name)
                yield Entry(f"{shard.name}/{name}", member.size, seconds * SECOND + member.offset_data // BLOCK)
            stream.seek(tar.offset)
            if stream.read(BLOCK).strip(b"\0"):  # where tarfile sees no header, it sees the end
                raise tarfile.ReadError(f"the tar is damaged at byte {tar.offset}")

    def look(self, name: str) -> Entry:
        shard, inside, _ = _split(name)
        if inside:
            for member in self._members(self._shards.look(shard), lambda name, reason: None):
                if member.name == name:
                    return member
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def stamp(self, file: Entry) -> Stamp | None:
        """A tar is written once: while its time is the same, so are its members. `fetch` looks at the header, too."""
        shard = self._shards.stamp(Entry(_split(file.name)[0], 0, 0))
        if shard is None:
            return None
        return file.stamp if shard[1] // SECOND == file.mtime_ns // SECOND else (-1, shard[1])

    def absent(self, files: Iterable[Entry]) -> Iterator[Entry]:
        """Those with the time of their tar were seen in it. For others the tar is gone through once."""
        for shard, members in itertools.groupby(files, key=lambda file: _split(file.name)[0]):
            try:
                found = self._shards.look(shard)
            except (FileNotFoundError, UnreadableError):
                yield from members
                continue
            except OSError:
                continue
            old = [file for file in members if file.mtime_ns // SECOND != found.mtime_ns // SECOND]
            names = self._names(found) if old else None
            if names is not None:
                yield from (file for file in old if file.name not in names)

    def _names(self, shard: Entry) -> set[str] | None:
        try:
            return {member.name for member in self._members(shard, lambda name, reason: None)}
        except OSError:
            return None

    def _part(self, file: Entry) -> Part:
        shards, start = self._shards, file.mtime_ns % SECOND * BLOCK
        path = shards.path(_split(file.name)[0])
        return Part(shards.files, path, start, file.size, self.address(file.name), header=True)


@contextmanager
def _damage() -> Iterator[None]:
    """What is wrong with a tar itself, as nothing that a disk or a network does."""
    try:
        yield
    except tarfile.TarError as error:
        raise OSError(errno.EINVAL, str(error)) from error


def _split(name: str) -> tuple[str, bool, str]:
    """(tar, is it one?, name within): "a/000.tar/x.jpg" -> ("a/000.tar", True, "x.jpg")"""
    shard, mark, rest = (name + "/").partition(".tar/")
    return (shard + ".tar", True, rest.rstrip("/")) if mark else (name, False, "")
