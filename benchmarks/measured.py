"""Tables of what was measured beside the paper's: speed, learned filters, engines, storage, experiments."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import paper
from benchmarks.results import MEASURED, Result, Results, Table, interval, number, sources
from cooc.bench.plan import MISSING, short

__all__ = ["TABLES"]

OXFORD = {name: paper.COLUMNS[name] for name in paper.OXFORD}


def performance(results: Results) -> Table:
    """Milliseconds of C_T for one image: the paper's machine, then each of ours, in every form that it was timed in."""
    rows: list[list[str]] = []
    timed = {
        device: {(r["channels"], r["batch"], r["name"]): r for r in result["rows"] if r["section"] == "cooccurrence"}
        for device, result in results.speed.items()
    }
    forms = list(dict.fromkeys(name for cells in timed.values() for *_, name in cells if name != "all"))
    theirs = {(timing.channels, timing.batch): timing for timing in paper.PERFORMANCE}
    for channels, batch in sorted({key[:2] for cells in timed.values() for key in cells}):
        size = [str(channels), str(batch)]
        if timing := theirs.get((channels, batch)):
            shih = "out of memory" if timing.shih is None else short(timing.shih)
            known = {"convolution float32": short(timing.ours), "Shih": shih}
            rows.append([*size, "paper: GTX 1080 Ti", *(known.get(form, "-") for form in forms), "-"])
        for device, cells in timed.items():
            found = [cells.get((channels, batch, form), {}) for form in forms]
            if not any(found):  # a run of other sizes
                continue
            floor = next((cell["floor"] for cell in found if cell.get("floor")), None)
            machine = results.speed[device]["machine"]["accelerator"] or "CPU"
            rows.append([*size, f"ours: {machine}", *(short(cell.get("ms")) for cell in found), short(floor)])
    note = "Milliseconds for one image, 32 x 24 positions, radius 4. Memory floor: the time to read A and to write C_T."
    headings = ["channels", "batch", "", *forms, "memory floor"]
    return Table("Time of the co-occurrence tensor", headings, rows, note, sources(results.speed.values()))


def learned(results: Results) -> Table:
    """Filters that were trained, against the direct form in the same run: mAP, and the gain with its interval."""
    files, trained = _trainings(results)
    rows: list[list[str]] = []
    for vector, direct in (files[0]["rows"]["direct"]["scores"] if files else {}).items():
        for expansion in direct["roxford5k"]:
            columns = {name: (dataset, expansion, protocol) for name, (dataset, protocol) in OXFORD.items()}
            cells = [interval(direct[d][e][p]) for d, e, p in columns.values()]
            rows.append([vector, expansion, "direct", *cells])
            for name, row in trained.items():
                if not row["best"]:  # no epoch helped: the direct form, once more
                    continue
                scores = row["scores"][vector]
                rows.append(["", "", name, *(_gain(scores[d][e][p]) for d, e, p in columns.values())])
    note = (
        "mAP in percent; behind the direct form its 95% bootstrap interval over queries, behind a filter what it gains "
        "and the interval of that gain. Full filters are compressed to rank 32 unless `full filter` is said."
    )
    headings = ["vector", "expansion", "filter", *OXFORD]
    return Table("Learned filters on Oxford and ROxford", headings, rows, note, sources(files))


def _trainings(results: Results) -> tuple[list[Result], dict[str, Result]]:
    """The runs, and the filters that they trained; names that are in both are told apart by their epochs."""
    names = ("experiment-learning", "experiment-losses", "experiment-factored", "experiment-factored-12-epochs")
    files = [f for n in names if (f := results.other.get(n))]
    trained: dict[str, Result] = {}
    for file in files:
        for name, row in file["rows"].items():
            if "history" in row:
                trained[name if name not in trained else f"{name}, {len(row['history']) - 1} epochs"] = row
    return files, trained


