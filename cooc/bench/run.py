"""describe -> whiten -> rank -> expand -> evaluate: one dataset, any number of recipes, results as JSON.

Recipes that share a network share its activations: a picture is decoded and goes through the network once for each
scale, whatever the number of poolings. Raw vectors are cached by recipe and picture: a run that was stopped goes on
where it was, and datasets that share pictures share the work.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cooc.activations import resolve_device
from cooc.bench.verified import local_features, verified_rankings
from cooc.datasets.retrieval import Dataset
from cooc.descriptor import NOT_FINITE, Descriptor, load_backbone, rescale
from cooc.errors import CoocError, DatasetError, InputError, UnknownNameError
from cooc.evaluation import PROTOCOLS, bootstrap_interval, evaluate, positive_ranks, precision_recall
from cooc.files import replacing, write_whole
from cooc.pictures.batches import Item, default_workers
from cooc.provenance import provenance
from cooc.recipes import Recipe, find_whitening
from cooc.reranking import alpha_expansion, average_expansion, database_augmentation, rank, rerank
from cooc.stream import download, stream, upload
from cooc.verification.engines import parts
from cooc.verification.rounds import TOP
from cooc.whitening import Storage, Whitening, fit_pca, save

__all__ = ["WAYS", "Options", "raw_vectors", "run", "whitened_vectors", "write_result"]

Vectors = NDArray[np.float32]
Indices = NDArray[np.int64]
PART = 512  # pictures in one part of the cache
RECALL = np.linspace(0, 1, 21)  # where the mean precision-recall curve of a result is kept


def _average(queries: Vectors, database: Vectors, own: Indices, n: int) -> Indices:
    return rank(average_expansion(queries, database, n, exclude=own), database)[0]


def _alpha(queries: Vectors, database: Vectors, own: Indices, n: int) -> Indices:
    return rank(alpha_expansion(queries, database, n, 3, exclude=own), database)[0]


def _augmented(queries: Vectors, database: Vectors, own: Indices) -> Indices:
    return rank(queries, database_augmentation(database))[0]


def _reranked(queries: Vectors, database: Vectors, own: Indices, name: str) -> Indices:
    return rerank(name, queries, database)


# What is done between the vectors and the ranking: queries (Q, D), database (N, D), own rows (Q,) -> rankings (Q, N)
WAYS: dict[str, Callable[[Vectors, Vectors, Indices], Indices]] = {
    "none": lambda queries, database, own: rank(queries, database)[0],
    "average-5": functools.partial(_average, n=5),
    "average-10": functools.partial(_average, n=10),
    "alpha-10": functools.partial(_alpha, n=10),
    "alpha-50": functools.partial(_alpha, n=50),
    "augmentation": _augmented,
    "k-reciprocal": functools.partial(_reranked, name="k-reciprocal"),
    "diffusion": functools.partial(_reranked, name="diffusion"),
    "superglobal": functools.partial(_reranked, name="superglobal"),
}


@dataclass(frozen=True)
class Options:
    """How to run. `whitening_set`: pictures to fit the whitening on; without them the recipe's own is used."""

    device: str = "auto"
    dtype: str = "auto"
    workers: int | None = None
    cache: Path = Path(".cooc/bench")
    expansions: tuple[str, ...] = ("none", "average-10", "alpha-10")
    whitening_set: tuple[Path, ...] = ()
    whitening_size: int = 640
    whitening_shrinkage: float = 0.0  # share of the mean variance that is added to every variance
    whitening_each_scale: bool = False  # fit on the vectors of every scale by itself: so many times more samples
    whitening_exponent: float = 0.5  # 0.5 whitens, 0 only turns; see cooc.whitening
    whitening_name: str = ""
    verify: tuple[str, ...] = ()  # engines of geometric verification, "sift+xfeat" for several at once
    top: int = TOP  # pictures verified in a round
    progress: Callable[[str, int, int], None] = lambda what, done, total: None


def run(
    dataset: Dataset,
    recipes: Sequence[Recipe],
    options: Options,
    keep: Callable[[dict[str, Whitening]], None] = lambda fitted: None,
) -> list[dict[str, Any]]:
    """One result for each recipe, as `results/` keeps it. `keep` is given the whitenings that were fitted."""
    started = time.monotonic()
    raw = _raw_of(dataset, recipes, options)
    local = _Local(dataset, options)
    results = []
    for recipe in recipes:
        whitening = raw.whitening(recipe)
        database, queries = raw.vectors(recipe, whitening)
        results.append(
            {
                "dataset": dataset.name,
                "recipe": recipe.name,
                "source": recipe.source,
                "config": recipe.config.as_dict(),
                "dim": database.shape[1],
                "whitening": dict(whitening.meta) if whitening is not None else None,
                "images": len(database),
                "queries": len(queries),
                "results": {name: evaluate_vectors(dataset, database, queries, name) for name in options.expansions}
                | local.results(database, queries),
                "top": nearest(dataset, database, queries),
                "seconds": {"describe": raw.seconds, "total": time.monotonic() - started},
                **provenance(options.device),
            }
        )
    keep({whitening.meta["space"]: whitening for whitening in raw.fitted.values()})
    return results


