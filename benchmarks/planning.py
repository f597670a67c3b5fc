"""The constants of `cooc plan`, taken from results/, and its tables for the documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks.results import Results, Table, sources
from cooc.bench.plan import (
    HEADINGS,
    LAYOUTS,
    Constants,
    Setting,
    cells,
    describing_hours,
    hours_text,
    images_text,
    note,
    plan,
)
from cooc.image_search import DEFAULT_FEATURES, QUALITIES
from cooc.recipes import find_recipe

WITHOUT = "fast"  # the quality that keeps no local features
SIZES = 10**6, 10**7, 10**8, 10**9
ROXFORD_PIXELS = 1024 * 768  # of nearly every picture of that set


def constants(results: Results) -> Constants:
    """From the largest run of each kind."""
    found: Constants = {}

    def put(name: str, value: float | None, file: str, images: int, **more: Any) -> None:
        if value is not None:
            source = f"results/{file}.json"
            found[name] = {"value": float(f"{value:.6g}"), "images": images, "source": source, **more}

    growth = results.other.get("growth-cpu", {"rows": []})
    for row in sorted(growth["rows"], key=lambda row: row["images"]):  # the largest is put last
        storage, where = row["storage"], ("growth-cpu", row["images"])
        layout, dim = LAYOUTS[storage], growth["dim"]
        beside = row["on disk, bytes per image"] - layout.code(dim) - layout.truth(dim)
        put(f"{storage}: bytes beside the vectors", beside, *where)
        put(f"{storage}: ms of a scan", row["exact search, ms"], *where)
        put(f"{storage}: images added per second", row["adding, images per second"], *where)
    files = {engine: (f"scale-{engine}-1m", f"scale-{engine}") for engine in ("embedded", "postgresql")}
    for engine, names in (files | {"milvus": ("scale-milvus-1m",)}).items():  # of fewer, Milvus builds no graph
        name = next((name for name in names if name in results.other), "")
        if run := results.other.get(name):
            where, dim, share = (name, run["vectors"]), run["dim"], run["on disk, share of the vectors"]
            rate = next((run[key] for key in run if key.startswith("approximate, queries per second")), None)
            put(f"{engine}: bytes on disk", share and 4 * dim * share, *where, dim=dim)
            put(f"{engine}: bytes of the graph", run["search structure, bytes per image"], *where)
            put(f"{engine}: images added per second", run["adding, vectors per second"], *where)
            put(f"{engine}: seconds to build", run["building the search structure, seconds"], *where)
            put(f"{engine}: ms of a search", run["approximate"]["p50 ms"], *where)
            put(f"{engine}: searches per second", rate, *where)
    if run := results.other.get("search-1m"):
        where, over = ("search-1m", run["vectors"]), run["resident memory, share of the vectors"] - 1
        put("embedded: bytes in memory beside the vectors", over * 4 * run["dim"], *where)
    if run := results.other.get("serving-1m"):
        put("embedded: searches per second", run["engine"]["searches/s"], "serving-1m", run["options"]["images"])
    return dict(sorted((found | _local_features(results) | _describing(results)).items()))


def _local_features(results: Results) -> Constants:
    """What an index has beyond that of the quality without any, words included."""
    found: Constants = {}
    run = results.other.get("qualities-cpu", {"qualities": {}})
    rows, megabytes = run["qualities"], "MB of a thousand photos"
    for name, quality in QUALITIES.items():
        if quality.features and name in rows and WITHOUT in rows:
            found[f"{quality.features}: bytes of local features"] = {
                "value": float(f"{1e3 * (rows[name][megabytes] - rows[WITHOUT][megabytes]):.6g}"),
                "images": rows[name]["photos"],
                "source": "results/qualities-cpu.json",
            }
    return found


def _describing(results: Results) -> Constants:
    """Pixels per second of a network on a device, decoded, described and stored; a whole run where there is one."""
    found: Constants = {}
    gpu = results.by_name.get(("roxford5k", "paper-linear"))
    if gpu and gpu["machine"].get("accelerator") and gpu["seconds"]["describe"] > 60:  # else it came from a cache
        rate = (gpu["images"] + gpu["queries"]) / gpu["seconds"]["describe"] * ROXFORD_PIXELS
        found[f"cuda, {gpu['config']['backbone']}: pixels per second"] = {
            "value": float(f"{rate:.6g}"),
            "source": "results/roxford5k--paper-linear.json",
            "machine": gpu["machine"]["accelerator"],
            "note": f"{len(gpu['command'].partition(' -r ')[2].partition(' ')[0].split(','))} recipes at once",
        }
    for name, result in results.other.items():
        if name.startswith("index-"):
            device = "cuda" if result["machine"].get("accelerator") else "cpu"
            rate = result["indexing, pictures per second"] * result["pixels"]
            machine = result["machine"].get("accelerator") or f"{result['machine'].get('cores')} cores"
            found[f"{device}, {_network(result['recipe'])}: pixels per second"] = {
                "value": float(f"{rate:.6g}"),
                "source": f"results/{name}.json",
                "machine": machine,
            }
    if run := results.other.get("qualities-cpu"):
        for name, row in run["qualities"].items():
            if name in QUALITIES:
                config = find_recipe(QUALITIES[name].recipe).config
                made = ", ".join(filter(None, ("cpu", config.backbone, QUALITIES[name].features)))
                pixels = config.size**2 * 3 // 4  # of photos of 4 to 3
                found[f"{made}: pixels per second"] = {
                    "value": float(f"{pixels / row['seconds of a photo']:.6g}"),
                    "source": "results/qualities-cpu.json",
                    "machine": f"{run['machine'].get('cores')} cores",
                }
    return found


def _network(recipe: str) -> str:
    return find_recipe(recipe).config.backbone


def text(results: Results) -> str:
    """Of data/planning.json."""
    return json.dumps(constants(results), indent=1) + "\n"


def plan_table(results: Results) -> Table:
    """For the documents: what was timed and can be done, by `cooc plan`'s own columns that matter most there."""
    known, setting = constants(results), Setting(features=DEFAULT_FEATURES)
    needs = [need for images in SIZES for need in plan(images, setting, known)]
    shown = [i for i, heading in enumerate(HEADINGS) if heading in PLAN_HEADINGS]
    rows = [[cells(need)[i] for i in shown] for need in needs if need.ms is not None and need.copy is not None]
    names = dict.fromkeys(
        constant["source"].removeprefix("results/").removesuffix(".json") for constant in known.values()
    )
    used = [results.other[name] for name in names if name in results.other]
    return Table("What a collection needs", [HEADINGS[i] for i in shown], rows, note(setting), sources(used))


PLAN_HEADINGS = ("images", "storage", "features", "on disk", "in memory", "one machine holds", "machines", "ms")


def describing_table(results: Results) -> Table:
    known, rows = constants(results), []
    for name, constant in known.items():
        if name.endswith(": pixels per second"):
            device, network, *features = name.partition(": ")[0].split(", ")
            gpus, made = int(device == "cuda"), "+".join(features)
            times = (describing_hours(i, network, ROXFORD_PIXELS, gpus, known, made) for i in SIZES)
            rate = f"{constant['value'] / ROXFORD_PIXELS:.3g}"
            machine = ", ".join(filter(None, (constant["machine"], constant.get("note"))))
            described = " and ".join((network, *features))
            rows.append([described, machine, rate, *map(hours_text, times), f"`{constant['source']}`"])
    headings = ["network", "one machine", "pictures/s", *map(images_text, SIZES), "from"]
    said = "Pictures of 1024 x 768, by the pixels of those that were measured; N machines take an N-th of the time."
    return Table("Time to describe", headings, rows, said)


TABLES: dict[str, Callable[[Results], Table]] = {"plan": plan_table, "describing": describing_table}