def training(results: Results) -> Table:
    """What each training took."""
    files, trained = _trainings(results)
    rows = [
        [
            name,
            f"{row['seconds']:.0f}",
            f"{row['peak_bytes'] / 2**30:.1f}",
            str(row["best"]),
            *(f"{row['history'][i].get('mAP', float('nan')):.1f}" for i in (0, row["best"])),
            f"{row['compressed_error']:.2f}",
        ]
        for name, row in trained.items()
        if "full filter" not in name
    ]
    headings = [
        "setting",
        "seconds",
        "peak GiB of GPU memory",
        "best epoch",
        "mAP before",
        "mAP after",
        "rank 32: error",
    ]
    note = "mAP in percent on landmarks held out of training; error: of the learned change, by the compression."
    return Table("Trainings", headings, rows, note, sources(files))


def learned_landmarks(results: Results) -> Table:
    """The shipped filter on the landmark dev set, whose photos it was not trained on."""
    rows = []
    files = [r for name, r in results.other.items() if name.startswith("learned/") and r["dataset"] == "gldv2_dev"]
    for result in files:
        for expansion, scores in result["results"].items():
            rows.append([f"`{result['recipe']}`", str(result["dim"]), expansion, interval(scores["plain"])])
    headings = ["recipe", "dim", "expansion", "mAP"]
    note = "mAP in percent with its 95% bootstrap interval over queries; whitening without photos of this set."
    return Table("The shipped filter on the landmark dev set", headings, rows, note, sources(files))


def seeds(results: Results) -> Table:
    """The sketch's hashes are drawn at random: how much that draw is worth, beside the reference values."""
    rows: list[list[str]] = []
    files = []
    for weights, file in {"Oxford/Caffe": "experiment-seeds", "torchvision": "experiment-seeds-vgg16"}.items():
        if found := results.other.get(file):
            files.append(found)
            rows += _draws(weights, found)
    note = "mAP in percent. The reference's own draw is not known."
    return Table("Draws of the sketch", ["method", "weights", "dim", "", *OXFORD], rows, note, sources(files))


def _draws(weights: str, found: Result) -> list[list[str]]:
    reference = {(row.method, row.dim): row.values for row in paper.REFERENCE[weights].rows}
    groups: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    for label, row in found["rows"].items():
        case, dim, variant = label.split(", ", 2)
        for expansion, suffix in (("none", ""), ("average-10", " + AQE")):
            values = [row["scores"][d][expansion][p]["mAP"] for d, p in OXFORD.values()]
            groups.setdefault((case + suffix, int(dim), expansion), {})[variant] = values
    rows: list[list[str]] = []
    for (case, dim, _), variants in groups.items():
        draws = [values for name, values in variants.items() if name.removeprefix("seed ").isdigit()]
        if known := reference.get((case, dim)):
            rows.append([case, weights, str(dim), "reference", *map(number, known)])
        cells = [
            f"{number(min(c))} .. {number(max(c))}, mean {number(sum(c) / len(c))}" for c in zip(*draws, strict=True)
        ]
        rows.append([case, weights, str(dim), f"{len(draws)} draws", *cells])
        rows += [
            ["", "", "", name, *map(number, v)]
            for name, v in variants.items()
            if not name.removeprefix("seed ").isdigit()
        ]
    return rows


def whitening(results: Results) -> Table:
    """Three scales and 8192 values: which whitening, fitted on how many pictures, at which size."""
    found = results.other.get("experiment-whitening")
    rows = []
    for label, row in (found["rows"] if found else {}).items():
        scores = row["scores"]
        cells = [number(scores[d][e][p]["mAP"]) for e in ("none", "alpha-10") for d, p in OXFORD.values()]
        rows.append([label, *cells])
    headings = ["method, whitening", *OXFORD, *(f"{name}, alphaQE" for name in OXFORD)]
    note = "mAP in percent, three scales unless sizes are named, 8192 values unless a number of dimensions is."
    return Table("Whitening of multi-scale bilinear vectors", headings, rows, note, sources([found] if found else []))


def rerankings(results: Results) -> Table:
    """Every expansion and re-ranking, for the recipes that were measured with all of them."""
    rows: list[list[str]] = []
    used: list[Result] = []
    for (dataset, recipe), result in results.by_name.items():
        if "k-reciprocal" not in result["results"] or dataset not in ("roxford5k", "gldv2_dev"):
            continue
        used.append(result)
        for name, scores in result["results"].items():
            cells = [scores.get(protocol) for d, protocol in MEASURED.values() if d != "oxford5k"]
            rows.append([f"`{recipe}`", name, *("-" if cell is None else interval(cell) for cell in cells)])
    headings = ["recipe", "expansion or re-ranking", *(name for name, (d, _) in MEASURED.items() if d != "oxford5k")]
    note = "mAP in percent with its 95% bootstrap interval over queries. average and alpha: query expansion."
    return Table("Expansion and re-ranking", headings, rows, note, sources(used))


