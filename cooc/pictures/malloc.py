"""What the C library does with memory that is free again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress


def keep_maps() -> None:
    """For a process that describes many pictures on a CPU: a command's choice, never a library's.

    Networks with depthwise convolutions spend more on pages than on arithmetic: EfficientNet-Lite0 takes less than half
    the time then (docs/performance.md). VGG16 would gain a twentieth, and hold 2 GB more.
    """
    keep_memory(1 << 27, 1 << 30)


def keep_pyramids() -> None:
    """For a process that answers many searches: SIFT takes a fifth less where its 200 MB need no new pages."""
    keep_memory(1 << 26, 1 << 28)


def share_memory() -> None:
    """For a process of few threads: what one frees, as the network's reader does, the others take, too."""
    arenas = -8  # glibc's number
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(arenas, 1)


def keep_memory(largest: int, in_all: int) -> None:
    """Keep what this process frees, pieces of up to `largest` bytes, for its next use. The C library would give it
    back to the system and ask for it again, a page at a time, which may take longer than what is done with it."""
    trim_threshold, mmap_threshold = -1, -3  # glibc's numbers; other libraries have no such function
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, in_all)
        if not library.mallopt(mmap_threshold, largest):
            library.mallopt(mmap_threshold, 1 << 25)  # the most that older versions take


def give_back(held: Callable[[], int], most: int) -> bool:
    """Return what is free to the system, if more than `most` bytes are held. Is it enough? Pieces that are still in use
    may lie between the others."""
    if held() > most:
        trim()
    return held() <= most


def trim() -> None:
    """Return what is free to the system, from between the pieces that are in use, too."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
