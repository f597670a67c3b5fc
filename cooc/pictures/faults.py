"""Whose fault is it when a file cannot be read? Only what is wrong with its content may ever be remembered.

    ImageError        its content is no picture, and stays none until the file changes
    UnreadableError   the path leads nowhere, or may not be followed: nothing is known about the content
    MachineError      memory, file handles, a disk or a network fail: nothing is wrong with the file

Pillow's own errors are OSErrors too, but have no errno: what has one comes from the system. Some decoders call it
damage when they get no memory, so before a file is blamed, the machine is asked whether it has any left.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cooc.errors import CoocError, ImageError, MachineError, NoMemoryError, UnreadableError

# What the system says about a path, not about the disk that it lies on.
_PATHS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
_PATH = frozenset((errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO))
# What a file makes the system say: a header that sends a decoder before the beginning, a size beyond all limits.
_CONTENT = frozenset((None, errno.EINVAL, errno.EOVERFLOW, errno.EFBIG))
_NETWORK = (TimeoutError, ConnectionError)  # often without errno
# Out of memory or threads, in the words of Pillow's decoders and of Python.
_OUT_OF = ("out of memory", "can't start new thread", "can't allocate lock")

SPARE_BYTES = 32 << 20  # that a decoder takes for itself, besides the pixels
BYTES_A_PIXEL = 16  # JPEG 2000 takes most
SPARE_FILES = 8


def blame(error: Exception, name: str, pixels: int = 0, content: ImageError | None = None) -> CoocError:
    """The error as one of the three; `content`: what to say if it is the file's own fault.

    `pixels`: how many the picture has, as far as that is known.
    """
    if isinstance(error, CoocError):
        return error
    if is_machine(error):
        return machine_error(name, error)
    if isinstance(error, FileNotFoundError):
        return UnreadableError(f"{name} does not exist. Check the path.")
    if _is_path(error):
        return UnreadableError(f"{name} cannot be read ({_reason(error)}). Check the path and its permissions.")
    if lacking := exhausted(SPARE_BYTES + BYTES_A_PIXEL * pixels):
        return machine_error(name, lacking)
    if content is not None:
        return content
    return ImageError(f"{name} is damaged or incomplete ({_reason(error)}). Copy it again from where it came.")


def machine_error(name: str, error: Exception) -> MachineError:
    no_memory = getattr(error, "errno", None) == errno.ENOMEM or _OUT_OF[0] in str(error)
    kind = NoMemoryError if no_memory or isinstance(error, MemoryError) else MachineError
    return kind(
        f"{name} could not be read on this machine ({_reason(error)}); nothing is known to be wrong with it. "
        "Free memory or file handles, check the disk or the network, and try again."
    )


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def is_machine(error: BaseException) -> bool:
    """Did the machine fail, here or in what led to this error? Decoders turn one exception into another."""
    return any(map(_is_machine, _chain(error)))


def _is_machine(error: BaseException) -> bool:
    if isinstance(error, (MachineError, MemoryError, ImportError, *_NETWORK)):  # ImportError: a library is missing
        return True
    if isinstance(error, OSError) and error.errno not in _CONTENT:
        return not _is_path(error)
    return isinstance(error, (OSError, RuntimeError)) and any(words in str(error).lower() for words in _OUT_OF)


def _is_path(error: BaseException) -> bool:
    return isinstance(error, _PATHS) or (isinstance(error, OSError) and error.errno in _PATH)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def exhausted(size: int = SPARE_BYTES) -> OSError | None:
    """What this process has run out of, if it cannot have so many bytes of memory now, or a few files."""
    files: list[int] = []
    try:
        np.empty(size, np.uint8)  # what is not touched costs nothing
        for _ in range(SPARE_FILES):
            files.append(os.open(os.devnull, os.O_RDONLY))
    except MemoryError:
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    except OSError as error:
        return error
    finally:
        for file in files:
            os.close(file)
    return None


class Attentive(io.FileIO):
    """A file that remembers a read error: Pillow's plugins swallow some, and find the file damaged."""

    failure: OSError | None = None

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            self.failure = error
            raise

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as error:
            self.failure = error
            raise


def read_failure(stream: object) -> OSError | None:
    """What went wrong while a file of `open_regular` was read, whoever else knows of it."""
    return getattr(getattr(stream, "raw", None), "failure", None)


def open_regular(path: Path) -> io.BufferedReader:
    """A file, opened for reading. Whatever else has its name is refused unopened: a pipe would be waited for."""
    check_regular(path.stat().st_mode, repr(str(path)))
    # Should it have become a pipe since, it is opened without waiting, and then refused.
    raw = Attentive(path, "rb", opener=_without_waiting)
    try:
        check_regular(os.fstat(raw.fileno()).st_mode, repr(str(path)))
    except UnreadableError:
        raw.close()
        raise
    return io.BufferedReader(raw)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_regular(mode: int, name: str) -> None:
    if stat.S_ISDIR(mode):
        raise UnreadableError(f"{name} is a folder, not a picture. Give one of its files.")
    if not stat.S_ISREG(mode):
        raise UnreadableError(f"{name} is not a regular file. Give a file, or pass a pipe as a stream.")
