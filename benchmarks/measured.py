"""Tables of what was measured beside the paper's: speed, learned filters, engines, storage, experiments."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import paper
from benchmarks.results import Result, Results, Table, number, sources
from cooc.bench.plan import short
from cooc.bench.verified import STAGES
from cooc.verification.words import ENGINE as WORDS

OXFORD = {name: paper.COLUMNS[name] for name in paper.OXFORD}


FORMS = ("closed form", "direct + rank 32", "convolution float32", "Shih")


def performance(results: Results) -> Table:
    """Milliseconds of C_T for one image: the paper's machine, then each of ours, at the sizes that the paper has."""
    best: dict[tuple[int, int], dict[str, dict[str, Result]]] = {}  # size -> machine -> form -> the quickest run
    used: list[Result] = []
    for result in results.speed.values():
        machine = result["machine"]["accelerator"] or "CPU"
        timed = [row for row in result["rows"] if row["section"] == "cooccurrence" and row["name"] in FORMS]
        for row in timed:
            cells = best.setdefault((row["channels"], row["batch"]), {}).setdefault(machine, {})
            known = cells.get(row["name"], {}).get("ms")
            if known is None or (row["ms"] is not None and row["ms"] < known):
                cells[row["name"]] = row | {"run": result}
    timed_forms = {form for machines in best.values() for cells in machines.values() for form in cells}
    forms = [form for form in FORMS if form in timed_forms]
    rows: list[list[str]] = []
    for timing in sorted(paper.PERFORMANCE, key=lambda timing: (timing.channels, timing.batch)):
        size = [str(timing.channels), str(timing.batch)]
        machines = best.get((timing.channels, timing.batch), {})
        if machines:
            shih = "out of memory" if timing.shih is None else short(timing.shih)
            theirs = {"convolution float32": short(timing.ours), "Shih": shih}
            rows.append([*size, "paper: GTX 1080 Ti", *(theirs.get(form, "-") for form in forms), "-"])
        for machine, cells in machines.items():
            floor = next((cell["floor"] for cell in cells.values() if cell.get("floor")), None)
            used += [cell["run"] for cell in cells.values()]
            times = (short(cells.get(form, {}).get("ms")) for form in forms)
            rows.append([*size, f"ours: {machine}", *times, short(floor)])
    note = (
        "Milliseconds for one image, 32 x 24 positions, radius 4, the quickest of the runs. Memory floor: the time to "
        "read A and to write C_T."
    )
    headings = ["channels", "batch", "", *forms, "memory floor"]
    return Table("Time of the co-occurrence tensor", headings, rows, note, sources(used))


SHIPPED = "contrastive-8e-3"
TOP = 6  # trainings in the table, by mAP on landmarks held out; all of them are in results/experiment-*.json


def learned(results: Results) -> Table:
    """The best filters that were trained and the one that ships, against the direct form in the same run."""
    files, trained = _trainings(results)
    if not files:
        return Table("Trained filters", [], [])
    direct = files[0]["rows"]["direct"]["scores"]
    protocol = OXFORD["ROxford M"]
    cells = [number(direct[vector][protocol[0]]["none"][protocol[1]]["mAP"]) for vector in direct]
    before = next(iter(trained.values()))["history"][0].get("mAP", float("nan"))
    rows = [["direct", "-", "-", number(before), *cells]]
    ranked = sorted(trained, key=lambda name: -trained[name]["history"][trained[name]["best"]].get("mAP", 0.0))
    shown = ranked[:TOP] + [name for name in ranked[TOP:] if name == SHIPPED]
    for name in shown:
        row = trained[name]
        gains = [_gain(row["scores"][vector][protocol[0]]["none"][protocol[1]]) for vector in direct]
        after = number(row["history"][row["best"]].get("mAP"))
        rows.append([name + " (ships)" * (name == SHIPPED), str(row["best"]), f"{row['seconds']:.0f}", after, *gains])
    note = (
        "mAP in percent: of landmarks held out, and of ROxford Medium by vector, without expansion. Behind the direct "
        "form what a filter gains, with the 95% bootstrap interval over queries."
    )
    headings = ["filter", "best epoch", "seconds", "held out", *direct]
    return Table("Trained filters", headings, rows, note, sources(files))


