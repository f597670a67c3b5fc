"""A picture of a stranger, opened safely: whatever a decoder throws becomes an `ImageError`, or a `MachineError` where
this machine failed, and Pillow's own limits hold meanwhile."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, UnidentifiedImageError

from cooc.errors import CoocError, ImageError
from cooc.pictures.effort import check_effort
from cooc.pictures.faults import blame, exhausted, machine_error, open_regular, read_failure
from cooc.pictures.pixels import from_array

Source: TypeAlias = "str | os.PathLike[str] | bytes | BinaryIO | Image.Image | npt.NDArray[Any]"

# Formats that Pillow recognises but cannot decode alone, or (EPS; IPTC may wrap it) by running a program on them.
_REFUSED = {"BUFR", "EPS", "FPX", "GRIB", "HDF5", "IPTC", "MIC", "MPEG", "WMF"}
_JPEG = b"\xff\xd8\xff"


@contextmanager
def opened(picture: Source, name: str, max_pixels: int) -> Iterator[Image.Image]:
    """The picture, its header read and checked, not yet decoded. What the body throws is explained, too."""
    pixels = 0
    stream: BinaryIO | None = None
    with ExitStack() as stack:
        try:
            stack.enter_context(pillow_switches(max_pixels))
            if isinstance(picture, Image.Image):
                image = picture
            elif isinstance(picture, np.ndarray):
                image = from_array(picture)
            else:
                stream = stack.enter_context(_stream(picture, name))
                check_effort(stream, name)
                photo = stream.read(len(_JPEG)) == _JPEG
                stream.seek(0)
                image = stack.enter_context(Image.open(stream, formats=formats(photo)))
            check_size(image.size, max_pixels, name)
            pixels = image.width * image.height
            yield image
            if failure := read_failure(stream):
                raise failure
        except UnidentifiedImageError as error:
            unknown = ImageError(
                f"{name} is not a picture in a known format, or its beginning is damaged. "
                "Open it in a viewer and save it as JPEG or PNG, or remove it."
            )
            raise blame(read_failure(stream) or error, name, content=unknown) from error
        except Image.DecompressionBombError as error:
            raise ImageError(_too_large(name, "more", max_pixels)) from error
        except CoocError:
            raise
        except Exception as error:  # hostile files make decoders throw anything: struct.error, RecursionError, ...
            raise blame(read_failure(stream) or error, name, pixels) from error


@contextmanager
def _stream(picture: str | os.PathLike[str] | bytes | BinaryIO, name: str) -> Iterator[BinaryIO]:
    """A seekable stream at its beginning, with something in it. Streams of the caller are read, never closed."""
    stream: BinaryIO
    with ExitStack() as stack:
        if isinstance(picture, (str, os.PathLike)):
            stream = stack.enter_context(open_regular(Path(os.fsdecode(picture))))
        elif isinstance(picture, bytes):
            stream = BytesIO(picture)
        elif hasattr(picture, "read"):
            if picture.seekable():
                picture.seek(0)  # as Pillow does: a stream that was read before is still the same picture
            content = picture.read()
            if not isinstance(content, bytes):
                raise ImageError(f"{name} gives text, not bytes. Open it in binary mode ('rb').")
            stream = BytesIO(content)
        else:
            choices = "a path, bytes, a binary stream, a Pillow image or an array"
            raise ImageError(f"A {type(picture).__name__} is not a picture. Give {choices}.")
        if not stream.read(1):
            raise ImageError(f"{name} is empty (0 bytes). Copy it again from where it came, or remove it.")
        stream.seek(0)
        yield stream


def check_size(size: tuple[int, int], max_pixels: int, name: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"{name} has no pixels ({width}x{height}). Remove it.")
    if width * height > max_pixels:
        raise ImageError(_too_large(name, f"{width}x{height} pixels, more", max_pixels))


def _too_large(name: str, size: str, max_pixels: int) -> str:
    limit = f"the limit of {max_pixels / 1e6:g} megapixels"
    return f"{name} has {size} than {limit}. Make it smaller with another program; in Python, raise max_pixels."


@cache
def formats(photo: bool = False) -> tuple[str, ...]:
    """What may be decoded. Here and not at import, because loading all plugins takes a while; for a `photo`, a file
    that begins as a JPEG does, those will do that Pillow loads first.

    Pillow does without a plugin that cannot be loaded, for the rest of the process: so there must be room for them.
    """
    if lacking := exhausted():
        raise machine_error("Pillow's decoders", lacking)
    if photo:
        Image.preinit()
        return ("JPEG",)
    import pillow_heif

    pillow_heif.register_heif_opener()
    Image.init()
    return tuple(name for name in Image.ID if name not in _REFUSED)


_switches_lock = threading.Lock()
_switches_limits: list[int] = []  # one for each decode under way
_switches_restore = ExitStack()


@contextmanager
def pillow_switches(max_pixels: int) -> Iterator[None]:
    """Pillow's limits and warnings belong to the whole process: set while any thread decodes here, then put back.

    The pixel limit must be Pillow's too, since only its decoders see the picture inside an icon or the tile of a TIFF.
    """
    with _switches_lock:
        if not _switches_limits:
            _switches_restore.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"(PIL|pillow_heif)\b")
            _switches_restore.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            truncated = ImageFile.LOAD_TRUNCATED_IMAGES
            _switches_restore.callback(setattr, ImageFile, "LOAD_TRUNCATED_IMAGES", truncated)
            ImageFile.LOAD_TRUNCATED_IMAGES = False
        _switches_limits.append(max_pixels)
        Image.MAX_IMAGE_PIXELS = max(_switches_limits)
    try:
        yield
    finally:
        with _switches_lock:
            _switches_limits.remove(max_pixels)
            if _switches_limits:
                Image.MAX_IMAGE_PIXELS = max(_switches_limits)
            else:
                _switches_restore.close()
