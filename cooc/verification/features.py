"""What a picture keeps for verification: its best local features, as a few kilobytes.

    features = extract("sift", pixels)[0]       # engines.py
    data = features.to_bytes()                  # 57 kB for 1500 features
    features = LocalFeatures.from_bytes(data)   # InputError if a single bit of it has changed

Positions are kept in 16 bits a coordinate (a 64th of a pixel at 1024 px), scales in 8 bits (16 steps an octave), angles
in 8 bits (1.4 degrees), descriptors in 4 or 8 bits a value. The code names its own length, so that the features of
several engines lie one behind the other: `pack` and `unpack`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

MAGIC, VERSION = b"cLF", 1
HEADER = struct.Struct("<3sBBBHIII")  # magic, version, bits, length of the engine's name, D, N, width, height
CHECKSUM = struct.Struct("<I")
STEPS = 65535  # of a coordinate
OCTAVE, SMALLEST = 16, -4  # steps of a scale in an octave; log2 of the smallest scale, in pixels
SCALES = np.exp2(np.arange(256, dtype=np.float32) / OCTAVE + SMALLEST)
ANGLES = np.arange(256, dtype=np.float32) * np.float32(360 / 256)


@dataclass(frozen=True)
class LocalFeatures:
    """Local features of one picture by one engine, the best first: any number of the first is a good choice."""

    points: Floats  # (N, 2): x and y of their centres, in pixels of the upright full-size picture
    scales: Floats  # (N,): how large each is there, in pixels
    angles: Floats  # (N,): degrees, clockwise as in the picture; 0 where the engine knows none
    descriptors: Bytes  # (N, D)
    width: int  # of the full-size picture
    height: int
    engine: str

    def __post_init__(self) -> None:
        count = len(self.points)
        shapes = {"points": (count, 2), "scales": (count,), "angles": (count,)}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != np.float32:
                raise InputError(f"{name} must be float32 {shape}, not {array.dtype} {array.shape}.")
            if not np.isfinite(array).all():
                raise InputError(f"{name} of local features must be finite numbers.")
        if self.descriptors.ndim != 2 or len(self.descriptors) != count or self.descriptors.dtype != np.uint8:
            found = f"{self.descriptors.dtype} {self.descriptors.shape}"
            raise InputError(f"descriptors must be uint8 ({count}, D), not {found}.")
        if (self.scales <= 0).any():
            raise InputError("scales of local features must be over 0.")
        if min(self.width, self.height) < 1:
            raise InputError(f"A picture of {self.width} x {self.height} pixels has no local features.")

    def __len__(self) -> int:
        return len(self.points)

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    def take(self, which: Any) -> LocalFeatures:
        """Some of them: a slice (`take(slice(500))` are the 500 best), a mask or indices."""
        return LocalFeatures(
            points=self.points[which],
            scales=self.scales[which],
            angles=self.angles[which],
            descriptors=self.descriptors[which],
            width=self.width,
            height=self.height,
            engine=self.engine,
        )

    def to_bytes(self, bits: int = 4) -> bytes:
        """`bits` of a descriptor's value. 4 find as many inliers as 8 do (docs/verification.md)."""
        if bits not in (4, 8):
            raise InputError(f"A descriptor's value is kept in 4 or 8 bits, not {bits}.")
        name = self.engine.encode()
        dim = self.descriptors.shape[1]
        header = HEADER.pack(MAGIC, VERSION, bits, len(name), dim, len(self), self.width, self.height)
        position = np.round(np.clip(self.points / np.array(self.size, np.float32), 0, 1) * STEPS).astype("<u2")
        scale = (np.log2(np.maximum(self.scales, 2.0**SMALLEST)) - SMALLEST) * OCTAVE
        scale = np.clip(np.round(scale), 0, 255).astype(np.uint8)
        angle = (np.round(self.angles % 360 / 360 * 256) % 256).astype(np.uint8)
        descriptors = _narrow(self.descriptors) if bits == 4 else self.descriptors
        body = b"".join([header, name, *(a.tobytes() for a in (position, scale, angle, descriptors))])
        return body + CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> LocalFeatures:
        features = unpack(data)
        if len(features) != 1:
            raise InputError(f"The code holds local features of {len(features)} engines, not of one: use unpack().")
        return features[0]


