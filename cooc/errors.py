"""What can go wrong, as one tree. Every message says what was wrong, with which file, and how to repair it.

    CoocError                       exit code 1
    ├── InputError                  2   something that the caller gave is wrong
    │   ├── UnknownNameError        2   no such recipe, backbone, pooling, ...: the nearest spelling is offered
    │   ├── ImageError              2   a picture that cannot be decoded: its content is wrong
    │   │   └── UnreadableError     2   not there, not allowed, or just being changed: its content is unknown
    │   └── BoxError                2   a box outside the picture, or empty
    ├── WeightsError                4   network weights missing, damaged or not the expected ones
    ├── WhiteningError              2   whitening that cannot be fitted, or does not fit the vectors
    ├── StoreError                  5   an index that cannot be used as asked
    │   ├── StoreMissingError       5   there is no index there
    │   ├── StoreMismatchError      5   vectors of another recipe, weight set or dimension
    │   ├── StoreLockedError        5   another process is writing
    │   └── StoreDamagedError       5   the files on disk are not what was written
    │       └── VectorDamagedError  5   the vectors of single images are not; the rest of the index is good
    ├── DatasetError                6   a benchmark's pictures or ground truth are missing or wrong
    └── MachineError                7   this machine failed, not the file: a lost disk, no file handles
        └── NoMemoryError           7   it has no memory left

Exit code 3 is no exception: a command that did its work, but had to leave some files out, ends with it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

PARTIAL = 3  # exit code: done, some files left out and reported


def counted(count: int, what: str) -> str:
    """For messages: "1 picture", "1,000 pictures"."""
    return f"{count:,} {what}{'' if count == 1 else 'es' if what.endswith('x') else 's'}"


def first_line(error: BaseException) -> str:
    """Of what another library says, for messages of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class CoocError(Exception):
    """Base of all errors that cooc raises on purpose; CLI and API show its text as it is."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors come from other processes, too, whatever their classes are made with."""
        return _remade, (type(self), self.args, self.__dict__)


def _remade(kind: type[CoocError], words: tuple[object, ...], state: dict[str, object]) -> CoocError:
    error = kind.__new__(kind, *words)
    error.__dict__.update(state)
    return error


class InputError(CoocError, ValueError):
    exit_code = 2


class UnknownNameError(InputError):
    """`check_name("recipe", name, RECIPES)` raises it: it names the nearest spelling and all choices."""

    def __init__(self, kind: str, name: object, choices: Iterable[str]) -> None:
        known = sorted(choices)
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"Unknown {kind} {name!r}.{hint} Choices: {', '.join(known)}.")


def check_name(kind: str, name: object, known: Collection[str]) -> None:
    if name not in known:
        raise UnknownNameError(kind, name, known)


class ImageError(InputError):
    pass


class UnreadableError(ImageError):
    pass


class BoxError(InputError):
    pass


class WeightsError(CoocError):
    exit_code = 4


class WhiteningError(InputError):
    pass


class StoreError(CoocError):
    exit_code = 5


class StoreMissingError(StoreError):
    pass


class StoreMismatchError(StoreError):
    pass


class StoreLockedError(StoreError):
    pass


class StoreDamagedError(StoreError):
    pass


class VectorDamagedError(StoreDamagedError):
    """`ids` are the images: who can do without them goes on with the others."""

    def __init__(self, message: str, ids: Iterable[str]) -> None:
        super().__init__(message)
        self.ids = frozenset(ids)


class DatasetError(CoocError):
    exit_code = 6


class MachineError(CoocError):
    """Nothing is wrong with what was given: the same may work later, or on another machine. Never remembered."""

    exit_code = 7


class NoMemoryError(MachineError):
    pass
