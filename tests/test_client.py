"""The client against the real server, over a socket; and all that it sends and expects against the server's schema."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import threading
import types
import typing
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fastapi import FastAPI
from PIL import Image

from cooc import client
from cooc.api import Settings, create_app
from cooc.client import Client, ServerError
from cooc.errors import InputError
from tests.serving import encoded, make_index, photo, serving, write_collection

TOKEN = "a token of more than sixteen characters"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """Of an index with local features, which may be changed by request."""
    root = write_collection(tmp_path_factory.mktemp("client") / "photos")
    with make_index(root, features="sift") as search:
        yield create_app(search, Settings(token=TOKEN, folders=(root,)))


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    with serving(app) as url:
        yield url


@pytest.fixture
def server(url: str) -> Client:
    return Client(url, TOKEN)


def test_it_loads_nothing_heavy() -> None:
    code = "import sys, cooc.client; print(*{'torch', 'numpy', 'PIL', 'typer', 'fastapi'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_questions(server: Client, tmp_path: Path) -> None:
    status = server.status()
    assert (status["images"], status["features"]) == (18, "sift")
    cat = photo("animals/cat")
    file = tmp_path / "cat.png"
    cat.save(file)
    found = server.search(file, k=3)
    assert {match["path"] for match in found["matches"]} == {f"animals/cat-{n}.jpg" for n in range(3)}
    assert found["matches"][0]["verified"]
    agreement = found["matches"][0]["agreement"]
    assert agreement is not None
    assert agreement["inliers"] > 10
    assert server.search(encoded(cat), k=3, verify=False)["checked"] is False
    part = server.search(file, (10.5, 10, cat.width - 10, cat.height - 10), k=1, folder="animals")
    assert part["matches"][0]["path"].startswith("animals/cat")
    both = server.search([file, encoded(photo("things/coffee"))], [None, (0, 0, 90, 90)], k=18)
    assert len(both["matches"]) == 18
    assert len(both["uploads"]) == 2
    id = found["matches"][0]["id"]
    assert id not in {match["id"] for match in server.similar(id, expand="average")["matches"]}
    assert server.similar(id, box=(0, 0, 60, 60), k=1, taken_to="2019")["matches"][0]["path"].startswith("animals/")
    groups = server.duplicates(0.7, folder="space")
    assert groups["next_offset"] is None
    assert all(one["path"].startswith("space/") for group in groups["groups"] for one in group["pictures"])
    assert server.folders() == {"animals": 3, "people": 3, "space": 6, "things": 6}
    good, wrong = server.search_batch([{"id": id, "box": (0, 0, 60, 60)}, {"id": "0" * 32}], k=1, taken_to="2019")
    assert good["results"] is not None
    assert good["results"]["matches"] == server.similar(id, (0, 0, 60, 60), k=1, taken_to="2019")["matches"]
    assert wrong["results"] is None
    assert "no such picture" in str(wrong["problem"])
    with zipfile.ZipFile(io.BytesIO(server.export(folder="space"))) as packed:
        assert len(packed.read("vectors.jsonl").splitlines()) == 1 + 6
    with pytest.raises(ServerError, match="--text"):
        server.search_text("a red car")


def test_pictures(server: Client) -> None:
    paths = [one["path"] for one in server.pictures(limit=4)]
    assert len(paths) == 18
    assert paths == sorted(paths)
    (first, *_) = server.pictures(folder="things")
    assert server.picture(first["id"]) == first
    data = server.file(first["id"])
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.size == (first["width"], first["height"])
    with Image.open(io.BytesIO(server.thumbnail(first["id"], 160))) as picture:
        assert max(picture.size) <= 160
    with zipfile.ZipFile(io.BytesIO(server.zip([first["id"]]))) as packed:
        assert packed.read(first["path"]) == data


def test_changes(app: FastAPI, server: Client) -> None:
    ids = [one["id"] for one in server.pictures(folder="space")]
    assert server.tag(ids, add=["stars", "night sky"]) == 6
    assert server.tags() == {"night sky": 6, "stars": 6}
    assert server.tag(ids[:1], remove=["stars"]) == 1
    assert len(list(server.pictures(tag=["stars", "night sky"]))) == 5
    assert server.mark(ids[0], ids[1:3], "right", scores=[0.5, 0.25], box=(0, 0, 10, 10)) == 2
    assert server.mark(ids[0], ids[1:3], "none", box=(0, 0, 10, 10)) == 2
    assert server.remove(ids[5:]) == 1
    assert server.status()["images"] == 17
    state = server.index("space", every=0.05)
    assert state["state"] == "done"
    assert server.indexing()["described"] == 1
    assert server.status()["images"] == 18
    with pytest.raises(ServerError) as error:
        server.stop_indexing()
    assert error.value.status == 409


def test_vectors_addresses_and_new_pictures(app: FastAPI, server: Client, tmp_path: Path) -> None:
    search = app.state.services.search
    first, *_ = server.pictures(folder="animals")
    vector = search.vectors([first["id"]])[0]
    assert server.search_vector(vector, k=1)["matches"][0]["id"] == first["id"]
    with pytest.raises(ServerError, match="--allow-url"):
        server.search_url("http://example.org/a.jpg", (0, 0, 9, 9))
    photo("people/astronaut", 90).save(tmp_path / 'an "odd" näme.png')
    (tmp_path / "bad.jpg").write_text("no picture")
    added = server.add([tmp_path / 'an "odd" näme.png', tmp_path / "bad.jpg"], "new")
    assert [one["path"] for one in added["pictures"]] == ["new/an %22odd%22 näme.png"]  # as browsers send it
    assert [one["path"] for one in added["problems"]] == ["bad.jpg"]
    assert server.remove([added["pictures"][0]["id"]], files=True) == 1


def test_errors_are_the_servers_words(url: str, server: Client, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"token.*\(401") as error:
        Client(url, "another token of sixteen").status()
    assert error.value.status == 401
    with pytest.raises(ServerError, match="404"):
        server.picture("0" * 32)
    with pytest.raises(ServerError, match="422"):
        server.similar("0" * 32, k=0)
    with pytest.raises(InputError, match="cannot be read"):
        server.search(tmp_path / "nothing.jpg")
    with pytest.raises(InputError, match="no address"):
        Client("photos/.cooc")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match="Is `cooc serve` running there") as error:
        Client(f"http://127.0.0.1:{port}").status()
    assert error.value.status == 0


class Busy(BaseHTTPRequestHandler):
    asked: ClassVar[list[str | None]] = []
    answers: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        self.asked.append(self.headers["Authorization"])
        self.send_response(self.answers.pop(0))
        self.send_header("Retry-After", "0")
        self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()
        self.wfile.write(b'{"tags": []}')

    def log_message(self, *_: Any) -> None:
        pass


def test_a_busy_server_is_asked_again_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # what is on this machine needs no proxy
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever).start()
        there = Client(f"http://127.0.0.1:{server.server_port}", TOKEN, retries=2)
        try:
            Busy.answers[:] = [503, 429, 200]
            assert there.tags() == {}
            assert Busy.asked == [f"Bearer {TOKEN}"] * 3
            Busy.answers[:] = [503, 503, 503, 200]
            with pytest.raises(ServerError) as error:
                there.tags()
            assert error.value.status == 503
            Busy.answers[:] = [302]
            with pytest.raises(ServerError) as error:
                there.tags()
            assert error.value.status == 302
        finally:
            server.shutdown()


# the schema

SHAPES = {
    client.Picture: "Picture",
    client.Region: "RegionOut",
    client.Agreement: "AgreementOut",
    client.Match: "MatchOut",
    client.Results: "ResultsOut",
    client.Answer: "Answer",
    client.Copy: "CopyOut",
    client.Group: "GroupOut",
    client.Groups: "GroupsOut",
    client.Status: "StatusOut",
    client.FileProblem: "FileProblem",
    client.Added: "Added",
    client.Indexing: "IndexingOut",
}
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null", list: "array"}


def kinds(annotation: Any) -> set[str]:
    """JSON's names of the kinds of values that a Python type allows."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return set().union(*map(kinds, typing.get_args(annotation)))
    if origin is typing.Literal:
        return {PLAIN[type(value)] for value in typing.get_args(annotation)}
    return {"object"} if annotation in SHAPES else {PLAIN[origin or annotation]}


