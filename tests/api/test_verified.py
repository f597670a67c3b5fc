"""What the API says of an index with local features: what is verified, where, and by which points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from cooc.api import Settings, create_app
from cooc.api.schemas import POINTS
from cooc.image_search import ImageSearch
from cooc.verification.transforms import project
from tests.serving import encoded, make_index, serving
from tests.verification.pictures import PHOTOS, SLANTED, photo, turned, warp

API = "/api/v1"
VIEWS = {"near": turned(10, 0.8, (200, 150), (40, 30)), "slanted": SLANTED}
SIZE = (560, 480)


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageSearch]:
    root = tmp_path_factory.mktemp("verified")
    for name in PHOTOS:
        for view, transform in VIEWS.items():
            Image.fromarray(warp(photo(name), transform, SIZE)).save(root / f"{name}-{view}.png")
    with make_index(root, features="sift") as search:
        yield search


@pytest.fixture(scope="module")
def client(search: ImageSearch) -> Iterator[httpx.Client]:
    with serving(create_app(search, Settings(rate=0))) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def upload(name: str) -> dict[str, tuple[str, bytes]]:
    return {"image": (f"{name}.png", encoded(Image.fromarray(photo(name))))}


def thing(match: dict[str, Any]) -> str:
    return str(match["path"]).partition("-")[0]


def test_status_names_the_features(client: httpx.Client) -> None:
    status = client.get(f"{API}/status").json()
    assert (status["features"], status["with_features"]) == ("sift", 2 * len(PHOTOS))


@pytest.mark.parametrize("name", PHOTOS)
def test_an_upload_is_verified(client: httpx.Client, search: ImageSearch, name: str) -> None:
    """As the library does it, from pixels that another process has decoded."""
    found = client.post(f"{API}/search", files=upload(name)).json()
    assert found["checked"]
    assert not found["no_match"]
    assert [thing(match) for match in found["matches"][:2]] == [name] * 2
    wanted = search.search(encoded(Image.fromarray(photo(name)))).matches
    assert [match["id"] for match in found["matches"]] == [match.id for match in wanted]
    for match, same in zip(found["matches"][:2], wanted, strict=False):
        assert match["verified"]
        assert match["probability"] == pytest.approx(same.probability)
        agreement = match["agreement"]
        assert same.agreement is not None
        assert agreement["engine"] == "sift"
        assert agreement["inliers"] == same.agreement.inliers
        known = VIEWS[Path(match["path"]).stem.partition("-")[2]]
        region = np.array(agreement["query"]["region"], np.float32)
        there = project(np.array(agreement["transform"]), region)
        assert np.abs(there - project(known, region)).max() < 6
        assert agreement["query"]["size"] == list(photo(name).shape[1::-1])
        assert agreement["picture"]["size"] == list(SIZE)
    assert all(match["agreement"] is None and not match["verified"] for match in found["matches"][2:])


def test_boxes_and_several_pictures(client: httpx.Client) -> None:
    box = {"box": "100,20,420,300"}
    part = client.post(f"{API}/search", files=upload("astronaut"), data=box).json()["matches"]
    assert [thing(match) for match in part if match["verified"]] == ["astronaut"] * 2
    x0, y0, x1, y1 = part[0]["agreement"]["query"]["box"]
    assert 100 <= x0 < x1 <= 420
    assert 20 <= y0 < y1 <= 300
    files = [("image", upload(name)["image"]) for name in ("coffee", "rocket")]
    found = client.post(f"{API}/search", files=files).json()["matches"]
    agreed = {(thing(match), match["query_picture"]) for match in found if match["verified"]}
    assert agreed == {("coffee", 0), ("rocket", 1)}


def test_verification_is_optional(client: httpx.Client) -> None:
    plain = client.post(f"{API}/search", params={"verify": False}, files=upload("cat")).json()
    assert not plain["checked"]
    assert not any(match["verified"] for match in plain["matches"])
    scores = [match["score"] for match in plain["matches"]]
    assert scores == sorted(scores, reverse=True)
    asked = client.post(f"{API}/search", params={"verify": True}, files=upload("cat")).json()
    assert asked["checked"]


def test_nothing_verified(client: httpx.Client) -> None:
    noise = encoded(Image.effect_noise((300, 200), 80).convert("RGB"))
    found = client.post(f"{API}/search", files={"image": ("noise.png", noise)}).json()
    assert found["checked"]
    assert found["no_match"]
    assert len(found["matches"]) == 2 * len(PHOTOS)


def test_the_explanation_holds_the_points(client: httpx.Client) -> None:
    found = client.post(f"{API}/search", files=upload("cat")).json()["matches"]
    why = client.post(f"{API}/images/{found[0]['id']}/explanation", files=upload("cat")).json()
    assert why["agreement"] == found[0]["agreement"]
    assert why["probability"] == pytest.approx(found[0]["probability"])
    assert 0 < len(why["points"]) == min(POINTS, why["agreement"]["inliers"])
    here, there = np.array(why["points"], np.float32)[:, :2], np.array(why["points"], np.float32)[:, 2:]
    error = np.linalg.norm(project(np.array(why["agreement"]["transform"]), here) - there, axis=1)
    assert np.median(error) < 3
    other = client.post(f"{API}/images/{found[-1]['id']}/explanation", files=upload("cat")).json()
    assert other["probability"] < 0.5
    assert other["agreement"]["inliers"] == len(other["points"])


def test_the_explanation_of_two_pictures_of_the_index(client: httpx.Client) -> None:
    ids = {one["path"]: one["id"] for one in client.get(f"{API}/images").json()["pictures"]}
    query, id = ids["coffee-near.png"], ids["coffee-slanted.png"]
    found = client.get(f"{API}/images/{query}/similar", params={"k": 1}).json()["matches"][0]
    assert (found["id"], found["verified"]) == (id, True)
    why = client.get(f"{API}/images/{id}/explanation", params={"query": query}).json()
    assert why["agreement"] == found["agreement"]
    part = client.get(f"{API}/images/{id}/explanation", params={"query": query, "box": "60,60,300,300"}).json()
    x0, y0, x1, y1 = part["agreement"]["query"]["box"]
    assert 60 <= x0 < x1 <= 300
    assert 60 <= y0 < y1 <= 300


def test_an_index_without_features(tmp_path: Path) -> None:
    Image.fromarray(photo("cat")).save(tmp_path / "cat.png")
    with make_index(tmp_path) as plain, serving(create_app(plain)) as address:
        client = httpx.Client(base_url=address, timeout=60)
        assert client.get(f"{API}/status").json()["features"] == ""
        found = client.post(f"{API}/search", files=upload("cat")).json()
        assert not found["checked"]
        why = client.post(f"{API}/images/{found['matches'][0]['id']}/explanation", files=upload("cat")).json()
        assert (why["agreement"], why["probability"], why["points"]) == (None, None, [])
        refused = client.post(f"{API}/search", params={"verify": True}, files=upload("cat"))
        assert refused.status_code == 422
        assert "cooc index --verify sift" in refused.json()["detail"]
        client.close()