def whitened_vectors(dataset: Dataset, recipes: Sequence[Recipe], options: Options) -> list[tuple[Vectors, Vectors]]:
    """Database and queries as each recipe describes and whitens them."""
    raw = _raw_of(dataset, recipes, options)
    return [raw.vectors(recipe, raw.whitening(recipe)) for recipe in recipes]


def save_whitenings(fitted: dict[str, Whitening], folder: Path | None, storage: Storage) -> None:
    """<set>--<space>.safetensors, as recipes find them."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for space, whitening in fitted.items():
        save(whitening, folder / f"landmarks--{space}.safetensors", storage)


def evaluate_vectors(dataset: Dataset, database: Vectors, queries: Vectors, expansion: str) -> dict[str, Any]:
    """mAP (in percent), its bootstrap interval, mP@k, the AP of each query and the mean curve, for each protocol."""
    if expansion not in WAYS:
        raise UnknownNameError("expansion or re-ranking", expansion, WAYS)
    return evaluate_rankings(dataset, WAYS[expansion](queries, database, _left_out(dataset)))


def evaluate_rankings(dataset: Dataset, rankings: Indices) -> dict[str, Any]:
    """The same for rankings (Q, N) that somebody else has made."""
    out = {}
    for protocol in dataset.protocols:
        scores = evaluate(rankings, dataset.ground_truth, protocol)
        low, high = bootstrap_interval(scores.ap)
        out[protocol] = {
            "mAP": round(100 * scores.map, 4),
            "interval": [round(100 * low, 2), round(100 * high, 2)],
            "mP@k": {str(k): round(100 * v, 2) for k, v in scores.mp_at_k.items()},
            "ap": [None if np.isnan(value) else round(float(value), 6) for value in scores.ap],
            "curve": [round(float(value), 4) for value in mean_curve(dataset, rankings, protocol)],
        }
    return out


def _left_out(dataset: Dataset) -> Indices:
    """Each query's own row where the protocol takes it out of the ranking; -1 where it does not, or there is none.

    What is ranked may expand a query too: Oxford and Paris count the query's own picture as a good answer.
    """
    ignored = {group for protocol in dataset.protocols for group in PROTOCOLS[protocol].ignored}
    own = [query.select(["itself"]) for query in dataset.ground_truth]
    hidden = [query.select(sorted(ignored)) for query in dataset.ground_truth]
    return np.array([int(row[0]) if np.isin(row, out).any() else -1 for row, out in zip(own, hidden, strict=True)])


def mean_curve(dataset: Dataset, rankings: NDArray[np.integer], protocol: str) -> NDArray[np.float64]:
    """Precision at the levels of RECALL along the line whose area is AP, averaged over queries that have positives."""
    curves = []
    for ranking, truth in zip(rankings, dataset.ground_truth, strict=True):
        ranks, count = positive_ranks(ranking, truth, protocol)
        if count:
            precision, recall = precision_recall(ranks, count)
            curves.append(np.interp(RECALL, recall, precision, right=0.0))
    return np.mean(curves, axis=0) if curves else np.full(len(RECALL), np.nan)


def nearest(dataset: Dataset, database: Vectors, queries: Vectors, k: int = 10) -> list[list[str]]:
    """Names of the first k pictures for each query, without expansion: what `cooc figures` shows."""
    rankings, _ = rank(queries, database, k)
    return [[dataset.image_paths[i].stem for i in row] for row in rankings]


class _Raw:
    """Raw vectors of database, queries and whitening set for all recipes of a run."""

    def __init__(self, dataset: Dataset, options: Options) -> None:
        self.options = options
        self.database: dict[str, Vectors] = {}
        self.queries: dict[str, Vectors] = {}
        self.fitting: dict[str, Vectors] = {}
        self.seconds = 0.0
        self.fitted: dict[str, Whitening] = {}

    def whitening(self, recipe: Recipe) -> Whitening | None:
        """Fitted on the named other set, as the paper does; or the one that the recipe names."""
        config = recipe.config
        if not config.whitening:
            return None
        if not self.options.whitening_set:
            return find_whitening(config).truncate(config.dim) if config.dim else find_whitening(config)
        key = config.pooling_hash
        vectors = self.fitting[key]
        most = min(vectors.shape[1], config.dim or vectors.shape[1])
        if key not in self.fitted or self.fitted[key].dim < most:
            meta = {
                "space": config.space,
                "space_hash": config.space_hash,
                "fitted_on": self.options.whitening_name,
                "size": str(self.options.whitening_size),
            }
            device = resolve_device(self.options.device)
            self.fitted[key] = fit_pca(
                torch.from_numpy(vectors).to(device),
                most,
                exponent=self.options.whitening_exponent,
                shrinkage=self.options.whitening_shrinkage,
                meta=meta,
            )
        return self.fitted[key].truncate(most)

    def vectors(self, recipe: Recipe, whitening: Whitening | None) -> tuple[Vectors, Vectors]:
        key = recipe.config.pooling_hash
        if whitening is None:
            return self.database[key], self.queries[key]
        device = resolve_device(self.options.device)
        whitening = whitening.to(device)
        database, queries = (
            whitening(torch.from_numpy(v).to(device)).float().cpu().numpy()
            for v in (self.database[key], self.queries[key])
        )
        return database, queries


class _Local:
    """Local features of a dataset's pictures, and what verification by them makes of a ranking."""

    def __init__(self, dataset: Dataset, options: Options) -> None:
        self.dataset, self.options = dataset, options
        self.codes: dict[str, tuple[list[bytes], list[bytes]]] = {}
        device = resolve_device(options.device)
        self.device = None if device.type == "cpu" else str(device)
        for engine in dict.fromkeys(part for spec in options.verify for part in parts(spec)):
            made = []
            for query, items in (
                (False, [Item(None, path) for path in dataset.image_paths]),
                (True, [Item(None, one.path, one.box) for one in dataset.queries]),
            ):
                made.append(
                    local_features(
                        items,
                        engine,
                        keys=[_key(item) for item in items],
                        cache=options.cache,
                        device=str(device),
                        workers=default_workers(device.type) if options.workers is None else options.workers,
                        query=query,
                        progress=functools.partial(options.progress, f"{engine} features"),
                    )
                )
            self.codes[engine] = (made[0], made[1])

    def results(self, database: Vectors, queries: Vectors) -> dict[str, dict[str, Any]]:
        """Engine and stage -> scores, as `evaluate_rankings` gives them."""
        found = {}
        for spec in self.options.verify:
            codes = [self.codes[engine] for engine in parts(spec)]
            stages = verified_rankings(
                database,
                queries,
                [pictures for pictures, _ in codes],
                [own for _, own in codes],
                own=_left_out(self.dataset),
                device=self.device,
                top=self.options.top,
            )
            for stage, rankings in stages.items():
                found[f"{spec} {stage}"] = evaluate_rankings(self.dataset, rankings)
        return found


