"""cooc plan: what a collection of any size needs."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table

from cooc.cli import app, err, options, out
from cooc.cli.reporting import show_table
from cooc.errors import InputError


@app.command()
def plan(
    images: Annotated[str, typer.Option(help="How many, by commas.")] = "1e6,1e7,1e8,1e9",
    recipe: options.Recipe = options.DEFAULT,
    storage: Annotated[
        str,
        typer.Option(
            help="float32, float16, int8, int4, pq, postgresql, milvus-hnsw, milvus-ivf_pq, by commas; all by default."
        ),
    ] = "",
    verify: Annotated[
        str, typer.Option(metavar="ENGINES|none", help="Local features that are kept, as `cooc index --verify`.")
    ] = "sift",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that describe; 0: one machine's CPU.")] = 1,
    memory: Annotated[float, typer.Option(help="GB of memory of a machine.")] = 128,
    disk: Annotated[float, typer.Option(help="GB of disk of a machine.")] = 4000,
    replicas: Annotated[int, typer.Option(min=1, help="Copies of everything.")] = 2,
    as_json: options.Json = False,
) -> None:
    """What any number of images needs, from what was measured: bytes, machines, hours, searches per second.

    What was not measured is said to be so. The JSON has the constants, with the result files that they come from.
    """
    from cooc.bench import plan
    from cooc.recipes import find_recipe
    from cooc.verification.engines import parts

    config = find_recipe(recipe).config
    if not config.dim:
        raise InputError(f"Recipe {recipe!r} does not say how long its vectors are: add a dimension, as in +dim=512.")
    counts = [_count(text) for text in images.split(",")]
    features = "" if verify == "none" else "+".join(parts(verify))
    setting = plan.Setting(config.dim, features, memory * 1e9, disk * 1e9, replicas)
    layouts = tuple(storage.split(",")) if storage else tuple(plan.LAYOUTS)
    known = plan.packaged()
    needs = [need for count in counts for need in plan.plan(count, setting, known, layouts)]
    pixels = config.size**2 * 3 // 4 * sum(scale**2 for scale in config.scales)
    hours = [plan.describing_hours(count, config.backbone, pixels, gpus, known, features) for count in counts]
    alone = [plan.describing_hours(count, config.backbone, pixels, gpus, known) for count in counts]
    if as_json:
        found = {
            "recipe": recipe,
            "setting": dataclasses.asdict(setting) | {"gpus": gpus, "pixels of a picture": pixels},
            "describing, hours": dict(zip((f"{count:.0f}" for count in counts), hours, strict=True)),
            "vectors alone, hours": dict(zip((f"{count:.0f}" for count in counts), alone, strict=True)),
            "needs": [dataclasses.asdict(need) for need in needs],
            "constants": known,
        }
        typer.echo(json.dumps(found))
        return
    shown = Table(*plan.HEADINGS, title=f"{recipe}: {config.dim} dimensions for a picture")
    for row in map(plan.cells, needs):
        shown.add_row(*row)
    show_table(shown)
    by = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "a machine without GPU"
    for count, time, vectors in zip(counts, hours, alone, strict=True):
        line = f"Describing {plan.images_text(count)} pictures of {pixels:,.0f} pixels by {by}: "
        line += plan.hours_text(time)
        if time is None and vectors is not None:
            line += f" with local features, {plan.hours_text(vectors)} without"
        out.print(line, markup=False)
    err.print(plan.note(setting), markup=False)
    err.print(f"From {', '.join(sorted({constant['source'] for constant in known.values()}))}.", markup=False)


def _count(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--images {text!r}: a number is wanted, such as 1000000 or 1e9; several by commas.") from None
