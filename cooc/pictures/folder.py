"""A folder of this machine."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cooc.errors import InputError
from cooc.pictures.collection import Entry, Fetched, OnError, Stamp, below, fail, outside
from cooc.pictures.decode import EXTENSIONS, Picture
from cooc.pictures.faults import check_regular, open_regular

_log = logging.getLogger("cooc")


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
        def unreadable(path: Path, error: OSError) -> None:
            on_error(relative_path(self.root, path), error)

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
                on_error(text[start:], error)
                continue
            yield Entry(text[start:], status.st_size, status.st_mtime_ns)

    def vacant(self, folder: str, *, follow: bool) -> bool:
        path = self.root / folder
        try:
            if not stat.S_ISDIR(path.stat().st_mode):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return True
        return next(_walk(path, follow, lambda path, error: fail(str(path), error)), None) is None

    def mounted(self, folder: str) -> bool:
        return os.path.ismount(self.address(folder))

    def look(self, name: str) -> Entry:
        status = (self.root / name).stat()
        check_regular(status.st_mode, repr(self.address(name)))
        return Entry(name, status.st_size, status.st_mtime_ns)

    def stamp(self, file: Entry) -> Stamp | None:
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
                if self.stamp(file) is None:
                    yield file
            except OSError:
                continue

    def fetch(self, file: Entry) -> Fetched:
        path = self.root / file.name
        with open_regular(path) as stream:
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
    if not os.path.lexists(given):
        raise InputError(f"{os.fspath(path)!r} does not exist: neither on this disk nor in the index of {str(root)!r}.")
    raise outside(path, str(root))


# the walk


def list_images(
    root: str | os.PathLike[str],
    *,
    follow_symlinks: bool = False,
    on_error: Callable[[Path, OSError], None] | None = None,
) -> Iterator[Path]:
    """The pictures below `root` by extension, sorted within each folder; names with a leading dot are left out.

    A folder that cannot be read goes to `on_error(path, error)`, or to the log, and the walk goes on. Without
    `follow_symlinks`, links to files and folders are left out; with it each folder is visited once, so that loops end.
    Memory is that of the folders on the way down, not of the tree. A file as `root` yields itself, whatever its name.
    """
    path = Path(os.fsdecode(root))
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{str(path)!r} cannot be listed ({reason}). Give an existing folder or picture.") from error
    if stat.S_ISREG(mode):
        return iter([path])
    if not stat.S_ISDIR(mode):
        raise InputError(f"{str(path)!r} is neither a folder nor a regular file. Give an existing folder or picture.")
    return _walk(path, follow_symlinks, on_error or _log_unreadable)


def _walk(root: Path, follow: bool, on_error: Callable[[Path, OSError], None]) -> Iterator[Path]:
    seen: set[tuple[int, int]] = set()  # only when following
    open_folders = [(root, iter(_scan(root, follow, seen, on_error)))]  # no recursion: trees may be deep
    while open_folders:
        folder, entries = open_folders[-1]
        name, is_folder = next(entries, ("", False))
        if not name:
            open_folders.pop()
        elif is_folder:
            open_folders.append((folder / name, iter(_scan(folder / name, follow, seen, on_error))))
        else:
            yield folder / name


def _scan(
    folder: Path, follow: bool, seen: set[tuple[int, int]], on_error: Callable[[Path, OSError], None]
) -> list[tuple[str, bool]]:
    """(name, is it a folder) of what the walk has to visit, sorted."""
    found: list[tuple[str, bool]] = []
    try:
        if follow:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                return []
            seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            for entry in entries:
                is_picture = os.path.splitext(entry.name)[1].lower() in EXTENSIONS  # noqa: PTH122
                if entry.name.startswith("."):
                    continue
                try:
                    if entry.is_dir(follow_symlinks=follow):
                        found.append((entry.name, True))
                    elif is_picture and entry.is_file(follow_symlinks=follow):
                        found.append((entry.name, False))
                    elif is_picture and follow and entry.is_symlink():
                        on_error(folder / entry.name, FileNotFoundError(errno.ENOENT, "broken link"))
                except OSError as error:  # such as a link to itself
                    on_error(folder / entry.name, error)
    except OSError as error:
        on_error(folder, error)
    return sorted(found)


def _log_unreadable(path: Path, error: OSError) -> None:
    _log.warning("%s cannot be read (%s); left out.", repr(str(path)), error.strerror or error)