def schema_kinds(schema: dict[str, Any]) -> set[str]:
    if "anyOf" in schema:
        return set().union(*map(schema_kinds, schema["anyOf"]))
    return {"object"} if "$ref" in schema else {schema["type"]}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_what_is_expected_is_what_the_schema_promises(app: FastAPI, shape: Any) -> None:
    promised = app.openapi()["components"]["schemas"][SHAPES[shape]]
    for name, annotation in typing.get_type_hints(shape).items():
        assert name in promised["required"]
        assert schema_kinds(promised["properties"][name]) == kinds(annotation), name
    missing = set(promised["properties"]) - set(typing.get_type_hints(shape))
    assert not missing, f"the client does not know of {missing}"


def test_what_is_sent_is_what_the_schema_takes(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method, with everything that it can be told: its route is there, and takes each of the names."""
    sent: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []

    def bytes_(
        self: Client, method: str, path: str, query: Any = None, *, body: Any = None, parts: Any = None
    ) -> bytes:
        sent.append((method, path, query or {}, body or {part[0]: part[1] for part in parts or []}))
        page = {"pictures": [], "next_after": None, "tags": [], "changed": 0, "state": "idle", "folders": []}
        page |= {"answers": [], "compared": 1}
        return json.dumps(page).encode()

    monkeypatch.setattr(Client, "_bytes", bytes_)
    a, b, box = Client(), "0" * 32, (0, 0, 9, 9)
    where: client.Where = {"folder": "f", "taken_from": "2023", "taken_to": "2024", "tag": ["t"]}
    how: client.Options = {
        "k": 5, "offset": 5, "expand": "alpha", "rerank": "diffusion", "augment": True, "min_score": 0.1, "verify": True
    }  # fmt: skip
    few: client.Portion = {"k": 5, "offset": 5, "min_score": 0.1}
    a.status()
    a.search(b"data", box, **where, **how)
    a.similar(b, box, **where, **how)
    a.search_vector([1.0], **where, **how)
    a.search_url("http://example.org/a.jpg", box, **where, **how)
    a.search_text("a red car", **where, **few)
    a.search_batch([{"id": b, "box": box}], **where, **how)
    a.duplicates(0.9, 9, 9, **where)
    list(a.pictures(9, **where))
    a.picture(b)
    a.file(b)
    a.thumbnail(b, 640)
    a.zip([b])
    a.export("parquet", **where)
    a.folders("f")
    a.tags()
    a.add([__file__], "f")
    a.tag([b], ["x"], ["y"])
    a.mark(b, [b], "right", box=box, scores=[0.5])
    a.remove([b], files=True)
    a.index("f")
    a.indexing()
    a.stop_indexing()
    public = {name for name, value in vars(Client).items() if callable(value) and not name.startswith("_")}
    assert len(sent) == len(public)
    schema = app.openapi()
    for method, path, query, body in sent:
        route = schema["paths"][f"/api/v1/{path.replace(b, '{id}')}"][method.lower()]
        assert set(query) <= {one["name"] for one in route.get("parameters", ()) if one["in"] == "query"}
        if body:
            (content,) = route["requestBody"]["content"].values()
            name = content["schema"]["$ref"].rpartition("/")[2]
            assert set(body) <= set(schema["components"]["schemas"][name]["properties"])
