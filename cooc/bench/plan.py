"""`cooc plan`: what a collection of any size needs, computed from what was measured.

    known = packaged()                                  # constants, each with the result file that it comes from
    plan(1_000_000_000, Setting(dim=512), known)        # one `Need` for each way to keep the vectors

The constants lie in data/planning.json, since results/ is not installed; `python -m benchmarks tables --write` renews
that file, and a test compares the two. What was not measured is None here and "not measured" where it is shown.

The model, beyond what was measured:

    bytes       in proportion to the images; a float16 or int8 index has the overhead of a float32 one; local features
                take the same wherever they are kept
    scans       in proportion to the images
    graphs      time to search, and to add one image, in proportion to log(images)
    machines    every one is asked, so more of them hold more, and only replicas answer more
    cores       as many as in the measurement: more of them are faster, by how much was not measured
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cooc.errors import InputError, check_name
from cooc.files import DATA

MISSING = "not measured"
USABLE = 0.8  # of a machine's memory and disk: the rest is the system's, and for growth
HALF_GRAPH = 4000  # dimensions, beyond which pgvector has no graph
LARGEST = 10**12  # images that a plan may be asked for

Constants = dict[str, dict[str, Any]]  # name -> value, source, and where it matters the images that it was measured on


@dataclass(frozen=True)
class Layout:
    """One way to keep vectors of D dimensions."""

    store: str
    code: Callable[[int], float]  # bytes of a vector where it is searched
    truth: Callable[[int], float]  # bytes of it where it is kept, beside that
    graph: bool
    spreads: bool = False  # over several machines


LAYOUTS = {
    "float32": Layout("embedded", lambda dim: 4 * dim, lambda dim: 4 * dim, graph=True),
    "float16": Layout("embedded", lambda dim: 2 * dim, lambda dim: 2 * dim, graph=True),
    "int8": Layout("embedded", lambda dim: dim, lambda dim: dim, graph=True),
    "int4": Layout("embedded", lambda dim: dim / 2, lambda dim: 0, graph=False),
    "pq": Layout("embedded", lambda dim: dim / 4, lambda dim: 0, graph=False),
    "postgresql": Layout("postgresql", lambda dim: 2 * dim, lambda dim: 4 * dim, graph=True),
    "milvus-hnsw": Layout("milvus", lambda dim: 4 * dim, lambda dim: 4 * dim, graph=True, spreads=True),
    "milvus-ivf_pq": Layout("milvus", lambda dim: dim / 8, lambda dim: 4 * dim, graph=False, spreads=True),
}


@dataclass(frozen=True)
class Setting:
    """What the collection is described with and where it is to be kept."""

    dim: int = 512
    features: str = ""  # engines of the local features that verify; "" is none
    memory: float = 128e9  # bytes of a machine
    disk: float = 4e12
    replicas: int = 2

    def __post_init__(self) -> None:
        for name, value in (("memory", self.memory), ("disk", self.disk)):
            if not 1e9 <= value < math.inf:
                raise InputError(f"{name} of {value:g} bytes: a machine has at least 1 GB.")
        if self.replicas < 1 or self.dim < 1:
            raise InputError("replicas and dim: at least 1 each.")


@dataclass(frozen=True)
class Need:
    """Of one layout. Bytes are of one copy of everything; None is what was not measured."""

    images: int
    layout: str
    store: str
    vectors: float  # searched and kept
    metadata: float | None
    features: float | None  # local ones, with their words
    graph: float | None
    memory: float | None  # to search
    disk: float | None
    holds: int | None  # images that one machine holds
    copy: int | None  # machines for one copy; None also where no store spreads this layout
    machines: int | None  # for all copies
    loading: float | None  # hours to add all vectors and to build what is searched, all machines at once
    ms: float | None  # of one search
    rate: float | None  # searches per second, of all copies
    missing: float | None  # share of the images that is not found while one machine is away
    beyond: float | None  # images on one machine over those of the measurement: above 1, times are the model's


def packaged() -> Constants:
    return dict(json.loads((DATA / "planning.json").read_text(encoding="utf-8")))


# What follows


def plan(images: float, setting: Setting, known: Constants, layouts: tuple[str, ...] = tuple(LAYOUTS)) -> list[Need]:
    count = check_images(images)
    for name in layouts:
        check_name("storage", name, LAYOUTS)
    return [_need(count, name, setting, known) for name in layouts]


def check_images(images: float) -> int:
    if not 1 <= images <= LARGEST or images != int(images):
        raise InputError(f"{images:g} images: a whole number from 1 to {LARGEST:g} is wanted, such as 1e9.")
    return int(images)


def _need(images: int, name: str, setting: Setting, known: Constants) -> Need:
    layout, dim = LAYOUTS[name], setting.dim
    code, truth = layout.code(dim), layout.truth(dim)
    beside, graph = _bytes(name, layout, dim, known)
    features = _value(known, f"{setting.features}: bytes of local features") if setting.features else 0.0
    memory = disk = holds = copy = None
    if beside is not None and graph is not None and features is not None:
        disk = code + truth + beside + features + graph
        memory, building = code + graph, 0
        if layout.store == "embedded" and layout.graph:
            memory = code + max(graph, _value(known, "embedded: bytes in memory beside the vectors") or 0)
            building = 4 * dim  # faiss builds over a copy of all vectors; the servers build in parts
        holds = int(min(USABLE * setting.memory / (memory + building), USABLE * setting.disk / disk))
        copy = math.ceil(images / holds) if holds else None
        if copy is not None and copy > 1 and not layout.spreads:
            copy = None
    rows = images if copy is None else math.ceil(images / copy)  # on one machine
    ms, rate, hours, measured = _times(name, layout, rows, known) if copy else (None, None, None, None)
    return Need(
        images=images,
        layout=name,
        store=layout.store,
        vectors=images * (code + truth),
        metadata=None if beside is None else images * beside,
        features=None if features is None else images * features,
        graph=None if graph is None else images * graph,
        memory=None if memory is None else images * memory,
        disk=None if disk is None else images * disk,
        holds=holds,
        copy=copy,
        machines=None if copy is None else copy * setting.replicas,
        loading=hours,
        ms=ms,
        rate=None if rate is None else rate * setting.replicas,
        missing=None if copy is None else (1 / copy if setting.replicas == 1 else 0.0),
        beyond=rows / measured if measured else None,
    )


def _bytes(name: str, layout: Layout, dim: int, known: Constants) -> tuple[float | None, float | None]:
    """Of one image beside its vectors: metadata and what else is stored; the graph."""
    if layout.store == "postgresql":
        total, graph = _value(known, "postgresql: bytes on disk"), _value(known, "postgresql: bytes of the graph")
        if total is None or graph is None or dim > HALF_GRAPH:
            return None, None
        measured = known["postgresql: bytes on disk"]["dim"]
        # pgvector's index holds the half-precision vectors, which are counted as vectors here
        return total - graph - layout.truth(measured), max(0.0, graph - layout.code(measured))
    like = "float32" if layout.graph or layout.store == "milvus" else "int4"
    beside = _value(known, f"{name}: bytes beside the vectors")
    if beside is None:
        beside = _value(known, f"{like}: bytes beside the vectors")
    return beside, _value(known, "embedded: bytes of the graph") if layout.graph else 0.0


def _times(
    name: str, layout: Layout, rows: int, known: Constants
) -> tuple[float | None, float | None, float | None, int | None]:
    """Of one machine: ms of a search, searches per second, hours to load, and the images that this was measured on."""
    if layout.store == "embedded" and not layout.graph:
        if not (scan := known.get(f"{name}: ms of a scan")):
            return None, None, None, None
        ms = scan["value"] * rows / scan["images"]
        return ms, 1e3 / ms, rows / known[f"{name}: images added per second"]["value"] / 3600, scan["images"]
    engine = {"float32": "embedded", "milvus-hnsw": "milvus"}.get(name, name)  # float16 and int8 were not timed
    names = ("ms of a search", "searches per second", "images added per second", "seconds to build")
    if not all(f"{engine}: {what}" in known for what in names):
        return None, None, None, None
    search, rate, adding, build = (known[f"{engine}: {what}"] for what in names)
    seconds = rows / adding["value"] + rows * build["value"] / build["images"] * _growth(rows, build)
    ms = search["value"] * _growth(rows, search)
    return ms, rate["value"] / _growth(rows, rate), seconds / 3600, search["images"]


def _growth(rows: int, constant: dict[str, Any]) -> float:
    """How much longer a walk through a graph is than in the measurement; never shorter."""
    return max(1.0, math.log(max(rows, 2)) / math.log(constant["images"]))


def _value(known: Constants, name: str) -> float | None:
    return known[name]["value"] if name in known else None


def describing_hours(
    images: float, backbone: str, pixels: float, gpus: int, known: Constants, features: str = ""
) -> float | None:
    """With so many GPUs, or, with none, on one machine's CPU; vectors, and local features in the same run."""
    made = ", ".join(filter(None, ("cuda" if gpus else "cpu", backbone, features)))
    rate = _value(known, f"{made}: pixels per second")
    return None if rate is None else check_images(images) * pixels / rate / max(gpus, 1) / 3600