class Coded(LocalFeatures):
    """The same as a code has them: decoded when they are looked at, which of most pictures only a GPU does."""

    def __init__(self, data: bytes, start: int, bits: int, count: int, dim: int, size: tuple[int, int], engine: str):
        row = (dim + 1) // 2 if bits == 4 else dim
        places = np.frombuffer(data, np.uint8, 6 * count, start)
        codes = np.frombuffer(data, np.uint8, count * row, start + 6 * count).reshape(count, row)
        width, height = size
        vars(self).update(places=places, codes=codes, bits=bits, dim=dim, width=width, height=height, engine=engine)

    places: Bytes  # (6 N,): positions, then scales, then angles
    codes: Bytes  # (N, D), or half of that for 4 bits
    bits: int
    dim: int

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def points(self) -> Floats:
        position = self.places[: 4 * len(self)].view("<u2").reshape(-1, 2)
        return position.astype(np.float32) * (np.array(self.size, np.float32) / np.float32(STEPS))

    @cached_property
    def scales(self) -> Floats:
        return SCALES[self.places[4 * len(self) : 5 * len(self)]]

    @cached_property
    def angles(self) -> Floats:
        return ANGLES[self.places[5 * len(self) :]]

    @cached_property
    def descriptors(self) -> Bytes:
        return _widen(self.codes, self.dim) if self.bits == 4 else self.codes


def pack(features: Iterable[LocalFeatures], bits: int = 4) -> bytes:
    """The features of one picture by several engines as one code."""
    return b"".join(part.to_bytes(bits) for part in features)


def unpack(data: bytes) -> tuple[LocalFeatures, ...]:
    """What `pack` made, as it was; InputError if the code is cut short, changed or of a later version."""
    parts, start = [], 0
    while start < len(data):
        features, start = _read(data, start)
        parts.append(features)
    return tuple(parts)


def _read(data: bytes, start: int) -> tuple[LocalFeatures, int]:
    if len(data) - start < HEADER.size or data[start : start + len(MAGIC)] != MAGIC:
        raise _damage("it does not begin as one")
    _, version, bits, letters, dim, count, width, height = HEADER.unpack_from(data, start)
    if version != VERSION:
        raise InputError(
            f"Local features of format {version}; this cooc reads {VERSION}: update cooc, or make them again."
        )
    row = (dim + 1) // 2 if bits == 4 else dim
    end = start + HEADER.size + letters + count * (6 + row)
    if len(data) < end + CHECKSUM.size:
        raise _damage(f"{end + CHECKSUM.size - start} bytes are needed, {len(data) - start} are there")
    if zlib.crc32(memoryview(data)[start:end]) != CHECKSUM.unpack_from(data, end)[0]:
        raise _damage("its checksum is wrong")
    if min(width, height) < 1:
        raise _damage(f"it is of a picture of {width} x {height} pixels")
    place = start + HEADER.size + letters
    engine = data[start + HEADER.size : place].decode()
    return Coded(data, place, bits, count, dim, (width, height), engine), end + CHECKSUM.size


def _narrow(descriptors: Bytes) -> Bytes:
    """Two values a byte: 0..255 to the nearest of 0, 17, ... 255."""
    if descriptors.shape[1] % 2:
        descriptors = np.pad(descriptors, ((0, 0), (0, 1)))
    rounded = (descriptors.astype(np.uint16) + 8) // 17
    return (rounded[:, 0::2] << 4 | rounded[:, 1::2]).astype(np.uint8)


def _widen(packed: Bytes, dim: int) -> Bytes:
    wide = packed.astype("<u2")  # the first value of a byte is the lower half of these
    return ((wide >> 4 | (wide & 15) << 8) * 17).view(np.uint8)[:, :dim]


def _damage(reason: str) -> InputError:
    return InputError(f"This code of local features is damaged: {reason}. Make the features of the picture again.")
