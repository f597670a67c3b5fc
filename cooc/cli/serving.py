"""Commands that show and serve: explain, serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cooc.cli import app, out
from cooc.cli.describing import DEFAULT, DeviceOption, JsonOption, RecipeOption, _check_output, _replacing


@app.command()
def explain(
    query: Annotated[Path, typer.Argument(metavar="QUERY", help="A picture.")],
    match: Annotated[Path, typer.Argument(metavar="MATCH", help="A picture that it was found to match.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.png", help="Where the drawing goes.")],
    recipe: RecipeOption = DEFAULT,
    box: Annotated[str, typer.Option(metavar="X0,Y0,X1,Y1", help="The part of QUERY that is looked for.")] = "",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Draw why two pictures match: the score as a sum over the positions of both.

    The frame in each picture holds most of it: "it is here".
    """
    from PIL import Image

    from cooc.descriptor import Descriptor
    from cooc.explanation import draw
    from cooc.explanation import explain as take_apart
    from cooc.images import parse_box
    from cooc.recipes import find_recipe

    part = parse_box(box) if box else None
    Image.init()
    _check_output(output, *(end for end, form in Image.EXTENSION.items() if form in Image.SAVE))
    descriptor = Descriptor(find_recipe(recipe).config, device=device)
    why = take_apart(descriptor, query, match, query_box=part)
    page = draw(descriptor, query, match, why, query_box=part, names=(query.name, match.name))
    with _replacing(output) as stream:
        page.save(stream, Image.EXTENSION[output.suffix.lower()])
    if as_json:
        sides = {
            name: {"map": side.map.tolist(), "region": side.region, "box": side.box}
            for name, side in (("query", why.query), ("match", why.match))
        }
        typer.echo(json.dumps({"score": why.score, "exact": why.exact, **sides}))
        return
    out.print(f"{output}: score {why.score:.3f}{'' if why.exact else ', shares by the derivative'}", markup=False)
    if why.match.box:
        corners = ",".join(f"{n:.0f}" for n in why.match.box)
        out.print(f"It is here: {corners} in {match}", markup=False)
