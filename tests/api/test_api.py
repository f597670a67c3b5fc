"""The API over a real socket: what it answers, what it refuses, and that nothing makes it fall."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import typer
from PIL import Image
from starlette.exceptions import HTTPException

from cooc.api import Settings, create_app
from cooc.api.limits import Pool, RateLimit
from cooc.api.schemas import Expansion, Reranking
from cooc.api.security import DOCS_HEADERS, HEADERS
from cooc.api.settings import check_host
from cooc.cli import every
from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.index.calibration import Calibration
from cooc.index.records import Filter
from cooc.index.shortlist import NEAR_DUPLICATE
from cooc.pictures.decoders import Decoders
from cooc.reranking import EXPANSIONS, RERANKERS
from cooc.verified_duplicates import LEAST
from tests.api.fuzzing import break_nothing
from tests.hostile import process
from tests.serving import PHOTOS, encoded, make_index, photo, serving, views, write_collection
from tests.shell import Shell

ROOT = Path(__file__).parents[2]
API = "/api/v1"
TOKEN = "a token of more than sixteen characters"
UNLIMITED = Settings(rate=0)


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageSearch]:
    with make_index(write_collection(tmp_path_factory.mktemp("photos"))) as search:
        yield search


@pytest.fixture(scope="module")
def client(search: ImageSearch) -> Iterator[httpx.Client]:
    with serving(create_app(search, UNLIMITED)) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.fixture
def serve(search: ImageSearch) -> Iterator[Callable[..., httpx.Client]]:
    """Another server over the same index, with other settings."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(**changes: Any) -> httpx.Client:
            address = stack.enter_context(serving(create_app(search, Settings(**changes))))
            return stack.enter_context(httpx.Client(base_url=address, timeout=60))

        yield start


def upload(name: str = "animals/cat", **crop: tuple[int, int, int, int]) -> dict[str, tuple[str, bytes]]:
    image = photo(name)
    return {"image": ("query.png", encoded(image.crop(crop["box"]) if crop else image))}


def ids(client: httpx.Client) -> dict[str, str]:
    return {one["path"]: one["id"] for one in client.get(f"{API}/images").json()["pictures"]}


def thing(match: dict[str, Any]) -> str:
    return str(match["path"]).rpartition("-")[0]


# Searching


@pytest.mark.parametrize("name", sorted(PHOTOS))
def test_upload_finds_the_photograph(client: httpx.Client, name: str) -> None:
    response = client.post(f"{API}/search", params={"k": 3}, files=upload(name))
    assert response.status_code == 200
    found = response.json()
    assert found["matches"][0]["path"] == f"{name}-0.jpg"
    assert thing(found["matches"][1]) == name
    assert found["matches"][0]["score"] > 0.9
    assert found["next_offset"] == 3
    assert found["matches"][0]["width"] == photo(name).width


def test_a_box_is_the_part_of_the_picture(client: httpx.Client, search: ImageSearch) -> None:
    """Two photographs side by side: the box says which one is meant."""
    cat, coffee = photo("animals/cat"), photo("things/coffee")
    both = Image.new("RGB", (cat.width + coffee.width, 110))
    both.paste(cat, (0, 0))
    both.paste(coffee, (cat.width, 0))
    files = {"image": ("both.png", encoded(both))}
    for box, name in (((0, 0, cat.width, 106), "animals/cat"), ((cat.width, 0, both.width, 106), "things/coffee")):
        text = ",".join(map(str, box))
        found = client.post(f"{API}/search", params={"k": 1}, files=files, data={"box": text}).json()
        assert thing(found["matches"][0]) == name
        wanted = search.search(encoded(both), box=box, k=1).matches[0]
        assert found["matches"][0]["id"] == wanted.id
        assert found["matches"][0]["score"] == pytest.approx(wanted.score, abs=1e-5)


def test_several_pictures_are_joined(client: httpx.Client, search: ImageSearch) -> None:
    pictures = [encoded(photo(name)) for name in ("animals/cat", "space/rocket")]
    files = [("image", ("a.png", data)) for data in pictures]
    found = client.post(f"{API}/search", params={"k": 4}, files=files, data={"box": ["", "0,0,80,80"]}).json()
    wanted = search.search(pictures, [None, (0, 0, 80, 80)], k=4)
    assert [match["id"] for match in found["matches"]] == [match.id for match in wanted.matches]


