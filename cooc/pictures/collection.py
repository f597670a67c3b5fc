"""What every collection of pictures is: named files, each with a size and a time that change when the file does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from cooc.errors import InputError
from cooc.pictures.decode import Picture

Stamp = tuple[int, int]  # size, time in nanoseconds
OnError = Callable[[str, Exception], None]  # name, what went wrong there


class Entry(NamedTuple):
    name: str  # relative to the collection, "/" between its parts
    size: int
    mtime_ns: int

    @property
    def stamp(self) -> Stamp:
        return self.size, self.mtime_ns


class Fetched(NamedTuple):
    """A file whose content was read."""

    sha256: str
    now: Picture  # costs no second reading, but perhaps memory
    later: Picture  # light enough to wait in a queue, and to be sent to another process


class Collection(Protocol):
    """OSError where something cannot be told or read at the moment; what surely is not there is None, or left out."""

    url: str  # as an index keeps it
    cheap: bool  # may it be listed a second time, just to count?
    steady: bool  # is what is read at once of one version? Files may change while they are read.

    def name(self, address: str | os.PathLike[str]) -> str:
        """How the index names an address: relative to the collection; "" is the collection itself."""
        ...

    def address(self, name: str) -> str: ...
    def link(self, name: str) -> str: ...
    def entries(self, folder: str, *, follow: bool, on_error: OnError) -> Iterator[Entry]:
        """The pictures below a folder. One that is not there is an error at once; later ones go to `on_error`."""
        ...

    def vacant(self, folder: str, *, follow: bool) -> bool:
        """Surely no picture below it: it is empty, or not there."""
        ...

    def mounted(self, folder: str) -> bool:
        """Is it a disk of its own? Then it may come and go."""
        ...

    def look(self, name: str) -> Entry:
        """One file as it is now; FileNotFoundError if there is none, UnreadableError if it is a folder or a pipe."""
        ...

    def stamp(self, file: Entry) -> Stamp | None:
        """Of that file now."""
        ...

    def absent(self, files: Iterable[Entry]) -> Iterator[Entry]:
        """Those that surely are not there any more. Asked in the order of names, this costs little."""
        ...

    def fetch(self, file: Entry) -> Fetched: ...
    def picture(self, file: Entry) -> Picture:
        """What decoders take. Nothing is read before it is decoded."""
        ...


def is_url(address: str | os.PathLike[str]) -> bool:
    """Does it name something else than a folder of this machine? Such names are strings: a Path would mangle them."""
    text = os.fsdecode(address)
    return text.startswith("tar+") or re.match(r"[a-z][a-z0-9+.-]+://", text) is not None


def is_web(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


def fail(name: str, error: Exception) -> None:
    """An `OnError` for who must know all: what cannot be listed is an error."""
    raise error


def below(base: str, path: str) -> str | None:
    prefix = base.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else "" if path == base else None


def outside(address: str | os.PathLike[str], root: str) -> InputError:
    return InputError(
        f"{os.fspath(address)!r} lies outside {root!r}, the root of this index. Make an index whose root holds both: "
        "cooc index FOLDER ... --root ROOT --index INDEX"
    )
