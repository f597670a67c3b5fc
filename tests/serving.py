"""A small collection of photographs (public domain or CC0, from scikit-image), its index, and a server on loopback."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import skimage.data
import uvicorn
from fastapi import FastAPI
from numpy.typing import NDArray
from PIL import Image

from cooc.api import impatient
from cooc.api.connections import BACKLOG
from cooc.descriptor import Descriptor
from cooc.image_search import ImageSearch
from cooc.index.calibration import Calibration
from cooc.recipes import find_recipe

Start = Callable[..., httpx.Client]  # starts a server with other settings: see tests/api/conftest.py
RECIPE = "paper-linear+backbone=efficientnet-lite0+raw+size=128+dtype=float32"
PHOTOS = {
    "animals/cat": (skimage.data.chelsea, "2019:05:04 10:00:00"),
    "people/astronaut": (skimage.data.astronaut, "2021:07:01 12:00:00"),
    "space/galaxies": (skimage.data.hubble_deep_field, "2021:12:24 20:00:00"),
    "space/rocket": (skimage.data.rocket, "2023:03:03 08:00:00"),
    "things/coffee": (skimage.data.coffee, "2023:08:15 09:30:00"),
    "things/clock": (skimage.data.clock, None),
}


@functools.cache
def descriptor() -> Descriptor:
    """A real one, of a light network and for small pictures."""
    return Descriptor(find_recipe(RECIPE).config, device="cpu")


@functools.cache
def photo(name: str, side: int = 160) -> Image.Image:
    pixels: NDArray[np.uint8] = PHOTOS[name][0]()
    image = Image.fromarray(pixels).convert("RGB")
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def views(image: Image.Image) -> list[Image.Image]:
    """The whole, a part of it, and a darker part."""
    w, h = image.size
    part = image.crop((w // 10, h // 10, w * 9 // 10, h * 9 // 10))
    return [image, part, image.crop((0, 0, w * 9 // 10, h)).point(lambda v: v * 0.8)]


def write_collection(root: Path) -> Path:
    """18 pictures in four folders, most with the date of a camera."""
    for name, (_, taken) in PHOTOS.items():
        for i, view in enumerate(views(photo(name))):
            path = root / f"{name}-{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            exif = Image.Exif()
            if taken:
                exif.get_ifd(0x8769)[0x9003] = taken
            view.save(path, quality=90, exif=exif)
    return root


def make_index(root: Path, calibration: Calibration | None = None, features: str = "") -> ImageSearch:
    """The collection indexed, and open to be read."""
    made = ImageSearch.create(root / ".cooc", recipe=RECIPE, root=root, features=features, descriptor=descriptor())
    with made as writer:
        writer.index([root], workers=0)
    search = ImageSearch.open(root / ".cooc", descriptor=descriptor())
    search.calibration = calibration
    return search


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, form)
    return stream.getvalue()


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The application on a free port of this machine: its address."""
    http = impatient(app.state.services.settings)
    config = uvicorn.Config(
        app,
        port=0,
        http=http,
        ws="none",
        log_level="error",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
