"""python -m benchmarks fit-words"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from cooc.cli import out


def fit_words(
    photos: Annotated[Path, typer.Argument(help="A folder of photos, none of which is in a benchmark.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.npz")],
    count: Annotated[int, typer.Option(min=1, help="Photos that are taken, evenly.")] = 600,
    without: Annotated[
        Path | None, typer.Option(help="A folder whose photos, by the ends of their names, are not.")
    ] = None,
) -> None:
    """Fit the vocabulary of visual words that ships."""
    from benchmarks.words import fit_vocabulary, sample_features
    from cooc.pictures.folder import list_images

    left_out = {path.stem.split("_")[-1] for path in without.glob("*.jpg")} if without else set()
    found = [path for path in list_images(photos) if path.stem not in left_out]
    chosen = found[:: max(1, len(found) // count)][:count]
    samples = sample_features(chosen)
    np.savez(output, **fit_vocabulary(samples))  # type: ignore[arg-type]
    out.print(f"{output}: fitted on {len(samples)} features of {len(chosen)} photos.")
