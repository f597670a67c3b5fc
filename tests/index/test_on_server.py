"""All of cooc on an index that a server keeps: the commands, the library and the API, with a real network."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from cooc.api import Settings, create_app
from cooc.errors import InputError, StoreMismatchError
from cooc.image_search import ImageSearch
from cooc.index import without_password
from cooc.index.records import Filter
from tests import servers
from tests.cli.test_searching import Shell
from tests.conftest import cooc  # noqa: F401
from tests.serving import RECIPE, descriptor, encoded, photo, serving, views, write_collection

API = "/api/v1"
SECRET = "not:to@be/shown"


@pytest.fixture(params=servers.SERVERS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    engine = servers.engine(request.param)
    where = engine.address(tmp_path)
    return f"{where}&features={tmp_path / 'features'}" if isinstance(engine, servers.Milvus) else where


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_collection(tmp_path_factory.mktemp("photos"))


def test_the_commands(cooc: Shell, address: str, photos: Path, tmp_path: Path) -> None:  # noqa: F811
    """The same as with a folder, to the last digit of a score that is shown."""
    folder = tmp_path / "embedded"
    said = ""

    def both(*words: object) -> list[str]:
        nonlocal said
        answers = []
        for index in (address, folder):
            done = cooc(*words, "--index", index)
            assert done.code == 0, done.err
            said += done.out + done.err
            answers.append(done.out)
        return answers

    def same(*words: object) -> str:
        first, second = both(*words)
        assert first == second
        return first

    for line in both("index", photos, "-r", RECIPE, "--device", "cpu"):
        assert "18 described" in line
        assert "18 in the index" in line
    for line in both("index", photos):
        assert "18 unchanged" in line
    view = tmp_path / "view.jpg"
    views(photo("things/coffee"))[2].save(view)
    for options in ((), ("--folder", "things"), ("--from", "2021"), ("--expand", "alpha", "--rerank", "k-reciprocal")):
        found = [json.loads(text)["matches"] for text in both("search", view, "-k", 5, "--json", *options)]
        assert [m["path"] for m in found[0]] == [m["path"] for m in found[1]]
        np.testing.assert_allclose(*([m["score"] for m in matches] for matches in found), atol=1e-5)
    assert "6 pictures tagged" in same("tag", "space", "--add", "far")
    assert same("tag", "space").count("far") == 6
    assert "things" not in same("search", view, "--tag", "far", "--no-thumbnails")
    assert "All is well: 18" in same("verify")
    assert json.loads(same("duplicates", "--threshold", 0.5, "--json").splitlines()[0])
    assert "3 pictures removed" in same("remove", "animals")
    assert "1 described" in both("add", photos / "animals/cat-0.jpg", "--device", "cpu")[0]
    both("compact")
    status = [json.loads(text) for text in both("status", "--json")]
    assert status[0]["index"] == without_password(address)
    assert status[0]["root"] == status[1]["root"] == str(photos)
    assert status[0]["images"] == 16
    assert status[0]["bytes"] is None or status[0]["bytes"] > 16 * status[0]["dim"] * 4
    assert "index" in cooc("status", "--index", address).out
    copy, back = tmp_path / "copy.npy", servers_index(address, tmp_path)
    assert "16 pictures" in cooc("export", copy, "--index", address).out
    assert np.load(copy).shape == (16, status[0]["dim"])
    done = cooc("import", copy, "--index", back, "--root", photos)
    assert "16 pictures" in done.out
    refused = cooc("index", photos, "--index", address, "-r", RECIPE.replace("128", "96"))
    assert refused.code == 5
    assert "cannot be compared" in refused.err
    assert SECRET not in said + done.out + done.err + refused.err


def servers_index(address: str, folder: Path) -> str:
    """Another index of the same server."""
    engines = (servers.engine(name) for name in servers.SERVERS)
    return next(e.address(folder / "back") for e in engines if address.startswith(e.address(folder)))


def test_the_library(address: str, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a root") as caught:
        ImageSearch.create(address, recipe=RECIPE, descriptor=descriptor())
    assert SECRET not in str(caught.value)
    with ImageSearch.create(address, recipe=RECIPE, root=photos, descriptor=descriptor()) as search:
        assert search.index([photos / "space"], workers=0).described == 6
        search.store.snapshot(str(tmp_path / "copy"))
    with pytest.raises(StoreMismatchError):
        ImageSearch.open(address, recipe=RECIPE.replace("128", "96"))
    with (
        ImageSearch.open(address, descriptor=descriptor()) as search,
        ImageSearch.open(tmp_path / "copy", descriptor=descriptor()) as copy,
    ):
        assert copy.root == search.root == photos
        query = photo("space/rocket")
        ours, theirs = search.search(query, box=(10, 10, 90, 90)), copy.search(query, box=(10, 10, 90, 90))
        assert [m.id for m in ours.matches] == [m.id for m in theirs.matches]
        assert search.file(ours.matches[0].id).is_file()


def test_the_api(address: str, photos: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(photos, tmp_path / "root"))
    with ImageSearch.create(address, recipe=RECIPE, root=root, descriptor=descriptor()) as writer:
        writer.index([root], workers=0)
    with ImageSearch.open(address, descriptor=descriptor()) as search:
        app = create_app(search, Settings(rate=0, folders=(Path("new"),)))
        with serving(app) as url, httpx.Client(base_url=url, timeout=30) as client:
            upload = {"image": ("a.png", encoded(photo("people/astronaut")), "image/png")}
            found = client.post(f"{API}/search", files=upload).json()["matches"]
            assert found[0]["path"].startswith("people/astronaut")
            name = found[0]["id"]
            by_id = client.get(f"{API}/images/{name}/similar", params={"folder": "people"}).json()["matches"]
            others = {f"people/astronaut-{n}.jpg" for n in range(3)} - {found[0]["path"]}
            assert {hit["path"] for hit in by_id} == others
            assert client.get(f"{API}/images/{name}/thumbnail").headers["content-type"] == "image/jpeg"
            why = client.get(f"{API}/images/{name}/explanation", params={"query": by_id[0]["id"]})
            assert why.json()["score"] == pytest.approx(by_id[0]["score"], abs=1e-3)
            (root / "new").mkdir()
            Image.fromarray(np.asarray(photo("things/clock"))[::-1]).save(root / "new/one.jpg")
            assert client.post(f"{API}/indexing", json={"folder": "new"}).status_code == 202
            with client.stream("GET", f"{API}/indexing/events") as events:
                assert '"done"' in events.read().decode()
            status = client.get(f"{API}/status")
            assert status.json()["images"] == 19
            assert SECRET not in status.text


def test_the_page_and_the_api_answer_as_on_a_folder(address: str, photos: Path, tmp_path: Path) -> None:
    """Every way to search, filter and explain: the same pictures, and scores to what rounding leaves."""
    with ImageSearch.create(address, recipe=RECIPE, root=photos, descriptor=descriptor()) as writer:
        writer.index([photos], workers=0)
        writer.store.tag([r.id for r in writer.store.records(Filter(prefix="space"))], add=["far"])
        writer.store.snapshot(str(tmp_path / "copy"))
    answers = []
    for index in (address, tmp_path / "copy"):
        with (
            ImageSearch.open(index, descriptor=descriptor()) as search,
            serving(create_app(search, Settings(rate=0))) as url,
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            assert "<title>" in client.get("/").text
            answers.append(list(_ask(client)))
    for ours, theirs in zip(*answers, strict=True):
        assert _shape(ours) == _shape(theirs)
        np.testing.assert_allclose(_numbers(ours), _numbers(theirs), atol=1e-4)


def test_the_api_changes_it_as_it_changes_a_folder(photos: Path, tmp_path: Path) -> None:
    """New pictures, tags, marks, removal: the same answers, and the same is left."""
    address, answers = servers.engine("postgresql").address(tmp_path), []
    for kind in ("server", "folder"):
        root = Path(shutil.copytree(photos / "space", tmp_path / kind))
        index = address if kind == "server" else root / ".cooc"
        with ImageSearch.create(index, recipe=RECIPE, root=root, features="sift", descriptor=descriptor()) as writer:
            writer.index([root], workers=0)
        with (
            ImageSearch.open(index, descriptor=descriptor()) as search,
            serving(create_app(search, Settings(rate=0, folders=(Path(),)))) as url,
            httpx.Client(base_url=f"{url}{API}", timeout=60) as client,
        ):
            said = list(_change(client))
            left = [(record.path, record.tags) for record in search.store.records()]
            answers.append([said, left, sorted(path.name for path in root.glob("**/*.*g"))])
    assert _shape(answers[0]) == _shape(answers[1])
    np.testing.assert_allclose(_numbers(answers[0]), _numbers(answers[1]), atol=1e-4)


def _change(client: httpx.Client) -> Iterator[Any]:
    def post(path: str, **body: Any) -> Any:
        answer = client.post(path, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json()

    ids = {one["path"]: one["id"] for one in client.get("images").json()["pictures"]}
    first, second, third, *_ = ids.values()
    yield post("images/tags", ids=[first, second], add=["far", "old"])
    yield post("images/tags", ids=[second], remove=["old"])
    yield client.get("tags").json()
    yield post("marks", ids=[second, third], scores=[0.5, 0.25], query=first, mark="right")
    yield post("marks", ids=[third], query=first, mark="none")
    yield client.get("marks").json()
    files = [("image", (name, encoded(photo(name)))) for name in ("animals/cat", "things/coffee")]
    added = client.post("images", files=[*files, ("image", ("bad.jpg", b"none"))], data={"folder": "new"}).json()
    assert [one["path"] for one in added["problems"]] == ["bad.jpg"]
    yield added
    cat, coffee = (one["id"] for one in added["pictures"])
    yield post("images/tags", ids=[cat, coffee], add=["new"])
    found = client.post("search", files={"image": encoded(photo("animals/cat", 120))}, params={"k": 3}).json()
    assert found["matches"][0]["id"] == cat
    yield found["matches"]
    yield post("images/remove", ids=[coffee, third], files=True)
    yield post("images/remove", ids=[second])
    assert client.get(f"images/{second}").status_code == 404
    yield client.get("marks").json()  # those of what is gone are forgotten
    yield client.get("folders").json()
    yield client.get("months").json()


def _ask(client: httpx.Client) -> Iterator[Any]:
    def answer(response: httpx.Response) -> Any:
        assert response.status_code == 200, response.text
        found = response.json()
        found.pop("seconds", None)  # that it took
        return found

    upload = {"image": ("a.png", encoded(photo("space/rocket")), "image/png")}
    first = answer(client.get(f"{API}/images", params={"limit": 5}))
    yield first
    yield answer(client.get(f"{API}/images", params={"limit": 50, "after": first["next_after"]}))
    yield answer(client.get(f"{API}/folders"))
    filters: list[tuple[dict[str, str], set[str]]] = [
        ({}, {"animals", "people", "space", "things"}),
        ({"folder": "space"}, {"space"}),
        ({"taken_from": "2021", "taken_to": "2021-07"}, {"people"}),
        ({"tag": "far", "taken_from": "2022"}, {"space"}),
        ({"tag": "near"}, set()),
    ]
    name = first["pictures"][0]["id"]
    for where, folders in filters:
        listed = answer(client.get(f"{API}/images", params=where))
        assert {picture["path"].partition("/")[0] for picture in listed["pictures"]} == folders
        yield listed
        for found in (
            answer(client.post(f"{API}/search", files=upload, params=where)),
            answer(client.get(f"{API}/images/{name}/similar", params=where)),
        ):
            assert {match["path"].partition("/")[0] for match in found["matches"]} == folders
            yield found
    box = {"box": "10,10,90,90"}
    match = answer(client.post(f"{API}/search", files=upload, data=box))["matches"][0]
    assert match["path"].startswith("space/rocket")
    yield answer(client.get(f"{API}/images/{name}/similar", params=box))
    yield answer(client.get(f"{API}/images/{name}/similar", params={"expand": "alpha", "rerank": "k-reciprocal"}))
    yield answer(client.get(f"{API}/images/{name}/near-duplicates", params={"threshold": 0.5}))
    yield answer(client.get(f"{API}/near-duplicates", params={"threshold": 0.5, "folder": "space"}))
    yield answer(client.post(f"{API}/images/{match['id']}/explanation", files=upload, data=box))
    yield answer(client.get(f"{API}/images/{match['id']}/explanation", params={"query": name}))


def _shape(answer: Any) -> Any:
    """An answer without its broken numbers ..."""
    if isinstance(answer, dict):
        return {key: _shape(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [_shape(value) for value in answer]
    return float if isinstance(answer, float) else answer


def _numbers(answer: Any) -> list[float]:
    """... and these alone."""
    if isinstance(answer, dict | list):
        parts = answer.values() if isinstance(answer, dict) else answer
        return [number for part in parts for number in _numbers(part)]
    return [answer] if isinstance(answer, float) else []


def test_the_server(address: str, photos: Path) -> None:
    with ImageSearch.create(address, recipe=RECIPE, root=photos, descriptor=descriptor()) as writer:
        writer.index([photos / "space"], workers=0)
    command = [sys.executable, "-m", "cooc.cli", "serve", "--index", address, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("6 pictures at http://127.0.0.1:")
        assert httpx.get(f"{said.split()[3]}{API}/status").json()["images"] == 6
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