def _raw_of(dataset: Dataset, recipes: Sequence[Recipe], options: Options) -> _Raw:
    raw = _Raw(dataset, options)
    started = time.monotonic()
    groups: dict[tuple[str, str, int], list[Recipe]] = {}
    for recipe in recipes:
        groups.setdefault((recipe.config.backbone, recipe.config.layer, recipe.config.size), []).append(recipe)
    for members in groups.values():
        unique = {recipe.config.pooling_hash: recipe for recipe in members}
        database = [Item(None, path) for path in dataset.image_paths]
        queries = [Item(None, query.path, query.box) for query in dataset.queries]
        raw.database |= raw_vectors(database, list(unique.values()), options, f"{dataset.name} database")
        raw.queries |= raw_vectors(queries, list(unique.values()), options, f"{dataset.name} queries")
        if options.whitening_set:
            fitting = [Item(None, path) for path in options.whitening_set]
            size = options.whitening_size
            samples = {key: _samples(recipe, options) for key, recipe in unique.items()}
            wanted = {sample.config.pooling_hash: sample for group in samples.values() for sample in group}
            found = raw_vectors(fitting, list(wanted.values()), options, "whitening set", size)
            for key, group in samples.items():
                raw.fitting[key] = np.concatenate([found[sample.config.pooling_hash] for sample in group])
    raw.seconds = time.monotonic() - started
    return raw


def _samples(recipe: Recipe, options: Options) -> list[Recipe]:
    """What a whitening is fitted on: the recipe's own vectors, or those of each of its scales."""
    if not options.whitening_each_scale:
        return [recipe]
    return [replace(recipe, config=recipe.config.replace(scales=(scale,))) for scale in recipe.config.scales]


