"""Files -> upright RGB pictures, decoded safely.

Pictures come from strangers: a file may be cut off, mislabelled, a bomb, or turned by 90 degrees. Whatever happens
inside a decoder, callers see either an upright 8-bit RGB picture or an `ImageError` with the file and the repair;
where this machine failed, and not the file, a `MachineError` (see `faults.py`).

    open_image   a picture (path, bytes, stream, Pillow image, array) as an upright RGB Pillow image
    load_image   the same as (H, W, 3) uint8, reduced to a longest side, cropped to a box
    load_twice   the same at two sizes: for a network, and for whatever else wants more of the picture
    image_info   size, format and date from the header alone
    decode_ahead both of these, for whoever decodes in another process than it describes

Colour profiles are not applied: the networks' own training pictures were read without them.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from cooc.errors import CoocError, InputError
from cooc.pictures.boxes import Box, clip
from cooc.pictures.exif import TURNS, orientation_of, read_exif, taken
from cooc.pictures.faults import blame
from cooc.pictures.opening import Source, check_size, opened, pillow_switches
from cooc.pictures.pixels import to_rgb

Picture: TypeAlias = "Source | Decoded"

MAX_PIXELS = 300_000_000  # larger than any camera's picture, small enough to decode in a few GB

# What Pillow and pillow-heif decode by themselves; a literal, because asking them takes as long as the whole import.
EXTENSIONS = frozenset(
    """
    .apng .avif .avifs .blp .bmp .bw .cur .dcx .dds .dib .fit .fits .flc .fli .ftc .ftu .gbr .gif .heic .heics .heif
    .heifs .hif .icb .icns .ico .im .j2c .j2k .jfif .jp2 .jpc .jpe .jpeg .jpf .jpg .jpx .mpo .msp .pbm .pcd .pcx .pfm
    .pgm .png .pnm .ppm .psd .pxr .qoi .ras .rgb .rgba .sgi .tga .tif .tiff .vda .vst .webp .xbm .xpm
    """.split()  # noqa: SIM905
)
ENOUGH = 0.96  # of the pixels that are asked for, where a fraction of a JPEG has them
LEAST = 64  # pixels: a reduced decode rounds its sides up, nothing in a photo, a distortion in a sliver

_log = logging.getLogger("cooc")


@dataclass(frozen=True)
class ImageInfo:
    width: int  # of the upright picture
    height: int
    format: str | None  # Pillow's name ("JPEG", "HEIF", ...); None for pixels that came from no file
    taken: str | None  # EXIF date and time as YYYY-MM-DDTHH:MM:SS; cameras do not say which time zone


class View(NamedTuple):
    """A picture, or a part of it, as large as local features want it."""

    pixels: npt.NDArray[np.uint8]
    size: tuple[int, int]  # of the whole picture
    box: Box | None  # of the part in it


@dataclass(frozen=True)
class Decoded:
    """A picture that has been decoded, perhaps by another process: what `load_image` gives with these settings."""

    pixels: npt.NDArray[np.uint8]
    info: ImageInfo
    size: int | None
    box: Box | None
    min_side: int
    least: int = 0
    view: View | None = None  # what `load_view` gives


def open_image(picture: Picture, *, size: int | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture as upright RGB: first frame, alpha on white, 16 bit scaled to 8.

    `size` says that the longest side will be reduced to it later, so a JPEG may be decoded smaller, never below that.
    """
    return _decode(picture, size, max_pixels).image


def load_image(
    picture: Picture,
    *,
    size: int | None = None,
    box: Box | None = None,
    min_side: int = 1,
    least: int = 0,
    max_pixels: int = MAX_PIXELS,
) -> npt.NDArray[np.uint8]:
    """The picture, or the part of it in `box`, as an (H, W, 3) uint8 array.

    The longest side of the *full* picture is reduced to `size`, and a crop is scaled by the same factor, so that things
    are as large in a query as in the indexed pictures. A full picture smaller than `least` is enlarged to it (to `size`
    at most), and a crop of it likewise; nothing else is. A side below `min_side` is padded by repeating its last
    pixels, with a warning. A box is clipped to the picture and rounded to whole pixels.
    """
    if min_side < 1:
        raise InputError(f"min_side must be at least 1, not {min_side}.")
    if isinstance(picture, Decoded):
        if (picture.size, picture.box, picture.min_side, picture.least) != (size, box, min_side, least):
            raise InputError("This picture was decoded with another size, box or smallest side than is asked for now.")
        return picture.pixels
    found = _decode(picture, size, max_pixels)
    return _pad(_scaled(found, size, box, name_of(picture), max_pixels, least), min_side, name_of(picture))


