"""Which recipe is best for these pictures, and at which cost: mAP, time and bytes side by side.

    compare(load_dataset("my/labelled/folder"), recipes, BenchOptions())

mAP comes from the labelled queries, with its bootstrap interval. Time is that of one picture after the other on this
device, the median over some pictures of the set: decoding, network, pooling and whitening, and the network's share of
it. Bytes are those of a float32 vector. A recipe is beaten when another one is at least as good in all three. Results
of another method (`cooc.bench.own`) have no time: they stand beside the others, beat nothing and are not beaten.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cooc.activations import Activations
from cooc.bench.describing import BenchOptions
from cooc.bench.run import run
from cooc.datasets.retrieval import Dataset
from cooc.descriptor import Descriptor, rescale
from cooc.errors import InputError
from cooc.provenance import provenance
from cooc.recipes import Recipe


def compare(
    dataset: Dataset,
    recipes: Sequence[Recipe],
    options: BenchOptions,
    *,
    images: int = 20,
    others: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The comparison as JSON, the best mAP first. `images` are timed; `others` are results that were not made here."""
    if not (recipes or others) or images < 1:
        raise InputError("A comparison needs at least one recipe and one picture to time.")
    found = run(dataset, recipes, replace(options, expansions=("none",))) if recipes else []
    protocol = dataset.protocols[len(dataset.protocols) // 2]  # medium, where there are easy, medium and hard
    backbones: dict[tuple[str, ...], Activations] = {}
    rows = [_row(result, protocol) for result in others]
    for recipe, result in zip(recipes, found, strict=True):
        config = recipe.config if options.dtype == "auto" else recipe.config.replace(dtype=options.dtype)
        key = config.backbone, config.layer, config.tuning, config.dtype
        descriptor = Descriptor(config, device=options.device, backbone=backbones.get(key))
        backbones[key] = descriptor.backbone
        rows.append(_row(result, protocol) | time_recipe(descriptor, dataset.image_paths[:images]))
    for row in rows:
        row["beaten_by"] = next((other["recipe"] for other in rows if _beats(other, row)), None)
    made = provenance(options.device)
    return {
        "dataset": dataset.name,
        "protocol": protocol,
        "images": len(dataset.image_paths),
        "queries": len(dataset.queries),
        "device": made["machine"]["accelerator"] or "CPU",
        "timed": min(images, len(dataset.image_paths)),
        "recipes": sorted(rows, key=lambda row: -row["mAP"]),
        **made,
    }


def _row(result: dict[str, Any], protocol: str) -> dict[str, Any]:
    scores, dim = result["results"]["none"][protocol], result["dim"]
    row = {"recipe": result["recipe"], "dim": dim, "bytes": None if dim is None else 4 * dim}
    row |= {name: scores[name] for name in ("mAP", "interval", "recall@k", "MRR")}
    return row | {"ms": None, "network_ms": None}


@torch.no_grad()
def time_recipe(descriptor: Descriptor, paths: Sequence[Path]) -> dict[str, float]:
    """Median milliseconds for one picture: all of it, and what the network takes of that."""
    times = [_time_one(descriptor, path) for path in [paths[0], *paths]][1:]
    return {
        "ms": round(statistics.median(whole for whole, _ in times), 3),
        "network_ms": round(statistics.median(network for _, network in times), 3),
    }


def _time_one(descriptor: Descriptor, path: Path) -> tuple[float, float]:
    started = _now(descriptor)
    images = descriptor.load(path)[None].to(descriptor.device)
    network, vectors = 0.0, []
    for scale in descriptor.config.scales:
        scaled = rescale(images, scale, descriptor.backbone.stride)
        before = _now(descriptor)
        A = descriptor.backbone(scaled)
        network += _now(descriptor) - before
        vectors.append(descriptor.pooler(A))
    raw = descriptor.combine(vectors)
    (raw if descriptor.whitening is None else descriptor.whitening(raw)).cpu()
    return 1000 * (_now(descriptor) - started), 1000 * network


def _now(descriptor: Descriptor) -> float:
    if descriptor.device.type == "cuda":
        torch.cuda.synchronize(descriptor.device)
    return time.perf_counter()


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    costs = [(-row["mAP"], row["ms"], row["bytes"]) for row in (one, other)]
    if any(None in cost for cost in costs):
        return False
    return all(a <= b for a, b in zip(*costs, strict=True)) and costs[0] != costs[1]
