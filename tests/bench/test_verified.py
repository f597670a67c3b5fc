"""The harness sees a query as a search does."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from cooc.bench.verified import Agreements, local_features
from cooc.pictures.batches import Item
from cooc.verification.engines import KEPT, QUERY, extract
from cooc.verification.features import pack, unpack
from cooc.verification.verifier import verify
from tests.verification.pictures import photo


def test_a_thumbnail_asks_as_it_is_and_enlarged(tmp_path: Path) -> None:
    large, other = photo("coffee"), photo("cat")
    thumbnail = cv2.resize(large, (150, 100), interpolation=cv2.INTER_AREA)
    for name, pixels in (("large", large), ("other", other), ("thumbnail", thumbnail)):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    agreements, names = Agreements(), ["large", "other", "thumbnail"]
    items = [Item(None, tmp_path / f"{name}.png") for name in names]
    database = local_features(items, "sift", keys=names, cache=tmp_path)
    queries = local_features(items[2:], "sift", keys=names[2:], cache=tmp_path, query=True)
    assert database[2] == pack(extract("sift", thumbnail, limit=KEPT))
    asked = extract("sift", thumbnail, limit=QUERY, enlarge=True)
    assert (len(asked), queries) == (2, [pack(asked, bits=8)])
    agreements.codes["sift"] = database, queries
    found = agreements.look(["sift"], 0, np.arange(3))
    as_it_is, enlarged = (verify([part], [unpack(database[0])])[0].inliers for part in asked)
    assert found[0].inliers == enlarged > as_it_is
    assert found[1].inliers == 0
    assert found[2].inliers > 100  # of itself, as it is
