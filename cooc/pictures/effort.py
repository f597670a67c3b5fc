"""What a file asks of a decoder, told from its bytes before one runs.

A few bytes can keep a decoder busy for hours: each scan of a progressive JPEG is a walk over all of its pixels, and
Pillow joins the segments of a header in a time that grows with their square. The bounds here lie far above what cameras
and programs write. They are for what is known to be out of all proportion; time and memory of whatever else a file
thinks of are bounded by the process that decodes it (`cooc.pictures.decoders`).
"""

from __future__ import annotations

import re
import struct
from typing import BinaryIO, NamedTuple

from cooc.errors import ImageError

SCANS = 100  # of a JPEG; programs write 1 to about 20
PIXELS_SCANNED = 5_000_000_000  # in all scans of a JPEG together: 16 of the largest picture that is taken
FEW_SCANS = 16  # allowed for a picture of any size
SEGMENTS = 1000  # before the pixels of a JPEG, 64 kB each; a panorama with its sound in them has about 200
CHUNKS = 1000  # of a PNG besides its pixels
COMPRESSED = 100  # of these that are unpacked: texts and colour profiles

_BLOCK = 1 << 20
_MARKER = re.compile(rb"\xff+([^\x00\xff])")  # FF 00 is a pixel's FF
_AFTER_SCAN = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")  # D0 to D7 divide the data of a scan
_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers that say the size
_PNG = b"\x89PNG\r\n\x1a\n"


def check_effort(stream: BinaryIO, name: str) -> None:
    """ImageError for a file that would keep a decoder busy out of all proportion. The stream ends at its beginning."""
    head = stream.read(8)
    if head.startswith(b"\xff\xd8"):
        _check_jpeg(stream, name)
    elif head == _PNG:
        _check_png(stream, name)
    stream.seek(0)


def _check_jpeg(stream: BinaryIO, name: str) -> None:
    """Most photographs have one scan, and their header says so. Of the others those with few of them are let through by
    counting bytes, which takes a twentieth of the time to decode them."""
    stream.seek(2)
    header = _jpeg_header(stream)
    if header.segments > SEGMENTS:
        raise ImageError(_refused(name, f"more than {SEGMENTS} segments before its pixels"))
    if header.one_scan or _count(stream, bytes([0xFF, _SOS])) <= FEW_SCANS:  # thumbnails count, and what is behind
        return
    most = min(SCANS, PIXELS_SCANNED // max(header.pixels, 1))
    stream.seek(2)
    if _scans(stream.read(), most) > most:
        raise ImageError(_refused(name, f"more than {most} scans"))


class _Header(NamedTuple):
    segments: int  # before the first scan
    pixels: int
    one_scan: bool  # all that a decoder reads


def _jpeg_header(stream: BinaryIO) -> _Header:
    """Read as decoders do, no further than the bound."""
    segments = pixels = components = 0
    progressive = True
    while segments <= SEGMENTS:
        marker = _next_marker(stream)
        if marker == 0x01 or 0xD0 <= marker <= _SOI:  # these stand alone
            continue
        length = stream.read(2)
        if marker == _EOI or len(length) < 2:
            break
        if marker == _SOS:
            one = not progressive and stream.read(1) == bytes([components])  # it has all colours
            return _Header(segments, pixels, one)
        body = max(struct.unpack(">H", length)[0] - 2, 0)
        if marker in _FRAMES and body >= 6:
            _, height, width, components = struct.unpack(">BHHB", stream.read(6).ljust(6))
            progressive, pixels, body = marker & 3 == 2, height * width, body - 6
        stream.seek(body, 1)
        segments += 1
    return _Header(segments, pixels, one_scan=False)


def _next_marker(stream: BinaryIO) -> int:
    """Whatever stands before it is skipped, as decoders do; the end of the file counts as the end of the picture."""
    before = b""
    while block := stream.read(2 if not before else 1 << 12):
        found = _MARKER.search(before + block)
        if found:
            stream.seek(found.end() - len(before) - len(block), 1)
            return found[1][0]
        before = block[-1:]
    return _EOI


def _count(stream: BinaryIO, what: bytes) -> int:
    """How often two bytes stand in the whole file, read in blocks."""
    stream.seek(0)
    count, last = 0, b""
    while block := stream.read(_BLOCK):
        count += block.count(what) + (last + block[:1] == what)
        last = block[-1:]
    return count


def _scans(data: bytes, most: int) -> int:
    """Scans of the first picture, one more than `most` at the most, found as a decoder finds them."""
    position = scans = 0
    pattern = _MARKER
    while scans <= most and (found := pattern.search(data, position)) is not None:
        marker, position = found[1][0], found.end()
        pattern = _AFTER_SCAN if marker == _SOS else _MARKER
        scans += marker == _SOS
        if marker in (_SOI, _EOI):
            break
        if marker != 0x01 and not 0xD0 <= marker <= 0xD7:
            position += int.from_bytes(data[position : position + 2], "big")
    return scans


def _check_png(stream: BinaryIO, name: str) -> None:
    chunks = compressed = 0
    while len(head := stream.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        chunks += kind not in (b"IDAT", b"fdAT", b"fcTL")  # pixels: a large picture has many
        compressed += kind in (b"iCCP", b"zTXt", b"iTXt")
        if chunks > CHUNKS:
            raise ImageError(_refused(name, f"more than {CHUNKS} chunks besides its pixels"))
        if compressed > COMPRESSED:
            raise ImageError(_refused(name, f"more than {COMPRESSED} compressed texts"))
        if kind == b"IEND":
            return
        stream.seek(length + 4, 1)


def _refused(name: str, what: str) -> str:
    return f"{name} has {what}, which no camera writes: it would take very long to decode. Save it again, or remove it."