def raw_vectors(
    items: Sequence[Item], recipes: Sequence[Recipe], options: Options, what: str = "", size: int | None = None
) -> dict[str, Vectors]:
    """pooling_hash -> (N, D) unit vectors before whitening, for recipes that share network, layer and image size."""
    size = size or recipes[0].config.size
    caches = {r.config.pooling_hash: _Cache(options.cache / f"{r.config.pooling_hash}-{size}") for r in recipes}
    keys = [_key(item) for item in items]
    todo: dict[str, Item] = {}
    for key, item in zip(keys, items, strict=True):
        if any(key not in cache for cache in caches.values()):
            todo.setdefault(key, item)
    finished: dict[str, list[Vectors]] = {}

    def keep() -> None:
        for i, cache in enumerate(caches.values()):
            cache.add(list(finished), np.stack([vectors[i] for vectors in finished.values()]))
        finished.clear()

    for done, (key, vectors) in enumerate(_describe(todo, recipes, size, options) if todo else (), start=1):
        finished[key] = vectors
        if len(finished) == PART or done == len(todo):
            keep()
            options.progress(what, done, len(todo))
    return {pooling: cache.get(keys) for pooling, cache in caches.items()}


class _Cache:
    """Raw vectors of one recipe at one image size: a folder of parts, each written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, tuple[int, int]] = {}  # key -> part, row
        self.parts: list[Vectors] = []
        for file in sorted(folder.glob("*.npz")):
            with np.load(file) as part:
                self._take(part["keys"].tolist(), part["vectors"])

    def _take(self, keys: Sequence[str], vectors: Vectors) -> None:
        self.rows.update({key: (len(self.parts), row) for row, key in enumerate(keys)})
        self.parts.append(vectors)

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def add(self, keys: Sequence[str], vectors: Vectors) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{hashlib.sha256(''.join(keys).encode()).hexdigest()[:20]}.npz"
        with replacing(file) as out:
            np.savez(out, keys=np.array(keys), vectors=vectors)
        self._take(keys, vectors)

    def get(self, keys: Sequence[str]) -> Vectors:
        return np.stack([self.parts[part][row] for part, row in (self.rows[key] for key in keys)])


def _key(item: Item) -> str:
    """A picture by its file name and size, and the box: enough to tell the pictures of a benchmark apart."""
    path = Path(str(item.picture))
    text = f"{path.parent.name}/{path.name} {path.stat().st_size} {item.box}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


class _Shared:
    """One network, many poolings: (B, 3, H, W) -> the vectors of every recipe."""

    def __init__(self, recipes: list[Recipe], options: Options) -> None:
        self.recipes = recipes
        device = resolve_device(options.device)
        self.device = device
        config = recipes[0].config.replace(dtype=options.dtype)
        self.backbone = load_backbone(config, device)
        self.descriptors = [
            Descriptor(r.config.replace(whitening="", dim=0), device=str(device), backbone=self.backbone)
            for r in recipes
        ]
        self.scales = sorted({scale for recipe in recipes for scale in recipe.config.scales}, reverse=True)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Callable[[], list[list[Vectors]]]:
        images = upload(images, self.device)
        found: list[list[Tensor]] = [[] for _ in self.descriptors]
        for scale in self.scales:
            A = self.backbone(rescale(images, scale, self.backbone.stride))
            for vectors, descriptor in zip(found, self.descriptors, strict=True):
                if scale in descriptor.config.scales:
                    vectors.append(descriptor.pooler(A))
        waits = [download(d.combine(v).float()) for d, v in zip(self.descriptors, found, strict=True)]
        return lambda: [list(of_one) for of_one in zip(*(wait() for wait in waits), strict=True)]


def _describe(
    todo: dict[str, Item], recipes: Sequence[Recipe], size: int, options: Options
) -> Iterator[tuple[str, list[Vectors]]]:
    """Each picture's key and its vector for every recipe, in the order in which they get done."""
    describe = _Shared(list(recipes), options)
    items = (Item(key, item.picture, item.box) for key, item in todo.items())
    least, workers = describe.backbone.stride, options.workers
    for item, found in stream(items, describe, device=describe.device, size=size, min_side=least, workers=workers):
        if isinstance(found, CoocError):
            raise DatasetError(f"A benchmark needs all of its pictures. {found}") from found
        if not all(np.isfinite(vector).all() for vector in found):
            raise InputError(NOT_FINITE)
        yield item.key, found


def write_result(result: dict[str, Any], folder: Path) -> Path:
    """results/<dataset>--<recipe>.json"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['dataset']}--{result['recipe']}.json"
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[\n[^\[\]{}]+\]", lambda flat: re.sub(r"\n\s*", " ", flat[0]), text)  # plain lists on one line
    write_whole(path, text + "\n")
    return path
