"""A client of `cooc serve`, of the standard library alone: `from cooc.client import Client` loads nothing heavy.

    with_token = Client("http://127.0.0.1:8765", token="...")        # the token only if the server has one
    found = with_token.search("photo.jpg", box=(40, 60, 300, 400), k=10, folder="holiday")
    for match in found["matches"]:
        print(match["path"], match["score"], match["verified"])
    with_token.similar(found["matches"][0]["id"])

What comes back are dicts, as the server's /docs shows them, with types for whoever checks types. A request that the
server refuses is a `ServerError`, with its words; one that is told to come again later is sent again.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from cooc.errors import CoocError, InputError

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels of the upright, full-size picture
Image = str | os.PathLike[str] | bytes  # a file, or what is in one
Part = tuple[str, bytes] | tuple[str, bytes, str]  # of a form: name, content, name of the file

PREFIX = "/api/v1"
AGAIN = (429, 503)  # what is answered when there is too much to do
LONGEST = 30.0  # seconds that are waited before a request is sent again


class ServerError(CoocError):
    """The server could not be reached (`status` 0), or it refused."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Picture(TypedDict):
    id: str
    path: str
    width: int
    height: int
    taken: str | None
    tags: list[str]


class Region(TypedDict):
    region: list[list[float]]
    box: list[float] | None
    size: list[int]


class Agreement(TypedDict):
    engine: str
    inliers: int
    transform: list[list[float]]
    query: Region
    picture: Region


class Match(Picture):
    score: float
    verified: bool
    probability: float | None
    agreement: Agreement | None
    query_picture: int


class Results(TypedDict):
    matches: list[Match]
    no_match: bool
    checked: bool
    next_offset: int | None
    seconds: float
    uploads: list[str]


class Answer(TypedDict):
    results: Results | None
    problem: str | None


class Copy(Picture):
    bytes: int


class Group(TypedDict):
    pictures: list[Copy]
    keep: str
    why: str


class Groups(TypedDict):
    groups: list[Group]
    next_offset: int | None
    compared: float


class Status(TypedDict):
    name: str
    images: int
    bad: int
    recipe: str
    dim: int
    calibrated: bool
    features: str
    with_features: int
    folders: list[str]
    writable: bool
    words: bool
    urls: bool
    keep_seconds: float
    version: str


class FileProblem(TypedDict):
    path: str
    reason: str


class Added(TypedDict):
    pictures: list[Picture]
    problems: list[FileProblem]


class Indexing(TypedDict):
    state: Literal["idle", "running", "stopping", "done", "stopped", "failed"]
    folder: str | None
    total: int | None
    done: int
    described: int
    unchanged: int
    moved: int
    removed: int
    copied: int
    bad: int
    failed: int
    seconds: float
    job: int
    problems: list[FileProblem]
    message: str | None


class Where(TypedDict, total=False):
    """Which pictures count."""

    folder: str
    taken_from: str
    taken_to: str
    tag: Sequence[str]


class Portion(Where, total=False):
    """How many results, from where on."""

    k: int
    offset: int
    min_score: float


class Options(Portion, total=False):
    """How to search: see SearchOptions in the server's /docs."""

    expand: Literal["none", "average", "alpha"]
    rerank: Literal["none", "k-reciprocal", "diffusion", "superglobal"]
    augment: bool
    verify: bool
    thorough: bool


class Query(TypedDict, total=False):
    """One of a batch: one of id, vector, url and upload (one of `uploads`, while it is kept), and a box if need be."""

    id: str
    vector: Sequence[float]
    url: str
    upload: str
    box: Box


