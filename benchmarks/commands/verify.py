"""`python -m benchmarks` verify-probability, verify-flat, verify-speed, kinds: what geometry proves and costs."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.commands.index import ResultsOption, _write
from benchmarks.verification import (
    alarms,
    by_cosine,
    by_geometry,
    family,
    first_by_words,
    fit,
    flat_recall,
    judge,
    measured,
    shares,
    words_of,
)
from cooc.cli import out
from cooc.errors import InputError
from cooc.files import write_whole
from cooc.image_search.opening import DEFAULT_RECIPE
from cooc.pictures.folder import list_images
from cooc.provenance import provenance

PARAMETERS = Path(__file__).parents[2] / "cooc/data/verification.json"
CURVES = Path(__file__).parents[2] / "cooc/data/calibration.json"
CacheOption = Annotated[Path, typer.Option(help="Where features and pairs are kept between runs.")]
VectorsOption = Annotated[Path | None, typer.Option(metavar="FOLDER", help="KIND.npz: arrays `names` and `vectors`.")]
SPACE = "resnet50-caffe-gem-tuned-landmarks-512"  # resnet-tuned, the default, whose vectors are searched
USED = {  # of what is seen of a pair; the rest makes kinds that were held out worse
    "sift": ("evidence", "inside"),
    "xfeat": ("inliers", "evidence"),
    "activations": ("inliers", "evidence"),
}


def verify_probability(
    kinds: Annotated[str, typer.Option(help="Labelled folders, by commas.")],
    together: Annotated[str, typer.Option(help="Kinds that are also counted as one, by commas.")] = "",
    data: Annotated[Path, typer.Option(help="Folder below which they lie.")] = Path("data"),
    engines: Annotated[str, typer.Option(help="By commas.")] = "sift,xfeat",
    vectors: VectorsOption = None,
    cache: CacheOption = Path(".cooc/verification"),
    output: Annotated[Path, typer.Option(help="The parameters.")] = PARAMETERS,
    results: ResultsOption = Path("results"),
) -> None:
    """Fit the probability that two pictures which agree show the same thing; judge it on kinds that were held out.

    Each kind is judged by a fit on all of other families; what ships is fitted on all. Other engines in the files are
    kept.
    """
    known = _vectors(vectors)
    curve = json.loads(CURVES.read_text(encoding="utf-8"))[SPACE]
    parameters, report = _read(output), _read(results / "verification-probability.json")
    for engine in engines.split(","):
        pairs = {kind: measured(data / kind, engine, cache, known.get(kind)) for kind in kinds.split(",")}
        whole = {name: round(value, 4) for name, value in fit(pairs, USED[engine]).as_dict().items()}
        parameters["engines"][engine] = whole
        rows: dict[str, Any] = {}
        counted: dict[str, dict[str, dict[str, int]]] = {"search": {}, "search by cosine": {}}
        for kind, own in pairs.items():
            others = fit({k: part for k, part in pairs.items() if family(k) != family(kind)}, USED[engine])
            counted["search"][kind] = alarms(own, *by_geometry(others))
            if kind in known:
                counted["search by cosine"][kind] = alarms(own, *by_cosine(curve["slope"], curve["offset"]))
            rows[kind] = {"fitted on the others": others.as_dict()} | judge(own, others)
            rows[kind] |= {how: shares(counts[kind]) for how, counts in counted.items() if kind in counts}
            out.print(engine, kind, rows[kind]["search"], rows[kind].get("search by cosine", ""), markup=False)
        wanted = [kind for kind in together.split(",") if kind]
        summed = {
            how: shares(_sum(some)) | {"mean over kinds": _means(some)}
            for how, counts in counted.items()
            if (some := [counts[kind] for kind in wanted if kind in counts])
        }
        out.print(engine, "together", summed, markup=False)
        found = {"parameters": whole, "kinds": rows, "together": {"kinds": wanted} | summed}
        report["engines"][engine] = found | provenance("cpu")
    write_whole(output, json.dumps(parameters, indent=1) + "\n")
    _write(report, results / "verification-probability.json")


def _sum(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(part[name] for part in counts) for name in counts[0]}


def _means(counts: list[dict[str, int]]) -> dict[str, float]:
    """Of the kinds' shares, each of which counts the same."""
    both = (("shown wrongly", "absent"), ("shown rightly", "first"))
    return {name: round(float(np.mean([part[name] / part[of] for part in counts if part[of]])), 4) for name, of in both}


