"""What the method's free choices are worth on Oxford and ROxford: one backbone pass, then everything from activations.

    python -m benchmarks.experiments --data data --landmarks landmarks --not-in data/gldv2_dev --out results

    seeds       bilinear pooling under several draws of the sketch's hashes, and without a sketch
    whitening   three scales: kind of whitening, its dimensions, shrinkage, and how many pictures it is fitted on
    learning    filters trained with several losses and rates against the direct form, each with and without expansion

Each part writes experiment-<part>.json as it goes, so a run that is stopped keeps what it has; filters of the learning
part are written beside it, compressed. Made for one large GPU (the activations of all pictures at three scales lie in
its memory); with --limit it runs anywhere.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cooc.activations import Activations, resolve_device
from cooc.bench.scoring import evaluate_vectors
from cooc.cooccurrence import Cooccurrence
from cooc.datasets.photos import Photos, hold_out, labelled_folders
from cooc.datasets.retrieval import Dataset, image_set, load_dataset
from cooc.descriptor import load_backbone, rescale
from cooc.errors import CoocError
from cooc.evaluation import bootstrap_interval
from cooc.files import write_whole
from cooc.pictures.batches import Item, default_workers
from cooc.pooling import l2_normalise, power_mean
from cooc.provenance import portable, provenance
from cooc.recipes import MULTI_SCALE, DescriptorConfig, find_recipe
from cooc.stream import stream, upload
from cooc.training import filters
from cooc.training.cache import ActivationCache, Columns, half
from cooc.training.network import CoOcNet, describe
from cooc.training.train import TrainConfig, as_it_is, train
from cooc.training.verification import all_pairs, verify
from cooc.whitening import Whitening, fit_pca

START = time.monotonic()
PARTS = ("seeds", "learning", "whitening")
SEEDS = 5
SIZES = (625, 1250, 2500)  # of smaller whitening sets
# The filter is 1 off its diagonal. The authors divide theirs by 81, so a rate of theirs is 81 times that rate here.
# `size` is the longest side of the photos that are trained on, `pairs` says whether all of a landmark count as such.
PAPER: dict[str, Any] = {"form": "learned", "loss": "contrastive", "positives": 1, "negatives": 5}
TRIPLET = {"loss": "triplet", "layer": 512, "options": {"margin": 0.5}}
SETTINGS: dict[str, dict[str, Any]] = {
    "contrastive-8e-3": {"lr": 8e-3},
    "smooth-ap-8e-3": {"lr": 8e-3, "loss": "smooth-ap", "positives": 2, "negatives": 10},
    "all-pairs-8e-3": {"lr": 8e-3, "pairs": "all"},
    "448-px-8e-3": {"lr": 8e-3, "size": 448},
    "whitened-triplet-8e-3": {"lr": 8e-3} | TRIPLET,
    "contrastive-3e-2": {"lr": 3e-2},
    "factored-1e-2": {"lr": 1e-2, "form": "factored", "rank": 32},
    "contrastive-1e-3": {"lr": 1e-3},
    "contrastive-8e-8": {"lr": 8e-8, "epochs": 2},
    "factored-smooth-ap-1e-2": {"lr": 1e-2, "form": "factored", "loss": "smooth-ap", "positives": 2, "negatives": 10},
    "factored-triplet-1e-2": {"lr": 1e-2, "form": "factored"} | TRIPLET,
}


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f} s]", *words, flush=True)


@dataclass
class Vectors:
    """Raw unit vectors of each scale: pictures to fit on, the database, and the queries of each test set."""

    fitting: list[Tensor]
    database: list[Tensor]
    queries: dict[str, list[Tensor]]


@dataclass
class Bench:
    """Activations of all pictures at each scale, and the truth."""

    photos: Photos  # pairs of which were verified
    unverified: Photos
    landmarks: list[ActivationCache]
    database: list[ActivationCache]
    queries: dict[str, list[ActivationCache]]
    tests: list[Dataset]
    orders: dict[str, list[int]]  # rows of the database in the order of each test set
    others: Callable[[int], ActivationCache]  # the landmarks at another size, one scale

    @torch.no_grad()
    def vectors(self, net: CoOcNet, scales: int = 3) -> Vectors:
        def of(caches: list[ActivationCache]) -> list[Tensor]:
            return [describe(net, cache, range(len(cache)), raw=True) for cache in caches[:scales]]

        return Vectors(of(self.landmarks), of(self.database), {name: of(c) for name, c in self.queries.items()})

    def scores(
        self,
        vectors: Vectors,
        whiten: Callable[[Tensor], Tensor],
        expansions: tuple[str, ...],
        scales: slice = slice(0, 3),
    ) -> dict[str, Any]:
        """dataset -> expansion -> protocol -> mAP, interval and AP of each query."""
        database = whiten(joined(vectors.database[scales])).float().cpu().numpy()
        out: dict[str, Any] = {}
        for test in self.tests:
            queries = whiten(joined(vectors.queries[test.name][scales])).float().cpu().numpy()
            found = {e: evaluate_vectors(test, database[self.orders[test.name]], queries, e) for e in expansions}
            out[test.name] = {
                e: {p: {k: s[k] for k in ("mAP", "interval", "ap")} for p, s in protocols.items()}
                for e, protocols in found.items()
            }
        return out


def joined(scales: list[Tensor]) -> Tensor:
    return l2_normalise(power_mean(torch.stack(scales)))


def line(scores: dict[str, Any]) -> str:
    """E / M / H of ROxford after the mAP of Oxford, for each expansion."""
    cells: dict[str, list[str]] = {}
    for expansions in scores.values():
        for name, protocols in expansions.items():
            cells.setdefault(name, []).extend(f"{score['mAP']:.1f}" for score in protocols.values())
    return "; ".join(f"{name} {' / '.join(values)}" for name, values in cells.items())


# --- activations -----------------------------------------------------------------------------------------------------


def activations(
    items: list[Item], backbone: Activations, size: int, workers: int, scales: tuple[float, ...] = MULTI_SCALE
) -> list[ActivationCache]:
    """One decode, one backbone pass for each scale: a cache for each, rows in the order of the items."""
    device = next(backbone.parameters()).device
    columns = [Columns(half(next(backbone.parameters()).dtype)) for _ in scales]

    @torch.no_grad()
    def begin(images: Tensor) -> Callable[[], list[list[Tensor]]]:
        images = upload(images, device)
        maps = [backbone(rescale(images, scale, backbone.stride)) for scale in scales]
        return lambda: [list(of_one) for of_one in zip(*maps, strict=True)]

    keyed = [Item(str(i), item.picture, item.box) for i, item in enumerate(items)]
    for item, found in stream(keyed, begin, device=device, size=size, min_side=backbone.stride, workers=workers):
        if isinstance(found, CoocError):
            sys.exit(f"An experiment needs all of its pictures. {found}")
        for column, A in zip(columns, found, strict=True):
            column.add([item.key], A[None])
    return [column.cache(str(i) for i in range(len(items))).to(device) for column in columns]


def load(args: argparse.Namespace, base: DescriptorConfig, device: torch.device) -> Bench:
    backbone = load_backbone(base, device)
    workers = default_workers(device.type) if args.workers is None else args.workers
    tests = [load_dataset(name, args.data) for name in ("oxford5k", "roxford5k")]
    places = {path.stem: i for i, path in enumerate(tests[0].image_paths)}
    orders = {test.name: [places[path.stem] for path in test.image_paths] for test in tests}
    photos = labelled_folders(
        args.landmarks, image_set(args.landmarks, exclude_labels=args.exclude, exclude_names_of=args.not_in)
    )
    if args.limit:
        rows = [i for c in np.unique(photos.clusters) for i in np.flatnonzero(photos.clusters == c)[:10].tolist()]
        photos = photos.subset(rows[: args.limit])
    photos = hold_out(photos, 0.2)
    landmarks = activations(photos.items, backbone, args.fit_size, workers)
    say(f"{len(photos)} landmark photos, {sum(c.bytes for c in landmarks) / 1e9:.1f} GB of activations")
    database = activations([Item(None, path) for path in tests[0].image_paths], backbone, base.size, workers)
    queries = {
        test.name: activations([Item(None, q.path, q.box) for q in test.queries], backbone, base.size, 0)
        for test in tests
    }
    say(f"{len(database[0])} Oxford photos, {sum(c.bytes for c in database) / 1e9:.1f} GB of activations")
    verified = verify(photos, landmarks[0], as_it_is(base, landmarks[0]))
    say(f"{len(verified.pairs()[0])} verified pairs, {len(verified.queries())} photos to train on")

    def others(size: int) -> ActivationCache:
        return activations(photos.items, backbone, size, workers, (1.0,))[0]

    return Bench(verified, all_pairs(verified), landmarks, database, queries, tests, orders, others)


# --- the parts -------------------------------------------------------------------------------------------------------


def seeds(bench: Bench, base: DescriptorConfig, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compact bilinear pooling under several draws, the sketch-free limit, and the signed square root; one scale."""
    cases = {
        "BP(AC_T) + SpTD": base.replace(mask="top-down"),
        "BP(AA)": base.replace(cooccurrence="none"),
        "BP(AC_T)": base,
    }
    variants: dict[str, dict[str, Any]] = {"no sketch": {"pooling": "bilinear", "options": ()}}
    variants |= {f"seed {s}": {"options": {"dim": args.sketch, "seed": s}} for s in range(SEEDS)}
    variants |= {"seed 0, square root": {"options": {"dim": args.sketch, "seed": 0, "sqrt": True}}}
    for case, config in cases.items():
        for variant, changes in variants.items():
            changed = config.replace(**changes)
            net = CoOcNet(changed, bench.landmarks[0].channels, train=()).to(bench.landmarks[0].device)
            vectors = bench.vectors(net, 1)
            whitening = fit_pca(vectors.fitting[0], min(args.dim, len(bench.photos) - 1))
            for dim in (512, whitening.dim):
                scores = bench.scores(
                    vectors, whitening.truncate(min(dim, whitening.dim)), ("none", "average-10"), slice(1)
                )
                yield f"{case}, {dim}, {variant}", {"scores": scores}
            del vectors, whitening


