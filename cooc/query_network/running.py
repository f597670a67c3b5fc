"""What was kept of a descriptor, run by OpenCV and numpy. Nothing here may import torch.

network = QueryNetwork.find(place_of(config, fingerprint), size) or None: ask the Descriptor
network.describe(["a.jpg"], [(40, 60, 300, 400)])                (1, D) float32, unit length
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from cooc.errors import MachineError, first_line
from cooc.files import cache_home
from cooc.pictures.boxes import Box
from cooc.pictures.decode import Picture, load_image

Floats = NDArray[np.float32]

FORMAT = 1  # of the files, and of the names that scores have
NETWORK, WHITENING, ABOUT = "network.onnx", "whitening.npy", "about.json"


@dataclass(frozen=True)
class Settings:
    """Everything but the weights, and the size of pictures."""

    min_side: int
    least: int
    mean: list[float]  # of the three colours, in 0..1
    std: list[float]
    power: float  # GeM's
    eps: float
    space: str | None  # the name of its scores: `DescriptorConfig.score_space`


def surely_cpu(device: str) -> bool:
    """Does that device mean the CPU? Only what is certain without asking torch: no driver of a GPU is installed."""
    if device != "auto":
        return device == "cpu"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return not Path("/dev/kfd").exists()  # AMD's
    return False


def place_of(config: Mapping[str, Any], fingerprint: str) -> Path:
    """The folder of a descriptor with these settings and values, for any size of pictures and any dtype."""
    settings = {name: value for name, value in config.items() if name not in ("dtype", "size")}
    if not settings.get("least"):  # older indexes do not name it
        settings.pop("least", None)
    named = hashlib.sha256(json.dumps([settings, fingerprint], sort_keys=True).encode()).hexdigest()[:32]
    return cache_home() / "queries" / named


def maker() -> list[object]:
    """What the files were written for, and tried with: others write their own."""
    return [FORMAT, cv2.__version__]


def read_settings(folder: Path) -> Settings | None:
    """None where the folder is not there, not whole, or of other versions."""
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        whole = all(checksum(folder / name) == number for name, number in about["files"].items())
        return Settings(**about["settings"]) if whole and about["maker"] == maker() else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def checksum(file: Path) -> int:
    """Against accidents: a tenth of the time of sha256."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return zlib.crc32(data)


class QueryNetwork:
    """See the module. `size`: the longest side that pictures are reduced to. Threads take turns."""

    def __init__(self, folder: Path, settings: Settings, size: int) -> None:
        self.settings, self.size = settings, size
        self._network = cv2.dnn.readNetFromONNX(os.fspath(folder / NETWORK))
        self._whitening: Floats | None = np.load(folder / WHITENING) if (folder / WHITENING).exists() else None
        self._running = threading.Lock()

    @classmethod
    def find(cls, folder: Path, size: int) -> QueryNetwork | None:
        """What is kept there, if it can be used here."""
        begun = _begun.pop((folder, size), None)
        return begun.result() if begun is not None else cls._read(folder, size)

    @classmethod
    def begin(cls, folder: Path, size: int) -> None:
        """Read it in a thread of its own, for the `find` that follows."""
        pool = ThreadPoolExecutor(1, "network")
        _begun[folder, size] = pool.submit(cls._read, folder, size)
        pool.shutdown(wait=False)  # its thread ends with its work

    @classmethod
    def _read(cls, folder: Path, size: int) -> QueryNetwork | None:
        settings = read_settings(folder)
        try:
            return None if settings is None else cls(folder, settings, size)
        except (OSError, ValueError, cv2.error):
            return None

    def describe(self, pictures: Sequence[Picture], boxes: Sequence[Box | None]) -> Floats:
        """Vectors (N, D) as those of `Descriptor.describe`. A MachineError says that OpenCV could not make them."""
        return np.stack([self._vector(*query) for query in zip(pictures, boxes, strict=True)])

    def _vector(self, picture: Picture, box: Box | None) -> Floats:
        settings = self.settings
        pixels = load_image(picture, size=self.size, box=box, min_side=settings.min_side, least=settings.least)
        images = pixels.transpose(2, 0, 1)[None].astype(np.float32, order="C") / np.float32(255)
        images -= np.array(settings.mean, np.float32).reshape(3, 1, 1)
        images /= np.array(settings.std, np.float32).reshape(3, 1, 1)
        try:
            with self._running:
                self._network.setInput(images)
                (maps,) = self._network.forward()  # (C, H, W)
        except cv2.error as error:
            raise MachineError(f"OpenCV could not run the network ({first_line(error)}).") from error
        vector = _unit(_gem(maps.reshape(len(maps), -1), settings.power, settings.eps))
        if self._whitening is not None and vector.any():  # a vector of zeros has no direction
            mean, *_ = self._whitening
            vector = _unit(self._whitening[1:] @ (vector - mean))
        if not np.isfinite(vector).all():
            raise MachineError("OpenCV's vector is NaN or infinite.")
        return vector


_begun: dict[tuple[Path, int], Future[QueryNetwork | None]] = {}


def _gem(maps: Floats, power: float, eps: float) -> Floats:
    """As `cooc.pooling.gem`: (C, P) -> (C,)"""
    largest = maps.max(axis=1, keepdims=True)
    scaled = np.maximum(maps, np.float32(eps)) / np.maximum(largest, np.float32(eps))
    means = (scaled ** np.float32(power)).mean(axis=1) ** np.float32(1 / power)
    found: Floats = np.where(largest[:, 0] > eps, means * largest[:, 0], np.float32(0))
    return found


def _unit(vector: Floats) -> Floats:
    """Length 1; zeros stay zeros. Divided by the largest first: squares neither overflow nor vanish."""
    vector = vector / (np.abs(vector).max() or np.float32(1))
    found: Floats = vector / (np.linalg.norm(vector) or np.float32(1))
    return found
