"""describe -> whiten -> rank -> expand -> evaluate: one dataset, any number of recipes, results as JSON.

Recipes that share a network share its activations, and raw vectors are kept between runs: `cooc.bench.describing`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cooc.activations import resolve_device
from cooc.bench.describing import BenchOptions, Vectors, item_key, raw_vectors
from cooc.bench.scoring import evaluate_rankings, evaluate_vectors, first_names, left_out
from cooc.bench.verified import Agreements, local_features, verified_rankings
from cooc.datasets.retrieval import Dataset
from cooc.pictures.batches import Item, default_workers
from cooc.provenance import provenance
from cooc.recipes import Recipe, find_whitening
from cooc.reranking import rank
from cooc.verification.engines import parts
from cooc.verification.verifier import gpu_of
from cooc.whitening import Storage, Whitening, fit_pca, save


def run(
    dataset: Dataset,
    recipes: Sequence[Recipe],
    options: BenchOptions,
    keep: Callable[[dict[str, Whitening]], None] = lambda fitted: None,
) -> list[dict[str, Any]]:
    """One result for each recipe, as `results/` keeps it. `keep` is given the whitenings that were fitted."""
    started = time.monotonic()
    raw = raw_of(dataset, recipes, options)
    local = Verified(dataset, options)
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
                "top": first_names(dataset, list(rank(queries, database, 10)[0])),
                "seconds": {"describe": raw.seconds, "total": time.monotonic() - started},
                **provenance(options.device),
            }
        )
    keep({whitening.meta["space"]: whitening for whitening in raw.fitted.values()})
    return results


def save_whitenings(fitted: dict[str, Whitening], folder: Path | None, storage: Storage) -> None:
    """<set>--<space>.safetensors, as recipes find them."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for space, whitening in fitted.items():
        save(whitening, folder / f"landmarks--{space}.safetensors", storage)


class _Raw:
    """Raw vectors of database, queries and whitening set for all recipes of a run."""

    def __init__(self, options: BenchOptions) -> None:
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


class Verified:
    """Local features of a dataset's pictures, and what verification by them makes of a ranking."""

    def __init__(self, dataset: Dataset, options: BenchOptions) -> None:
        self.dataset, self.options = dataset, options
        device = resolve_device(options.device)
        self.agreements = Agreements(gpu_of(device))
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
                        keys=[item_key(item) for item in items],
                        cache=options.cache,
                        device=str(device),
                        workers=default_workers(device.type) if options.workers is None else options.workers,
                        query=query,
                        progress=functools.partial(options.progress, f"{engine} features"),
                    )
                )
            self.agreements.codes[engine] = (made[0], made[1])

    def results(self, database: Vectors, queries: Vectors) -> dict[str, dict[str, Any]]:
        """Engine and stage -> scores, as `evaluate_rankings` gives them."""
        found = {}
        for spec in self.options.verify:
            own = left_out(self.dataset)
            stages = verified_rankings(database, queries, self.agreements, parts(spec), own=own, top=self.options.top)
            for stage, rankings in stages.items():
                found[f"{spec} {stage}"] = evaluate_rankings(self.dataset, list(rankings))
        return found


def raw_of(dataset: Dataset, recipes: Sequence[Recipe], options: BenchOptions) -> _Raw:
    raw = _Raw(options)
    started = time.monotonic()
    groups: dict[tuple[str | int, ...], list[Recipe]] = {}
    for recipe in recipes:
        config = recipe.config
        groups.setdefault((config.backbone, config.layer, config.tuning, config.size, config.least), []).append(recipe)
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


def _samples(recipe: Recipe, options: BenchOptions) -> list[Recipe]:
    """What a whitening is fitted on: the recipe's own vectors, or those of each of its scales."""
    if not options.whitening_each_scale:
        return [recipe]
    return [replace(recipe, config=recipe.config.replace(scales=(scale,))) for scale in recipe.config.scales]
