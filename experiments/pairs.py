"""Pairs and image size, small enough for a CPU: a full filter trained on part of the landmark photos.

    python experiments/pairs.py --landmarks landmarks --exclude 16.Eiffel_Tower --out results

The same photos are taken at each size; pairs are those that were verified, or any two of a landmark. Validation is on
landmarks held out of training, whose pairs are always verified: mAP before (the direct form) and after.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cooc.benchmark.datasets import image_set
from cooc.benchmark.results import portable
from cooc.benchmark.run import provenance
from cooc.descriptor import load_backbone
from cooc.recipes import find_recipe
from cooc.training.cache import build_cache
from cooc.training.train import TrainConfig, train
from cooc.training.tuples import hold_out, labelled_folders
from cooc.training.verification import all_pairs, verify

START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f} s]", *words, flush=True)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--landmarks", type=Path, required=True, help="photos in a folder for each landmark")
    parse.add_argument("--exclude", nargs="*", default=[], help="landmarks (folders) to leave out")
    parse.add_argument("--out", type=Path, default=Path("results"))
    parse.add_argument("--settings", default="256:verified,256:all,384:verified", help="SIZE:PAIRS, by commas")
    parse.add_argument("--photos", type=int, default=20, help="of each landmark")
    parse.add_argument("--queries", type=int, default=200)
    parse.add_argument("--epochs", type=int, default=2)
    parse.add_argument("--lr", type=float, default=8e-3)
    args = parse.parse_args()
    device = torch.device("cpu")
    base = find_recipe("paper-bilinear").config.replace(whitening="", dim=0)
    backbone = load_backbone(base, device)
    photos = labelled_folders(args.landmarks, image_set(args.landmarks, exclude_labels=args.exclude))
    rows = np.concatenate([np.flatnonzero(photos.clusters == c)[: args.photos] for c in np.unique(photos.clusters)])
    photos = hold_out(photos.subset(rows.tolist()), 0.2)
    about = provenance("cpu") | {
        "command": portable(shlex.join(["python", "experiments/pairs.py", *sys.argv[1:]])),
        "photos": len(photos),
    }
    found: dict[str, Any] = {}
    caches: dict[int, Any] = {}
    for setting in args.settings.split(","):
        size, pairs = setting.split(":")
        config = base.replace(size=int(size))
        if int(size) not in caches:
            caches = {int(size): build_cache(photos.items, config, device=device, backbone=backbone)[0]}
            verified = verify(photos, caches[int(size)], config)
            say(f"{size} px: {len(verified.pairs()[0])} verified pairs")
        chosen = verified if pairs == "verified" else all_pairs(verified)
        options = TrainConfig(config, lr=args.lr, epochs=args.epochs, patience=args.epochs, queries=args.queries)
        run = train(caches[int(size)], chosen, options, report=lambda record, name=setting: say(name, record))
        found[setting] = {
            "size": int(size),
            "pairs": pairs,
            "pairs to train on": len(chosen.pairs(held_out=False)[0]),
            "queries of the validation": len(chosen.queries(held_out=True)),
            "history": run.history,
            "seconds": run.seconds,
        }
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "experiment-pairs.json").write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