def test_similar_to_a_picture_of_the_index(client: httpx.Client, search: ImageSearch) -> None:
    names = ids(client)
    id = names["space/rocket-0.jpg"]
    found = client.get(f"{API}/images/{id}/similar", params={"k": 2}).json()
    assert sorted(match["path"] for match in found["matches"]) == ["space/rocket-1.jpg", "space/rocket-2.jpg"]
    part = client.get(f"{API}/images/{id}/similar", params={"k": 3, "box": "10,10,90,70"}).json()
    wanted = search.search_id(id, 3, box=(10, 10, 90, 70))
    assert [match["id"] for match in part["matches"]] == [match.id for match in wanted.matches]
    close = client.get(f"{API}/images/{id}/near-duplicates", params={"threshold": 0.5}).json()
    assert all(match["score"] >= 0.5 for match in close["matches"])


def test_scrolling_gives_every_picture_once(client: httpx.Client) -> None:
    id = ids(client)["animals/cat-0.jpg"]
    seen: list[str] = []
    offset: int | None = 0
    while offset is not None:
        page = client.get(f"{API}/images/{id}/similar", params={"k": 5, "offset": offset}).json()
        seen += [match["id"] for match in page["matches"]]
        offset = page["next_offset"]
    assert len(seen) == len(set(seen)) == 17


@pytest.mark.parametrize("options", [{"expand": "alpha"}, {"rerank": "diffusion"}, {"augment": True}])
def test_expansion_and_reranking(client: httpx.Client, search: ImageSearch, options: dict[str, Any]) -> None:
    id = ids(client)["animals/cat-0.jpg"]
    found = client.get(f"{API}/images/{id}/similar", params={"k": 5, **options}).json()
    wanted = search.search_id(id, 5, **options)
    assert [match["id"] for match in found["matches"]] == [match.id for match in wanted.matches]


def test_the_schema_offers_what_there_is() -> None:
    assert set(Expansion.__args__) == set(EXPANSIONS)  # type: ignore[attr-defined]
    assert set(Reranking.__args__) == set(RERANKERS)  # type: ignore[attr-defined]


def test_filters(client: httpx.Client) -> None:
    id = ids(client)["animals/cat-0.jpg"]

    def found(**where: str) -> set[str]:
        answer = client.get(f"{API}/images/{id}/similar", params={"k": 100, **where})
        return {thing(match) for match in answer.json()["matches"]}

    assert found(folder="space") == {"space/galaxies", "space/rocket"}
    assert found(taken_from="2023") == {"space/rocket", "things/coffee"}
    assert found(taken_from="2021-12", taken_to="2023-03-03") == {"space/galaxies", "space/rocket"}
    assert found(folder="things", taken_to="2022") == set()


def test_lists_come_in_pages(client: httpx.Client) -> None:
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = client.get(f"{API}/images", params={"limit": 7, **after}).json()
        seen += [picture["path"] for picture in page["pictures"]]
        if page["next_after"] is None:
            break
        after = {"after": page["next_after"]}
    assert seen == sorted(seen)
    assert len(seen) == 18


def test_near_duplicates_of_a_folder(client: httpx.Client) -> None:
    groups = client.get(f"{API}/near-duplicates", params={"folder": "space", "threshold": 0.7}).json()
    assert groups["next_offset"] is None
    assert all(one["path"].startswith("space/") for group in groups["groups"] for one in group["pictures"])
    assert groups["groups"]


def test_near_duplicates_are_one_thing_everywhere(client: httpx.Client, search: ImageSearch) -> None:
    """The library, the command line and both routes begin at the same similarity."""
    routes = client.get(f"{API}/openapi.json").json()["paths"]
    said = {}
    for path in ("near-duplicates", "images/{id}/near-duplicates"):
        (said[path],) = (one for one in routes[f"{API}/{path}"]["get"]["parameters"] if one["name"] == "threshold")
    assert said["images/{id}/near-duplicates"]["schema"]["default"] == NEAR_DUPLICATE
    assert f"by default {NEAR_DUPLICATE}, or {LEAST} where geometry" in said["near-duplicates"]["description"]
    (help,) = (p.help for p in typer.main.get_command(every()).commands["duplicates"].params if p.name == "threshold")  # type: ignore[attr-defined]
    assert f"[default: {NEAR_DUPLICATE}; {LEAST} where geometry decides]" in help
    groups = client.get(f"{API}/near-duplicates", params={"folder": "space"}).json()["groups"]
    found = [[one["path"] for one in group["pictures"]] for group in groups]
    assert found == [[one.path for one in group] for group in search.duplicates(where=Filter("space"))]
    assert found == [[one.path for one in group] for group in search.duplicates(NEAR_DUPLICATE, where=Filter("space"))]


