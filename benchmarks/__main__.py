"""python -m benchmarks COMMAND: how cooc measures itself."""

from __future__ import annotations

from collections.abc import Callable

import typer

from benchmarks.commands.calibrate import calibrate
from benchmarks.commands.cost import (
    bench_compact,
    bench_duplicates,
    bench_engine_map,
    bench_engines,
    bench_features,
    bench_growth,
    bench_hard,
    bench_ladder,
    bench_maps,
    bench_qualities,
    bench_queries,
    bench_startup,
    make_thumbnails,
)
from benchmarks.commands.index import bench_index, bench_search
from benchmarks.commands.reporting import figures, tables
from benchmarks.commands.scale import bench_scale
from benchmarks.commands.serve import bench_serve
from benchmarks.commands.speed import speed
from benchmarks.commands.store import bench_store
from benchmarks.commands.verify import bench_kinds, verify_flat, verify_probability, verify_speed
from benchmarks.commands.words import fit_words
from cooc.cli import run

app = typer.Typer(
    name="python -m benchmarks",
    help="How cooc measures itself; every command writes to results/.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "speed": speed,
    "engines": bench_engines,
    "engine-map": bench_engine_map,
    "index": bench_index,
    "search": bench_search,
    "store": bench_store,
    "scale": bench_scale,
    "serve": bench_serve,
    "maps": bench_maps,
    "hard-queries": bench_hard,
    "thumbnails": make_thumbnails,
    "compact": bench_compact,
    "growth": bench_growth,
    "features": bench_features,
    "startup": bench_startup,
    "queries": bench_queries,
    "duplicates": bench_duplicates,
    "qualities": bench_qualities,
    "ladder": bench_ladder,
    "calibrate": calibrate,
    "verify-probability": verify_probability,
    "verify-flat": verify_flat,
    "verify-speed": verify_speed,
    "kinds": bench_kinds,
    "fit-words": fit_words,
    "tables": tables,
    "figures": figures,
}
for name, command in COMMANDS.items():
    app.command(name)(command)

if __name__ == "__main__":
    run(app)