def load_twice(
    picture: Picture, *, size: int, larger: int, min_side: int = 1, least: int = 0, max_pixels: int = MAX_PIXELS
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], tuple[int, int]]:
    """What `load_image` gives at `size`, the same to the bit; the picture at up to `larger` pixels; its full size.

    It is decoded once. Only a JPEG that may be decoded smaller for the one than for the other is decoded twice: what
    another fraction gives are other pixels. A fraction that misses `larger` by a little will do: a quarter of 12
    megapixels is 1000 or 1008 pixels long, and takes a third of the time that a half does.
    """
    if isinstance(picture, Decoded):
        raise InputError("This picture was decoded already, at one size: give its file.")
    name, enough = name_of(picture), max(size, round(larger * ENOUGH))
    found = _decode(picture, enough, max_pixels)
    large = _scaled(found, min(max(size, larger), max(found.image.size)), None, name, max_pixels)
    if size >= max(large.shape[:2]) >= least:  # at that size it is the same
        return _pad(large, min_side, name), large, found.size
    if found.reducible and _reduction(found.size, size) != _reduction(found.size, enough):
        return load_image(picture, size=size, min_side=min_side, max_pixels=max_pixels), large, found.size
    return _pad(_scaled(found, size, None, name, max_pixels, least), min_side, name), large, found.size


def scale_of(longest: int, size: int | None, least: int = 0) -> float:
    """By which factor `load_image` scales a picture whose longest side has so many pixels."""
    wanted = longest if size is None else min(size, max(longest, least))
    return wanted / longest


