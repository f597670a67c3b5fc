"""What makes indexing fast on a CPU, one thing after the other, on the same photos: decoding, network, local features.

The forms of a step take turns on each photo; what a whole run makes of them is measured by the command of a user. Each
way to the vector is compared with the plainest one: photos decoded whole, PyTorch in float32 as it comes.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmarks.qualities import index_in_process
from cooc.activations import resolve_dtype
from cooc.descriptor import Descriptor
from cooc.image_search.opening import DEFAULT_FEATURES, DEFAULT_RECIPE
from cooc.pictures.decode import load_image, load_twice, load_view
from cooc.pictures.folder import list_images
from cooc.provenance import provenance
from cooc.verification.engines import LONGEST, extract

Pixels = NDArray[np.uint8]
RUNS = {"threads": ["--workers", "0"], "processes": []}


def measure_ladder(folder: Path, count: int) -> dict[str, Any]:
    photos = list(itertools.islice(list_images(folder), count))
    size = Descriptor.from_pretrained(DEFAULT_RECIPE, device="cpu").config.size
    decoding: dict[str, Callable[[Path], tuple[Pixels, Pixels]]] = {
        "whole": lambda photo: _whole(photo, size),
        "reduced, for each": lambda photo: (load_image(photo, size=size), load_view(photo, LONGEST).pixels),
        "reduced, once for both": lambda photo: load_twice(photo, size=size, larger=LONGEST)[:2],
    }
    networks = {"float32, channels first": _channels_first("float32"), "float32": _network("float32")}
    if resolve_dtype() == torch.bfloat16:  # what this CPU multiplies natively
        networks["bfloat16"] = _network("bfloat16")
    pixels = {photo: {name: decode(photo) for name, decode in decoding.items()} for photo in photos}
    best = "reduced, once for both"
    seconds = {
        "decoding": _in_turns(decoding, photos),
        "network": _in_turns(networks, [pixels[photo][best][0] for photo in photos]),
        "local features": _in_turns(
            {name: functools.partial(extract, name) for name in (DEFAULT_FEATURES, "xfeat")},
            [pixels[photo][best][1] for photo in photos],
        ),
    }
    plain = [networks["float32, channels first"](pixels[photo]["whole"][0]) for photo in photos]
    cosines = {
        f"{name}, decoded {way}": [
            float(vector @ network(pixels[photo][way][0])) for photo, vector in zip(photos, plain, strict=True)
        ]
        for name, network in networks.items()
        for way in ("whole", best)
    }
    return {
        "benchmark": "ladder",
        "recipe": DEFAULT_RECIPE,
        "photos": len(photos),
        "seconds of a photo": seconds,
        "seconds of a photo in cooc index": {
            name: index_in_process(photos, options)["seconds of a photo"] for name, options in RUNS.items()
        },
        "least cosine to the first": {name: round(min(found), 5) for name, found in cosines.items()},
        "load": round(os.getloadavg()[0], 2),
        **provenance("cpu"),
    }


def _whole(photo: Path, size: int) -> tuple[Pixels, Pixels]:
    with Image.open(photo) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return load_image(pixels, size=size), load_view(pixels, LONGEST).pixels


def _network(dtype: str) -> Callable[[Pixels], NDArray[np.float32]]:
    describe = Descriptor.from_pretrained(DEFAULT_RECIPE, device="cpu", dtype=dtype)
    return lambda pixels: describe([pixels])[0].numpy()


def _channels_first(dtype: str) -> Callable[[Pixels], NDArray[np.float32]]:
    describe = Descriptor.from_pretrained(DEFAULT_RECIPE, device="cpu", dtype=dtype)
    describe.backbone.network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    describe.backbone.layout = torch.contiguous_format
    return lambda pixels: describe([pixels])[0].numpy()


def _in_turns(forms: Mapping[str, Callable[[Any], Any]], inputs: list[Any]) -> dict[str, float]:
    """Median over the inputs, of which the first warms up."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for one in [inputs[0], *inputs]:
        for name, form in forms.items():
            began = time.perf_counter()
            form(one)
            times[name].append(time.perf_counter() - began)
    return {name: round(statistics.median(taken[1:]), 4) for name, taken in times.items()}
