"""cooc match: do two pictures show the same thing?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cooc.cli import app, err, options, out
from cooc.cli.writing import PICTURES, check_output, save_picture

if TYPE_CHECKING:
    from cooc.verification.agreement import Agreement
    from cooc.verification.transforms import Points

NOT_VERIFIED = 1  # exit code, as of `cmp` for files that differ


@app.command("match")
def match_(
    query: Annotated[Path, typer.Argument(metavar="A", help="A picture.")],
    picture: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    engine: Annotated[str, typer.Option(help="Local features: sift, xfeat, activations; or sift+xfeat.")] = "sift",
    box: Annotated[str, typer.Option(metavar="X0,Y0,X1,Y1", help="The part of A that is looked for in B.")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.jpg", help="Draw both, with what they agree on.")
    ] = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Verify that two pictures show the same thing: points of both that agree on one geometry.

    The exit code is 0 if they do, 1 if that cannot be verified.
    """
    from cooc.activations import resolve_device
    from cooc.pictures.boxes import parse_box
    from cooc.verification.pair import verify_pair
    from cooc.verification.probability import PROVEN, same_thing

    if output is not None:
        check_output(output, *PICTURES)
    part = parse_box(box) if box else None
    agreement = verify_pair(query, picture, engine, box=part, device=str(resolve_device(device)))
    chance = same_thing(agreement)
    verified = chance >= PROVEN
    if output is not None:
        _draw(query, picture, agreement, output)
    if as_json:
        found = {"verified": verified, "probability": chance, **agreement.as_dict()}
        typer.echo(json.dumps(found | {"points": agreement.pairs(agreement.inliers)}))
    else:
        _print(query, picture, agreement, chance, verified)
    if not verified:
        raise typer.Exit(NOT_VERIFIED)


def _print(query: Path, picture: Path, agreement: Agreement, chance: float, verified: bool) -> None:
    from cooc.cli.showing import percent, points_agree, shown

    if not agreement.inliers:
        out.print("Nothing agrees: these are two things, or too little of one can be compared.", style="yellow")
        return
    said = "The same thing" if verified else "Not verified"
    style = "green" if verified else "yellow"
    out.print(f"{said}: {points_agree(agreement.inliers)} ({agreement.engine}), {percent(chance)}.", style=style)
    for name, region in ((query, agreement.query_region), (picture, agreement.picture_region)):
        out.print(f"{shown(name)}: {_corners(region)}", markup=False)
    out.print("Transform, from pixels of the first to pixels of the second:")
    for row in agreement.transform.tolist():
        out.print("  " + " ".join(f"{value:12.5g}" for value in row))


def _corners(region: Points) -> str:
    (x0, y0), (x1, y1) = region.min(0).tolist(), region.max(0).tolist()
    return f"{len(region)} corners of a region within {x0:.0f},{y0:.0f},{x1:.0f},{y1:.0f}"


def _draw(query: Path, picture: Path, agreement: Agreement, output: Path) -> None:
    from cooc.pictures.decode import load_view
    from cooc.verification.drawing import draw
    from cooc.verification.engines import LONGEST

    sides = [load_view(one, LONGEST) for one in (query, picture)]
    drawn = draw(
        sides[0].pixels, sides[1].pixels, agreement, query_size=sides[0].size, picture_size=sides[1].size, height=640
    )
    save_picture(drawn, output, quality=90)
    err.print(f"Written: {output}", markup=False)
