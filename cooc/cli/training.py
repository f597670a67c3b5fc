"""cooc train: a filter, and more of the chain, from photos of which some show the same thing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cooc.cli import app, err, options, out
from cooc.cli.bars import counting
from cooc.cli.filters import DEFAULT_RANK, Storage
from cooc.errors import PARTIAL, InputError


@app.command()
def train(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN", help="Folder for all that is written.")],
    data: Annotated[
        Path | None, typer.Option(help="Labelled folders, a folder with ground_truth.json, or retrieval-SfM-120k's.")
    ] = None,
    index: Annotated[
        str, typer.Option(metavar="INDEX", help="Instead: pictures of an index that geometry proves to match.")
    ] = "",
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="What to learn for. [default: paper-bilinear, or that of the index]")
    ] = "",
    size: Annotated[
        int | None, typer.Option(min=32, help="Longest side of the photos. [default: 640, or that of the index]")
    ] = None,
    form: Annotated[Literal["learned", "factored"], typer.Option(help="A full filter, or low rank.")] = "factored",
    rank: Annotated[
        int, typer.Option(min=0, help="Rank of a factored filter (0: 32); a full one is cut to it at the end (0: not).")
    ] = 0,
    parts: Annotated[
        str,
        typer.Option(
            "--train",
            help="What to train, by commas: filter, exponent, whitening, block5 (the network's last block; block4: the "
            "last two). [default: filter, if there is one]",
        ),
    ] = "",
    layer: Annotated[int, typer.Option(min=0, help="Dimensions of a whitening layer before the loss; 0: none.")] = 0,
    loss: Annotated[
        Literal["contrastive", "triplet", "smooth-ap"], typer.Option(help="The paper's is contrastive.")
    ] = "smooth-ap",
    margin: Annotated[float | None, typer.Option(help="Margin of contrastive (tau, 0.75) and triplet (0.1).")] = None,
    temperature: Annotated[float | None, typer.Option(help="Temperature of smooth-ap (0.01).")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Adam's learning rate (full 8e-3, factored 1e-2; the paper's 1e-9).")
    ] = None,
    average: Annotated[
        float,
        typer.Option(help="Keep the mean over steps, each of which leaves so much of the mean before it; 0: none."),
    ] = 0.0,
    epochs: Annotated[int, typer.Option(min=1)] = 8,
    patience: Annotated[int, typer.Option(min=1, help="Epochs without a better validation mAP.")] = 3,
    block_rank: Annotated[int, typer.Option(min=1, help="Rank of the change of a block's kernels.")] = 32,
    block_lr: Annotated[float | None, typer.Option(help="Learning rate of a block (3e-4).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Tuples in a step.")] = 24,
    at_once: Annotated[int, typer.Option(min=1, help="Tuples in memory at once; fewer need less of it.")] = 24,
    queries: Annotated[int, typer.Option(min=1, help="Tuples in an epoch.")] = 2000,
    positives: Annotated[int, typer.Option(min=1, help="Positives in a tuple.")] = 2,
    negatives: Annotated[int, typer.Option(min=1, help="Negatives in a tuple, each of another label.")] = 10,
    pool: Annotated[
        int, typer.Option(min=2, help="Photos that negatives are mined from; of an index, those that are compared.")
    ] = 20000,
    pairs: Annotated[
        Literal["verified", "all"], typer.Option(help="Pairs of one label to train on: those that match, or all.")
    ] = "verified",
    held_out: Annotated[
        float | None,
        typer.Option(help="Part of the labels kept for validation. [default: 0.2, of fewer than 2000 photos 0.5]"),
    ] = None,
    crops: Annotated[
        bool, typer.Option("--crops", help="A part of each photo is a query, too: to learn from, and to validate with.")
    ] = False,
    distractors: Annotated[
        Path | None, typer.Option(help="Pictures that show nothing of it, to search among in validation.")
    ] = None,
    unlabelled: Annotated[
        Path | None,
        typer.Option(
            help="Pictures that show nothing of it, to learn from: with --crops each is found by a part of it."
        ),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Labels to leave out.")] = None,
    not_in: Annotated[Path | None, typer.Option(help="A folder of test photos, none of which is trained on.")] = None,
    whitening: Annotated[
        Literal["adapted", "pca", "learned", "none"] | None,
        typer.Option(help="Fitted at the end: pca; of fewer than 2000 photos the recipe's own, adapted to the pairs."),
    ] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Dimensions after whitening. [default: the recipe's]")] = None,
    storage: Annotated[Storage, typer.Option(help="Dtype of the files that are written.")] = "float32",
    cache: Annotated[Path | None, typer.Option(help="Keep activations in this folder, not in memory.")] = None,
    keep: Annotated[str, typer.Option(help="Activations as auto, float16, bfloat16 or float32.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from RUN's checkpoint.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Curves in RUN/tensorboard.")] = False,
    device: options.Device = "auto",
    dtype: Annotated[
        str, typer.Option(help="Dtype of the network and a full filter: auto, float32, bfloat16.")
    ] = "auto",
    workers: Annotated[int | None, typer.Option(min=0, help="Decoding processes; 0 is threads.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print run.json.")] = False,
) -> None:
    """Learn a co-occurrence filter from photos of which some show the same thing (section 5 of the paper).

    RUN is then a recipe for any command (descriptor.json, filter.safetensors, whitening.safetensors), and holds
    run.json, log.jsonl and the checkpoint too. If photos that were held out are not found better than by the recipe as
    it is, that is said, and RUN is none. On several GPUs: torchrun --nproc-per-node 4 -m cooc.cli train
    --cache FOLDER ...
    """
    from cooc.activations import resolve_device
    from cooc.datasets.photos import ENOUGH, add_crops, add_unlabelled, load_photos
    from cooc.datasets.retrieval import image_set
    from cooc.image_search import ImageSearch
    from cooc.pooling import POOLINGS
    from cooc.provenance import provenance
    from cooc.recipes import find_recipe
    from cooc.training import processes as running
    from cooc.training.artefacts import finish, own_whitening
    from cooc.training.block import layer_before
    from cooc.training.cache import build_cache
    from cooc.training.mining import mine_pairs
    from cooc.training.train import BLOCK_RATE, TrainConfig, as_it_is
    from cooc.training.train import train as learn
    from cooc.training.verification import all_pairs, verify

    if bool(index) == (data is not None):
        raise InputError(
            "Learn from labelled photos, --data FOLDER, or from an index, --index INDEX: give one of them."
        )
    output.mkdir(parents=True, exist_ok=True)
    if data is not None:
        photos = load_photos(data, exclude=exclude or (), not_in=not_in, held_out=held_out, seed=seed)
        recipe, size = recipe or "paper-bilinear", size or 640
        named = find_recipe(recipe).config
    else:
        with ImageSearch.open(index, device=device) as search, counting("pictures compared") as show:
            photos = mine_pairs(search, most=pool, held_out=held_out, seed=seed, device=device, progress=show)
            named = find_recipe(recipe).config if recipe else search.config
            recipe, size = recipe or search.meta.recipe, size or named.size
    if unlabelled is not None:
        photos = add_unlabelled(photos, image_set(unlabelled), held_out=False)
    if crops:
        photos = add_crops(photos, seed)
    if distractors is not None:
        photos = add_unlabelled(photos, image_set(distractors), held_out=True)
    parts = parts or ("filter" if POOLINGS[named.pooling].cooccurrence else "exponent")
    descriptor = named.replace(size=size, scales=(1.0,), whitening="", dim=0, dtype=dtype)
    if POOLINGS[named.pooling].cooccurrence:
        descriptor = descriptor.replace(cooccurrence="direct", filter="")  # where learning starts
    loss_options = {"margin": margin, "temperature": temperature}
    settings = TrainConfig(
        descriptor,
        form=form,
        rank=rank or DEFAULT_RANK,
        block_rank=block_rank,
        block_lr=block_lr or BLOCK_RATE,
        train=tuple(part for part in parts.split(",") if part),
        layer=layer,
        loss=loss,
        options={name: value for name, value in loss_options.items() if value is not None},
        lr=lr,
        average=average,
        epochs=epochs,
        patience=patience,
        batch=batch,
        at_once=at_once,
        queries=queries,
        positives=positives,
        negatives=negatives,
        pool=pool,
        dtype=dtype,
        seed=seed,
    )
    kept_for = descriptor.replace(layer=layer_before(descriptor, settings.block)) if settings.block else descriptor
    with running.processes(device) as own:
        if running.world() > 1 and cache is None:
            raise InputError("Several processes share activations on disk: add --cache FOLDER.")
        place = resolve_device(own)
        with running.first_before_others(), counting("activations") as show:
            kept, good, bad = build_cache(
                photos.items, kept_for, device=place, folder=cache, keep=keep, workers=workers, progress=show
            )
        photos = photos.subset(good)
        with counting("verifying pairs") as show:
            photos = verify(photos, kept, as_it_is(descriptor, kept, settings.block), progress=show)
        photos = photos if pairs == "verified" else all_pairs(photos)
        few = whitening == "adapted" or (not whitening and len(photos) < ENOUGH)
        layer_of_recipe = own_whitening(named.replace(dim=dim or named.dim)) if few else None
        if whitening == "adapted" and layer_of_recipe is None:
            raise InputError(f"{recipe} has no whitening to {dim or named.dim} dimensions to adapt: --whitening pca")
        whitening = whitening or ("pca" if layer_of_recipe is None else "adapted")
        first, judges = running.rank() == 0, len(photos.queries(held_out=True))
        if not judges and held_out != 0:
            raise InputError(
                "No photo that was held out has a match, so that nothing could judge what is learned. Give more photos "
                "of each label, or --held-out 0 to learn without a judge."
            )
        if first:
            for one in bad:
                err.print(f"left out: {one.reason}", style="yellow", markup=False)
            err.print(f"{len(photos)} photos, {len(photos.queries())} with matches to train on, {judges} to judge by.")
        run = learn(
            kept,
            photos,
            settings,
            folder=output,
            whitening=layer_of_recipe,
            resume=resume,
            tensorboard=tensorboard,
            report=lambda epoch: err.print(_line(epoch)) if first else None,
        )
        if not first:
            return
        summary = finish(
            run,
            kept,
            photos,
            output,
            recipe=named,
            whitening=whitening,
            dim=dim or named.dim,
            compress=rank if form == "learned" else 0,
            storage=storage,
            about={"recipe": recipe, **provenance(own)},
        )
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        _show_summary(summary, output, index)
    if bad:
        raise typer.Exit(PARTIAL)


def _line(epoch: dict[str, Any]) -> str:
    parts = [f"epoch {epoch['epoch']}"]
    parts += [f"{name} {epoch[name]:.4g}" for name in ("loss", "mAP", "mAP raw", "seconds") if name in epoch]
    return ", ".join(parts)


def _show_summary(summary: dict[str, Any], folder: Path, index: str) -> None:
    out.print(f"{summary['seconds']:.0f} s, {summary['peak_bytes'] / 1e9:.2f} GB at most.")
    judged = summary.get("judged")
    if judged is not None:
        gain = "[{:+.2f}, {:+.2f}]".format(*judged["gain"])
        out.print(f"mAP of {judged['queries']} photos held out: {judged['before']:.2f} as it is, ", end="")
        out.print(f"{judged['after']:.2f} as learned; the gain, 95 %: {gain}.", markup=False)
        if not judged["better"]:
            kept = f"{index} stays" if index else f"use the recipe {summary['recipe']}"
            out.print(f"Not better beyond chance, so no recipe was written: {kept} as it is.", markup=False)
            return
    if "filter" in summary:
        found = summary["filter"]
        size = f"{found['bytes'] / 1e6:.1f} MB, error {found['error']:.2g}"
        out.print(f"{folder / found['file']}: {found['form']}, {size}", markup=False)
    if "tuning" in summary:
        found = summary["tuning"]
        out.print(f"{folder / found['file']}: the network's change, {found['bytes'] / 1e6:.1f} MB", markup=False)
    if "exponent" in summary:
        out.print(f"exponent {summary['exponent']:.4f}")
    use = f"cooc rebuild --index {shlex.quote(index)}" if index else "cooc index FOLDER"
    out.print(f"Use it: {use} -r {shlex.quote(str(folder))}", markup=False, soft_wrap=True)