class Client:
    def __init__(
        self, url: str = "http://127.0.0.1:8765", token: str | None = None, *, timeout: float = 60, retries: int = 3
    ) -> None:
        """`retries`: how often a request is sent again that the server has no time for."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{url!r} is no address of a server, such as http://127.0.0.1:8765")
        self.url, self.token, self.timeout, self.retries = url.rstrip("/"), token, timeout, retries
        here = parts.hostname in ("127.0.0.1", "::1", "localhost")
        self._opener = build_opener(_Stay(), *([ProxyHandler({})] if here else []))

    # questions

    def status(self) -> Status:
        return cast(Status, self._json("GET", "status"))

    def search(
        self, image: Image | Sequence[Image], box: Box | Sequence[Box | None] | None = None, **options: Unpack[Options]
    ) -> Results:
        """By a picture, the part of it in a box, or several pictures with a box or None for each."""
        images = [image] if isinstance(image, (str, bytes, os.PathLike)) else list(image)
        boxes = [box] if box is None or isinstance(box[0], (int, float)) else list(box)
        fields = [("image", _content(one)) for one in images]
        texts = [("box", _corners(cast(Box | None, one)).encode()) for one in boxes if box is not None]
        return cast(Results, self._json("POST", "search", dict(options), parts=[*fields, *texts]))

    def similar(self, id: str, box: Box | None = None, **options: Unpack[Options]) -> Results:
        """By a picture of the index, or a part of it; it is not among the results."""
        query = dict(options) | ({"box": _corners(box)} if box else {})
        return cast(Results, self._json("GET", f"images/{quote(id)}/similar", query))

    def search_vector(self, vector: Iterable[float], **options: Unpack[Options]) -> Results:
        """By a vector of the index's descriptor."""
        body = {"vector": [float(value) for value in vector]}
        return cast(Results, self._json("POST", "search/vector", dict(options), body=body))

    def search_url(self, url: str, box: Box | None = None, **options: Unpack[Options]) -> Results:
        """By a picture in the web, which the server fetches if it may (`cooc serve --allow-url`)."""
        body = {"url": url} | ({"box": _corners(box)} if box else {})
        return cast(Results, self._json("POST", "search/url", dict(options), body=body))

    def search_text(self, text: str, **options: Unpack[Portion]) -> Results:
        """By words, where the index knows any (`cooc index --text`)."""
        return cast(Results, self._json("GET", "search/words", dict(options) | {"text": text}))

    def search_batch(self, queries: Iterable[Query], **options: Unpack[Options]) -> list[Answer]:
        """An answer for each of several queries; one that is wrong does not stop the others."""
        body = {"queries": [one | ({"box": _corners(one["box"])} if "box" in one else {}) for one in queries]}
        return cast(list[Answer], self._json("POST", "search/batch", dict(options), body=body)["answers"])

    def duplicates(
        self, threshold: float | None = None, limit: int = 20, offset: int = 0, **where: Unpack[Where]
    ) -> Groups:
        """Groups of copies, and which one of each to keep. It may take minutes: the server is asked until then."""
        query = dict(where) | {"limit": limit, "offset": offset}
        query |= {} if threshold is None else {"threshold": threshold}
        while (found := cast(Groups, self._json("GET", "near-duplicates", query)))["compared"] < 1:
            pass  # the server has waited
        return found

    def pictures(self, limit: int = 200, **where: Unpack[Where]) -> Iterator[Picture]:
        """All pictures of the index, in the order of their paths; so many are asked for at a time."""
        query: dict[str, Any] = dict(where) | {"limit": limit}
        while True:
            page = self._json("GET", "images", query)
            yield from page["pictures"]
            if page["next_after"] is None:
                return
            query["after"] = page["next_after"]

    def picture(self, id: str) -> Picture:
        return cast(Picture, self._json("GET", f"images/{quote(id)}"))

    def file(self, id: str) -> bytes:
        """The file itself."""
        return self._bytes("GET", f"images/{quote(id)}/file")

    def thumbnail(self, id: str, side: Literal[160, 320, 640, 1280] = 320) -> bytes:
        """A small version, as JPEG."""
        return self._bytes("GET", f"images/{quote(id)}/thumbnail", {"side": side})

    def zip(self, ids: Iterable[str]) -> bytes:
        """Files as one ZIP."""
        return self._bytes("POST", "images/zip", body={"ids": list(ids)})

    def export(self, format: Literal["npy", "parquet"] = "npy", **where: Unpack[Where]) -> bytes:
        """Vectors and records: a ZIP of vectors.npy and vectors.jsonl, or a Parquet file."""
        return self._bytes("GET", "export", dict(where) | {"format": format})

    def folders(self, below: str = "") -> dict[str, int]:
        """Folders directly below one, and how many pictures each has with all below it."""
        return {one["path"]: one["pictures"] for one in self._json("GET", "folders", {"below": below})["folders"]}

    def tags(self) -> dict[str, int]:
        """Tags, and how many pictures have each."""
        return {one["tag"]: one["pictures"] for one in self._json("GET", "tags")["tags"]}

    # changes, where the server allows them

    def add(self, files: Iterable[str | os.PathLike[str]], folder: str = "") -> Added:
        """Files into a folder of the collection, and into the index; a name that is taken gets a number."""
        parts = [("image", _content(one), Path(one).name) for one in files]
        return cast(Added, self._json("POST", "images", parts=[*parts, ("folder", folder.encode())]))

    def tag(self, ids: Iterable[str], add: Iterable[str] = (), remove: Iterable[str] = ()) -> int:
        """How many pictures were given tags, or lost some."""
        return self._changed("images/tags", {"ids": list(ids), "add": list(add), "remove": list(remove)})

    def mark(
        self,
        query: str,
        ids: Iterable[str],
        mark: Literal["right", "wrong", "none"],
        *,
        box: Box | None = None,
        scores: Iterable[float] | None = None,
    ) -> int:
        """Results as right or wrong. `query`: the id of a picture, or what a search by a file calls it (`uploads`)."""
        body = {"query": query, "ids": list(ids), "mark": mark}
        more = ({"box": _corners(box)} if box else {}) | ({} if scores is None else {"scores": list(scores)})
        return self._changed("marks", body | more)

    def remove(self, ids: Iterable[str], *, files: bool = False) -> int:
        """Out of the index; with `files`, off the disk, too."""
        return self._changed("images/remove", {"ids": list(ids), "files": files})

    def index(self, folder: str = "", *, wait: bool = True, every: float = 0.5) -> Indexing:
        """Bring a folder up to date; by default until that is done, asking again and again."""
        state = cast(Indexing, self._json("POST", "indexing", body={"folder": folder}))
        while wait and state["state"] in ("running", "stopping"):
            time.sleep(every)
            state = self.indexing()
        return state

    def indexing(self) -> Indexing:
        """How far it is, or how it ended."""
        return cast(Indexing, self._json("GET", "indexing"))

    def stop_indexing(self) -> Indexing:
        return cast(Indexing, self._json("DELETE", "indexing"))

    # requests

    def _changed(self, path: str, body: dict[str, Any]) -> int:
        return int(self._json("POST", path, body=body)["changed"])

    def _json(self, method: str, path: str, query: dict[str, Any] | None = None, **content: Any) -> Any:
        return json.loads(self._bytes(method, path, query, **content))

    def _bytes(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        *,
        body: dict[str, Any] | None = None,
        parts: Sequence[Part] | None = None,
    ) -> bytes:
        words = {
            name: str(value).lower() if isinstance(value, bool) else value for name, value in (query or {}).items()
        }
        url = f"{self.url}{PREFIX}/{path}" + (f"?{urlencode(words, doseq=True)}" if words else "")
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        elif parts is not None:
            data, headers["Content-Type"] = _form(parts)
        for left in range(self.retries, -1, -1):
            try:
                with self._opener.open(Request(url, data, headers, method=method), timeout=self.timeout) as answer:
                    return cast(bytes, answer.read())
            except HTTPError as error:
                with error:
                    if left and error.code in AGAIN:
                        time.sleep(_seconds(error))
                        continue
                    raise ServerError(f"{_detail(error)} ({error.code}, {method} {path})", error.code) from error
            except (URLError, http.client.HTTPException, OSError) as error:
                reason = getattr(error, "reason", None) or error
                raise ServerError(f"{self.url} cannot be reached: {reason}. Is `cooc serve` running there?") from error
        raise AssertionError