# To be shown


def amount(value: float | None, units: tuple[str, ...] = (" B", " kB", " MB", " GB", " TB", " PB")) -> str:
    """Three digits and a unit."""
    if value is None:
        return MISSING
    power = min(len(units) - 1, max(0, int(math.log10(max(value, 1)) // 3)))
    shown = value / 1000**power
    if float(f"{shown:.3g}") >= 1000 and power + 1 < len(units):
        power, shown = power + 1, shown / 1000
    return f"{shown:.3g}{units[power]}" if shown < 1000 else f"{shown:.0f}{units[power]}"


def images_text(value: float | None) -> str:
    return amount(value, ("", "k", "M", "B"))


def hours_text(hours: float | None) -> str:
    if hours is None:
        return MISSING
    for limit, scale, unit in ((1 / 60, 3600, "s"), (1, 60, "min"), (48, 1, "h"), (365 * 48, 1 / 24, "days")):
        if hours < limit:
            return f"{hours * scale:.3g} {unit}"
    return f"{hours / 24 / 365:.3g} years"


def short(ms: float | None) -> str:
    """Three digits, whatever the size; never 1e+03."""
    if ms is None:
        return "-"
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


HEADINGS = ["images", "storage", "vectors", "metadata", "features", "graph", "on disk", "in memory"]
HEADINGS += ["one machine holds", "machines", "loading", "ms", "searches/s", "one machine fails"]


def cells(need: Need) -> list[str]:
    none = "-" if need.holds is not None and need.copy is None else MISSING  # measured, but not possible
    about = "~" if need.beyond is not None and need.beyond > 1 else ""
    fails = none
    if need.missing is not None:
        fails = f"{100 * need.missing:.3g} % not found" if need.missing else "all found"
        fails += f"; back in {about}{hours_text(need.loading)}" if need.loading is not None else ""
    machines = none
    if need.machines is not None and need.copy is not None:
        machines = str(need.copy) if need.machines == need.copy else f"{need.machines // need.copy} x {need.copy}"
    elif need.holds is not None:
        machines = "not spread"
    return [
        images_text(need.images),
        need.layout,
        *(amount(value) for value in (need.vectors, need.metadata, need.features, need.graph, need.disk, need.memory)),
        images_text(need.holds),
        machines,
        none if need.loading is None else about + hours_text(need.loading),
        none if need.ms is None else about + short(need.ms),
        none if need.rate is None else about + short(need.rate),
        fails,
    ]


def note(setting: Setting) -> str:
    features = f"local features by {setting.features}" if setting.features else "no local features"
    return (
        f"Vectors of {setting.dim} dimensions, {features}; {setting.replicas} copies, on machines of "
        f"{amount(setting.memory)} memory and {amount(setting.disk)} disk, {100 * USABLE:.0f} % of it used. Bytes, ms "
        "and loading are of one copy, searches of all copies; times of two cores, of a search before it is verified. "
        "`~`: more images than were measured, by the model. `not spread`: one machine is not enough, and no store "
        "spreads it. Milvus does not tell its bytes; embedded ones are taken."
    )
