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
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageCms, ImageFile, UnidentifiedImageError

from cooc.errors import CoocError, ImageError, InputError
from cooc.pictures.boxes import Box, clip
from cooc.pictures.effort import check_effort
from cooc.pictures.faults import blame, exhausted, is_machine, machine_error, open_regular, read_failure

__all__ = [
    "EXTENSIONS",
    "MAX_PIXELS",
    "Decoded",
    "ImageInfo",
    "Picture",
    "decode_ahead",
    "image_info",
    "is_picture",
    "load_image",
    "load_twice",
    "open_image",
]

Picture: TypeAlias = "str | os.PathLike[str] | bytes | BinaryIO | Image.Image | npt.NDArray[Any] | Decoded"

MAX_PIXELS = 300_000_000  # larger than any camera's picture, small enough to decode in a few GB

# What Pillow and pillow-heif decode by themselves; a literal, because asking them takes as long as the whole import.
EXTENSIONS = frozenset(
    """
    .apng .avif .avifs .blp .bmp .bw .cur .dcx .dds .dib .fit .fits .flc .fli .ftc .ftu .gbr .gif .heic .heics .heif
    .heifs .hif .icb .icns .ico .im .j2c .j2k .jfif .jp2 .jpc .jpe .jpeg .jpf .jpg .jpx .mpo .msp .pbm .pcd .pcx .pfm
    .pgm .png .pnm .ppm .psd .pxr .qoi .ras .rgb .rgba .sgi .tga .tif .tiff .vda .vst .webp .xbm .xpm
    """.split()  # noqa: SIM905
)
# Formats that Pillow recognises but cannot decode alone, or (EPS; IPTC may wrap it) by running a program on them.
_REFUSED = {"BUFR", "EPS", "FPX", "GRIB", "HDF5", "IPTC", "MIC", "MPEG", "WMF"}

LEAST = 64  # pixels: a reduced decode rounds its sides up, nothing in a photo, a distortion in a sliver

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_16_TO_8 = ((np.arange(65536) * 255 + 32767) // 65535).astype(np.uint8)  # round(v / 257)

_log = logging.getLogger("cooc")


@dataclass(frozen=True)
class ImageInfo:
    width: int  # of the upright picture
    height: int
    format: str | None  # Pillow's name ("JPEG", "HEIF", ...); None for pixels that came from no file
    taken: str | None  # EXIF date and time as YYYY-MM-DDTHH:MM:SS; cameras do not say which time zone


@dataclass(frozen=True)
class Decoded:
    """A picture that has been decoded, perhaps by another process: what `load_image` gives with these settings."""

    pixels: npt.NDArray[np.uint8]
    info: ImageInfo
    size: int | None
    box: Box | None
    min_side: int


# -- pictures ----------------------------------------------------------------------------------------------------------


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
    max_pixels: int = MAX_PIXELS,
) -> npt.NDArray[np.uint8]:
    """The picture, or the part of it in `box`, as an (H, W, 3) uint8 array.

    The longest side of the *full* picture is reduced to `size`, and a crop is scaled by the same factor, so that things
    are as large in a query as in the indexed pictures. Nothing is ever enlarged: a side below `min_side` is padded by
    repeating its last pixels, with a warning. A box is clipped to the picture and rounded to whole pixels.
    """
    if min_side < 1:
        raise InputError(f"min_side must be at least 1, not {min_side}.")
    if isinstance(picture, Decoded):
        if (picture.size, picture.box, picture.min_side) != (size, box, min_side):
            raise InputError("This picture was decoded with another size, box or smallest side than is asked for now.")
        return picture.pixels
    found = _decode(picture, size, max_pixels)
    return _pad(_scaled(found, size, box, _name(picture), max_pixels), min_side, _name(picture))


