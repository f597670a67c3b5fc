"""Small files that ask much of whoever decodes them, and what decoding processes are given to do in tests.

Those processes import this module, so it imports nothing heavy.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any


def segment(marker: int, body: bytes) -> bytes:
    """Of a JPEG."""
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def many_scans(side: int, scans: int, *, marker: int = 0xC2) -> bytes:
    """A grey progressive JPEG: one scan of average values, then empty ones, each a walk over all coefficients."""
    blocks = (-(-side // 8)) ** 2
    run = "0" * 15  # the only code there is, for 2^14 empty blocks; then 14 bits that say how many more
    bits = run * -(-blocks // 16384)
    bits += "1" * (-len(bits) % 8)
    empty = int(bits, 2).to_bytes(len(bits) // 8, "big")
    return b"".join(
        [
            b"\xff\xd8",
            segment(0xDB, b"\0" + bytes([1] * 64)),
            segment(marker, struct.pack(">BHHB", 8, side, side, 1) + b"\1\x11\0"),
            segment(0xC4, b"\x00" + bytes([1] + [0] * 15) + b"\x00"),
            segment(0xC4, b"\x10" + bytes([1] + [0] * 15) + b"\xe0"),
            segment(0xDA, bytes([1, 1, 0, 0, 0, 1])) + bytes(-(-blocks // 8)),
            (segment(0xDA, bytes([1, 1, 0, 1, 63, 0x10])) + empty) * (scans - 1),
            b"\xff\xd9",
        ]
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(side: int, *before: bytes) -> bytes:
    """Black, and a thousandth of the size that it is in memory; with chunks before its pixels."""
    packed = zlib.compressobj(9)
    rows = [packed.compress(bytes(1 + 3 * side)) for _ in range(side)] + [packed.flush()]
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(before) + chunk(b"IDAT", b"".join(rows)) + chunk(b"IEND", b"")


def text() -> bytes:
    """A chunk of a thousand bytes that unpacks to a million."""
    return chunk(b"zTXt", b"\0\0" + zlib.compress(bytes(1_000_000), 9))


def slow_icon() -> bytes:
    """An icon that holds a PNG of 8000 such texts: minutes of work in 8 MB that no bound on PNGs sees."""
    inner = png(16, text() * 8000)
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inner), 22) + inner


# What a process is given to do: a function of a "picture".


def process(picture: Any) -> int:
    return os.getpid()


def resident(picture: Any) -> int:
    """Bytes that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sleep(picture: Any) -> None:
    time.sleep(3600)


def end_by(picture: Any, signal: int) -> None:
    os.kill(os.getpid(), signal)
    time.sleep(3600)


_kept: list[Any] = []


def keep(picture: Any, size: int) -> None:
    _kept.append(b"1" * size)


def leave_holes(picture: Any, size: int) -> None:
    """Pieces that the C library takes back, between others that are still in use: nothing that it would trim itself."""
    pieces = [b"1" * 100_000 for _ in range(size // 100_000)]
    _kept.extend(pieces[::100])