def _trainings(results: Results) -> tuple[list[Result], dict[str, Result]]:
    """The runs, and the filters that they trained; of two trainings of one name the better one counts."""
    names = ("experiment-learning", "experiment-losses", "experiment-factored", "experiment-factored-12-epochs")
    files = [f for n in names if (f := results.other.get(n))]
    trained: dict[str, Result] = {}
    for file in files:
        for name, row in file["rows"].items():
            if "history" in row and "full filter" not in name:
                best = row["history"][row["best"]].get("mAP", 0.0)
                if name not in trained or best > trained[name]["history"][trained[name]["best"]].get("mAP", 0.0):
                    trained[name] = row
    return files, trained


def _gain(score: Result) -> str:
    gain, low, high = score["gain"]
    return f"{gain:+.1f} [{low:+.1f}, {high:+.1f}]"


def seeds(results: Results) -> Table:
    """The sketch's hashes are drawn at random: how much that draw is worth, beside the reference values."""
    rows: list[list[str]] = []
    files = []
    for weights, file in {"Oxford/Caffe": "experiment-seeds", "torchvision": "experiment-seeds-vgg16"}.items():
        if found := results.other.get(file):
            files.append(found)
            rows += _draws(weights, found)
    note = "mAP in percent of five draws (of the other implementation, whose draw is not known)."
    return Table("Draws of the sketch", ["method", "weights", "dim", *OXFORD], rows, note, sources(files))


def _draws(weights: str, found: Result) -> list[list[str]]:
    reference = {(row.method, row.dim): row.values for row in paper.REFERENCE[weights].rows}
    groups: dict[tuple[str, int], dict[str, list[float]]] = {}
    for label, row in found["rows"].items():
        case, dim, variant = label.split(", ", 2)
        values = [row["scores"][d]["none"][p]["mAP"] for d, p in OXFORD.values()]
        groups.setdefault((case, int(dim)), {})[variant] = values
    rows: list[list[str]] = []
    for (case, dim), variants in groups.items():
        if (known := reference.get((case, dim))) is None:
            continue
        draws = [values for name, values in variants.items() if name.removeprefix("seed ").isdigit()]
        columns = zip(zip(*draws, strict=True), known, strict=True)
        cells = [f"{number(min(ours))} .. {number(max(ours))} ({number(theirs)})" for ours, theirs in columns]
        rows.append([case, weights, str(dim), *cells])
    return rows


WHITENINGS = (  # those that answer a question; all are in results/experiment-whitening.json
    "no whitening",
    "PCA 4096",
    "shrunk 0.01",
    "shrunk 0.01, 1250 pictures",
    "shrunk 0.01, sizes 1024, 724",
    "PCA 8192 of each scale",
    "each scale, shrunk 0.01",
    "Lw shrunk 0.01",
)


def whitening(results: Results) -> Table:
    """Three scales and 8192 dimensions: which whitening, fitted on how many pictures, at which size."""
    found = results.other.get("experiment-whitening")
    rows = []
    for label, row in (found["rows"] if found else {}).items():
        method, _, kind = label.partition(", ")
        if kind.removeprefix(f"{SHIPPED}, ") in WHITENINGS:
            named = f"{method} learned, {kind.removeprefix(f'{SHIPPED}, ')}" if kind.startswith(SHIPPED) else label
            rows.append([named, *(number(row["scores"][d]["none"][p]["mAP"]) for d, p in OXFORD.values())])
    note = "mAP in percent, three scales unless sizes are named, 8192 dimensions unless another number is."
    used = sources([found] if found else [])
    return Table("Whitening of multi-scale bilinear vectors", ["method, whitening", *OXFORD], rows, note, used)