class _Stay(HTTPRedirectHandler):
    """The server redirects nobody, and a token is for the server alone."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _content(image: Image) -> bytes:
    try:
        return image if isinstance(image, bytes) else Path(image).read_bytes()
    except OSError as error:
        raise InputError(f"{os.fspath(image)!r} cannot be read: {error.strerror}.") from error


def _corners(box: Box | None) -> str:
    return "" if box is None else ",".join(f"{value:.6f}".rstrip("0").rstrip(".") for value in box)


def _form(parts: Sequence[Part]) -> tuple[bytes, str]:
    """multipart/form-data: pictures as files, with the names that they have."""
    boundary = uuid.uuid4().hex
    lines = []
    for name, value, *given in parts:
        called = "".join(quote(one) if one in '"\r\n' else one for one in (given or ["picture"])[0])
        file = f'; filename="{called}"\r\nContent-Type: application/octet-stream' if name == "image" else ""
        lines.append(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + value)
    return b"\r\n".join([*lines, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"


def _detail(error: HTTPError) -> str:
    try:
        found = json.loads(error.read())["detail"]
        return found if isinstance(found, str) else json.dumps(found)
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)


def _seconds(error: HTTPError) -> float:
    try:
        return min(LONGEST, max(0.0, float(error.headers.get("Retry-After", 1))))
    except ValueError:
        return 1.0
