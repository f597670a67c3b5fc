"""How long verification takes on this machine, beside the network that makes the vector of the same picture."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from cooc.activations import BACKBONES, build_backbone, resolve_dtype
from cooc.provenance import provenance
from cooc.verification.engine import Pixels
from cooc.verification.engines import KEPT, LONGEST, QUERY, extract
from cooc.verification.features import LocalFeatures, pack, unpack
from cooc.verification.verifier import verify
from cooc.verification.words import ENGINE
from cooc.weights import load_weights

NETWORK = "vgg16-caffe"
SHAPE = (768, 1024)
PICTURES = 100


def measure_speed(
    photos: Sequence[Path], engines: Sequence[str], turns: int = 5, device: str = "cpu"
) -> dict[str, Any]:
    """Seconds of each, in turns: VGG16 at 1024 x 768, features of such a picture, 100 pictures verified from bytes.

    A query is one of the photos, and its 100 pictures are itself and those after it: give photos in the order of what
    they show. Screened is what a search does, unscreened a thorough one.
    """
    pixels = [_read(path) for path in photos]
    network = build_backbone(NETWORK, weights=load_weights(BACKBONES[NETWORK].weights)).eval().to(device)
    kind = torch.device(device).type
    dtype = resolve_dtype("auto", torch.device(device))
    batch = torch.zeros(1, 3, *SHAPE).to(device, memory_format=torch.channels_last)

    def describe(_: int) -> None:
        with torch.inference_mode(), torch.autocast(kind, dtype, enabled=dtype != torch.float32):
            network(batch).sum().item()

    work: dict[str, Callable[[int], object]] = {"network": describe}
    size = {}
    for engine in engines:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            codes = list(pool.map(lambda p, engine=engine: pack(extract(engine, p, device=device)), pixels))
            queries = list(pool.map(lambda p, engine=engine: extract(engine, p, limit=QUERY, device=device), pixels))
        size[engine] = round(sum(map(len, codes)) / len(codes))
        work[f"{engine}: features"] = partial(_extract, engine, pixels, device)
        for name, screened in (("verify", False), ("screen and verify", True))[: 2 if engine == ENGINE else 1]:
            work[f"{engine}: {name} {PICTURES}"] = partial(
                _verify, queries, codes, screened, None if kind == "cpu" else device
            )
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns):
        for name, call in work.items():
            start = time.perf_counter()
            call(turn)
            seconds[name].append(time.perf_counter() - start)
    network_s = min(seconds["network"])
    rows = {
        name: {"p50 s": round(median(s), 4), "best s": round(min(s), 4), "best / network": round(min(s) / network_s, 4)}
        for name, s in seconds.items()
    }
    about = {"network": NETWORK, "pixels": f"{SHAPE[1]} x {SHAPE[0]}", "photos": len(photos), "turns": turns}
    kept = {"features kept": KEPT, "features of a query": QUERY, "bytes a picture": size}
    return about | kept | {"rows": rows} | provenance(kind)


def _extract(engine: str, pixels: Sequence[Pixels], device: str, turn: int) -> None:
    extract(engine, pixels[turn % len(pixels)], device=device)


def _verify(
    queries: Sequence[Sequence[LocalFeatures]], codes: Sequence[bytes], screened: bool, device: str | None, turn: int
) -> None:
    first = turn * len(queries) // 7  # others in each turn
    shortlist = [unpack(codes[(first + n) % len(codes)]) for n in range(PICTURES)]
    verify(queries[first % len(queries)], shortlist, device=device, screened=screened)


def _read(path: Path) -> Pixels:
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    scale = LONGEST / max(rgb.size)
    return np.array(rgb.resize((round(rgb.width * scale), round(rgb.height * scale)), Image.Resampling.LANCZOS))
