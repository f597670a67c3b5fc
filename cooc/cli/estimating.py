"""cooc index --estimate: what each quality takes on this machine, told from a sample of the pictures."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.table import Table

from cooc.cli import err, out
from cooc.errors import InputError, UnknownNameError, WeightsError, counted

LIGHT = ("resnet50", "resnet50-caffe", "efficientnet-lite0")


def show_estimates(
    folders: list[str], quality: str, device: str, workers: int | None, *, follow: bool, as_json: bool
) -> None:
    """Of one quality, or of all."""
    from cooc.image_search import QUALITIES
    from cooc.image_search.estimating import Estimate, estimate, list_pictures
    from cooc.recipes import find_recipe

    if len(folders) > 1:
        raise InputError("Estimate one folder at a time.")
    if quality and quality not in QUALITIES:
        raise UnknownNameError("quality", quality, QUALITIES)
    pictures = list_pictures(folders[0], follow=follow)
    if not as_json:
        err.print(f"{counted(len(pictures), 'picture')}. A few of them are indexed with each quality ...", style="dim")
    found: list[Estimate] = []
    for name in [quality] if quality else QUALITIES:
        try:
            chosen = QUALITIES[name]
            shared = share_cores(find_recipe(chosen.recipe).config.backbone, chosen.features, device, workers)
            found.append(estimate(folders[0], name, pictures, device=device, workers=shared))
        except WeightsError as error:  # one that cannot be had here is no reason not to tell of the others
            err.print(f"{name}: {error}", style="yellow", markup=False)
    if as_json:
        for one in found:
            typer.echo(json.dumps(asdict(one)))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("quality", "time", "on disk", "finds"):
        table.add_column(column)
    for one in found:
        table.add_row(one.quality, duration(one.seconds), f"{one.bytes / 1e6:,.0f} MB", QUALITIES[one.quality].about)
    out.print(table, soft_wrap=False, crop=False)


def share_cores(backbone: str, features: str, device: str, workers: int | None) -> int | None:
    """How many processes decode, if nobody has said it: for a command that fills an index.

    On a CPU they make the local features, too, which takes as long as a light network does. So it gets half of the
    cores: threads of it that wait for a core that another has use up their own meanwhile (docs/performance.md).
    """
    import torch

    from cooc.activations import resolve_device
    from cooc.pictures.batches import default_workers

    if workers is not None or not features or backbone not in LIGHT or resolve_device(device).type != "cpu":
        return workers
    cores = default_workers("cuda")  # all of them
    torch.set_num_threads(threads := max(1, cores // 2))
    return cores - threads + 1


def duration(seconds: float) -> str:
    """As people say it: "about 40 s", "about 15 min", "about 6.2 h"."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
