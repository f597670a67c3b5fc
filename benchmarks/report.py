"""Tables from results/: what was measured here, beside what the paper published.

    results = load_results("results")
    print(markdown(TABLES["table1"](results)))

`rewrite(text, results)` renews every block of a document between `<!-- table:NAME -->` and `<!-- /table -->`; a test
compares README and docs with it, so that no number there can differ from its result file. Nothing is typed in by hand.
Columns and rows without a result file are not printed.

The commands that made the results are numbered and printed once, by the block `<!-- table:commands -->` at the end of
docs/results.md; a table names their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import measured, paper, planning
from benchmarks.results import Result, Results, Table, difference, number, sources
from cooc.bench.plan import MISSING
from cooc.errors import InputError, UnknownNameError

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
    """One line for each row of the paper, in the columns that were measured."""
    found = [measure(row, table.columns, results) for row in table.rows]
    shown = [i for i in range(len(table.columns)) if any(ours[i] for ours, _ in found)]
    rows = [
        _beside(row, [(ours[i], row.values[i]) for i in shown], files)
        for row, (ours, files) in zip(table.rows, found, strict=True)
    ]
    used = [file for _, files in found for file in files]
    headings = ["method", "dim", *(table.columns[i] for i in shown)]
    return Table(table.title, headings, rows if shown else [], PUBLISHED, sources(used))


def _rest(table: paper.Published) -> paper.Published:
    """Rows that no other table of the paper has."""
    others = [row for other in paper.TABLES.values() if other is not table for row in other.rows]
    known = {(row.method, row.dim) for row in others}
    return replace(table, rows=tuple(row for row in table.rows if (row.method, row.dim) not in known))


PUBLISHED = "mAP in percent as measured here (as published). E, M, H: easy, medium, hard."


def _beside(row: paper.Row, cells: Sequence[tuple[Result | None, float | None]], files: Sequence[Result]) -> list[str]:
    """A row of the paper: ours (theirs). A smaller vector than the paper's is shown as such."""
    size = files[0]["dim"] if files else row.dim
    dim = str(row.dim) if size == row.dim else f"{size} ({row.dim})"
    return [row.method, dim, *(f"{number(ours['mAP']) if ours else '-'} ({number(theirs)})" for ours, theirs in cells)]


README = (  # the rows that tell the story
    ("table1", "crow", 512),
    ("table1", "ChCO-SC_T + SpTD", 512),
    ("table3", "BP(AC_T) + SpTD", 4096),
    ("table3", "BP(AC_T) + SpTD + AQE", 4096),
    ("table4", "BP(AC_T) learned + ms", 8192),
)


def readme(results: Results) -> Table:
    """The short one: rows and sets that were measured."""
    rows: list[list[str]] = []
    used: list[Result] = []
    for name, method, dim in README:
        row = next(row for row in paper.TABLES[name].rows if (row.method, row.dim) == (method, dim))
        ours, files = measure(row, paper.OXFORD, results)
        if any(ours):
            rows.append(_beside(row, list(zip(ours, row.values, strict=False)), files))
            used += files
    return Table("Measured (published)", ["method", "dim", *paper.OXFORD], rows, PUBLISHED, sources(used))


def reference(results: Results) -> Table:
    """Differences from reference values with both sets of weights; what is off by more than a point is marked."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    used: list[Result] = []
    for weights, suffix in paper.WEIGHTS.items():
        for row in paper.REFERENCE[weights].rows:
            named = replace(row, recipes=tuple(recipe + suffix for recipe in row.recipes))
            ours, files = measure(named, paper.OXFORD, results)
            if any(ours):
                cells = found.setdefault((row.method, row.dim), {})
                cells[weights] = " / ".join(map(partial(difference, tolerance=TOLERANCE), ours, row.values))
                used += files
    rows = [[m, str(dim), *(cells.get(weights, "-") for weights in paper.WEIGHTS)] for (m, dim), cells in found.items()]
    note = f"Differences in mAP: {' / '.join(paper.OXFORD)}; ! where it is more than {TOLERANCE:g} point."
    return Table("Against another implementation", ["method", "dim", *paper.WEIGHTS], rows, note, sources(used))


TABLES: dict[str, Callable[[Results], Table]] = {
    "readme": readme,
    **{name: partial(published, table) for name, table in paper.TABLES.items() if name != "table6"},
    "table6": partial(published, _rest(paper.TABLES["table6"])),
    "reference": reference,
    **measured.TABLES,
    **planning.TABLES,
}


def make(name: str, results: Results) -> Table:
    if name not in TABLES:
        raise UnknownNameError("table", name, TABLES)
    return TABLES[name](results)


# Documents


def commands(results: Results) -> list[str]:
    """Every command that a table comes from, once, in the order of the tables: the first has the number 1."""
    return list(dict.fromkeys(source for make_table in TABLES.values() for source in make_table(results).sources))


def markdown(table: Table, numbered: Sequence[str] = (), link: str = "results.md#commands") -> str:
    """`numbered`: the commands that `link` leads to; those of the table are named by their numbers."""
    if not table.rows:
        return f"**{table.title}**: {MISSING}.\n"
    lines = [f"**{table.title}**", ""]
    lines += [f"| {' | '.join(row)} |" for row in (table.headings, ["---"] * len(table.headings), *table.rows)]
    numbers = sorted(numbered.index(source) + 1 for source in table.sources if source in numbered)
    made = f"Commands [{', '.join(map(str, numbers))}]({link})." if numbers else ""
    said = " ".join(filter(None, (table.note, made)))
    return "\n".join([*lines, *(["", said] if said else [])]) + "\n"


def documents(root: str | Path = ".") -> list[Path]:
    """The documents that may hold generated tables."""
    base = Path(root)
    return [path for path in (base / "README.md", *sorted((base / "docs").glob("*.md"))) if path.is_file()]


def rewrite(text: str, results: Results, where: str = "the document") -> str:
    """The text with every block made again from the results."""
    opened, closed = text.count("<!-- table:"), text.count("<!-- /table -->")
    if not opened == closed == len(BLOCK.findall(text)):
        raise InputError(f"{where}: every <!-- table:NAME --> needs its <!-- /table -->, both on lines of their own.")
    numbered = commands(results)
    link = LINKS.get(Path(where).name, "results.md#commands")

    def block(name: str) -> str:
        if name == "commands":
            return "".join(f"{i}. {command}\n" for i, command in enumerate(numbered, 1))
        return markdown(make(name, results), numbered, link)

    return BLOCK.sub(lambda found: f"{found[1]}{block(found[2])}{found[4]}", text)


LINKS = {"README.md": "docs/results.md#commands", "results.md": "#commands"}
