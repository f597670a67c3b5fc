"""Queries that are no upload, pictures that are added, what other pages may do, and the API's own page."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cooc.api import Settings
from cooc.api.receiving import safe_name
from cooc.api.uploads import Uploads
from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.pictures.download import Origin
from tests.api.fuzzing import break_nothing
from tests.serving import Start, encoded, photo
from tests.shell import Shell

API = "/api/v1"
TOKEN = "a token of more than sixteen characters"
HERE = (Path(),)
ELSEWHERE = "https://photos.example"


@contextmanager
def web(pages: dict[str, bytes | str]) -> Iterator[Origin]:
    """A small web: path -> what lies there, or where it leads to."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = pages.get(self.path)
            self.send_response(404 if found is None else 302 if isinstance(found, str) else 200)
            if isinstance(found, str):
                self.send_header("Location", found)
            body = found if isinstance(found, bytes) else b""
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Origin("127.0.0.1", server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


# Vectors, addresses, many at once


def test_by_vector(start: Start, search: ImageSearch) -> None:
    client = start()
    record = next(iter(search.store.records()))
    vector = 3 * search.vectors([record.id])[0]
    found = client.post("search/vector", json={"vector": vector.tolist()}, params={"k": 3}).json()
    wanted = search.search_vector(vector, 3)
    assert [one["id"] for one in found["matches"]] == [match.id for match in wanted.matches]
    assert found["matches"][0]["id"] == record.id
    for wrong in ([], [1.0, 2.0], [0.0] * search.meta.dim, [1e400] * search.meta.dim, ["a"]):
        content = json.dumps({"vector": wrong})
        answer = client.post("search/vector", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422


def test_by_url(start: Start, search: ImageSearch) -> None:
    """Off unless allowed; what is private is not fetched, by name, by number or by a redirect."""
    sent = encoded(photo("things/coffee", 150))
    with web({"/q.png": sent, "/text": b"no picture", "/again": "/q.png", "/in": "http://127.0.0.2/q.png"}) as here:
        place = f"http://127.0.0.1:{here.port}"
        off = start().post("search/url", json={"url": f"{place}/q.png"})
        assert off.status_code == 403
        assert "--allow-url" in off.json()["detail"]
        strict = start(allow_url=True)
        private = (place, f"http://localhost:{here.port}", "http://169.254.169.254", "http://[::1]", "http://10.0.0.1")
        for url in (*(f"{one}/q.png" for one in private), "file:///etc/passwd", "ftp://a/b", "//a", "http://u@a/", ""):
            answer = strict.post("search/url", json={"url": url})
            assert answer.status_code == 422, url
        client = start(allow_url=True, url_origins=frozenset({here}))
        for path in ("q.png", "again"):
            found = client.post("search/url", json={"url": f"{place}/{path}"}, params={"k": 3}).json()
            wanted = search.search(sent, k=3)
            assert [one["id"] for one in found["matches"]] == [match.id for match in wanted.matches]
        for path, told in (("text", "not a picture"), ("none", "404"), ("in", "no public address")):
            answer = client.post("search/url", json={"url": f"{place}/{path}"})
            assert answer.status_code == 422
            assert told in answer.json()["detail"]
        small = start(allow_url=True, url_origins=frozenset({here}), upload_bytes=2000)
        assert "MB" in small.post("search/url", json={"url": f"{place}/q.png"}).json()["detail"]


def test_a_batch_of_queries(start: Start, search: ImageSearch) -> None:
    """Each has its own answer, as if it had been asked alone; a wrong one does not stop the others."""
    client = start(keep_seconds=60)
    record, other, *_ = search.store.records()
    sent = encoded(photo("space/rocket", 150))
    (upload,) = client.post("search", files={"image": ("q.png", sent)}).json()["uploads"]
    vector = search.vectors([other.id])[0]
    queries = [
        {"id": record.id},
        {"id": record.id, "box": "10,10,90,80"},
        {"vector": vector.tolist()},
        {"upload": upload, "box": "0,0,100,100"},
        {"id": "0" * 32},
        {"upload": "0" * 64},
        {"url": "http://example.org/a.jpg"},
        {"id": record.id, "box": "5,5,1,1"},
    ]
    answers = client.post("search/batch", json={"queries": queries}, params={"k": 4}).json()["answers"]
    wanted = [
        search.search_id(record.id, 4),
        search.search_id(record.id, 4, box=(10, 10, 90, 80)),
        search.search_vector(vector, 4),
        search.search(sent, (0, 0, 100, 100), 4),
    ]
    for answer, results in zip(answers, wanted, strict=False):
        assert answer["problem"] is None
        assert [one["id"] for one in answer["results"]["matches"]] == [match.id for match in results.matches]
    assert [bool(answer["problem"]) for answer in answers] == [False] * 4 + [True] * 4
    for wrong in ([], [{}], [{"id": record.id, "upload": upload}], [{"id": record.id}] * 33):
        assert client.post("search/batch", json={"queries": wrong}).status_code == 422


# What was sent


def test_uploads_are_kept_for_a_while(start: Start) -> None:
    sent = encoded(photo("space/rocket", 150))
    for seconds, code in ((0.0, 404), (60.0, 200)):
        client = start(keep_seconds=seconds)
        (name,) = client.post("search", files={"image": ("q.png", sent)}).json()["uploads"]
        answer = client.get(f"queries/{name}")
        assert answer.status_code == code
        assert client.get("status").json()["keep_seconds"] == seconds
    assert answer.content == sent
    assert answer.headers["content-type"] == "application/octet-stream"  # never shown as what it claims to be
    now = 0.0
    kept = Uploads(10, 1000, clock=lambda: now)
    names = [kept.keep(bytes([i]) * 300) for i in range(4)]  # the first makes room
    assert [name in kept._kept for name in names] == [False, True, True, True]
    assert kept._size == 900
    now = 5.0
    kept.keep(b"\x01" * 300)  # given again: it begins anew
    now = 12.0
    kept._tidy()
    assert list(kept._kept) == [names[1]]


@pytest.mark.parametrize("form", ["HEIF", "TIFF", "PNG"])
def test_previews(start: Start, form: str) -> None:
    import pillow_heif

    pillow_heif.register_heif_opener()
    client = start()
    image = photo("things/coffee", 400)
    answer = client.post("preview", files={"image": ("a", encoded(image, form))}, params={"side": 160})
    assert answer.headers["full-size"] == f"{image.width}x{image.height}"
    with Image.open(io.BytesIO(answer.content)) as small:
        assert (small.format, max(small.size)) == ("JPEG", 160)
    assert client.post("preview", files={"image": ("a", b"no picture")}).status_code == 422


# Pictures that are added


def test_pictures_are_added(start: Start, root: Path, search: ImageSearch) -> None:
    client = start()
    views = {f"{i}.png": encoded(photo("animals/cat", 90 + i)) for i in range(2)}
    files = [("image", (f"../../{name}", data)) for name, data in views.items()] + [("image", ("b.jpg", b"none"))]
    answer = client.post("images", files=files, data={"folder": "new/trip"})
    assert answer.status_code == 201
    added = answer.json()
    assert [one["path"] for one in added["pictures"]] == ["new/trip/0.png", "new/trip/1.png"]
    assert [one["path"] for one in added["problems"]] == ["b.jpg"]
    assert "not a picture" in added["problems"][0]["reason"]
    for name, data in views.items():
        assert (root / "new/trip" / name).read_bytes() == data
    assert len(search.store) == 20
    similar = client.get(f"images/{added['pictures'][0]['id']}/similar", params={"k": 2}).json()["matches"]
    assert all("cat" in one["path"] or "trip" in one["path"] for one in similar)
    before = (root / "space/rocket-0.jpg").read_bytes()
    again = client.post("images", files=[("image", ("rocket-0.jpg", views["0.png"]))], data={"folder": "space"}).json()
    assert [one["path"] for one in again["pictures"]] == ["space/rocket-0-2.jpg"]
    assert (root / "space/rocket-0.jpg").read_bytes() == before
    assert not list(root.rglob("*.tmp"))


@pytest.mark.parametrize(
    "folder", ["..", "a/../..", ".cooc", "a/.hidden", "a\\b", "a\nb", "a/ b", "x" * 300, "a/" * 30]
)
def test_folders_that_are_none(start: Start, root: Path, folder: str) -> None:
    answer = start().post("images", files={"image": ("a.png", encoded(photo("animals/cat")))}, data={"folder": folder})
    assert answer.status_code == 422
    assert sorted(path.name for path in root.iterdir()) == [".cooc", "animals", "people", "space", "things"]


def test_nothing_is_added_outside(start: Start, root: Path, tmp_path: Path) -> None:
    """Nor through a link, nor where it is not allowed, nor more than a query may have."""
    client = start(folders=(Path("space"),), upload_pixels=10_000)
    files = {"image": ("a.png", encoded(photo("animals/cat", 100)))}
    (root / "space/out").symlink_to(tmp_path, target_is_directory=True)
    for folder in ("", "animals", "space/out"):
        assert client.post("images", files=files, data={"folder": folder}).status_code == 403, folder
    assert not list(tmp_path.glob("*.png"))
    large = {"image": ("a.png", encoded(photo("animals/cat", 160)))}
    answer = client.post("images", files=large, data={"folder": "space"})
    assert answer.status_code == 422
    assert "pixels" in answer.json()["detail"]
    nine = [("image", ("a.png", files["image"][1]))] * 9
    assert client.post("images", files=nine, data={"folder": "space"}).status_code == 422
    assert client.post("images", files=files, data={"folder": "space"}).status_code == 201
    for changes, code in (({"folders": ()}, 403), ({"token": TOKEN}, 401)):
        assert start(**changes).post("images", files=files).status_code == code
    foreign = client.post("images", files=files, data={"folder": "space"}, headers={"Origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert client.post("images", files=files, headers={"Host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a.jpg", "a.jpg"),
        ("A.JPG", "A.jpg"),
        ("C:\\photos\\a.png", "a.png"),
        ("/etc/passwd", "passwd.png"),
        ("..", "picture.png"),
        ("", "picture.png"),
        (".htaccess", "htaccess.png"),
        ("a\0b\n.jpg", "a_b_.jpg"),
        ("\ud800.jpg", "_.jpg"),
        ("e\u0301.jpg", "\xe9.jpg"),
        ("\xe9" * 200 + ".jpg", "\xe9" * 75 + ".jpg"),
        ("a.tar.gz", "a.tar.gz.png"),
    ],
)
def test_safe_names(given: str, wanted: str) -> None:
    assert safe_name(given, "PNG") == wanted


def test_a_format_that_is_not_indexed() -> None:
    assert safe_name("a", "HEIF") == "a.heic"
    with pytest.raises(InputError, match="not indexed"):
        safe_name("a", "WMF")


def test_jobs_tell_of_their_problems(start: Start, root: Path) -> None:
    client = start()
    (root / "bad.jpg").write_text("no picture")
    for job, body in ((1, {"folder": ""}), (2, {"folder": "", "retry": True})):
        assert client.post("indexing", json=body).json()["job"] == job
        with client.stream("GET", "indexing/events") as stream:
            *_, last = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        assert (last["state"], last["bad"]) == ("done", 1)
        assert [one["path"] for one in last["problems"]] == ["bad.jpg"]
        assert "not a picture" in last["problems"][0]["reason"]
        assert client.get("indexing").json() == last
    assert [one["job"] for one in client.get("indexing/jobs").json()] == [2, 1]


# Other pages


def test_other_pages_that_are_named_may_use_it(start: Start) -> None:
    client, closed = start(cors=frozenset({ELSEWHERE})), start()
    asking = {
        "Origin": ELSEWHERE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    allowed = client.options("search", headers=asking)
    assert allowed.headers["access-control-allow-origin"] == ELSEWHERE
    answer = client.get("status", headers={"Origin": ELSEWHERE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ELSEWHERE)
    assert "access-control-allow-credentials" not in answer.headers  # cookies are for our own page
    refused = start(cors=frozenset({ELSEWHERE}), token=TOKEN).get("status", headers={"Origin": ELSEWHERE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ELSEWHERE)
    for origin in ("https://evil.example", "http://photos.example", "null", f"{ELSEWHERE}.evil.example"):
        assert client.get("status", headers={"Origin": origin}).status_code == 403
        assert (
            "access-control-allow-origin" not in client.options("search", headers={**asking, "Origin": origin}).headers
        )
        assert closed.post("indexing", json={}, headers={"Origin": origin}).status_code == 403
    assert client.get("status", headers={"Origin": ELSEWHERE, "Host": "evil.example"}).status_code == 421
    assert closed.get("status", headers={"Origin": ELSEWHERE}).status_code == 403
    for wrong in ("*", "photos.example", "https://photos.example/page"):
        with pytest.raises(InputError, match="no origin"):
            Settings(cors=frozenset({wrong}))


def test_the_command_refuses_what_is_no_origin(cooc: Shell) -> None:
    assert "no origin" in cooc("serve", "--cors", "photos.example", "--index", "nowhere").err


# The schema


def test_operations_have_short_names(start: Start) -> None:
    paths = start().get("openapi.json").json()["paths"]
    names = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert len(set(names)) == len(names) >= 30
    assert all(name.islower() and len(name) < 30 and "api" not in name for name in names)
    assert {"search_by_vector", "add_pictures", "download_zip", "get_picture"} <= set(names)


def test_no_request_breaks_a_server_that_allows_everything(start: Start, search: ImageSearch) -> None:
    """schemathesis again, where requests may change, fetch and keep: with ids that there are, too."""
    client = start(allow_url=True, keep_seconds=60)
    known = [record.id for record in search.store.records()]

    def change(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("ids"), list):
            case.body["ids"] = known[:1]
        if "id" in (case.path_parameters or {}):
            case.path_parameters["id"] = known[-1]

    assert break_nothing(client, 6, change) >= 30
    assert np.isfinite(search.search_id(known[-1], 3).matches[0].score)
