"""Pixels of any kind -> 8-bit RGB: alpha on white, 16 bits and floats scaled, arrays checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from cooc.errors import ImageError

_16_TO_8 = ((np.arange(65536) * 255 + 32767) // 65535).astype(np.uint8)  # round(v / 257)


def to_rgb(image: Image.Image) -> Image.Image:
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


def from_array(array: npt.NDArray[Any]) -> Image.Image:
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