def rerankings(results: Results) -> Table:
    """Every expansion and re-ranking, for the recipes that were measured with all of them."""
    shown = {"roxford5k": ("ROxford M", "roxford-medium"), "gldv2_dev": ("Landmarks", "plain")}
    used = {
        (dataset, recipe): result
        for (dataset, recipe), result in results.by_name.items()
        if dataset in shown and "k-reciprocal" in result["results"]
    }
    names = dict.fromkeys(name for result in used.values() for name in result["results"])
    rows = []
    for name in names:
        scores = [result["results"].get(name, {}).get(shown[dataset][1]) for (dataset, _), result in used.items()]
        rows.append([name, *("-" if score is None else number(score["mAP"]) for score in scores)])
    headings = ["", *(f"{shown[dataset][0]}, `{recipe}`" for dataset, recipe in used)]
    note = "mAP in percent. average-N and alpha-N: query expansion with N neighbours; the others re-rank."
    return Table("Expansion and re-ranking", headings, rows, note, sources(used.values()))


def engines(results: Results) -> Table:
    """Networks on a CPU by every engine, at the largest size that was timed."""
    found = results.other.get("engines-cpu")
    timed = found["rows"] if found else []
    largest = max((row["width"] * row["height"] for row in timed), default=0)
    rows = [
        [
            row["backbone"],
            row["engine"],
            short(row["ms"]),
            row["note"] if row["low"] is None else f"{short(row['low'])} .. {short(row['high'])}",
            "-" if row["times_faster"] is None else f"{row['times_faster']:.2f}",
        ]
        for row in timed
        if row["width"] * row["height"] == largest
    ]
    size = next((f"{row['width']} x {row['height']}" for row in timed if row["width"] * row["height"] == largest), "")
    note = f"Milliseconds for one picture of {size}; times faster than the default, the first row."
    if found:
        note += f" Load of the machine meanwhile: {', '.join(map(str, found['load']))} on {found['threads']} cores."
    headings = ["network", "engine", "ms", "10 .. 90 %", "times faster"]
    return Table("Networks on a CPU", headings, rows, note, sources([found] if found else []))


def compact(results: Results) -> Table:
    """mAP that each storage changes: a line for each recipe, a number for each set."""
    files = [result for name, result in results.other.items() if name.startswith("compact-")]
    kinds = list(dict.fromkeys(row["storage"] for result in files for row in result["rows"]))
    found: dict[str, dict[str, list[str]]] = {}  # recipe -> storage -> a number for each set
    sets = []
    for result in files:
        protocols = list(result["rows"][0]["mAP"])
        protocol = protocols[len(protocols) // 2]  # of Easy, Medium and Hard the one in the middle
        sets.append(f"{result['dataset']}, {protocol}")
        for row in result["rows"]:
            plain = row["storage"] == "float32"
            value = f"{row['mAP'][protocol]:.2f}" if plain else f"{row['change'][protocol]:+.2f}"
            cells = found.setdefault(row["recipe"], {}).setdefault(row["storage"], [])
            cells.append("0.00" if value[1:] == "0.00" else value)
    rows = [[f"`{name}`", *(" / ".join(cells.get(kind, ["-"])) for kind in kinds)] for name, cells in found.items()]
    note = f"mAP in percent with float32, and what each storage changes of it: {' / '.join(sets)}."
    sizes = {row["storage"]: row["bytes"] for result in files for row in result["rows"] if row["dim"] == 512}
    headings = [f"{kind} ({sizes.get(kind, '-')} bytes)" for kind in kinds]
    return Table("Compact vectors of 512 dimensions", ["recipe", *headings], rows, note, sources(files))


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
        ]
        for row in (found["rows"] if found else [])
    ]
    headings = ["storage", "images", "added per second", "memory while adding, MB", "on disk, MB", "bytes per image"]
    headings += ["first search, s", "exact search, ms"]
    note = "Synthetic vectors. Memory beyond mapped files, the most that was held; on disk with metadata and cache."
    return Table("Growth of an index", headings, rows, note, sources([found] if found else []))


