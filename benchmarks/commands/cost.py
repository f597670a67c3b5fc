"""What an index costs and finds: engines, compact vectors, growth, features, the first search, qualities and others."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.commands.index import ResultsOption, _write
from cooc.cli import err, options, out
from cooc.errors import InputError


def bench_engines(
    backbones: Annotated[str, typer.Option(help="Networks, by commas.")] = "vgg16-caffe,efficientnet-lite0",
    sizes: Annotated[str, typer.Option(metavar="WxH,...", help="Pixels of a picture.")] = "512x384,1024x768",
    engines: Annotated[str, typer.Option(help="Only these, by commas.")] = "",
    seconds: Annotated[float, typer.Option(help="For one engine at one size.")] = 10.0,
    photos: Annotated[Path | None, typer.Option(help="A folder: 8 bits are calibrated on its first 50.")] = None,
    dataset: Annotated[str, typer.Option(help="Measure the mAP of --recipe by each engine on this set.")] = "",
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="For --dataset; its network is measured, too.")] = "",
    results: ResultsOption = Path("results"),
) -> None:
    """Networks on this CPU by torch, torch.compile, ONNX Runtime and OpenVINO, those that are installed."""
    from benchmarks.engines import DEFAULT as PLAIN
    from benchmarks.engines import ENGINES, lost_map, run_engines
    from cooc.datasets.retrieval import load_dataset
    from cooc.pictures.folder import list_images
    from cooc.recipes import find_recipe

    shapes = []
    for size in sizes.split(","):
        width, _, height = size.partition("x")
        if not (width.isdigit() and height.isdigit()):
            raise InputError(f"--sizes {sizes!r}: write 1024x768, or several joined by commas.")
        shapes.append((int(height), int(width)))
    chosen = engines.split(",") if engines else list(ENGINES)
    sample = list(itertools.islice(list_images(photos), 50)) if photos else []
    keep = functools.partial(_write, file=results / "engines-cpu.json")
    with err.status("Measuring ..."):
        found = run_engines(backbones.split(","), shapes, chosen, seconds, keep, sample)
        if dataset:
            used = find_recipe(recipe)
            changed = {row["engine"] for row in found["rows"] if (row["error"] or 0) > 1e-3}
            ask = [name for name in chosen if name == PLAIN or name in changed]
            found["mAP"] = {"dataset": dataset, "recipe": recipe} | lost_map(used, load_dataset(dataset), ask, sample)
            keep(found)
    table = Table("network", "pixels", "engine", "ms", "times faster", "error", "", box=None, pad_edge=False)
    for row in found["rows"]:
        pixels = f"{row['width']} x {row['height']}"
        numbers = ["-" if row[k] is None else f"{row[k]:.4g}" for k in ("ms", "times_faster", "error")]
        table.add_row(row["backbone"], pixels, row["engine"], *numbers, row["note"][:60])
    out.print(table)


def bench_engine_map(
    dataset: Annotated[str, typer.Argument(help="A known dataset, or a folder with ground_truth.json.")],
    photos: Annotated[Path, typer.Option(help="A folder: 8 bits are calibrated on its first 50.")],
    engines: Annotated[str, typer.Option(help="By commas.")] = (
        "torch float32 channels-last,torch bfloat16 channels-last,ONNX Runtime int8,OpenVINO int8"
    ),
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Whose vectors are compared.")] = "resnet-gem",
    results: ResultsOption = Path("results"),
) -> None:
    """What mAP each engine costs: all pictures of a dataset go through it. Nothing is timed."""
    from benchmarks.engines import lost_map
    from cooc.datasets.retrieval import load_dataset
    from cooc.pictures.folder import list_images
    from cooc.provenance import provenance
    from cooc.recipes import find_recipe

    loaded, sample = load_dataset(dataset), list(itertools.islice(list_images(photos), 50))
    found = lost_map(find_recipe(recipe), loaded, engines.split(","), sample)
    about = {"benchmark": "engine-map", "dataset": loaded.name, "recipe": recipe, "mAP": found}
    _write(about | provenance("cpu"), results / "engine-map-cpu.json")
    out.print(found)


def bench_maps(
    landmarks: Annotated[Path, typer.Option(help="Labelled folders of photos, on which whitening is fitted.")],
    datasets: Annotated[str, typer.Option(help="Known datasets or folders with ground_truth.json, by commas.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Whose network, size and dimensions.")] = "resnet-gem",
    exclude: Annotated[list[str] | None, typer.Option(help="A label to leave out; again for more.")] = None,
    not_in: Annotated[Path | None, typer.Option(help="Leave out photos of this set.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Fit on every Nth photo.")] = 4,
    fit_size: Annotated[int, typer.Option(help="Pixels of their longer side.")] = 512,
    exponent: Annotated[float, typer.Option(help="Of the whitening.")] = 0.25,
    data: Annotated[Path, typer.Option(help="Folder below which the datasets lie.")] = Path("data"),
    results: ResultsOption = Path("results"),
) -> None:
    """Sums, GeM and forms of co-occurrence on the maps of one network: which finds most."""
    from benchmarks.maps import measure_maps
    from cooc.datasets.retrieval import image_set, load_dataset
    from cooc.recipes import find_recipe

    photos = image_set(landmarks, exclude_labels=exclude or (), exclude_names_of=not_in)[::every]
    sets = [load_dataset(name, data) for name in datasets.split(",")]
    found = measure_maps(find_recipe(recipe), photos, sets, fit_size=fit_size, exponent=exponent)
    _write(found, results / f"maps-{recipe}.json")
    for dataset, forms in found["results"].items():
        for form, protocols in forms.items():
            out.print(f"{dataset} {form}: {' / '.join(format(score['mAP'], '.1f') for score in protocols.values())}")


def bench_hard(
    dataset: Annotated[str, typer.Argument(help="A known dataset, or a folder with ground_truth.json.")],
    distractors: Annotated[Path, typer.Option(help="A folder of pictures that show nothing of it.")],
    recipes: Annotated[str, typer.Option("--recipe", "-r", help="By commas; gains are over the first.")],
    others: Annotated[int, typer.Option(help="Of those pictures, so many at most.")] = 2000,
    data: Annotated[Path, typer.Option(help="Folder below which the datasets lie.")] = Path("data"),
    results: ResultsOption = Path("results"),
) -> None:
    """What is found by a photo, a part of it, the photo from afar, and at dusk."""
    from benchmarks.hard import measure_hard
    from cooc.datasets.retrieval import load_dataset
    from cooc.pictures.folder import list_images

    loaded, strangers = load_dataset(dataset, data), list(itertools.islice(list_images(distractors), others))
    found = measure_hard(loaded, strangers, recipes.split(","))
    _write(found, results / f"hard-queries-{loaded.name}.json")
    for recipe, views in found["results"].items():
        for view, protocols in views.items():
            scores = " / ".join(format(score["mAP"], ".1f") for score in protocols.values())
            out.print(f"{recipe} {view}: {scores}")


def make_thumbnails(
    folder: Annotated[Path, typer.Argument(help="With jpg/ and ground_truth.json.")],
    output: Annotated[Path, typer.Argument(help="The folder that gets half/ and half-by-thumbnail/.")],
) -> None:
    """A labelled folder of which half is thumbnails, for `cooc bench`; and the same with thumbnails as queries."""
    from benchmarks.thumbnails import write_thumbnails

    for made in write_thumbnails(folder, output):
        out.print(str(made), markup=False)


def bench_compact(
    dataset: Annotated[str, typer.Argument(help="A known dataset, or a folder with ground_truth.json.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="One or more recipes, by commas.")] = "",
    vectors: Annotated[list[Path] | None, typer.Option(help="Instead: files that --export wrote.")] = None,
    storages: Annotated[str, typer.Option(help="By commas.")] = "float16,int8,int4,pq",
    export: Annotated[Path | None, typer.Option(help="Only write the vectors there, for another machine.")] = None,
    data: Annotated[Path, typer.Option(help="Folder below which the datasets lie.")] = Path("data"),
    cache: Annotated[Path, typer.Option(help="Where raw vectors are kept between runs.")] = Path(".cooc/bench"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    results: ResultsOption = Path("results"),
) -> None:
    """What mAP is lost when vectors are stored as float16, int8, int4 or pq."""
    from benchmarks.compact import export_vectors, import_vectors, measure_compact, whitened
    from cooc.bench.describing import BenchOptions
    from cooc.datasets.retrieval import load_dataset
    from cooc.recipes import find_recipe

    loaded = load_dataset(dataset, data)
    if vectors:
        pairs = import_vectors(loaded, vectors)
    elif recipe:
        options = BenchOptions(device=device, dtype=dtype, cache=cache)
        pairs = whitened(loaded, [find_recipe(name) for name in recipe.split(",")], options)
    else:
        raise InputError("Name recipes with -r, or files of vectors with --vectors.")
    if export is not None:
        files = export_vectors(loaded, pairs, export)
        err.print(f"Written: {', '.join(map(str, files))}", markup=False)
        return
    found = measure_compact(loaded, pairs, storages.split(","))
    _write(found, results / f"compact-{loaded.name}.json")
    table = Table("recipe", "storage", "bytes", *loaded.protocols, title=f"mAP on {loaded.name}, in percent")
    for row in found["rows"]:
        cells = (f"{row['mAP'][p]:.2f} ({row['change'][p]:+.2f})" for p in loaded.protocols)
        table.add_row(row["recipe"], row["storage"], str(row["bytes"]), *cells)
    out.print(table)


def bench_growth(
    sizes: Annotated[str, typer.Option(help="Numbers of images, by commas.")] = "1000,10000,100000,1000000",
    storages: Annotated[str, typer.Option(help="By commas.")] = "float32,int4",
    dim: Annotated[int, typer.Option(min=4, help="Numbers in a vector.")] = 512,
    place: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For the temporary indexes.")] = None,
    results: ResultsOption = Path("results"),
) -> None:
    """Time, memory and disk of indexes of synthetic vectors, from a thousand to a million."""
    from benchmarks.growth import run_growth

    if not all(part.isdigit() and int(part) for part in sizes.split(",")):
        raise InputError(f"--sizes {sizes!r}: whole numbers joined by commas are wanted.")
    counts = [int(part) for part in sizes.split(",")]
    keep = functools.partial(_write, file=results / "growth-cpu.json")
    with err.status("Measuring ...") as status:
        found = run_growth(counts, storages.split(","), dim, place, keep, status.update)
    table = Table(box=None, pad_edge=False)
    rows: list[dict[str, Any]] = found["rows"]
    for heading in rows[0]:
        table.add_column(heading)
    for row in rows:
        table.add_row(*(str(value["most"] if isinstance(value, dict) else value) for value in row.values()))
    out.print(table)


def bench_features(
    folder: Annotated[Path, typer.Argument(help="A folder of photos.")],
    engines: Annotated[str, typer.Option(help="sift, xfeat, activations, or several: sift+xfeat.")] = "sift",
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="Whose vectors they are compared with.")
    ] = "paper-linear",
    count: Annotated[int, typer.Option(help="Photos.")] = 40,
    results: ResultsOption = Path("results"),
) -> None:
    """What local features cost in an index: seconds and bytes of a picture."""
    from benchmarks.features import measure_features

    found = measure_features(folder, engines, recipe, count)
    _write(found, file=results / "features-cpu.json")
    seconds = found["processor seconds of a picture"]
    out.print(
        f"{found['features of a picture']} features, {found['bytes of a picture']} bytes a picture; "
        f"{seconds['features']} s of the processor, {100 * found['features beside the vector']:.1f} % of the vector's"
    )


def bench_queries(
    dataset: Annotated[str, typer.Argument(help="A known dataset, or a folder with ground_truth.json.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Whose vectors are compared.")] = options.DEFAULT,
    data: Annotated[Path, typer.Option(help="Folder below which the datasets lie.")] = Path("data"),
    cache: Annotated[Path, typer.Option(help="Where raw vectors are kept between runs.")] = Path(".cooc/bench"),
    results: ResultsOption = Path("results"),
) -> None:
    """What is found by queries that OpenCV describes, as searches on a CPU do, and by those that torch describes."""
    from benchmarks.queries import compare_queries
    from cooc.datasets.retrieval import load_dataset

    found = compare_queries(load_dataset(dataset, data), recipe, cache)
    _write(found, results / "queries-cpu.json")
    out.print(found)


def bench_startup(
    folder: Annotated[Path, typer.Argument(help="A folder of photos.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Of the temporary index.")] = options.DEFAULT,
    count: Annotated[int, typer.Option(help="Photos.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Searches of each kind.")] = 5,
    fill: Annotated[int, typer.Option(help="Made-up pictures are added until the index has so many.")] = 0,
    index: Annotated[Path | None, typer.Option(help="One that is there, which the photos are queries to.")] = None,
    results: ResultsOption = Path("results"),
) -> None:
    """What `cooc search` takes, the first time and again, and which steps take it."""
    from benchmarks.startup import measure_startup

    found = measure_startup(folder, recipe, count, rounds, fill, index)
    _write(found, file=results / "startup-cpu.json")
    for kind, took in found.items():
        if isinstance(took, dict) and "seconds" in took:
            out.print(f"{kind}: {took['seconds']} s")


def bench_duplicates(
    folders: Annotated[list[Path], typer.Argument(help="Folders of different photos.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Of the temporary index.")] = options.DEFAULT,
    count: Annotated[int, typer.Option(help="Photos.")] = 1000,
    copied: Annotated[int, typer.Option(help="Of them, how many have a copy of each kind.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the choice of photos.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For photos and index, which the next run uses again.")
    ] = None,
    results: ResultsOption = Path("results"),
) -> None:
    """Which copies `cooc duplicates` finds among different photos, by kind, and what it joins by mistake."""
    from benchmarks.duplicates import measure_duplicates

    found = measure_duplicates(folders, recipe, count, copied, seed, keep)
    _write(found, file=results / f"duplicates-{recipe}.json")
    for kind, number in found["found"].items():
        out.print(f"{kind}: {number} of {copied}")
    out.print(f"photos that were joined: {found['photos that were joined'] or 'none'}")


def bench_ladder(
    folder: Annotated[Path, typer.Argument(help="A folder of photos.")],
    count: Annotated[int, typer.Option(help="Photos.")] = 40,
    results: ResultsOption = Path("results"),
) -> None:
    """What makes `cooc index` fast on a CPU: each step in several forms, and threads beside processes."""
    from benchmarks.ladder import measure_ladder

    found = measure_ladder(folder, count)
    _write(found, file=results / "ladder-cpu.json")
    for step, forms in found["seconds of a photo"].items():
        out.print(f"{step}: {', '.join(f'{name} {seconds} s' for name, seconds in forms.items())}", markup=False)


def bench_qualities(
    folder: Annotated[Path, typer.Argument(help="A folder of photos.")],
    counts: Annotated[str, typer.Option(help="Photos for each quality, by commas.")] = (
        "paper-linear=20,fast=100,balanced=100,best=20"
    ),
    results: ResultsOption = Path("results"),
) -> None:
    """What `cooc index` takes by quality: seconds, memory and bytes of a photo, and whether its time left was true."""
    from benchmarks.qualities import measure_qualities

    wanted = {name: int(count) for name, _, count in (part.partition("=") for part in counts.split(","))}
    found = measure_qualities(folder, wanted)
    _write(found, file=results / "qualities-cpu.json")
    for name, row in found["qualities"].items():
        seconds, memory, size = row["seconds of a photo"], row["MB of memory"], row["MB of a thousand photos"]
        out.print(f"{name}: {seconds} s a photo, {memory} MB of memory, {size} MB a thousand on disk")
