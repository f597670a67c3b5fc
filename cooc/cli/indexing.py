"""Commands that make an index and fill it: index, add."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cooc.asking import stand_by
from cooc.cli import app, options, out
from cooc.cli.cores import sharing_cores
from cooc.cli.estimating import show_estimates, tell_before_a_long_run
from cooc.cli.runs import finish, running
from cooc.errors import InputError, StoreMissingError, UnknownNameError, WeightsError, check_name, counted

if TYPE_CHECKING:
    from cooc.image_search import ImageSearch
    from cooc.index.engine import Engine

ENGINES = ("here", "ray")
TIDY = 0.1  # share of the index that changed, from which it is compacted after a run


@app.command()
def index(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="FOLDER|URL...", help="Pictures: folders, s3://BUCKET/PREFIX, tar+FOLDER with tars."),
    ],
    index: Annotated[
        str,
        typer.Option(
            "--index",
            metavar="INDEX",
            help="A folder, postgresql://user@host/db?index=NAME or milvus://host/NAME. [default: FOLDER/.cooc]",
        ),
    ] = "",
    quality: Annotated[
        str, typer.Option(metavar="fast|balanced|best", help="For a new index. [default: balanced]")
    ] = "",
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what each quality takes here, from a sample, and index nothing.")
    ] = False,
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="For a new index, instead of a quality: see `cooc recipes`.")
    ] = "",
    root: Annotated[
        str, typer.Option(metavar="FOLDER|URL", help="For a new index: all its pictures lie below. [default: FOLDER]")
    ] = "",
    storage: Annotated[str, typer.Option(help="For a new index: vectors as float32, float16, int8, int4 or pq.")] = "",
    verify: Annotated[
        str,
        typer.Option(
            metavar="ENGINES|none",
            help="Local features that prove matches: sift, xfeat, activations, or several: sift+xfeat. "
            "[default: those of the index; a new one has sift]",
        ),
    ] = "",
    device: options.Device = "auto",
    workers: options.Workers = None,
    engine: Annotated[str, typer.Option(help="What describes: here, or ray for a cluster of machines.")] = "here",
    address: Annotated[
        str,
        typer.Option(
            help="Address of the Ray cluster. [default: $RAY_ADDRESS, or one that is started on this machine]"
        ),
    ] = "",
    text: Annotated[
        str,
        typer.Option(
            metavar="MODEL=FILE|FOLDER",
            help='For `cooc search "a red car"`: a model of open_clip with weights of your own. Later runs keep to it.',
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Follow symbolic links.")] = False,
    keep_missing: Annotated[bool, typer.Option("--keep-missing", help="Keep what is no longer on disk.")] = False,
    prune: options.Prune = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try bad files again that have not changed.")] = False,
    nice: Annotated[bool, typer.Option("--nice", help="Let other programs of this machine go first.")] = False,
    quiet: options.Quiet = False,
    as_json: options.Events = False,
) -> None:
    """Index folders of pictures, or bring their index up to date.

    Only new and changed pictures are described. Stop it when you like, and run it again: it goes on where it was.
    Pictures of a folder that is empty or missing (is its disk mounted?) stay in the index, marked as away.
    An index that was made without local features gets them with --verify sift: nothing is described again for that.
    What is done can be searched at once, from another terminal. In a terminal the network stays loaded for 5 minutes
    when all is done, so that the first search need not wait for it: COOC_WARM, as for `cooc search`.
    """
    from cooc.activations import resolve_device
    from cooc.pictures import is_url
    from cooc.pictures.malloc import keep_maps

    check_name("engine", engine, ENGINES)
    missing = [f for f in folders if not is_url(f) and not Path(f).is_dir() and not f.endswith(".tar")]
    for folder in missing:
        if not index or Path(folder).exists():  # else the index may know it: then it is away
            raise _no_folder(folder)
    if estimate:
        show_estimates(folders, quality, device, workers, follow=follow, as_json=as_json)
        return
    if nice:
        os.nice(10)
    if not index and len(folders) > 1:
        raise InputError("Several folders need --index INDEX, where their common index is kept.")
    pictures = root or _common(folders)
    if not index and is_url(pictures):
        raise InputError(f"Pictures in {pictures} need --index INDEX: a folder of this machine, or a server.")
    where = index or str(Path(folders[0]) / options.NAME)
    plain = len(folders) == 1 and not (recipe or verify or quiet or as_json or missing or engine == "ray")
    if plain and not is_url(folders[0]) and not is_url(where) and not Path(where).exists():
        tell_before_a_long_run(folders[0], quality, device, workers, follow=follow)
    with _open_or_create(where, recipe, quality, pictures, device, storage, missing, verify) as search:
        if search.config.depthwise and resolve_device(device).type == "cpu":
            keep_maps()
        features = search.meta.features if engine != "ray" else ""  # its workers share nothing
        with (
            sharing_cores(search.config.backbone, features, device, workers) as shared,
            running(search, quiet, as_json) as progress,
        ):
            report = search.index(
                folders,
                workers=shared,
                engine=_on_ray(search, address, workers, device) if engine == "ray" else None,
                keep_missing=keep_missing,
                prune=prune,
                retry=retry,
                follow=follow,
                check_features=verify not in ("", "none"),
                progress=progress,
            )
        if not report.interrupted and report.described + report.removed > TIDY * len(search.store):
            search.store.compact()
        if not report.interrupted:
            follow_with_text(search, text, device, quiet, as_json)
        if not search.meta.features and not verify and not quiet and not as_json:
            named = f" --index {index}" if index else ""
            out.print(
                f"The index keeps no local features, so matches are not verified. To add them: cooc index {folders[0]}"
                f"{named} --verify sift",
                markup=False,
            )
        if not (report.interrupted or quiet or as_json or search.config.given or resolve_device(device).type != "cpu"):
            stand_by(where, device)
        finish(search, report, quiet, as_json)


def follow_with_text(search: ImageSearch, model: str, device: str, quiet: bool, as_json: bool) -> None:
    """Describe for words what the index has and they have not, where that is wanted."""
    from cooc.text import knows_words, update

    if not model and not knows_words(search.index_path):
        return
    with running(search, quiet, as_json) as progress:
        done = update(search.index_path, search.store, search.collection, model, device=device, progress=progress)
    if done is not None and done.described and not quiet and not as_json:
        out.print(f"{counted(done.described, 'picture')} described for words.")


@app.command()
def add(
    files: Annotated[list[str], typer.Argument(metavar="FILE|URL...", help="Pictures.")],
    index: options.Index = "",
    device: options.Device = "auto",
    quiet: options.Quiet = False,
    as_json: options.Events = False,
) -> None:
    """Add single pictures to an index, or describe them again if they changed."""
    for file in files:
        if Path(file).is_dir():
            raise InputError(f"{file!r} is a folder: cooc index {file}")
    with options.opened(index, write=True, device=device) as search:
        with running(search, quiet, as_json) as progress:
            report = search.add(files, progress=progress)
        finish(search, report, quiet, as_json)


def _common(folders: list[str]) -> str:
    """The root of a new index: the folder that holds all of these. Single tars lie in one, too."""
    from cooc.pictures import is_url

    tars = [folder.endswith(".tar") for folder in folders]
    places = [
        folder.rpartition("/")[0] or "." if tar else folder.rstrip("/")
        for folder, tar in zip(folders, tars, strict=True)
    ]
    mark = "tar+" if any(tars) and not places[0].startswith("tar+") else ""
    if not any(map(is_url, places)):
        return mark + os.path.commonpath([os.path.abspath(place) for place in places])  # noqa: PTH100
    if len(set(places)) > 1:
        raise InputError("Several addresses need --root URL: what they have in common, and all pictures lie below.")
    return mark + places[0]


def _on_ray(search: ImageSearch, address: str, workers: int | None, device: str) -> Engine:
    from cooc.descriptor import Descriptor
    from cooc.index.ray import OnRay

    config = search.config

    def build(device: str, threads: int) -> Descriptor:
        import torch

        torch.set_num_threads(threads)
        return Descriptor(config, device=device)

    weights, extraction = search.meta.weights_hash, search.extraction
    return OnRay(build, weights, address=address, workers=workers, device=device, extraction=extraction)


def _no_folder(name: str) -> InputError:
    return InputError(f"{name!r} is not a folder. For single pictures: cooc add FILE --index INDEX")


def _open_or_create(
    where: str, recipe: str, quality: str, root: str, device: str, storage: str, missing: list[str], verify: str
) -> ImageSearch:
    """`missing`: folders that are not there, of which only an index that is there may know something."""
    from cooc.image_search import DEFAULT_FEATURES, DEFAULT_QUALITY, QUALITIES, ImageSearch
    from cooc.index.store import kept_open

    if recipe and quality:
        raise InputError("--quality stands for a recipe: give one of the two.")
    if quality and quality not in QUALITIES:
        raise UnknownNameError("quality", quality, QUALITIES)
    asked = QUALITIES[quality].recipe if quality else recipe
    verify = verify or (QUALITIES[quality].features if quality else "")
    try:
        search = ImageSearch.open(where, write=True, recipe=asked or None, device=device)
    except StoreMissingError as error:
        if missing:
            raise _no_folder(missing[0]) from error
        chosen = storage or "float32"
        made = QUALITIES[quality or DEFAULT_QUALITY]
        features = "" if verify == "none" else verify or (DEFAULT_FEATURES if recipe else made.features)
        try:
            search = ImageSearch.create(
                where, recipe=asked or made.recipe, root=root, storage=chosen, features=features, device=device
            )
        except WeightsError as error:
            if asked:
                raise
            raise WeightsError(f"{error}\nOr take -r paper-linear, whose weights pip brings; it is slower.") from error
    with kept_open(search):
        if storage not in ("", search.meta.storage):
            kept = f"keeps vectors as {search.meta.storage}: for {storage} build another one."
            raise InputError(f"The index {search.index_name} {kept}")
        if verify == "none" and search.meta.features:
            raise InputError(
                f"The index {search.index_name} keeps local features by {search.meta.features}. To do without them, "
                "make it again: cooc rebuild --verify none"
            )
        if verify not in ("", "none"):
            search.keep_features(verify)
    return search