def test_probabilities_and_no_match(search: ImageSearch, serve: Callable[..., httpx.Client]) -> None:
    client = serve()
    search.calibration = Calibration(slope=200, offset=-198)  # likely from a score of 0.99 on
    try:
        found = client.post(f"{API}/search", files=upload()).json()
        assert not found["no_match"]
        assert found["matches"][0]["probability"] > 0.5
        assert not any(match["verified"] for match in found["matches"])
        noise = Image.effect_noise((96, 96), 90).convert("RGB")
        found = client.post(f"{API}/search", files={"image": ("noise.png", encoded(noise))}).json()
        assert found["no_match"]
    finally:
        search.calibration = None


# Why


def test_explanation_adds_up_to_the_score(client: httpx.Client) -> None:
    id = ids(client)["animals/cat-1.jpg"]
    found = client.post(f"{API}/search", files=upload()).json()
    score = next(match["score"] for match in found["matches"] if match["id"] == id)
    why = client.post(f"{API}/images/{id}/explanation", files=upload()).json()
    assert why["exact"]
    assert why["score"] == pytest.approx(score, abs=1e-4)
    for side in ("query", "match"):
        assert np.sum(why[side]["map"]) == pytest.approx(score, abs=1e-4)
        assert len(why[side]["box"]) == 4
    other = ids(client)["animals/cat-0.jpg"]
    same = client.get(f"{API}/images/{id}/explanation", params={"query": other, "box": "10,5,120,90"}).json()
    x0, y0, x1, y1 = same["query"]["box"]
    assert 10 <= x0 < x1 <= 120
    assert 5 <= y0 < y1 <= 90


# Pictures


