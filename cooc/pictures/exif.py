"""What a picture's header says of it: which way is up, and when it was taken. Nothing is decoded for that."""

from __future__ import annotations

import os
import re
import struct
from datetime import datetime
from typing import Any

from PIL import ExifTags, Image, ImageFile

from cooc.pictures.faults import is_machine

TURNS = {  # EXIF's orientation -> how to turn the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_exif(image: Image.Image) -> Image.Exif:
    """EXIF from the header, never by decoding; empty where it is broken."""
    try:
        if image.format == "PNG" and "exif" not in image.info and isinstance(image, ImageFile.ImageFile) and image.fp:
            late = _late_png_exif(image.fp)
            if late is not None:
                image.info["exif"] = late
        return Image.Image.getexif(image)  # PNG's own getexif() decodes the picture first
    except Exception as error:
        if is_machine(error):  # else the picture would not be turned
            raise
        return Image.Exif()


def _late_png_exif(stream: Any) -> bytes | None:
    """PNG allows EXIF behind the pixels: hop over the chunks to it."""
    here = stream.tell()
    try:
        stream.seek(8)
        while len(head := stream.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"eXIf":
                return bytes(stream.read(length))
            stream.seek(length + 4, os.SEEK_CUR)
        return None
    finally:
        stream.seek(here)


def orientation_of(image: Image.Image, exif: Image.Exif) -> int:
    """1..8. Pillow turns TIFFs itself, and libheif HEICs (whose EXIF then says 1)."""
    value = exif.get(ExifTags.Base.Orientation)
    return value if value in TURNS and image.format != "TIFF" else 1


def taken(exif: Image.Exif) -> str | None:
    try:
        dates = [exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.DateTimeOriginal), exif.get(ExifTags.Base.DateTime)]
    except Exception as error:
        if is_machine(error):
            raise
        dates = [exif.get(ExifTags.Base.DateTime)]
    for date in dates:
        fields = re.match(r"\s*(\d{4})\D(\d\d)\D(\d\d)\D(\d\d)\D(\d\d)\D(\d\d)", str(date), re.ASCII)
        try:
            if fields:
                return datetime(*map(int, fields.groups())).isoformat()  # type: ignore[arg-type]
        except ValueError:  # cameras with an unset clock write 0000:00:00
            continue
    return None
