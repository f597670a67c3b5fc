"""Measure your own method by the protocols of the benchmarks: its vectors are all that is needed.

    python examples/compare_your_method.py LABELLED_FOLDER OUTPUT
    cooc bench LABELLED_FOLDER --vectors mine=OUTPUT/database.npy,OUTPUT/queries.npy
    cooc compare LABELLED_FOLDER -r default --vectors mine=OUTPUT/database.npy,OUTPUT/queries.npy

To look at what your vectors find, make an index of them:

    cooc import OUTPUT/database.npy --paths OUTPUT/names.txt --index OUTPUT/index --root LABELLED_FOLDER --name mine
    cooc serve --index OUTPUT/index

LABELLED_FOLDER has ground_truth.json and jpg/, or is the name of a benchmark (`cooc data list`). Put your network in
place of `describe`; here a colour histogram stands for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from cooc.datasets.retrieval import load_dataset
from cooc.evaluation import evaluate

BINS = 4  # for each colour


def describe(path: Path, box: tuple[float, float, float, float] | None = None) -> NDArray[np.float32]:
    """One picture, or a part of it -> one vector."""
    with Image.open(path) as opened:
        picture = ImageOps.exif_transpose(opened).convert("RGB")
    if box is not None:  # queries of a benchmark are cropped first
        picture = picture.crop(tuple(map(round, box)))
    pixels = np.asarray(picture.resize((64, 64))).reshape(-1, 3)
    counts = np.histogramdd(pixels, bins=BINS, range=[(0, 256)] * 3)[0]
    return np.sqrt(counts / counts.sum()).ravel().astype(np.float32)  # (64,), of length 1


def main(folder: str, output: Path) -> None:
    dataset = load_dataset(folder, "data")
    database = np.stack([describe(path) for path in dataset.image_paths])  # (N, D), in the order of the dataset
    queries = np.stack([describe(query.path, query.box) for query in dataset.queries])  # (Q, D)
    output.mkdir(parents=True, exist_ok=True)
    np.save(output / "database.npy", database)
    np.save(output / "queries.npy", queries)
    (output / "names.txt").write_text("".join(f"{path.absolute()}\n" for path in dataset.image_paths))

    rankings = np.argsort(-queries @ database.T, axis=1, kind="stable")  # (Q, N)
    for protocol in dataset.protocols:
        scores = evaluate(rankings, dataset.ground_truth, protocol)
        recall = ", ".join(f"recall@{k} {100 * value:.1f}" for k, value in scores.recall_at_k.items())
        print(f"{protocol}: mAP {100 * scores.map:.1f}, {recall}, MRR {100 * scores.mrr:.1f}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
