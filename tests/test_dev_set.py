"""Real photographs, where there are some: COOC_DEV_SET=FOLDER names a set with ground_truth.json and jpg/.

A slice of it goes through index and search as a user's folder would. `.ci/run` sets the variable if it finds the set.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from cooc.datasets.retrieval import load_dataset
from cooc.descriptor import Descriptor
from cooc.image_search import ImageSearch

QUERIES, EACH = 4, 5  # queries from different landmarks, and matches of each


@pytest.mark.skipif("COOC_DEV_SET" not in os.environ, reason="no set of real photographs is named by COOC_DEV_SET")
def test_search_finds_real_landmarks_in_the_order_of_the_matrix_product(tmp_path: Path) -> None:
    dataset = load_dataset(os.environ["COOC_DEV_SET"])
    chosen = np.linspace(0, len(dataset.queries) - 1, QUERIES).astype(int)
    matches = [[dataset.image_paths[i] for i in dataset.ground_truth[q].select(["positives"])[:EACH]] for q in chosen]
    photos = tmp_path / "photos"
    photos.mkdir()
    for path in {path for row in matches for path in row}:
        shutil.copyfile(path, photos / path.name)
    descriptor = Descriptor.from_recipe("paper-linear+size=320", device="cpu")
    with ImageSearch.create(
        photos / ".cooc", recipe="paper-linear+size=320", root=photos, descriptor=descriptor
    ) as search:
        report = search.index([photos], workers=1)
        assert report.bad == 0
        names = sorted(path.name for path in photos.glob("*.jpg"))
        database = descriptor([photos / name for name in names])  # (N, D)
        for q, right in zip(chosen, matches, strict=True):
            query = dataset.queries[q]
            found = search.search(query.path, box=query.box, k=len(names), verify=False).matches
            scores = (descriptor([query.path], [query.box]) @ database.T)[0].numpy()  # (N,)
            assert [match.path for match in found] == [names[i] for i in np.argsort(-scores)]
            np.testing.assert_allclose([match.score for match in found], np.sort(scores)[::-1], atol=1e-5)
            assert found[0].path in {path.name for path in right}
            assert found[0].probability is not None
            assert found[0].probability > 0.5
            verified = search.search(query.path, box=query.box, k=len(names)).matches
            assert verified[0].path in {path.name for path in right}
            assert {match.path for match in verified if match.verified} <= {path.name for path in right}