def spectrum(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, axes (r, D) and variances (r,) of unit rows, in float64."""
    x = x.double()
    mean = x.mean(0)
    x = x - mean
    if len(x) > x.shape[1]:
        values, vectors = torch.linalg.eigh(x.T @ x / (len(x) - 1))
        return mean, vectors.T.flip(0), values.flip(0).clamp_min(0)
    values, sides = torch.linalg.eigh(x @ x.T / (len(x) - 1))
    values, sides = values.flip(0)[:-1], sides.T.flip(0)[:-1]
    return mean, torch.nn.functional.normalize(sides @ x, dim=1), values


def shrunk(mean: Tensor, axes: Tensor, values: Tensor, share: float) -> Whitening:
    """(covariance + share * its mean variance)^(-1/2) in all dimensions, those that the samples lack included."""
    floor = share * values.sum() / axes.shape[1]
    matrix = (axes.T * ((values + floor).rsqrt() - floor.rsqrt())) @ axes
    matrix.diagonal().add_(floor.rsqrt())
    return Whitening(mean.float(), (matrix * floor.sqrt()).float())


def whitening(bench: Bench, base: DescriptorConfig, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    device = bench.landmarks[0].device
    nets = {"BP(AC_T)": CoOcNet(base, bench.landmarks[0].channels, train=()).to(device)}
    if (file := args.out / f"filter-{args.filter}.safetensors").is_file():
        learned = CoOcNet(base, bench.landmarks[0].channels, form="factored", rank=args.rank, train=("filter",))
        learned = learned.to(device)
        learned.load_filter(Cooccurrence.load(file))
        nets[f"BP(AC_T), {args.filter}"] = learned
    nets["BP(AC_T) + SpTD"] = CoOcNet(base.replace(mask="top-down"), bench.landmarks[0].channels, train=()).to(device)
    ways = ("none", "alpha-10")
    for name, network in nets.items():
        vectors = bench.vectors(network)
        three, each = joined(vectors.fitting), torch.cat(vectors.fitting)

        def tried(
            label: str,
            whiten: Callable[[Tensor], Tensor],
            scales: slice = slice(3),
            name: str = name,
            vectors: Vectors = vectors,
        ) -> tuple[str, dict[str, Any]]:
            return f"{name}, {label}", {"scores": bench.scores(vectors, whiten, ways, scales)}

        found = spectrum(three)
        pca = Whitening(found[0].float(), (found[1][: args.dim] * found[2][: args.dim, None].rsqrt()).float())
        yield tried(f"PCA {pca.dim}", pca)
        for share in (0.001, 0.01, 0.1):
            yield tried(f"shrunk {share:g}", shrunk(*found, share))
        if name == "BP(AC_T)":
            yield tried("no whitening", l2_normalise)
            for label, scales in {"size 1024": slice(1), "size 724": slice(1, 2), "sizes 1024, 724": slice(2)}.items():
                yield tried(f"shrunk 0.01, {label}", shrunk(*found, 0.01), scales)
            for size in SIZES:
                rows = torch.from_numpy(np.random.default_rng(0).permutation(len(three))[:size].copy()).to(device)
                yield tried(f"shrunk 0.01, {size} pictures", shrunk(*spectrum(three[rows]), 0.01))
        found = spectrum(each)
        if len(found[2]) >= args.sketch:
            pca = Whitening(found[0].float(), (found[1] * found[2][:, None].clamp_min(1e-12).rsqrt()).float())
            yield tried(f"PCA {args.sketch} of each scale", pca)
        for share in (0.01, 0.1):
            yield tried(f"each scale, shrunk {share:g}", shrunk(*found, share))
        queries, positives = (torch.from_numpy(i).to(device) for i in bench.photos.pairs())
        differences = torch.cat([x[queries] - x[positives] for x in (*vectors.fitting, three)]).double()
        values, axes = torch.linalg.eigh(differences.T @ differences / len(differences))
        lw = three[queries].double().mean(0), axes.T.flip(0), values.flip(0).clamp_min(0)
        for share in (0.01, 0.1, 1.0):
            yield tried(f"Lw shrunk {share:g}", shrunk(*lw, share))


def learning(bench: Bench, base: DescriptorConfig, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    device = bench.landmarks[0].device
    photos = bench.photos
    ways = ("none", "alpha-10", "alpha-50")

    def compare(net: CoOcNet, against: dict[str, Any] | None) -> dict[str, Any]:
        vectors = bench.vectors(net)
        out: dict[str, Any] = {}
        for label, scales in {"one scale": slice(1), "three scales": slice(3)}.items():
            fitted = fit_pca(joined(vectors.fitting[scales]), min(args.dim, len(photos) - 1))
            for dim in (512, fitted.dim):
                scores = bench.scores(vectors, fitted.truncate(min(dim, fitted.dim)), ways, scales)
                out[f"{label}, {dim}"] = scores
        if against is not None:
            for key, scores in out.items():
                for dataset, expansions in scores.items():
                    for expansion, protocols in expansions.items():
                        for protocol, score in protocols.items():
                            other = against[key][dataset][expansion][protocol]["ap"]
                            gain = [100 * (a - b) for a, b in zip(score["ap"], other, strict=True) if a is not None]
                            score["gain"] = [
                                round(float(np.mean(gain)), 2),
                                *(round(g, 2) for g in bootstrap_interval(gain)),
                            ]
        return out

    direct = compare(CoOcNet(base, bench.landmarks[0].channels, train=()).to(device), None)
    yield "direct", {"scores": direct}
    settings = json.loads(args.settings) if args.settings else SETTINGS
    best = float("inf") if args.filter else 0.0
    for name, given in settings.items():
        if time.monotonic() - START > args.deadline:
            say(f"no time left for {name}")
            continue
        values = PAPER | {"epochs": args.epochs, "patience": args.epochs, "queries": args.queries} | given
        size, pairs = values.pop("size", args.fit_size), values.pop("pairs", "verified")
        config = TrainConfig(base.replace(size=size), **values)
        cache = bench.landmarks[0] if size == args.fit_size else bench.others(size)
        run = train(
            cache, photos if pairs == "verified" else bench.unverified, config, report=functools.partial(say, name)
        )
        del cache
        layer = run.net.filter()
        full = compare(run.net, direct) if name == next(iter(settings)) and layer.form == "learned" else None
        small = filters.compress(layer, args.rank) if layer.form == "learned" else layer
        about = provenance(args.device) | {"config": config.as_dict(), "history": run.history}
        file = args.out / f"filter-{name}.safetensors"
        small.save(file, storage="float16", about=about)
        run.net.load_filter(Cooccurrence.load(file))
        result = {
            "config": config.as_dict() | {"pairs": pairs},
            "history": run.history,
            "best": run.best,
            "seconds": run.seconds,
            "peak_bytes": run.peak_bytes,
            "bytes": file.stat().st_size,
            "compressed_error": filters.error(small, layer),
        }
        del layer, small
        if full is not None:
            yield f"{name}, full filter", result | {"scores": full}
        yield name, result | {"scores": compare(run.net, direct)}
        reached = run.history[run.best].get("mAP", 0.0)  # on held-out landmarks, never on the test set
        if not args.filter or reached > best:
            args.filter, best = name, reached
        del run


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--data", type=Path, required=True, help="folder that holds Oxford5k and its ground truth")
    parse.add_argument("--landmarks", type=Path, required=True, help="photos in a folder for each landmark")
    parse.add_argument("--not-in", type=Path, help="leave out landmark photos that this folder also holds")
    parse.add_argument("--exclude", nargs="*", default=[], help="landmarks (folders) to leave out")
    parse.add_argument("--out", type=Path, default=Path("results"))
    parse.add_argument("--parts", default=",".join(PARTS))
    parse.add_argument("--recipe", default="paper-bilinear")
    parse.add_argument("--size", type=int, default=1024)
    parse.add_argument("--fit-size", type=int, default=640)
    parse.add_argument("--sketch", type=int, default=8192)
    parse.add_argument("--dim", type=int, default=4096)
    parse.add_argument("--epochs", type=int, default=6)
    parse.add_argument("--queries", type=int, default=2000)
    parse.add_argument("--rank", type=int, default=32)
    parse.add_argument("--settings", default="", help="of the learning part, as JSON")
    parse.add_argument(
        "--filter", default="", help="whose filter the whitening part compares too; else the best in validation"
    )
    parse.add_argument("--limit", type=int, default=0, help="so many landmark photos only")
    parse.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further setting is begun")
    parse.add_argument("--device", default="auto")
    parse.add_argument("--workers", type=int, default=None)
    args = parse.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = resolve_device(args.device)
    options = {"dim": args.sketch, "seed": 0}
    base = find_recipe(args.recipe).config.replace(whitening="", dim=0, scales=(1.0,), size=args.size, options=options)
    bench = load(args, base, device)
    command = portable(shlex.join(["python", "-m", "benchmarks.experiments", *sys.argv[1:]]))
    about = provenance(args.device) | {
        "command": command,
        "photos": len(bench.photos),
        "pairs": len(bench.photos.pairs()[0]),
    }
    functions = {"seeds": seeds, "learning": learning, "whitening": whitening}
    for part in args.parts.split(","):
        rows: dict[str, Any] = {}
        begun = time.monotonic()
        try:
            for name, row in functions[part](bench, base, args):
                rows[name] = row
                say(f"{name}: " + " | ".join(line(s) for s in nested(row["scores"])))
                taken = round(time.monotonic() - begun, 1)
                content = json.dumps(about | {"seconds": taken, "rows": rows}) + "\n"
                write_whole(args.out / f"experiment-{part}.json", content)
        except (RuntimeError, ValueError) as error:  # one part must not cost the others
            say(f"{part} stopped: {type(error).__name__}: {error}")
        if part == "learning" and args.filter:
            (args.out / "chosen").write_text(args.filter)
    say("done")


def nested(scores: dict[str, Any]) -> list[dict[str, Any]]:
    """Scores by dataset, or several of them under the names of their settings."""
    first = next(iter(scores.values()))
    inner = next(iter(next(iter(first.values())).values()))
    return [scores] if "mAP" in inner else list(scores.values())


if __name__ == "__main__":
    main()