def load_twice(
    picture: Picture, *, size: int, larger: int, min_side: int = 1, max_pixels: int = MAX_PIXELS
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], tuple[int, int]]:
    """What `load_image` gives at `size`, the same to the bit; the picture at up to `larger` pixels; its full size.

    It is decoded once. Only a JPEG that may be decoded smaller for the one than for the other is decoded twice: what
    another fraction gives are other pixels.
    """
    if isinstance(picture, Decoded):
        raise InputError("This picture was decoded already, at one size: give its file.")
    name, most = _name(picture), max(size, larger)
    found = _decode(picture, most, max_pixels)
    large = _scaled(found, most, None, name, max_pixels)
    if size >= max(large.shape[:2]):  # at that size it is the same
        return _pad(large, min_side, name), large, found.size
    if found.reducible and _reduction(found.size, size) != _reduction(found.size, most):
        return load_image(picture, size=size, min_side=min_side, max_pixels=max_pixels), large, found.size
    return _pad(_scaled(found, size, None, name, max_pixels), min_side, name), large, found.size


def _scaled(found: _Upright, size: int | None, box: Box | None, name: str, max_pixels: int) -> npt.NDArray[np.uint8]:
    image, (width, height) = found.image, found.size
    x0, y0, x1, y1 = (0, 0, width, height) if box is None else clip(box, width, height, name)
    factor = 1.0 if size is None else min(1.0, size / max(width, height))
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
            with _pillow_switches(max_pixels):  # crop() has a pixel limit of its own
                image = image.crop(outer)
        if target != image.size or inner != (0, 0, *image.size):
            image = image.resize(target, Image.Resampling.LANCZOS, box=inner)
        return np.array(image)


def decode_ahead(
    picture: Picture, *, size: int | None, box: Box | None, min_side: int, max_pixels: int = MAX_PIXELS
) -> Decoded:
    info = image_info(picture, max_pixels=max_pixels)
    pixels = load_image(picture, size=size, box=box, min_side=min_side, max_pixels=max_pixels)
    return Decoded(pixels, info, size, box, min_side)


def is_picture(value: object) -> bool:
    """One picture, not a list of them? Whether it can be decoded is another question."""
    kinds = (str, bytes, os.PathLike, np.ndarray, Image.Image, Decoded)
    return isinstance(value, kinds) or hasattr(value, "read")


