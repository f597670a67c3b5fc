"""Tables from results/: what the paper published, what was measured here, and the difference.

    results = load_results("results")
    print(markdown(TABLES["table1"](results)))

`rewrite(text, results)` renews every block of a document between `<!-- table:NAME -->` and `<!-- /table -->`; a test
compares README and docs with it, so that no number there can differ from its result file. Nothing is ever typed in by
hand: a row without a result file says `not measured`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import measured, paper, planning
from benchmarks.results import Result, Results, Table, compared, load_results, number, sources
from cooc.bench.plan import MISSING
from cooc.errors import InputError, UnknownNameError

__all__ = ["TABLES", "Results", "Table", "documents", "load_results", "markdown", "rewrite"]

TOLERANCE = 1.0  # mAP points that a reference value may be missed by
BLOCK = re.compile(r"(<!-- table:([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


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
        rows.append([row.method, str(row.dim), "paper", *map(number, row.values)])
        if row.recipes:
            ours, files = measure(row, table.columns, results)
            dim = files[0]["dim"] if files else row.dim
            rows.append(["", str(dim), "ours", *map(compared, ours, row.values)])
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
            f"{number(mine['mAP']) if mine else MISSING} ({number(theirs)})"
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
            rows.append([row.method, str(row.dim), weights, "reference", *map(number, row.values)])
            rows.append(["", "", "", "ours", *(map(partial(compared, tolerance=TOLERANCE), ours, row.values))])
            used += files
    note = f"mAP in percent; in brackets the difference, with ! where it is more than {TOLERANCE:g} point."
    title = "Reference values of another implementation, both sets of weights"
    return Table(title, ["method", "dim", "weights", "", *paper.OXFORD], rows, note, sources(used))


TABLES: dict[str, Callable[[Results], Table]] = {
    "readme": readme,
    **{name: partial(published, table) for name, table in paper.TABLES.items()},
    "reference": reference,
    **measured.TABLES,
    **planning.TABLES,
}


def make(name: str, results: Results) -> Table:
    if name not in TABLES:
        raise UnknownNameError("table", name, TABLES)
    return TABLES[name](results)


# Documents


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