def test_files_with_etag_and_range(client: httpx.Client, search: ImageSearch) -> None:
    id = ids(client)["things/coffee-0.jpg"]
    data = (search.root / "things/coffee-0.jpg").read_bytes()
    whole = client.get(f"{API}/images/{id}/file")
    assert whole.content == data
    assert whole.headers["content-type"] == "image/jpeg"
    assert whole.headers["content-disposition"].startswith("inline")
    again = client.get(f"{API}/images/{id}/file", headers={"If-None-Match": whole.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    part = client.get(f"{API}/images/{id}/file", headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, data[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(data)}"
    behind = client.get(f"{API}/images/{id}/file", headers={"Range": f"bytes={len(data)}-"})
    assert behind.status_code == 416


def test_thumbnails(client: httpx.Client) -> None:
    id = ids(client)["things/coffee-0.jpg"]
    small = client.get(f"{API}/images/{id}/thumbnail", params={"side": 160})
    assert small.headers["content-type"] == "image/jpeg"
    with Image.open(io.BytesIO(small.content)) as image:
        assert max(image.size) == 160
    again = client.get(f"{API}/images/{id}/thumbnail", params={"side": 160})
    assert again.content == small.content
    other = client.get(f"{API}/images/{id}/thumbnail", headers={"If-None-Match": small.headers["etag"]})
    assert other.status_code == 200  # another size is another picture
    same = client.get(f"{API}/images/{id}/thumbnail?side=160", headers={"If-None-Match": f"W/{small.headers['etag']}"})
    assert same.status_code == 304


def test_a_process_that_decodes_is_kept(
    client: httpx.Client, search: ImageSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes from a module that needs torch would have it imported: a new process for each picture."""
    run, used = Decoders.run, list[Decoders]()

    def noted(self: Decoders, *args: Any, **options: Any) -> Any:
        used.append(self)
        return run(self, *args, **options)

    monkeypatch.setattr(Decoders, "run", noted)
    first, second, *_ = (record.id for record in search.store.records())
    assert client.get(f"{API}/images/{first}/thumbnail", params={"side": 1280}).status_code == 200
    kept = run(used[0], process, b"")
    assert client.get(f"{API}/images/{second}/thumbnail", params={"side": 1280}).status_code == 200
    assert client.get(f"{API}/images/{second}/similar", params={"box": "0,0,40,40"}).status_code == 200
    assert run(used[0], process, b"") == kept


def test_thumbnails_kept_are_bounded(search: ImageSearch) -> None:
    from cooc.api.pictures import Pictures

    with Decoders() as decoders:
        pictures = Pictures(search, decoders, keep_bytes=6000)
        for record in search.store.records():
            pictures.thumbnail(pictures.find(record.id), 160)
            assert pictures._size == sum(map(len, pictures._small.values())) <= 6000
        assert pictures._small


def test_types_are_those_of_the_content(tmp_path: Path) -> None:
    """Whatever a file is called, and whatever became of it."""
    (tmp_path / "odd").mkdir()
    image = photo("animals/cat")
    image.save(tmp_path / "odd/really a png.jpg", "PNG")
    image.save(tmp_path / "odd/picture.tif", "TIFF")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd/\xff.jpg")).write_bytes(encoded(image, "JPEG"))
    with make_index(tmp_path) as search, serving(create_app(search)) as address:
        client = httpx.Client(base_url=address, timeout=60)  # a busy machine starts processes slowly
        names = ids(client)
        png = client.get(f"{API}/images/{names['odd/really a png.jpg']}/file")
        assert png.headers["content-type"] == "image/png"
        tiff = client.get(f"{API}/images/{names['odd/picture.tif']}/file")
        assert tiff.headers["content-type"] == "image/tiff"
        assert tiff.headers["content-disposition"].startswith("attachment")
        nameless = names["odd/\N{REPLACEMENT CHARACTER}.jpg"]
        assert client.get(f"{API}/images/{nameless}/file").status_code == 200
        (tmp_path / "odd/picture.tif").write_text("<script>alert(1)</script>")
        script = client.get(f"{API}/images/{names['odd/picture.tif']}/file")
        assert script.headers["content-type"] == "application/octet-stream"
        assert script.headers["x-content-type-options"] == "nosniff"
        broken = client.get(f"{API}/images/{names['odd/picture.tif']}/thumbnail")
        assert broken.status_code == 422
        assert "odd/picture.tif" in broken.json()["detail"]
        assert str(tmp_path) not in broken.text
        client.close()


def test_nothing_outside_the_root_is_served(tmp_path: Path) -> None:
    root, secret = tmp_path / "photos", tmp_path / "secret.jpg"
    root.mkdir()
    photo("animals/cat").save(secret)
    for name in ("link", "folder/inside", "gone", "pipe"):
        (root / name).parent.mkdir(exist_ok=True)
        photo("animals/cat").save(root / f"{name}.jpg")
    with make_index(root) as search, serving(create_app(search)) as address:
        client = httpx.Client(base_url=address)
        names = ids(client)
        (root / "link.jpg").unlink()
        (root / "link.jpg").symlink_to(secret)
        (root / "folder/inside.jpg").unlink()
        (root / "folder").rmdir()
        (root / "folder").symlink_to(tmp_path, target_is_directory=True)
        secret.rename(tmp_path / "inside.jpg")
        (root / "link.jpg").unlink()
        (root / "link.jpg").symlink_to(tmp_path / "inside.jpg")
        (root / "gone.jpg").unlink()
        (root / "pipe.jpg").unlink()
        os.mkfifo(root / "pipe.jpg")
        for name in ("link.jpg", "folder/inside.jpg", "gone.jpg", "pipe.jpg"):
            for kind in ("file", "thumbnail", f"explanation?query={names['link.jpg']}", "similar?box=0,0,50,50"):
                answer = client.get(f"{API}/images/{names[name]}/{kind}")
                assert answer.status_code == 404, (name, kind)
                assert str(tmp_path) not in answer.text
        client.close()


TRAVERSALS = [
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "....//etc/passwd",
    "/etc/passwd",
]


@pytest.mark.parametrize("path", [*TRAVERSALS, "%00", "style.css%00.html", "C:%5Cwindows", "cooc/../../cooc/errors.py"])
def test_no_path_in_a_url_leads_anywhere(client: httpx.Client, path: str) -> None:
    host = urlsplit(str(client.base_url))
    for prefix in ("/", f"{API}/images/", "/web/", "//"):
        with socket.create_connection((host.hostname, host.port)) as connection:  # httpx would tidy the path up
            connection.sendall(f"GET {prefix}{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = connection.makefile("rb").read()
        assert answer.split()[1] in (b"404", b"405", b"422", b"400"), answer
        assert b"root:" not in answer


# Refusals


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "empty"),
        (b"no picture", "This file is not a picture"),
        (encoded(photo("animals/cat"))[:200], ""),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, ""),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", ""),
    ],
)
def test_what_is_no_picture_is_refused(client: httpx.Client, data: bytes, told: str) -> None:
    answer = client.post(f"{API}/search", files={"image": ("a.jpg", data)})
    assert answer.status_code == 422
    assert told in answer.json()["detail"]


def png_bomb(side: int) -> bytes:
    """A few kB that would unpack to side * side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * ((side // 8 + 1) * 2000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_bombs_are_refused_before_they_are_decoded(client: httpx.Client) -> None:
    for side in (20_000, 100_000):
        answer = client.post(f"{API}/search", files={"image": ("bomb.png", png_bomb(side))})
        assert answer.status_code == 422
        assert "pixels" in answer.json()["detail"]
    id = ids(client)["animals/cat-0.jpg"]
    answer = client.post(f"{API}/images/{id}/explanation", files={"image": ("bomb.png", png_bomb(20_000))})
    assert answer.status_code == 422


@pytest.mark.parametrize("box", ["1,2,3", "a,b,c,d", "5,5,5,9", "0,0,nan,5", "900,900,950,950", "0,0,inf,inf"])
def test_wrong_boxes(client: httpx.Client, box: str) -> None:
    assert client.post(f"{API}/search", files=upload(), data={"box": box}).status_code == 422
    id = ids(client)["animals/cat-0.jpg"]
    assert client.get(f"{API}/images/{id}/similar", params={"box": box}).status_code == 422


def test_too_many_pictures_or_boxes(client: httpx.Client) -> None:
    nine = [("image", ("a.png", encoded(photo("animals/cat", 40)))) for _ in range(9)]
    assert "At most 8" in client.post(f"{API}/search", files=nine).json()["detail"]
    answer = client.post(f"{API}/search", files=upload(), data={"box": ["", "1,2,3,4"]})
    assert answer.status_code == 422


@pytest.mark.parametrize(
    "query", ["k=0", "k=201", "offset=-1", "offset=10001", "expand=all", "taken_from=July", "min_score=2"]
)
def test_options_out_of_range(client: httpx.Client, query: str) -> None:
    answer = client.get(f"{API}/images/{'0' * 32}/similar?{query}")
    assert answer.status_code == 422
    assert query.partition("=")[0] in answer.json()["detail"]


@pytest.mark.parametrize(
    "query",
    [
        "k=2.5",
        "k=many",
        "min_score=nan",
        "min_score=high",
        "offset=1e3",
        "folder=%00",
        "folder=%ff%fe",
        "folder=/../..",
        "tag=",
        "tag=%0A",
        "tag=%00",
        "taken_from=2023-99-99",
        "box=1,2,3",
        "box=1,2,3,4,5",
        "box=3,3,1,1",
        "box=%00",
        "box=999999,999999,999999.5,999999.5",
    ],
)
def test_odd_values_are_the_client_s_error(client: httpx.Client, query: str) -> None:
    id = ids(client)["animals/cat-0.jpg"]
    for path in (f"images/{id}/similar", "near-duplicates", "images", "folders", f"images/{id}/explanation"):
        answer = client.get(f"{API}/{path}?{query}")
        assert answer.status_code in (200, 422), f"{path}: {answer.text}"
    answer = client.get(f"{API}/images/{id.upper()}/similar")
    assert answer.status_code == (200 if id.isdigit() else 422)


def test_unknown_ids(client: httpx.Client) -> None:
    for path in ("similar", "file", "thumbnail", f"explanation?query={'0' * 32}", "near-duplicates"):
        answer = client.get(f"{API}/images/{'0' * 32}/{path}")
        assert answer.status_code == 404
        assert answer.json()["detail"]
    assert client.get(f"{API}/images?after={'0' * 32}").status_code == 404


def test_large_requests_are_refused(serve: Callable[..., httpx.Client]) -> None:
    client = serve(upload_bytes=100_000)
    files = {"image": ("a.png", os.urandom(200_000))}
    assert client.post(f"{API}/search", files=files).status_code == 413

    def unsaid() -> Iterator[bytes]:  # sent in chunks: no Content-Length says how large it is
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        for _ in range(20):
            yield b"0" * 10_000

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert client.post(f"{API}/search", content=unsaid(), headers=headers).status_code == 413
    assert client.get(f"{API}/health").status_code == 200


def test_slow_requests_are_cut_off(serve: Callable[..., httpx.Client]) -> None:
    client = serve(upload_seconds=0.3)
    host = urlsplit(str(client.base_url))
    head = f"POST {API}/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    with socket.create_connection((host.hostname, host.port), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: 5000\r\n\r\n--x\r\n".encode())
        answer = connection.makefile("rb").read()  # until the server closes it
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"took longer" in answer


def test_requests_that_never_begin(serve: Callable[..., httpx.Client]) -> None:
    """Two hundred connections whose first lines never end, new or kept from an earlier request: hung up on."""
    client = serve(head_seconds=2.0)
    host = urlsplit(str(client.base_url))
    with ExitStack() as opened:
        slow = []
        for number in range(200):
            connection = opened.enter_context(socket.create_connection((host.hostname, host.port), timeout=30))
            if number % 2:
                connection.sendall(f"GET {API}/health HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                while not connection.recv(65536).endswith(b"}"):
                    pass
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            slow.append(connection)
        assert client.get(f"{API}/status").status_code == 200  # it has time for others
        for connection in slow:
            assert not connection.recv(1)  # the end, without an answer
    assert client.get(f"{API}/status").status_code == 200


def test_broken_forms(client: httpx.Client) -> None:
    for kind, body in (
        ("multipart/form-data", b"no boundary"),
        ("multipart/form-data; boundary=x", b"--y\r\n"),
        ("application/json", b"{}"),
        ("text/plain", b""),
    ):
        answer = client.post(f"{API}/search", content=body, headers={"Content-Type": kind})
        assert answer.status_code in (400, 422)
        assert answer.json()["detail"]


# Who may ask


def test_token(serve: Callable[..., httpx.Client]) -> None:
    client = serve(token=TOKEN)
    assert client.get(f"{API}/health").status_code == 200
    assert client.get("/").status_code == 200  # the page, which then asks for it
    for path in (f"{API}/status", f"{API}/images", "/metrics", f"{API}/openapi.json", f"{API}/indexing/events"):
        answer = client.get(path)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in (TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\u00fc"):
            headers = {"Authorization": f"Bearer {wrong}".encode()}
            assert client.get(path, headers=headers).status_code == 401
        assert client.get(path, headers={"Authorization": f"Basic {TOKEN}"}).status_code == 401
        assert client.get(path, headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


def test_a_session_for_browsers(serve: Callable[..., httpx.Client]) -> None:
    client = serve(token=TOKEN)
    assert client.post(f"{API}/session", json={"token": "wrong"}).status_code == 401
    answer = client.post(f"{API}/session", json={"token": TOKEN})
    assert answer.status_code == 204
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert client.get(f"{API}/status").status_code == 200  # the client has kept it
    client.cookies.set("cooc_session", "00" * 32, domain="127.0.0.1", path="/")
    client.cookies.clear()
    assert client.get(f"{API}/status", headers={"Cookie": f"cooc_session={'0' * 64}"}).status_code == 401
    assert client.get(f"{API}/status", headers={"Cookie": 'cooc_session="\\'}).status_code == 401


def test_other_hosts_demand_a_token(cooc: Shell) -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_host(host, None)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(InputError, match="needs a token"):
            check_host(host, None)
        check_host(host, TOKEN)
    with pytest.raises(InputError, match="16 characters"):
        Settings(token="short")
    refused = cooc("serve", "--host", "0.0.0.0", "--index", "nowhere")
    assert refused.code == 2
    assert "needs a token" in refused.err


def test_foreign_names_and_origins(client: httpx.Client) -> None:
    """A page elsewhere can neither point its own name here nor post to us."""
    assert client.get(f"{API}/status", headers={"Host": "evil.example"}).status_code == 421
    assert client.get(f"{API}/status", headers={"Host": "evil.example:80"}).status_code == 421
    assert client.get(f"{API}/status", headers={"Host": "localhost:9"}).status_code == 200
    assert client.get(f"{API}/status", headers={"Host": "[::1]:9"}).status_code == 200
    for origin in ("http://evil.example", "null", "http://localhost"):
        answer = client.post(f"{API}/indexing", json={"folder": ""}, headers={"Origin": origin})
        assert answer.status_code == 403
    own = urlsplit(str(client.base_url)).netloc
    assert client.get(f"{API}/status", headers={"Origin": f"http://{own}"}).status_code == 200
    allowed = client.options(
        f"{API}/search", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert not any(name.startswith("access-control") for name in allowed.headers)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_pages_load_nothing_from_here(client: httpx.Client, site: str) -> None:
    """A picture or a frame in another page sends no Origin; what the browser tells of it instead is looked at."""
    for mode, dest, code in (("no-cors", "image", 403), ("navigate", "iframe", 403), ("navigate", "document", 200)):
        told = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
        assert client.get(f"{API}/export", headers=told).status_code == code
    ours = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert client.get(f"{API}/status", headers=ours).status_code == 200


def test_every_answer_has_the_headers(client: httpx.Client) -> None:
    for path in ("/", "/docs", "/app.js", f"{API}/status", f"{API}/nothing", f"{API}/images/x/file", "/metrics"):
        answer = client.get(path)
        for name, value in (DOCS_HEADERS if path == "/docs" else HEADERS).items():
            assert answer.headers[name] == value, path
    assert "script-src 'self'" in HEADERS["Content-Security-Policy"]
    for headers in (HEADERS, DOCS_HEADERS):
        assert "unsafe" not in headers["Content-Security-Policy"]


def test_rate_limit(serve: Callable[..., httpx.Client]) -> None:
    client = serve(rate=0.5, burst=5)
    answers = [client.get(f"{API}/health") for _ in range(8)]
    codes = [answer.status_code for answer in answers]
    assert codes[:5] == [200] * 5
    assert 429 in codes
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_rate_limit_counts_each_client() -> None:
    now = 0.0
    limit = RateLimit(2, 3, clock=lambda: now)
    assert [limit.wait("a") for _ in range(3)] == [0, 0, 0]
    assert limit.wait("a") == pytest.approx(0.5)
    assert limit.wait("b") == 0
    now = 0.5
    assert limit.wait("a") == 0
    assert limit.wait("a") > 0
    for i in range(20_000):
        limit.wait(f"c{i}")
    assert len(limit._buckets) == 10_000
    assert RateLimit(0, 0).wait("a") == 0


def test_errors_inside_stay_inside(search: ImageSearch, caplog: pytest.LogCaptureFixture) -> None:
    """An index that breaks: the log says how, the answer does not."""
    app = create_app(search, UNLIMITED)

    @app.get("/api/v1/broken")
    def broken() -> None:
        raise RuntimeError("the secret of /home/someone")

    app.router.routes.insert(0, app.router.routes.pop())  # before the page, which takes all that is left
    with serving(app) as address, caplog.at_level(logging.ERROR, "cooc.api"):
        answer = httpx.get(f"{address}/api/v1/broken")
    assert answer.status_code == 500
    assert answer.json() == {"detail": "Something went wrong here; the server's log says what."}
    assert answer.headers["content-security-policy"]
    assert "secret" in caplog.text


def test_log_and_metrics(serve: Callable[..., httpx.Client], caplog: pytest.LogCaptureFixture) -> None:
    client = serve(token=TOKEN)
    head = {"Authorization": f"Bearer {TOKEN}"}
    with caplog.at_level(logging.INFO, "cooc.api"):
        client.post(f"{API}/search", files={"image": ("holiday.png", encoded(photo("animals/cat")))}, headers=head)
        client.get(f"{API}/status?folder=private", headers=head)
        client.get("/%0Afake%20line")
    lines = [record.getMessage() for record in caplog.records if record.name == "cooc.api"]
    assert any("POST /api/v1/search 200" in line for line in lines)
    for hidden in ("holiday", "PNG", TOKEN, "private", "\n"):
        assert not any(hidden in line for line in lines)
    text = client.get("/metrics", headers=head).text
    assert 'cooc_requests_total{method="POST",route="/api/v1/search",status="200"} 1.0' in text
    assert "cooc_images 18.0" in text
    assert 'cooc_pool_busy{pool="describing"} 0.0' in text


# Too much at once


def test_pool_refuses_what_is_over_its_bound() -> None:
    async def story() -> None:
        pool, go = Pool("test", workers=1, waiting=1), threading.Event()
        running = [asyncio.create_task(pool.run(go.wait, 30)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException) as refused:
            await pool.run(print)
        assert refused.value.status_code == 503
        assert refused.value.headers is not None
        assert int(refused.value.headers["Retry-After"]) >= 1
        running[1].cancel()  # its client has gone: its place is free again
        with pytest.raises(asyncio.CancelledError):
            await running[1]
        await asyncio.sleep(0)
        assert pool.busy == 1
        go.set()
        assert await running[0]
        assert await pool.run(lambda: 7) == 7
        await asyncio.sleep(0.01)
        assert pool.busy == 0
        assert pool.close(time.monotonic() + 60)

    asyncio.run(story())


def test_a_flood_is_answered_with_503(serve: Callable[..., httpx.Client]) -> None:
    client = serve(rate=0, describing=1, describing_waiting=1)
    files = {"image": ("a.png", encoded(photo("animals/cat")))}

    def ask(_: int) -> httpx.Response:
        return client.post(f"{API}/search", files=files)

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, range(32)))
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 503)
    assert ask(0).status_code == 200


# Indexing


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def test_indexing_by_request(tmp_path: Path) -> None:
    write_collection(tmp_path / "old")
    with make_index(tmp_path) as search:
        allowed = Settings(folders=(Path("new"),), rate=0)
        with serving(create_app(search, allowed)) as address, httpx.Client(base_url=address, timeout=60) as client:
            for name in ("cat", "dog"):
                (tmp_path / "new" / name).mkdir(parents=True)
                for i, view in enumerate(views(photo("animals/cat", 120))):
                    view.rotate(90 if name == "dog" else 0, expand=True).save(tmp_path / "new" / name / f"{i}.png")
            (tmp_path / "new/bad.jpg").write_text("no picture")
            for folder, code in (
                ("old", 403),
                ("", 403),
                ("..", 403),
                ("/etc", 404),
                ("new/none", 404),
                ("new/../old", 403),
            ):
                assert client.post(f"{API}/indexing", json={"folder": folder}).status_code == code, folder
            (tmp_path / "new/out").symlink_to(tmp_path / "old", target_is_directory=True)
            assert client.post(f"{API}/indexing", json={"folder": "new/out"}).status_code == 403
            (tmp_path / "new/out").unlink()
            assert client.delete(f"{API}/indexing").status_code == 409
            started = client.post(f"{API}/indexing", json={"folder": "new"})
            assert started.status_code == 202
            with client.stream("GET", f"{API}/indexing/events") as stream:
                told = list(events(stream.iter_lines()))
            assert told[-1]["state"] == "done"
            assert (told[-1]["described"], told[-1]["bad"]) == (6, 1)
            assert client.get(f"{API}/status").json()["images"] == 24
            found = client.get(f"{API}/images", params={"folder": "new/dog"}).json()
            assert len(found["pictures"]) == 3
            with ImageSearch.open(search.index_path, write=True, descriptor=search.descriptor):
                locked = client.post(f"{API}/indexing", json={"folder": "new"})
                assert locked.status_code == 409
                assert "another process" in locked.json()["detail"]


def test_indexing_can_be_stopped(tmp_path: Path) -> None:
    with make_index(write_collection(tmp_path / "photos")) as search:
        for i in range(60):  # all of different shapes, so that each is a batch of its own
            photo("animals/cat").resize((66 + i, 128)).save(search.root / f"{i:02}.png")
        app = create_app(search, Settings(folders=(Path(),), rate=0))
        with serving(app) as address, httpx.Client(base_url=address, timeout=60) as client:
            assert client.post(f"{API}/indexing", json={}).status_code == 202
            assert client.post(f"{API}/indexing", json={}).status_code == 409
            stopping = client.delete(f"{API}/indexing")
            assert stopping.status_code == 202
            assert stopping.json()["state"] in ("stopping", "stopped")
            with client.stream("GET", f"{API}/indexing/events") as stream:
                last = list(events(stream.iter_lines()))[-1]
            assert last["state"] == "stopped"
            before = len(search.store)
            client.post(f"{API}/indexing", json={})
            with client.stream("GET", f"{API}/indexing/events") as stream:
                last = list(events(stream.iter_lines()))[-1]
            assert last["state"] == "done"
            assert len(search.store) == 78
            assert last["described"] == 78 - before


def test_listeners_are_bounded(search: ImageSearch) -> None:
    from cooc.api.indexing import Indexing
    from cooc.api.writing import Writer

    async def story() -> None:
        indexing = Indexing(search, Writer(search, Settings(streams=1)))
        first = indexing.listen()
        with pytest.raises(HTTPException) as refused:
            indexing.listen()
        assert refused.value.status_code == 503
        assert [event async for event in first]
        assert [event async for event in indexing.listen()]

    asyncio.run(story())


# The command


def test_serve_command(search: ImageSearch) -> None:
    """Says where it is, answers there, knows its token, and ends with Ctrl-C."""
    command = [sys.executable, "-m", "cooc.cli", "serve", "--index", search.index_path, "--port", "0"]
    environment = os.environ | {"COOC_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("18 pictures at http://127.0.0.1:")
        address = said.split()[3]
        assert httpx.get(f"{address}{API}/status").status_code == 401
        told = httpx.get(f"{address}{API}/status", headers={"Authorization": f"Bearer {TOKEN}"})
        assert told.json()["images"] == 18
        assert "server" not in told.headers
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in complaints


# The schema


def test_no_request_of_any_kind_breaks_the_server(client: httpx.Client) -> None:
    """schemathesis makes up requests from the schema, right and wrong ones: no answer is a 5xx."""
    assert break_nothing(client, 10) >= 15


def test_the_page_in_docs_is_what_the_schema_says() -> None:
    script = ROOT / "docs/write_api.py"
    spec = importlib.util.spec_from_file_location("write_api", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "docs/api.md is old: run docs/write_api.py"
