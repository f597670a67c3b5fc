"""Tables from results/: what the paper published, what was measured here, and the difference.

    results = load_results("results")
    print(markdown(TABLES["table1"](results)))

`rewrite(text, results)` renews every block of a document between `<!-- table:NAME -->` and `<!-- /table -->`; a test
compares README and docs with it, so that no number there can differ from its result file. Nothing is ever typed in by
hand: a row without a result file says `not measured`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cooc.benchmark import paper
from cooc.errors import DatasetError, InputError, UnknownNameError

__all__ = ["TABLES", "Results", "Table", "documents", "load_results", "markdown", "rewrite"]

MISSING = "not measured"
TOLERANCE = 1.0  # mAP points that a reference value may be missed by
LANDMARKS = {"Landmarks": ("gldv2_dev", "plain")}
MEASURED = {**{name: paper.COLUMNS[name] for name in paper.OXFORD}, **LANDMARKS}
BLOCK = re.compile(r"(<!-- table:([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)

Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""
    sources: list[str] = field(default_factory=list)  # command, commit and machine of its result files


@dataclass(frozen=True)
class Results:
    """Result files by data set and recipe, those of `cooc bench speed` by device, and the others by file name."""

    by_name: dict[tuple[str, str], Result]
    speed: dict[str, Result]
    other: dict[str, Result] = field(default_factory=dict)

    def choose(self, recipes: Sequence[str], datasets: Iterable[str]) -> str | None:
        """The first of the recipes that was measured on any of the data sets."""
        known = set(datasets)
        return next((name for name in recipes if any((dataset, name) in self.by_name for dataset in known)), None)

    def score(self, recipe: str, column: tuple[str, str], expansions: Sequence[str] = ("none",)) -> Result | None:
        """mAP, interval, ... of a recipe in a column, with the first of the expansions that was measured."""
        dataset, protocol = column
        measured: dict[str, Result] = self.by_name.get((dataset, recipe), {}).get("results", {})
        return next((measured[name][protocol] for name in expansions if name in measured), None)


def load_results(folder: str | Path) -> Results:
    """All result files of a folder. One that cannot be read is an error: a table must not lose a row silently."""
    by_name: dict[tuple[str, str], Result] = {}
    speed: dict[str, Result] = {}
    other: dict[str, Result] = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if path.name.startswith("speed-"):
                speed[path.stem.removeprefix("speed-")] = content
            elif "--" in path.name:
                by_name[content["dataset"], content["recipe"]] = content
            else:
                other[path.stem] = content
        except (ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{path} is no result file of cooc ({error!r}). Measure it again, or remove it."
            ) from error
    return Results(by_name, speed, other)


# The paper's tables


def measure(row: paper.Row, headings: Sequence[str], results: Results) -> tuple[list[Result | None], list[Result]]:
    """Our scores for a row, one for each column, and the result files that they come from. One recipe for all."""
    columns = [paper.COLUMNS[heading] for heading in headings]
    recipe = results.choose(row.recipes, [dataset for dataset, _ in columns])
    if recipe is None:
        return [None] * len(columns), []
    files = [r for dataset in dict.fromkeys(d for d, _ in columns) if (r := results.by_name.get((dataset, recipe)))]
    return [results.score(recipe, column, row.expansions) for column in columns], files


def published(table: paper.Published, results: Results) -> Table:
    """Two lines for each row of the paper: its values, and ours with the difference."""
    rows: list[list[str]] = []
    used: list[Result] = []
    for row in table.rows:
        rows.append([row.method, str(row.dim), "paper", *map(_number, row.values)])
        if row.recipes:
            ours, files = measure(row, table.columns, results)
            dim = files[0]["dim"] if files else row.dim
            rows.append(["", str(dim), "ours", *map(_compared, ours, row.values)])
            used += files
    note = "mAP in percent; in brackets the difference from the paper."
    return Table(table.title, ["method", "dim", "", *table.columns], rows, note, sources(used))


README = (  # the rows that tell the story
    ("table1", "ucrow", 512),
    ("table1", "crow", 512),
    ("table1", "ChCO-SC_T", 512),
    ("table1", "ChCO-SC_T + SpTD", 512),
    ("table2", "BP(AC_T) + SpTD", 512),
    ("table3", "BP(AC_T) + SpTD", 4096),
    ("table3", "BP(AC_T) + SpTD + AQE", 4096),
    ("table4", "BP(AC_T) + ms", 8192),
    ("table4", "BP(AC_T) + alphaQE + ms", 8192),
    ("table4", "BP(AC_T) learned + ms", 8192),
    ("table4", "BP(AC_T) learned + alphaQE + ms", 8192),
)


def readme(results: Results) -> Table:
    """The short one: rows and sets that were measured."""
    rows: list[list[str]] = []
    used: list[Result] = []
    for name, method, dim in README:
        row = next(row for row in paper.TABLES[name].rows if (row.method, row.dim) == (method, dim))
        ours, files = measure(row, paper.OXFORD, results)
        if not any(ours):
            continue
        size = files[0]["dim"]
        cells = [
            f"{_number(mine['mAP']) if mine else MISSING} ({_number(theirs)})"
            for mine, theirs in zip(ours, row.values, strict=False)
        ]
        rows.append([method, str(dim) if size == dim else f"{size} ({dim})", *cells])
        used += files
    note = "mAP in percent as measured here, in brackets as published. E, M, H: easy, medium, hard."
    return Table("Measured (published)", ["method", "dim", *paper.OXFORD], rows, note, sources(used))


def reference(results: Results) -> Table:
    """Both sets of weights against reference values; what is off by more than a point is marked."""
    rows: list[list[str]] = []
    used: list[Result] = []
    for weights, suffix in paper.WEIGHTS.items():
        for row in paper.REFERENCE[weights].rows:
            named = replace(row, recipes=tuple(recipe + suffix for recipe in row.recipes))
            ours, files = measure(named, paper.OXFORD, results)
            rows.append([row.method, str(row.dim), weights, "reference", *map(_number, row.values)])
            rows.append(["", "", "", "ours", *(map(partial(_compared, tolerance=TOLERANCE), ours, row.values))])
            used += files
    note = f"mAP in percent; in brackets the difference, with ! where it is more than {TOLERANCE:g} point."
    title = "Reference values of another implementation, both sets of weights"
    return Table(title, ["method", "dim", "weights", "", *paper.OXFORD], rows, note, sources(used))


# What else was measured


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
            shih = "out of memory" if timing.shih is None else _short(timing.shih)
            known = {"convolution float32": _short(timing.ours), "Shih": shih}
            rows.append([*size, "paper: GTX 1080 Ti", *(known.get(form, "-") for form in forms), "-"])
        for device, cells in timed.items():
            found = [cells.get((channels, batch, form), {}) for form in forms]
            if not any(found):  # a run of other sizes
                continue
            floor = next((cell["floor"] for cell in found if cell.get("floor")), None)
            machine = results.speed[device]["machine"]["accelerator"] or "CPU"
            rows.append([*size, f"ours: {machine}", *(_short(cell.get("ms")) for cell in found), _short(floor)])
    note = "Milliseconds for one image, 32 x 24 positions, radius 4. Memory floor: the time to read A and to write C_T."
    headings = ["channels", "batch", "", *forms, "memory floor"]
    return Table("Time of the co-occurrence tensor", headings, rows, note, sources(results.speed.values()))


def learned(results: Results) -> Table:
    """Every learned filter beside the direct co-occurrences of the same recipe, with bootstrap intervals."""
    rows: list[list[str]] = []
    used: list[Result] = []
    names = sorted({recipe for (_, recipe), r in results.by_name.items() if _form(r) == "learned"})
    for name in names:
        pairs = {dataset: r for (dataset, recipe), r in results.by_name.items() if recipe == name}
        twins = {dataset: _twin(r, results) for dataset, r in pairs.items()}
        for expansion in sorted({e for r in pairs.values() for e in r["results"]}, key=_plain_first):
            for kind, group in (("direct", twins), ("learned", pairs)):
                cells = []
                for dataset, protocol in MEASURED.values():
                    measured = (group.get(dataset) or {}).get("results", {}).get(expansion, {})
                    cells.append(_interval(measured.get(protocol)))
                dim = next(str(r["dim"]) for r in pairs.values())
                rows.append([name if kind == "direct" else "", dim, expansion, kind, *cells])
        used += [r for r in (*pairs.values(), *twins.values()) if r]
    note = "mAP in percent with its 95% bootstrap interval over queries; direct and learned differ in the filter alone."
    return Table(
        "Direct and learned co-occurrences", ["recipe", "dim", "expansion", "", *MEASURED], rows, note, sources(used)
    )


def recipes(results: Results) -> Table:
    """Everything that was measured here, without expansion."""
    rows: list[list[str]] = []
    known = {dataset for dataset, _ in MEASURED.values()}
    names = sorted({recipe for dataset, recipe in results.by_name if dataset in known})
    for name in names:
        cells = [_interval(results.score(name, column)) for column in MEASURED.values()]
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
            _short(row["ms"]),
            row["note"] if row["low"] is None else f"{_short(row['low'])} .. {_short(row['high'])}",
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
            _short(row["exact search, ms"]),
            f"{row['searching, memory in MB']:.0f}",
        ]
        for row in (found["rows"] if found else [])
    ]
    headings = ["storage", "images", "added per second", "memory while adding, MB", "on disk, MB", "bytes per image"]
    headings += ["first search, s", "exact search, ms", "memory while searching, MB"]
    note = "Synthetic vectors. Memory beyond mapped files, the most that was held; on disk with metadata and cache."
    return Table("Growth of an index", headings, rows, note, sources([found] if found else []))


TABLES: dict[str, Callable[[Results], Table]] = {
    "readme": readme,
    **{name: partial(published, table) for name, table in paper.TABLES.items()},
    "reference": reference,
    "performance": performance,
    "learned": learned,
    "recipes": recipes,
    "engines": engines,
    "compact": compact,
    "growth": growth,
}


def make(name: str, results: Results) -> Table:
    if name not in TABLES:
        raise UnknownNameError("table", name, TABLES)
    return TABLES[name](results)


def _form(result: Result) -> str:
    return str(result.get("config", {}).get("cooccurrence"))


def _twin(result: Result, results: Results) -> Result | None:
    """The same recipe with direct co-occurrences, on the same data set."""

    def key(other: Result) -> dict[str, Any]:
        config = {k: v for k, v in other["config"].items() if k not in ("cooccurrence", "filter", "whitening", "dtype")}
        return config | {"on": other["dataset"], "dim": other["dim"]}

    return next((r for r in results.by_name.values() if _form(r) == "direct" and key(r) == key(result)), None)


def _plain_first(expansion: str) -> tuple[bool, str]:
    return expansion != "none", expansion


# Numbers and documents


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value + 1e-9:.1f}"  # 59.65 is 59.7, not 59.6


def _short(ms: float | None) -> str:
    """Three digits, whatever the size; never 1e+03."""
    if ms is None:
        return "-"
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def _compared(ours: Result | None, theirs: float | None, tolerance: float = math.inf) -> str:
    if ours is None:
        return MISSING
    if theirs is None:
        return _number(ours["mAP"])
    difference = round(ours["mAP"] - theirs, 1) + 0.0  # what is shown is what is judged; no -0.0
    return f"{_number(ours['mAP'])} ({difference:+.1f}{' !' if abs(difference) > tolerance else ''})"


def _interval(measured: Result | None) -> str:
    if measured is None:
        return MISSING
    low, high = measured["interval"]
    return f"{_number(measured['mAP'])} [{low:.1f}, {high:.1f}]"


def sources(used: Iterable[Result]) -> list[str]:
    """How those results were made, each run once; of a path on that machine only the last part."""
    lines = []
    for result in used:
        machine = result.get("machine") or {}
        on = machine.get("accelerator") or machine.get("cpu") or "unknown machine"
        command = re.sub(r"(?<=[ =])/(?:[^/ ]+/)*", "", result.get("command", "unknown"))
        lines.append(f"`{command}` (commit {result.get('commit', 'unknown')}, {on})")
    return list(dict.fromkeys(lines))


def markdown(table: Table) -> str:
    if not table.rows:
        return f"**{table.title}**: {MISSING}.\n"
    lines = [f"**{table.title}**", ""]
    lines += [f"| {' | '.join(row)} |" for row in (table.headings, ["---"] * len(table.headings), *table.rows)]
    lines += ["", table.note] if table.note else []
    if table.sources:
        lines += ["", "<details><summary>Commands and commits</summary>", ""]
        lines += [*(f"- {source}" for source in table.sources), "", "</details>"]
    return "\n".join(lines) + "\n"


def documents(root: str | Path = ".") -> list[Path]:
    """The documents that may hold generated tables."""
    base = Path(root)
    return [path for path in (base / "README.md", *sorted((base / "docs").glob("*.md"))) if path.is_file()]


def rewrite(text: str, results: Results, where: str = "the document") -> str:
    """The text with every block made anew from the results."""
    opened, closed = text.count("<!-- table:"), text.count("<!-- /table -->")
    if not opened == closed == len(BLOCK.findall(text)):
        raise InputError(f"{where}: every <!-- table:NAME --> needs its <!-- /table -->, both on lines of their own.")
    return BLOCK.sub(lambda block: f"{block[1]}{markdown(make(block[2], results))}{block[4]}", text)