def _scaled(
    found: _Upright, size: int | None, box: Box | None, name: str, max_pixels: int, least: int = 0
) -> npt.NDArray[np.uint8]:
    image, (width, height) = found.image, found.size
    x0, y0, x1, y1 = (0, 0, width, height) if box is None else clip(box, width, height, name)
    factor = scale_of(max(width, height), size, least)
    target = max(1, round((x1 - x0) * factor)), max(1, round((y1 - y0) * factor))

    with _blaming(name):
        # In a JPEG that was decoded smaller, the box lies between pixels: crop outwards, the resize does the fraction.
        w, h = image.size
        outer = (x0 * w // width, y0 * h // height, -(-x1 * w // width), -(-y1 * h // height))
        inner = (
            x0 * w / width - outer[0],
            y0 * h / height - outer[1],
            x1 * w / width - outer[0],
            y1 * h / height - outer[1],
        )
        if outer != (0, 0, w, h):
            with pillow_switches(max_pixels):  # crop() has a pixel limit of its own
                image = image.crop(outer)
        if target != image.size or inner != (0, 0, *image.size):
            image = image.resize(target, Image.Resampling.LANCZOS, box=inner)
        return np.array(image)


def load_view(picture: Picture, longest: int, box: Box | None = None, *, max_pixels: int = MAX_PIXELS) -> View:
    """The picture, or the part of it in `box`, with its *own* longest side reduced to `longest`; never enlarged.

    A whole picture is what `load_twice` gives as the larger one, which may miss `longest` by a little.
    """
    if isinstance(picture, Decoded):
        if picture.view is None:
            raise InputError("This picture was decoded without a view for local features: give its file.")
        return picture.view
    if box is None:
        found, name = _decode(picture, round(longest * ENOUGH), max_pixels), name_of(picture)
        return View(_scaled(found, min(longest, max(found.image.size)), None, name, max_pixels), found.size, None)
    info = image_info(picture, max_pixels=max_pixels)
    full = info.width, info.height
    part = clip(box, *full, name_of(picture))
    shown = max(part[2] - part[0], part[3] - part[1])
    size = max(1, round(longest * max(full) / shown))  # of the whole picture, where the part has that size
    pixels = load_image(picture, size=size, box=box, max_pixels=max_pixels)
    x0, y0, x1, y1 = map(float, part)
    return View(pixels, full, (x0, y0, x1, y1))


def decode_ahead(
    picture: Picture,
    *,
    size: int | None,
    box: Box | None,
    min_side: int,
    least: int = 0,
    view: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Decoded:
    """`view`: the longest side of the pixels that local features are made of, where these are wanted, too."""
    info = image_info(picture, max_pixels=max_pixels)
    pixels = load_image(picture, size=size, box=box, min_side=min_side, least=least, max_pixels=max_pixels)
    seen = None if view is None else load_view(picture, view, box, max_pixels=max_pixels)
    return Decoded(pixels, info, size, box, min_side, least, seen)


def is_picture(value: object) -> bool:
    """One picture, not a list of them? Whether it can be decoded is another question."""
    kinds = (str, bytes, os.PathLike, np.ndarray, Image.Image, Decoded)
    return isinstance(value, kinds) or hasattr(value, "read")


def image_info(picture: Picture, *, max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Upright size, format and EXIF date, without decoding the picture. Broken EXIF counts as none."""
    if isinstance(picture, Decoded):
        return picture.info
    with opened(picture, name_of(picture), max_pixels) as image:
        exif = read_exif(image)
        width, height = image.size if orientation_of(image, exif) < 5 else image.size[::-1]
        return ImageInfo(width, height, image.format, taken(exif))


class _Upright(NamedTuple):
    image: Image.Image  # RGB
    size: tuple[int, int]  # that the upright picture has when it is not decoded smaller
    reducible: bool  # may it be?


def _decode(picture: Picture, size: int | None, max_pixels: int) -> _Upright:
    if size is not None and size < 1:
        raise InputError(f"size must be at least 1 pixel, not {size}.")
    source, name = picture.pixels if isinstance(picture, Decoded) else picture, name_of(picture)
    with opened(source, name, max_pixels) as image:
        orientation = orientation_of(image, read_exif(image))
        width, height = image.size
        reducible = image.format in ("JPEG", "MPO") and image is not source
        target = _target(image.size, size)
        if reducible and min(target) >= LEAST:
            image.draft(None, target)
            image.load()
        else:
            image.load()
            width, height = image.size  # icons only know their size now
        check_size(image.size, max_pixels, name)
        plain = reducible and image.mode == "RGB"  # its own copy already
        upright = image if plain else to_rgb(image)
        if orientation in TURNS:
            upright = upright.transpose(TURNS[orientation])
        return _Upright(upright, (width, height) if orientation < 5 else (height, width), reducible)


def _target(full: tuple[int, int], size: int | None) -> tuple[int, int]:
    """What a JPEG may be decoded to."""
    factor = 1.0 if size is None else min(1.0, size / max(full))
    return math.ceil(full[0] * factor), math.ceil(full[1] * factor)


def _reduction(full: tuple[int, int], size: int) -> int:
    """By which a JPEG is decoded smaller: what Pillow's `draft` finds."""
    target = _target(full, size)
    if min(target) < LEAST:
        return 1
    return next(step for step in (8, 4, 2, 1) if min(full[0] // target[0], full[1] // target[1]) >= step)


def _pad(pixels: npt.NDArray[np.uint8], min_side: int, name: str) -> npt.NDArray[np.uint8]:
    height, width = pixels.shape[:2]
    below, beside = max(0, min_side - height), max(0, min_side - width)
    if below or beside:
        _log.warning(
            "%s: %dx%d pixels are too few; padded to %dx%d by repeating the right and bottom edges.",
            name, width, height, width + beside, height + below,
        )  # fmt: skip
        pixels = np.pad(pixels, ((0, below), (0, beside), (0, 0)), mode="edge")
    return pixels


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    try:
        yield
    except CoocError:
        raise
    except Exception as error:
        raise blame(error, name) from error


def name_of(picture: object) -> str:
    """For messages: names may hold newlines or bytes that are no text, so they are quoted as Python would."""
    if isinstance(picture, (str, os.PathLike)):
        return repr(os.fsdecode(picture))
    if isinstance(picture, bytes):
        return "<bytes>"
    if isinstance(picture, np.ndarray):
        return "<array>"
    given = getattr(picture, "filename" if isinstance(picture, Image.Image) else "name", None)
    if isinstance(given, str) and given:
        return repr(given)
    return "<image>" if isinstance(picture, Image.Image) else "<stream>"
