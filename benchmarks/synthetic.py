"""An index of made-up vectors, to measure searching and serving in collections larger than anyone here has."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.index import create_store
from cooc.index.records import Record, StoreMeta
from cooc.vectors import unit_rows

BLOCK = 5000  # vectors added in one transaction
QUERIES = 512
FOLDER = 1000  # pictures in one folder, of which the first one is there

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Made:
    index: Path
    vectors: Vectors  # on disk
    queries: Vectors
    seconds: dict[str, float]  # that adding and building the graph took


def make_index(
    folder: Path,
    count: int,
    dim: int = 0,
    seed: int = 0,
    recipe: str = "",
    graph: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Made:
    """The index in FOLDER/.cooc and its vectors beside it; what was made there before is used again.

    With a recipe, which says the dimension too, it is an index that can be served. `graph`: even where it is so small
    that it is searched without one.
    """
    asked = {"vectors": count, "dim": dim, "seed": seed, "recipe": recipe}
    note, index, queries = folder / "made.json", folder / ".cooc", folder / "queries.npy"
    if note.exists():
        made: dict[str, Any] = json.loads(note.read_text())
        if made["asked"] != asked:
            raise InputError(f"{folder} holds other vectors ({made['asked']}): name another folder, or delete it.")
        return Made(
            index,
            np.memmap(folder / "vectors.f32", np.float32, "r", shape=(count, dim)),
            np.load(queries),
            made["seconds"],
        )
    folder.mkdir(parents=True, exist_ok=True)
    if recipe:
        store: Any = ImageSearch.create(index, recipe=recipe, features="", device="cpu").store
    else:
        store = create_store(index, StoreMeta("none", {}, "none", "none", dim))
    with store:
        dim = dim or store.meta.dim
        if store.meta.dim != dim:
            raise InputError(f"The vectors of {recipe} have {store.meta.dim} dimensions, not {dim}.")
        say("making vectors")
        vectors, asking = clustered(folder / "vectors.f32", count, dim, seed)
        np.save(queries, asking)
        say("adding vectors")
        started = time.perf_counter()
        for records, block in blocks(vectors):
            store.add(records, block)
        added = time.perf_counter() - started
        say("building the graph")
        started = time.perf_counter()
        store.compact()
        if graph and hasattr(store, "build_graph"):
            store.build_graph()
        seconds = {"adding": added, "building the graph": time.perf_counter() - started}
    seen = picture()
    for row in range(0, count, FOLDER):
        path = folder / record(row).path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(seen)
    note.write_text(json.dumps({"asked": asked, "seconds": seconds}))
    return Made(index, vectors, asking, seconds)


def clustered(file: Path, count: int, dim: int, seed: int) -> tuple[Vectors, Vectors]:
    """Unit vectors (on disk) and queries: like descriptors, in clusters and of lower rank than they have dimensions.

    A thousand around each centre in 64 dimensions, turned into `dim`, with a little noise in all of them.
    """
    rng = np.random.default_rng(seed)
    centres, turn = _normal(rng, max(1, count // 1000), 64), _normal(rng, 64, dim) / 8

    def around(number: int) -> Vectors:
        latent = centres[rng.integers(0, len(centres), number)] + 0.7 * _normal(rng, number, 64)
        rows = latent @ turn + 0.2 * _normal(rng, number, dim)
        return unit_rows(rows)

    vectors = np.memmap(file, np.float32, "w+", shape=(count, dim))
    for start in range(0, count, BLOCK):
        vectors[start : start + BLOCK] = around(min(BLOCK, count - start))
    return vectors, around(QUERIES)


def _normal(rng: np.random.Generator, *shape: int) -> Vectors:
    return rng.standard_normal(shape, np.float32)


def record(row: int) -> Record:
    """A thousand pictures in each folder, taken over ten years."""
    taken = f"{2015 + row % 10}-{1 + row % 12:02}-{1 + row % 28:02}"
    return Record(f"{row // FOLDER:06}/{row:09}.jpg", 1, 1, f"{row:064x}", 640, 480, taken)


def blocks(vectors: Vectors) -> Iterator[tuple[list[Record], Vectors]]:
    for start in range(0, len(vectors), BLOCK):
        block = np.array(vectors[start : start + BLOCK])
        yield [record(row) for row in range(start, start + len(block))], block


def picture(width: int = 640, height: int = 480) -> bytes:
    """A JPEG of soft blots."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(stream, "JPEG")
    return stream.getvalue()