def _gain(score: Result) -> str:
    gain, low, high = score["gain"]
    return f"{number(score['mAP'])}, {gain:+.1f} [{low:+.1f}, {high:+.1f}]"


def recipes(results: Results) -> Table:
    """Everything that was measured here, without expansion."""
    rows: list[list[str]] = []
    known = {dataset for dataset, _ in MEASURED.values()}
    names = sorted({recipe for dataset, recipe in results.by_name if dataset in known})
    for name in names:
        cells = [interval(results.score(name, column)) for column in MEASURED.values()]
        dim = next(r["dim"] for (_, recipe), r in results.by_name.items() if recipe == name)
        rows.append([f"`{name}`", str(dim), *cells])
    used = [r for (dataset, _), r in results.by_name.items() if dataset in known]
    note = "mAP in percent with its 95% bootstrap interval over queries, without query expansion."
    return Table("All measured recipes", ["recipe", "dim", *MEASURED], rows, note, sources(used))


def engines(results: Results) -> Table:
    """Networks on a CPU by every engine that was tried."""
    found = results.other.get("engines-cpu")
    rows = [
        [
            row["backbone"],
            f"{row['width']} x {row['height']}",
            row["engine"],
            short(row["ms"]),
            row["note"] if row["low"] is None else f"{short(row['low'])} .. {short(row['high'])}",
            "-" if row["times_faster"] is None else f"{row['times_faster']:.2f}",
            "-" if row["error"] is None else f"{row['error']:.0e}",
        ]
        for row in (found["rows"] if found else [])
    ]
    note = "Milliseconds for one picture; times faster than the default, the first row; error: relative distance to it."
    if found:
        note += f" Load of the machine meanwhile: {', '.join(map(str, found['load']))} on {found['threads']} cores."
    headings = ["network", "pixels", "engine", "ms", "10 .. 90 %", "times faster", "error"]
    return Table("Networks on a CPU", headings, rows, note, sources([found] if found else []))


def compact(results: Results) -> Table:
    """mAP that is lost by each storage: one line for each set and recipe."""
    rows: list[list[str]] = []
    files = [result for name, result in results.other.items() if name.startswith("compact-")]
    kinds = list(dict.fromkeys(row["storage"] for result in files for row in result["rows"]))
    for result in files:
        for recipe in dict.fromkeys(row["recipe"] for row in result["rows"]):
            cells = {row["storage"]: row for row in result["rows"] if row["recipe"] == recipe}
            for protocol in cells["float32"]["mAP"]:
                name = f"{result['dataset']}, {protocol}"
                changes = [f"{cells[k]['change'][protocol]:+.2f}" if k in cells else "-" for k in kinds[1:]]
                plain = f"{cells['float32']['mAP'][protocol]:.2f}"
                rows.append([name, f"`{recipe}`", plain, *("0.00" if c[1:] == "0.00" else c for c in changes)])
    note = "mAP in percent with float32, and what each storage changes of it."
    sizes = {row["storage"]: row["bytes"] for result in files for row in result["rows"] if row["dim"] == 512}
    headings = [f"{kind} ({sizes.get(kind, '-')} bytes)" for kind in kinds]
    return Table("Compact vectors of 512 numbers", ["set", "recipe", *headings], rows, note, sources(files))


