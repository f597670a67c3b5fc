"""cooc index --estimate: what each quality takes on this machine, told from a sample of the pictures."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from cooc.cli import err, out
from cooc.cli.cores import sharing_cores
from cooc.errors import InputError, UnknownNameError, WeightsError, counted

if TYPE_CHECKING:
    from cooc.image_search.estimating import Estimate

MANY = 2000  # pictures of a new index that are worth an estimate before it is made,
LONG = 1800.0  # and seconds that are worth a word


def show_estimates(
    folders: list[str], quality: str, device: str, workers: int | None, *, follow: bool, as_json: bool
) -> None:
    """Of one quality, or of all."""
    from cooc.image_search import QUALITIES
    from cooc.image_search.estimating import list_pictures

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
            found.append(_estimated(folders[0], name, pictures, device, workers))
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


def tell_before_a_long_run(folder: str, quality: str, device: str, workers: int | None, *, follow: bool) -> None:
    """Of a new index of many pictures: how long it will take, and how long the fastest quality would."""
    from cooc.image_search import DEFAULT_QUALITY, QUALITIES
    from cooc.image_search.estimating import list_pictures

    quality, pictures = quality or DEFAULT_QUALITY, list_pictures(folder, follow=follow)
    if quality not in QUALITIES or len(pictures) < MANY:
        return
    seconds, faster = _estimated(folder, quality, pictures, device, workers).seconds, ""
    if seconds < LONG:
        return
    if quality != "fast":
        with suppress(WeightsError):  # another network, which may not be had here
            faster = f"; `--quality fast`: {duration(_estimated(folder, 'fast', pictures, device, workers).seconds)}"
    err.print(f"{counted(len(pictures), 'picture')}: {duration(seconds)}{faster}. Ctrl-C loses nothing.", markup=False)


def _estimated(folder: str, quality: str, pictures: list[str], device: str, workers: int | None) -> Estimate:
    from cooc.image_search import QUALITIES
    from cooc.image_search.estimating import estimate
    from cooc.recipes import find_recipe

    chosen = QUALITIES[quality]
    with sharing_cores(find_recipe(chosen.recipe).config.backbone, chosen.features, device, workers) as shared:
        return estimate(folder, quality, pictures, device=device, workers=shared)


def duration(seconds: float) -> str:
    """As people say it: "about 40 s", "about 15 min", "about 6.2 h"."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