STORES = ("embedded", "embedded-1m", "postgresql", "postgresql-1m", "milvus", "milvus-hnsw", "milvus-1m")


def stores(results: Results) -> Table:
    """Every engine at scale: what an image costs, and a query."""
    rows: list[list[str]] = []
    files = []
    for engine in STORES:
        if (found := results.other.get(f"scale-{engine}")) is None:
            continue
        files.append(found)
        share = found["on disk, share of the vectors"]
        rate = next(value for key, value in found.items() if key.startswith("approximate, queries per second"))
        rows.append(
            [
                engine,
                f"{found['vectors']:,}",
                f"{found['adding, vectors per second']:.0f}",
                f"{found['building the search structure, seconds']:.0f}",
                "-" if share is None else f"{share * 4 * found['dim']:.0f}",
                *(_latency(found[name]) if name in found else "-" for name in STORE_QUERIES.values()),
                f"{rate:.0f}",
            ]
        )
    note = (
        "Synthetic vectors of 512 dimensions, 100 results of a query. Queries: p50 / p99 in milliseconds, and recall. "
        "`-`: the server does not tell, or it took too long."
    )
    return Table("The same vectors in every store", STORE_HEADINGS, rows, note, sources(files))


STORE_QUERIES = {
    "exact": "exact",
    "approximate": "approximate",
    "1 in 60 passes a filter": "approximate, 1 in 60 passes",
}
STORE_HEADINGS = ["store", "images", "added per second", "building, s", "bytes per image on disk"]
STORE_HEADINGS += [*STORE_QUERIES, "queries/s, 4 threads"]


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


def verified(results: Results) -> Table:
    """ROxford easy / medium / hard, stage by stage, for each shortlist and engine; intervals of the last stage."""
    rows: list[list[str]] = []
    used = [result for name, result in results.other.items() if name.startswith("verified/roxford5k--")]
    for result in sorted(used, key=lambda result: result["dim"]):
        scores = result["results"]
        vector, dim = _shortlist(result), str(result["dim"])
        rows.append([vector, dim, "nothing", _three(scores["none"]), *[""] * len(STAGES)])
        engines = [name.removesuffix(f" {STAGES[0]}") for name in scores if name.endswith(STAGES[0])]
        for engine in engines:
            stages = [scores.get(f"{engine} {stage}", {}) for stage in STAGES]
            if earlier := scores.get(f"{engine} second round"):  # what a search was, before it went onward
                stages[STAGES.index("search")] = earlier
            last = [stage for stage in stages if stage][-1]
            known = [protocol["interval"] for protocol in last.values() if "interval" in protocol]
            ends = ", ".join(f"{low:.0f}-{high:.0f}" for low, high in known) or "not kept"
            words = ", and words" if WORDS in engine.split("+") or result.get("words") else ""
            whole = "\\*" if result.get("witnesses") == "whole" else "\\+" if earlier else ""
            rows.append([vector + words + whole, dim, engine, *map(_three, stages), ends])
    headings = ["shortlist", "dim", "verified by", *STAGES, "95 % of the last"]
    note = (
        "ROxford, mAP easy / medium / hard in percent; of nothing verified, that of the cosine. "
        "\\+: a search as it was, two rounds of 60 and nothing onward; "
        "\\*: thorough as it was, too, each witness asked as a whole."
    )
    return Table("Verified by geometry", headings, rows, note if rows else "", sources(used))


def _shortlist(result: Result) -> str:
    return f"`{result['recipe'].split('+')[0]}`" + ", three scales" * (len(result["config"]["scales"]) > 1)


def _three(scores: Result) -> str:
    return " / ".join(number(protocol["mAP"]) for protocol in scores.values())


TABLES: dict[str, Callable[[Results], Table]] = {
    "verified": verified,
    "performance": performance,
    "learned": learned,
    "rerankings": rerankings,
    "seeds": seeds,
    "whitening": whitening,
    "engines": engines,
    "compact": compact,
    "growth": growth,
    "stores": stores,
    "scale-ray": scale_ray,
}