def growth(results: Results) -> Table:
    """Time, memory and disk by the number of images."""
    found = results.other.get("growth-cpu")
    rows = [
        [
            row["storage"],
            f"{row['images']:,}",
            f"{row['adding, images per second']:.0f}",
            f"{row['adding, memory in MB']['most']:.0f}",
            f"{row['on disk, MB']:.1f}",
            f"{row['on disk, bytes per image']:.0f}",
            f"{row['first search, seconds']:.2f}",
            short(row["exact search, ms"]),
            f"{row['searching, memory in MB']:.0f}",
        ]
        for row in (found["rows"] if found else [])
    ]
    headings = ["storage", "images", "added per second", "memory while adding, MB", "on disk, MB", "bytes per image"]
    headings += ["first search, s", "exact search, ms", "memory while searching, MB"]
    note = "Synthetic vectors. Memory beyond mapped files, the most that was held; on disk with metadata and cache."
    return Table("Growth of an index", headings, rows, note, sources([found] if found else []))


STORES = ("embedded", "embedded-1m", "postgresql", "postgresql-1m", "milvus", "milvus-hnsw", "milvus-1m")


def stores(results: Results) -> Table:
    """Any engine at scale: what an image costs, and a query."""
    rows: list[list[str]] = []
    files = []
    for engine in STORES:
        found = results.other.get(f"scale-{engine}")
        if found is None:
            rows.append([engine, *[MISSING] * (len(STORE_HEADINGS) - 1)])
            continue
        files.append(found)
        share, graph = found["on disk, share of the vectors"], found["search structure, bytes per image"]
        server = found.get("memory of the server, MB")
        rate = next(value for key, value in found.items() if key.startswith("approximate, queries per second"))
        rows.append(
            [
                engine,
                f"{found['vectors']:,}",
                f"{found['adding, vectors per second']:.0f}",
                f"{found['building the search structure, seconds']:.0f}",
                *("-" if value is None else f"{value:.0f}" for value in (share and share * 4 * found["dim"], graph)),
                *(_latency(found[name]) if name in found else "-" for name in STORE_QUERIES.values()),
                f"{rate:.0f}",
                "-" if server is None else f"{server:.0f}",
            ]
        )
    note = (
        "Synthetic vectors of 512 numbers, 100 results of a query. Queries: p50 / p99 in milliseconds, and the share "
        "of the right answers. `-`: the server does not tell, there is none, or it was not measured."
    )
    return Table("The same vectors in every store", STORE_HEADINGS, rows, note, sources(files))


STORE_QUERIES = {
    "exact": "exact",
    "approximate": "approximate",
    "1 in 60 passes a filter": "approximate, 1 in 60 passes",
    "1 in 2 passes": "approximate, 1 in 2 passes",
}
STORE_HEADINGS = ["store", "images", "added per second", "building, s", "bytes per image on disk", "of it to search"]
STORE_HEADINGS += [*STORE_QUERIES, "queries/s, 4 threads", "server's memory, MB"]


def _latency(found: Result) -> str:
    return f"{short(found['p50 ms'])} / {short(found['p99 ms'])}, {found['recall']:.3f}"


def scale_ray(results: Results) -> Table:
    """Describing by Ray, beside the plain loop on the same pictures."""
    found = results.other.get("scale-ray")
    rows = []
    if found:
        runs = {name: run for name, run in found.items() if isinstance(run, dict) and "pictures per second" in run}
        for name, run in runs.items():
            rows.append([name, f"{run['described']:,}", f"{run['pictures per second']:.1f}", f"{run['seconds']:.0f}"])
        for name in ("efficiency of 2 workers", "overhead of ray on one core", "overhead of ray on all cores"):
            rows.append([name, "", f"{100 * found[name]:.0f} %", ""])
        worst = found["largest difference of a vector"]
        same = "different pictures" if worst is None else f"{worst:.1g}"
        rows.append(["largest difference of a vector", f"{found['pictures in the index of ray']:,}", same, ""])
    headings = ["", "pictures", "pictures/s", "seconds in all"]
    note = (
        "Made pictures of 96 pixels and a light network, so that the engine's own work shows; rates without the start."
    )
    return Table("Describing by Ray", headings, rows, note if found else "", sources([found] if found else []))


TABLES: dict[str, Callable[[Results], Table]] = {
    "performance": performance,
    "learned": learned,
    "training": training,
    "learned-landmarks": learned_landmarks,
    "rerankings": rerankings,
    "seeds": seeds,
    "whitening": whitening,
    "recipes": recipes,
    "engines": engines,
    "compact": compact,
    "growth": growth,
    "stores": stores,
    "scale-ray": scale_ray,
}
