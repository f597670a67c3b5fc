"""Commands on pictures alone, without an index: describe, heatmap, whiten, recipes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cooc import __version__
from cooc.cli import app, err, options, out
from cooc.cli.bars import counting
from cooc.cli.writing import check_drawing, check_output, save_picture, writing
from cooc.errors import PARTIAL, CoocError, ImageError, InputError, WhiteningError, check_name, counted

if TYPE_CHECKING:
    from cooc.descriptor import Descriptor
    from cooc.pictures.boxes import Box

WIDE = 140  # columns of a table that goes into a file or a pipe
FITTED = 512  # vectors that a whitening is given at once
FEW = 32  # pictures: for no more than that, starting worker processes costs more time than they save

Images = Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures, or folders of them.")]


@app.command()
def describe(
    images: Images,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.npy", help="Where the vectors go.")],
    recipe: options.Recipe = options.DEFAULT,
    box: Annotated[str, typer.Option(metavar="X0,Y0,X1,Y1", help="The part of one picture to describe.")] = "",
    device: options.Device = "auto",
    workers: options.Workers = None,
    as_json: options.Json = False,
) -> None:
    """Write the vectors of pictures to a file.

    It holds an array (N, D) of float32, rows of unit length; a .json beside it names the picture of each row.
    """
    import numpy as np

    from cooc.pictures.boxes import parse_box
    from cooc.recipes import find_recipe

    config = find_recipe(recipe).config
    part = parse_box(box) if box else None
    check_output(output, ".npy")
    paths = _list(images)
    if part and len(paths) != 1:
        raise InputError(f"--box is the part of one picture, and there are {len(paths)}. Describe them one by one.")
    descriptor = _descriptor(config, device)
    bad: dict[int, str] = {}
    rows = dict(_vectors(descriptor, paths, workers, bad, part))
    order = sorted(rows)
    matrix = np.stack([rows[i] for i in order])  # (N, D)
    sidecar = output.with_suffix(".json")
    about = {
        "vectors": output.name,
        "shape": list(matrix.shape),
        "paths": [str(paths[i]) for i in order],
        "box": part,
        "bad": [{"path": str(paths[i]), "reason": reason} for i, reason in bad.items()],
        "recipe": recipe,
        "config": descriptor.config.as_dict(),
        "fingerprint": descriptor.fingerprint,
        "cooc": __version__,
    }
    with writing(sidecar) as text, writing(output) as data:
        text.write(json.dumps(about, indent=1).encode())
        np.save(data, matrix)
    if as_json:
        typer.echo(json.dumps(about))
    else:
        out.print(
            f"{counted(len(matrix), 'vector')} of {matrix.shape[1]} dimensions: {output}; their pictures: {sidecar}"
        )
    if bad:
        raise typer.Exit(PARTIAL)


@app.command()
def heatmap(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="A picture.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.png", help="Where the drawing goes.")],
    recipe: options.Recipe = options.PAPER,
    learned: Annotated[
        str, typer.Option(metavar="FILTER", help="A learned filter beside it: a file, or `landmarks`, which is ours.")
    ] = "",
    size: Annotated[int | None, typer.Option(min=32, help="Longest side in pixels. [default: the recipe's]")] = None,
    device: options.Device = "auto",
) -> None:
    """Draw a picture's spatial co-occurrences over it.

    They are the weights alpha of equation 8. `-r paper-linear+layer=conv5_3` draws a map that is twice as fine.
    """
    from cooc.cooccurrence import Cooccurrence
    from cooc.explanation.heatmaps import overlay, sheet, spatial_cooccurrences
    from cooc.recipes import find_filter, find_recipe

    config = find_recipe(recipe).config
    check_drawing(output)
    layers = {"direct co-occurrences": Cooccurrence(radius=config.radius)}
    if learned:
        layers["learned co-occurrences"] = Cooccurrence.load(find_filter(learned))
    descriptor = _descriptor(config.replace(size=size or config.size, whitening="", dim=0), device)
    picture = descriptor.load(image)  # (3, H, W)
    panels = {image.name: picture.permute(1, 2, 0).numpy()}
    for name, layer in layers.items():
        alpha = spatial_cooccurrences(descriptor, picture, layer)
        panels[name] = overlay(panels[image.name], alpha, descriptor.backbone.stride)
    save_picture(sheet(panels), output)
    out.print(f"{output}: {' | '.join(panels)}")


@app.command()
def whiten(
    images: Images,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.safetensors", help="Where it goes.")],
    recipe: options.Recipe = options.DEFAULT,
    dim: Annotated[int | None, typer.Option(min=1, help="Dimensions of a vector. [default: the recipe's]")] = None,
    size: Annotated[int, typer.Option(min=32, help="Longest side of the pictures in pixels, for the fit.")] = 640,
    exponent: Annotated[
        float, typer.Option(min=0, max=1, help="0.5 makes all directions count the same; less is gentler.")
    ] = 0.5,
    storage: Annotated[str, typer.Option(help="float32, float16 or int8: smaller files, hardly worse.")] = "float32",
    device: options.Device = "auto",
    workers: options.Workers = None,
) -> None:
    """Fit a PCA whitening on your own pictures.

    Any command then takes it as part of a recipe's name: RECIPE+whitening=FILE.safetensors
    """
    import numpy as np

    from cooc import whitening
    from cooc.recipes import find_recipe

    config = find_recipe(recipe).config.replace(whitening="", dim=0, size=size)
    wanted = dim or find_recipe(recipe).config.dim
    check_name("whitening storage", storage, whitening.STORAGE)
    check_output(output, ".safetensors")
    paths = _list(images)
    descriptor = _descriptor(config, device)
    wanted = wanted or descriptor.dim
    if wanted >= len(paths):  # say so now, not after an hour
        raise WhiteningError(
            f"Whitening to {wanted} dimensions needs more pictures than that (better several times as many), "
            f"and there are {len(paths)}: add pictures, or use --dim {max(len(paths) - 1, 1)} or less."
        )
    fitter = whitening.PCAFitter()
    bad: dict[int, str] = {}
    vectors = (vector for _, vector in _vectors(descriptor, paths, workers, bad))
    while rows := list(itertools.islice(vectors, FITTED)):
        fitter.update(np.stack(rows))
    names = ", ".join(sorted({path.name or str(path) for path in images}))
    meta = {"space": config.space, "space_hash": config.space_hash, "fitted_on": names, "size": str(size)}
    fitted = fitter.fit(wanted, exponent=exponent, meta=meta | {"recipe": recipe, "cooc": __version__})
    whitening.save(fitted, output, storage)  # type: ignore[arg-type]  # checked above
    out.print(f"{output}: {fitted.input_dim} -> {fitted.dim} dimensions, fitted on {counted(fitter.count, 'picture')}.")
    base, *changes = [recipe] if Path(recipe).is_dir() else recipe.split("+")
    kept = [change for change in changes if not change.startswith(("whitening=", "dim=", "raw"))]
    named = "+".join([base, *kept, f"whitening={output}", f"dim={fitted.dim}"])
    out.print(f"Use it as the recipe {named}", markup=False)
    if bad:
        raise typer.Exit(PARTIAL)


@app.command()
def recipes(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One recipe, in full; +changes are understood.")] = "",
    as_json: options.Json = False,
) -> None:
    """List the named descriptors and where each comes from."""
    from cooc.recipes import RECIPES, find_recipe

    found = [find_recipe(name)] if name else list(RECIPES.values())
    if as_json:
        typer.echo(json.dumps([{"name": r.name, "source": r.source, "config": r.config.as_dict()} for r in found]))
        return
    table = Table(box=None, pad_edge=False, width=None if name or out.is_terminal else WIDE)
    if name:
        table.add_column("setting", style="bold")
        table.add_column("value")
        for key, value in {"name": found[0].name, "source": found[0].source, **found[0].config.as_dict()}.items():
            table.add_row(key, str(value))
    else:
        for title in ("recipe", "pooling", "C_T", "mask", "dim", "source"):
            table.add_column(title, no_wrap=title != "source", justify="right" if title == "dim" else "left")
        for r in found:
            cells = (r.config.pooling, r.config.cooccurrence, r.config.mask, str(r.config.dim), r.source)
            table.add_row(r.name, *("-" if cell == "none" else cell for cell in cells))
    out.print(table, soft_wrap=False, crop=False)


def _list(images: list[Path]) -> list[Path]:
    """All pictures named or in the folders named, in order. A name that is not there is an error, before any work."""
    from cooc.pictures.folder import list_images

    paths = [path for image in images for path in list_images(image)]
    if not paths:
        raise InputError(f"No pictures in {', '.join(map(str, images))}. Give pictures, or folders with some.")
    return paths


def _descriptor(config: Any, device: str) -> Descriptor:
    from cooc.descriptor import Descriptor

    return Descriptor(config, device=device)


def _vectors(
    descriptor: Descriptor, paths: list[Path], workers: int | None, bad: dict[int, str], box: Box | None = None
) -> Iterator[tuple[int, Any]]:
    """(place in `paths`, vector) as they get done. Why one has none is told and put into `bad`; all bad is an error."""
    from cooc.pictures.batches import Item

    if workers is None and len(paths) <= FEW:
        workers = 0
    with counting("describing") as show:
        items = (Item(i, path, box) for i, path in enumerate(paths))
        for done, (item, found) in enumerate(descriptor.stream(items, workers=workers), start=1):
            show(done, len(paths))
            if not isinstance(found, CoocError):
                yield item.key, found
                continue
            bad[item.key] = str(found)
            err.print(f"left out: {found}", style="yellow", markup=False)
            if len(bad) == len(paths):
                raise found if len(paths) == 1 else ImageError(f"None of the {len(paths)} pictures could be read.")