def _read(file: Path) -> dict[str, dict[str, Any]]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"engines": {}}


def verify_flat(
    kinds: Annotated[str, typer.Option(help="Labelled folders of flat things, by commas.")],
    vectors: VectorsOption = None,
    data: Annotated[Path, typer.Option(help="Folder below which they lie.")] = Path("data"),
    engine: str = "sift",
    recipe: Annotated[str, typer.Option(help="What made the vectors.")] = "paper-linear",
    cache: CacheOption = Path(".cooc/verification"),
    results: ResultsOption = Path("results"),
) -> None:
    """Flat things found first: by the vector, by geometry over all pictures, by geometry over a shortlist.

    The pictures of all other kinds below `--vectors` are distractors of the shortlist.
    """
    known = _vectors(vectors)
    rows = {}
    for kind in kinds.split(","):
        if kind not in known:
            raise InputError(f"--vectors has no {kind}.npz: describe the pictures of that folder first.")
        others = [v for name, part in known.items() if name != kind for v in part.values()]
        pictures, queries = words_of(data / kind, cache)
        far = [one for name in known if name != kind for part in words_of(data / name, cache) for one in part.values()]
        words = first_by_words(pictures, queries, far, 50)
        rows[kind] = flat_recall(measured(data / kind, engine, cache), known[kind], np.array(others), words)
        out.print(kind, rows[kind], markup=False)
    found = {"engine": engine, "recipe": recipe, "kinds": rows}
    _write(found | provenance("cpu"), results / "verification-flat.json")


def bench_kinds(
    root: Annotated[Path, typer.Argument(help="A folder of labelled folders, and of others that are searched, too.")],
    kinds: Annotated[str, typer.Option(help="The labelled ones, by commas.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Of a new index.")] = DEFAULT_RECIPE,
    everyday: Annotated[
        Path | None, typer.Option(metavar="PHOTOS", help="Make the kind `everyday` of these first, if it is not there.")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Queries of a kind.")] = 100,
    results: ResultsOption = Path("results"),
) -> None:
    """Recall at 1 of real searches, with and without verification, in one index of all kinds."""
    from benchmarks.kinds import make_seen_again, measure_kinds

    if everyday is not None and not (root / "everyday").exists():
        make_seen_again(everyday, root / "everyday", 100)
    found = measure_kinds(root, kinds.split(","), recipe, most)
    _write(found, results / "kinds-cpu.json")
    for kind, row in found["kinds"].items():
        out.print(kind, row, markup=False)


def verify_speed(
    photos: Annotated[Path, typer.Argument(help="A folder of photos.")],
    engines: Annotated[str, typer.Option(help="By commas.")] = "sift,xfeat",
    count: Annotated[int, typer.Option(min=1, help="Photos, the first in the order of their paths.")] = 200,
    turns: Annotated[int, typer.Option(min=3, help="Times that each is measured.")] = 9,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    results: ResultsOption = Path("results"),
) -> None:
    """Features and verification of 100 pictures, beside VGG16 at 1024 x 768."""
    from benchmarks.verifying import measure_speed

    found = measure_speed(list(islice(list_images(photos), count)), engines.split(","), turns, device)
    for name, row in found["rows"].items():
        out.print(name, row, markup=False)
    _write(found, results / f"verification-speed{'' if device == 'cpu' else '-' + device}.json")


def _vectors(folder: Path | None) -> dict[str, dict[str, NDArray[np.float32]]]:
    """Kind -> name of a picture -> vector."""
    known = {}
    for file in sorted(folder.glob("*.npz")) if folder else []:
        with np.load(file, allow_pickle=False) as arrays:
            known[file.stem] = dict(zip(arrays["names"].tolist(), arrays["vectors"].astype(np.float32), strict=True))
    return known
