"""`python -m benchmarks verify-probability`, `verify-flat`, `verify-speed`: what geometry proves, finds and costs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.commands.index import ResultsOption, _write
from cooc.cli import out
from cooc.errors import InputError
from cooc.files import write_whole

PARAMETERS = Path(__file__).parents[2] / "cooc/data/verification.json"
CURVES = Path(__file__).parents[2] / "cooc/data/calibration.json"
CacheOption = Annotated[Path, typer.Option(help="Where features and pairs are kept between runs.")]
VectorsOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="KIND.npz: arrays `names` and `vectors` (of paper-linear).")
]
SPACE = "vgg16-caffe-chco-sct-act-landmarks-512"  # paper-linear, whose vectors these are


def verify_probability(
    fit: Annotated[str, typer.Option(help="Labelled folders to fit on, by commas.")],
    test: Annotated[str, typer.Option(help="Labelled folders that are held out, by commas.")],
    data: Annotated[Path, typer.Option(help="Folder below which they lie.")] = Path("data"),
    engines: Annotated[str, typer.Option(help="By commas.")] = "sift,xfeat",
    vectors: VectorsOption = None,
    top: Annotated[int, typer.Option(help="Pictures by cosine that are verified, where vectors are given.")] = 100,
    cache: CacheOption = Path(".cooc/verification"),
    output: Annotated[Path, typer.Option(help="The parameters.")] = PARAMETERS,
    results: ResultsOption = Path("results"),
) -> None:
    """Fit the probability that two pictures which agree show the same thing; judge it on other kinds of pictures."""
    from benchmarks.verification import alarms, judge, measured, probability
    from benchmarks.verification import fit as fit_kinds
    from cooc.provenance import provenance

    known = _vectors(vectors)
    curve = json.loads(CURVES.read_text(encoding="utf-8"))[SPACE]
    report: dict[str, object] = {"fitted on": fit.split(","), "held out": test.split(","), "engines": {}}
    parameters = {}
    for engine in engines.split(","):
        kinds = {}
        for kind in [*fit.split(","), *test.split(",")]:
            kinds[kind] = measured(data / kind, engine, cache, top=top, vectors=known.get(kind))
        calibration = fit_kinds([kinds[kind] for kind in fit.split(",")])
        parameters[engine] = {name: round(value, 4) for name, value in calibration.as_dict().items()}
        rows = {}
        for kind, pairs in kinds.items():
            rows[kind] = judge(pairs, calibration) | {
                "search": alarms(pairs, partial(probability, calibration), lambda r: r.inliers)
            }
            if all(pair.cosine is not None for pair in pairs):
                rows[kind]["search by cosine"] = alarms(
                    pairs,
                    lambda r: float(1 / (1 + np.exp(-(curve["slope"] * (r.cosine or 0.0) + curve["offset"])))),
                    lambda r: r.cosine or 0.0,
                )
            out.print(engine, kind, rows[kind]["search"], rows[kind].get("search by cosine"), markup=False)
        report["engines"][engine] = {"parameters": parameters[engine], "kinds": rows}  # type: ignore[index]
    about = {"fitted_on": fit.split(","), "command": "python -m benchmarks verify-probability"}
    write_whole(output, json.dumps({"engines": parameters} | about, indent=1) + "\n")
    _write(report | provenance("cpu"), results / "verification-probability.json")


def verify_flat(
    kinds: Annotated[str, typer.Option(help="Labelled folders of flat things, by commas.")],
    vectors: VectorsOption = None,
    data: Annotated[Path, typer.Option(help="Folder below which they lie.")] = Path("data"),
    engine: str = "sift",
    cache: CacheOption = Path(".cooc/verification"),
    results: ResultsOption = Path("results"),
) -> None:
    """Flat things found first: by the vector, by geometry over all pictures, by geometry over a shortlist.

    The pictures of all other kinds below `--vectors` are distractors of the shortlist.
    """
    from benchmarks.verification import flat_recall, measured
    from cooc.provenance import provenance

    known = _vectors(vectors)
    rows = {}
    for kind in kinds.split(","):
        if kind not in known:
            raise InputError(f"--vectors has no {kind}.npz: describe the pictures of that folder first.")
        others = [v for name, part in known.items() if name != kind for v in part.values()]
        rows[kind] = flat_recall(measured(data / kind, engine, cache), known[kind], np.array(others))
        out.print(kind, rows[kind], markup=False)
    found = {"engine": engine, "recipe": "paper-linear", "kinds": rows}
    _write(found | provenance("cpu"), results / "verification-flat.json")


def verify_speed(
    photos: Annotated[Path, typer.Argument(help="A folder of photos.")],
    engines: Annotated[str, typer.Option(help="By commas.")] = "sift,xfeat",
    count: Annotated[int, typer.Option(min=1, help="Photos.")] = 20,
    turns: Annotated[int, typer.Option(min=3, help="Times that each is measured.")] = 9,
    results: ResultsOption = Path("results"),
) -> None:
    """Features and verification of 100 pictures on this CPU, beside VGG16 at 1024 x 768."""
    from benchmarks.verifying import measure_speed

    files = sorted(photos.rglob("*.jpg"))
    found = measure_speed(files[:: max(1, len(files) // count)][:count], engines.split(","), turns)
    for name, row in found["rows"].items():
        out.print(name, row, markup=False)
    _write(found, results / "verification-speed.json")


def _vectors(folder: Path | None) -> dict[str, dict[str, NDArray[np.float32]]]:
    """Kind -> name of a picture -> vector."""
    known = {}
    for file in sorted(folder.glob("*.npz")) if folder else []:
        with np.load(file, allow_pickle=False) as arrays:
            known[file.stem] = dict(zip(arrays["names"].tolist(), arrays["vectors"].astype(np.float32), strict=True))
    return known