def image_info(picture: Picture, *, max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Upright size, format and EXIF date, without decoding the picture. Broken EXIF counts as none."""
    if isinstance(picture, Decoded):
        return picture.info
    with _opened(picture, max_pixels) as image:
        exif = _exif(image)
        width, height = image.size if _orientation(image, exif) < 5 else image.size[::-1]
        return ImageInfo(width, height, image.format, _taken(exif))


class _Upright(NamedTuple):
    image: Image.Image  # RGB
    size: tuple[int, int]  # that the upright picture has when it is not decoded smaller
    reducible: bool  # may it be?


def _decode(picture: Picture, size: int | None, max_pixels: int) -> _Upright:
    if size is not None and size < 1:
        raise InputError(f"size must be at least 1 pixel, not {size}.")
    with _opened(picture, max_pixels) as image:
        orientation = _orientation(image, _exif(image))
        width, height = image.size
        reducible = image.format in ("JPEG", "MPO") and image is not picture
        target = _target(image.size, size)
        if reducible and min(target) >= LEAST:
            image.draft(None, target)
            image.load()
        else:
            image.load()
            width, height = image.size  # icons only know their size now
        _check_size(image.size, max_pixels, _name(picture))
        plain = reducible and image.mode == "RGB"  # its own copy already
        upright = image if plain else _to_rgb(image)
        if orientation in _TURNS:
            upright = upright.transpose(_TURNS[orientation])
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


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        grey = _to_8_bit(values)
        if isinstance(clear := image.info.get("transparency"), int):  # 16-bit PNG: one grey value is transparent
            grey[values == clear] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite((image.convert("LA") if image.mode == "La" else image).convert("RGBA"))
        return paper.convert("RGB")
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB")
        assert converted is not None  # only with inPlace
        return converted
    return image.convert("RGB")


def _to_8_bit(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Grey values of any range. 16 bits mean 0..65535. Other types say nothing: the smallest usual range that holds the
    values counts, and where there is none (elevations, exposures) their own range with zero in it."""
    if values.dtype.kind == "u":
        return np.take(_16_TO_8, values)
    finite = values[np.isfinite(values)].astype(np.float64)
    low, high = finite.min(initial=0), finite.max(initial=0)
    if low == 0:
        high = next((usual for usual in (1, 255, 65535)[values.dtype.kind != "f" and 2 :] if high <= usual), high)
    shares = (np.nan_to_num(values.astype(np.float64), nan=low, posinf=high, neginf=low) - low) / (high - low)
    eight: npt.NDArray[np.uint8] = np.rint(shares * 255).astype(np.uint8)
    return eight


def _from_array(array: npt.NDArray[Any]) -> Image.Image:
    shape, kind = array.shape, array.dtype.kind
    if array.ndim not in (2, 3) or 0 in shape or (array.ndim == 3 and shape[2] not in (1, 3, 4)):
        hint = " Put the channels last: array.transpose(1, 2, 0)." if array.ndim == 3 and shape[0] in (1, 3, 4) else ""
        raise ImageError(f"An array of shape {shape} is not a picture: (H, W) or (H, W, 1 | 3 | 4) is.{hint}")
    if kind == "b":
        array = array * np.uint8(255)
    elif kind == "u" and array.dtype.itemsize == 2:
        array = np.take(_16_TO_8, array)
    elif kind == "f":
        if not (array.min() >= 0 and array.max() <= 1):  # NaN is neither
            raise ImageError("A float array must hold values in 0..1, no NaN. Divide by 255, or convert it to uint8.")
        array = np.rint(array.astype(np.float32) * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        raise ImageError(f"An array of {array.dtype} is not a picture. Give uint8, uint16, bool, or float in 0..1.")
    return Image.fromarray(np.ascontiguousarray(array[:, :, 0] if shape[2:] == (1,) else array))


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


# -- safe decoding -----------------------------------------------------------------------------------------------------


@contextmanager
def _opened(picture: Picture, max_pixels: int) -> Iterator[Image.Image]:
    """The picture, its header read and checked, not yet decoded. What the body throws is explained, too."""
    name = _name(picture)
    pixels = 0
    stream: BinaryIO | None = None
    with ExitStack() as stack:
        try:
            stack.enter_context(_pillow_switches(max_pixels))
            if isinstance(picture, Image.Image):
                image = picture
            elif isinstance(picture, (np.ndarray, Decoded)):
                image = _from_array(picture.pixels if isinstance(picture, Decoded) else picture)
            else:
                stream = stack.enter_context(_stream(picture, name))
                check_effort(stream, name)
                image = stack.enter_context(Image.open(stream, formats=_formats()))
            _check_size(image.size, max_pixels, name)
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
def _blaming(name: str) -> Iterator[None]:
    try:
        yield
    except CoocError:
        raise
    except Exception as error:
        raise blame(error, name) from error


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


def _check_size(size: tuple[int, int], max_pixels: int, name: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"{name} has no pixels ({width}x{height}). Remove it.")
    if width * height > max_pixels:
        raise ImageError(_too_large(name, f"{width}x{height} pixels, more", max_pixels))


def _too_large(name: str, size: str, max_pixels: int) -> str:
    limit = f"the limit of {max_pixels / 1e6:g} megapixels"
    return f"{name} has {size} than {limit}. If you trust it, reduce it with another program or raise max_pixels."


def _name(picture: object) -> str:
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


@cache
def _formats() -> tuple[str, ...]:
    """What may be decoded. Here and not at import, because loading all plugins takes a while.

    Pillow does without a plugin that cannot be loaded, for the rest of the process: so there must be room for them.
    """
    if lacking := exhausted():
        raise machine_error("Pillow's decoders", lacking)
    import pillow_heif

    pillow_heif.register_heif_opener()
    Image.init()
    return tuple(name for name in Image.ID if name not in _REFUSED)


_switches_lock = threading.Lock()
_switches_limits: list[int] = []  # one for each decode under way
_switches_restore = ExitStack()


@contextmanager
def _pillow_switches(max_pixels: int) -> Iterator[None]:
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


# -- EXIF --------------------------------------------------------------------------------------------------------------


def _exif(image: Image.Image) -> Image.Exif:
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


def _orientation(image: Image.Image, exif: Image.Exif) -> int:
    """1..8. Pillow turns TIFFs itself, and libheif HEICs (whose EXIF then says 1)."""
    value = exif.get(ExifTags.Base.Orientation)
    return value if value in _TURNS and image.format != "TIFF" else 1


def _taken(exif: Image.Exif) -> str | None:
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
