"""What requests may look through, take away and change: over a real socket, on a copy of a real index."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import re
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from fastapi.routing import APIRoute

from cooc.api import Settings, create_app
from cooc.api.routes import ROUTERS
from cooc.api.services import Services, _changing
from cooc.bench.marks import kept_marks
from cooc.image_search import ImageSearch
from cooc.index.records import Filter, Record
from cooc.keeping import choose
from tests.serving import Start, descriptor, encoded, photo
from tests.shell import Shell

API = "/api/v1"
TOKEN = "a token of more than sixteen characters"
HERE = (Path(),)
# Every route that changes something, with a body that is right.
CHANGES: dict[str, dict[str, Any]] = {
    "images/remove": {"ids": ["0" * 32]},
    "images/tags": {"ids": ["0" * 32], "add": ["a"]},
    "marks": {"ids": ["0" * 32], "query": "0" * 32, "mark": "right"},
    "indexing": {"folder": ""},
}


def ids(search: ImageSearch, folder: str | None = None) -> dict[str, str]:
    return {record.path: record.id for record in search.store.records(Filter(prefix=folder))}


# Looking through


def test_folders_tags_and_months_are_counted(start: Start, search: ImageSearch) -> None:
    client, names = start(), ids(search)
    client.post("images/tags", json={"ids": [names["space/rocket-0.jpg"], names["animals/cat-0.jpg"]], "add": ["best"]})
    records = list(search.store.records())
    folders = Counter(record.path.partition("/")[0] for record in records)
    assert client.get("folders").json() == {
        "folders": [{"path": path, "pictures": count} for path, count in sorted(folders.items())],
        "complete": True,
    }
    assert client.get("folders", params={"below": "space"}).json()["folders"] == []
    assert client.get("tags").json()["tags"] == [{"tag": "best", "pictures": 2}]
    months = Counter((record.taken or "")[:7] for record in records)
    undated = months.pop("")
    found = client.get("months").json()
    assert found["undated"] == undated == 3
    assert [(one["month"], one["pictures"]) for one in found["months"]] == sorted(months.items(), reverse=True)
    for month, count in months.items():
        answer = client.get("images", params={"taken_from": month, "taken_to": month}).json()
        assert len(answer["pictures"]) == count
    tagged = client.get("images", params={"tag": "best", "folder": "space"}).json()["pictures"]
    assert [one["path"] for one in tagged] == ["space/rocket-0.jpg"]
    assert tagged[0]["tags"] == ["best"]


def test_folders_of_folders() -> None:
    from cooc.api.overview import below

    folders = {"a": 5, "a/b": 2, "a/b/c": 1, "a/b-c": 1, "ab": 1, "a/\udcff": 1}
    assert below(folders, "") == {"a": 5, "ab": 1}
    assert below(folders, "a") == {"a/b": 2, "a/b-c": 1, "a/\udcff": 1}


def test_counts_follow_another_process(start: Start, search: ImageSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pictures at once, its tags after a while: that is all that another opening tells."""
    client = start()
    assert client.get("tags").json()["tags"] == []
    monkeypatch.setattr("cooc.api.kept.FRESH", -1.0)
    monkeypatch.setattr("cooc.api.kept.RARELY", -1)
    with ImageSearch.open(search.index_path, write=True, descriptor=descriptor()) as other:
        other.tag(["space"], add="far")
        other.remove(["things"])
    assert [one["path"] for one in client.get("folders").json()["folders"]] == ["animals", "people", "space"]
    assert client.get("tags").json()["tags"] == [{"tag": "far", "pictures": 6}]


def test_bad_files_are_listed(start: Start, root: Path, search: ImageSearch) -> None:
    (root / "bad.jpg").write_text("no picture")
    with ImageSearch.open(search.index_path, write=True, descriptor=descriptor()) as other:
        other.index([root], workers=0)
    (found,) = start().get("bad-files").json()["files"]
    assert found["path"] == "bad.jpg"
    assert "not a picture" in found["reason"]


# Taking away


def test_files_as_a_zip(start: Start, root: Path, search: ImageSearch) -> None:
    client, names = start(), ids(search, "space")
    (root / "space/rocket-1.jpg").unlink()
    os.utime(root / "space/rocket-2.jpg", (0, 0))  # a ZIP knows no 1970
    answer = client.post("images/zip", json={"ids": [*names.values(), *names.values()]})
    assert answer.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(answer.content)) as packed:
        assert packed.testzip() is None
        left = sorted(set(names) - {"space/rocket-1.jpg"})
        assert sorted(packed.namelist()) == ["missing.txt", *left]
        assert names["space/rocket-1.jpg"] in packed.read("missing.txt").decode()
        for name in left:
            assert packed.read(name) == (root / name).read_bytes()
    gone = client.post("images/zip", json={"ids": [names["space/rocket-1.jpg"]]})
    assert gone.status_code == 404
    assert start(zip_bytes=10_000).post("images/zip", json={"ids": [*names.values()]}).status_code == 413
    assert client.post("images/zip", json={"ids": ["0" * 32] * 1001}).status_code == 422


def test_more_zips_than_may_be_sent_wait_for_their_turn(search: ImageSearch) -> None:
    async def story() -> None:
        services = Services(search, Settings(downloads=1))
        first, second = services.stream(iter([b"a", b"b"])), services.stream(iter([b"c"]))
        assert await anext(first) == b"a"
        waiting = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert [block async for block in first] == [b"b"]
        assert await waiting == b"c"
        await second.aclose()  # type: ignore[attr-defined]
        services.close()

    asyncio.run(story())


def test_lists(start: Start, search: ImageSearch) -> None:
    client, names = start(), ids(search, "space")
    chosen = [names["space/rocket-0.jpg"], names["space/galaxies-1.jpg"]]
    client.post("images/tags", json={"ids": chosen[:1], "add": ["far", "away"]})
    table = client.post("images/list", json={"ids": chosen})
    assert table.headers["content-disposition"] == 'attachment; filename="pictures.csv"'
    first, second = csv.DictReader(io.StringIO(table.text))
    assert (first["path"], first["tags"], first["id"]) == ("space/rocket-0.jpg", "away far", chosen[0])
    assert (second["path"], second["taken"]) == ("space/galaxies-1.jpg", "2021-12-24T20:00:00")
    listed = client.post("images/list", json={"ids": chosen}, params={"format": "json"}).json()
    assert listed == [client.get(f"images/{id}").json() for id in chosen]


@pytest.mark.parametrize("format", ["npy", "parquet"])
def test_export(start: Start, search: ImageSearch, tmp_path: Path, format: str) -> None:
    answer = start().get("export", params={"format": format, "folder": "space"})
    names = ids(search, "space")
    vectors = search.vectors([*names.values()])
    if format == "npy":
        with zipfile.ZipFile(io.BytesIO(answer.content)) as packed:
            lines = packed.read("vectors.jsonl").decode().splitlines()
            found = np.load(io.BytesIO(packed.read("vectors.npy")))
        assert [json.loads(line)["path"] for line in lines[1:]] == list(names)
        np.testing.assert_array_equal(found, vectors)
    else:
        (tmp_path / "v.parquet").write_bytes(answer.content)
        with ImageSearch.import_from(tmp_path / "v.parquet", tmp_path / "new", root=search.root) as other:
            assert ids(other) == names
            np.testing.assert_array_equal(other.vectors([*names.values()]), vectors)


# Changing


def test_tags(start: Start, search: ImageSearch) -> None:
    client, names = start(), ids(search)
    chosen = [names["space/rocket-0.jpg"], names["animals/cat-0.jpg"]]
    assert client.post("images/tags", json={"ids": chosen, "add": ["a", "b c"]}).json() == {"changed": 2}
    assert client.post("images/tags", json={"ids": chosen[:1], "add": ["d"], "remove": ["a"]}).json() == {"changed": 1}
    tags = [set(record.tags) for record in search.store.get(chosen) if record]
    assert tags == [{"b c", "d"}, {"a", "b c"}]
    for wrong in ([""], ["a\n"], ["\u0000"], ["x" * 101], ["a"] * 21):
        assert client.post("images/tags", json={"ids": chosen, "add": wrong}).status_code == 422
    surrogate = b'{"ids": ["%s"], "remove": ["\\ud800"]}' % chosen[0].encode()
    assert (
        client.post("images/tags", content=surrogate, headers={"Content-Type": "application/json"}).status_code == 422
    )
    assert client.post("images/tags", json={"ids": [*chosen, "0" * 32], "add": ["e"]}).status_code == 404
    assert not any("e" in record.tags for record in search.store.records())  # all or nothing


def test_removal(start: Start, root: Path, search: ImageSearch) -> None:
    client, names = start(), ids(search)
    first, second, third = (names[f"space/rocket-{i}.jpg"] for i in range(3))
    assert client.post("images/remove", json={"ids": [first]}).json() == {"changed": 1}
    assert (root / "space/rocket-0.jpg").exists()
    assert client.get(f"images/{first}").status_code == 404
    assert client.post("images/remove", json={"ids": [second], "files": True}).json() == {"changed": 1}
    assert not (root / "space/rocket-1.jpg").exists()
    (root / "space/rocket-2.jpg").rename(root / "kept.jpg")
    (root / "space/rocket-2.jpg").symlink_to(root / "kept.jpg")
    assert client.post("images/remove", json={"ids": [third], "files": True}).status_code == 200
    assert (root / "kept.jpg").exists()  # a link is deleted, not what it leads to
    assert not (root / "space/rocket-2.jpg").is_symlink()
    assert len(search.store) == 15
    assert client.post("images/remove", json={"ids": [first]}).status_code == 404


def test_only_what_is_allowed_is_changed(start: Start, root: Path, search: ImageSearch) -> None:
    client, names = start(folders=(Path("space"),)), ids(search)
    inside, outside = names["space/rocket-0.jpg"], names["animals/cat-0.jpg"]
    for path, body in (("images/tags", {"add": ["a"]}), ("images/remove", {"files": True})):
        assert client.post(path, json={"ids": [inside, outside], **body}).status_code == 403
    assert client.post("marks", json={"ids": [outside], "query": inside, "mark": "right"}).status_code == 403
    (root / "space/rocket-0.jpg").unlink()
    (root / "space/rocket-0.jpg").symlink_to(root / "animals/cat-0.jpg")
    answer = client.post("images/remove", json={"ids": [inside], "files": True})
    assert answer.status_code == 403  # it leads out of there by now
    assert (root / "animals/cat-0.jpg").exists()
    assert len(search.store) == 18


def test_changes_during_an_indexing_run(start: Start, root: Path, search: ImageSearch) -> None:
    """Both share one opening of the index; another process is waited for."""
    client, names = start(), ids(search)
    for i in range(12):
        photo("animals/cat").resize((66 + i, 128)).save(root / f"{i:02}.png")
    assert client.post("indexing", json={}).status_code == 202
    body = {"ids": [*names.values()], "add": ["during"]}
    assert client.post("images/tags", json=body).json() == {"changed": 18}
    with client.stream("GET", "indexing/events") as stream:
        *_, last = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
    assert (last["state"], last["described"]) == ("done", 12)
    assert sum("during" in record.tags for record in search.store.records()) == 18
    with ImageSearch.open(search.index_path, write=True, descriptor=descriptor()):
        locked = client.post("images/tags", json=body)
    assert locked.status_code == 409
    assert client.post("images/tags", json=body).status_code == 200


# Marks


def test_marks_are_kept_in_the_index_and_calibrate_it(start: Start, search: ImageSearch, cooc: Shell) -> None:
    """Of two queries, one of the index and one that was sent: right is what shows the same thing."""
    client = start()
    sent = encoded(photo("things/coffee", 150))
    for thing, id in (("space/rocket", ids(search)["space/rocket-0.jpg"]), ("things/coffee", "")):
        if id:
            found, query = client.get(f"images/{id}/similar", params={"k": 17}).json(), id
        else:
            found = client.post("search", files={"image": ("q.png", sent)}, params={"k": 18}).json()
            (query,) = found["uploads"]
        for mark, same in (("right", True), ("wrong", False)):
            chosen = [one for one in found["matches"] if one["path"].startswith(thing) == same]
            body = {"ids": [one["id"] for one in chosen], "scores": [one["score"] for one in chosen]}
            answer = client.post("marks", json={**body, "query": query, "mark": mark})
            assert answer.json() == {"changed": len(chosen)}
        marks = client.get("marks", params={"query": query}).json()
        assert {(one["path"].startswith(thing), one["mark"]) for one in marks} == {(True, "right"), (False, "wrong")}
    kept = kept_marks(search.store)
    assert [mark.right for mark in kept].count(True) == 2 + 3
    few = cooc("calibrate", "--marked", "--index", search.index_path)
    assert few.code == 2
    assert "5 right and 30 wrong marks are too few" in few.err
    client.post("marks", json={"ids": [kept_id(search, kept[-1].path)], "query": query, "mark": "none"})
    assert len(client.get("marks").json()) == len(kept) - 1


def kept_id(search: ImageSearch, path: str) -> str:
    (record,) = search.store.find([path])
    assert record
    return record.id


def test_a_curve_from_marks_of_pictures_that_were_sent(start: Start, search: ImageSearch, cooc: Shell) -> None:
    """Nothing is left of these queries but their scores; the curve is the one that the scores themselves give."""
    from cooc.index.calibration import fit

    client, scores, right = start(), list[float](), list[bool]()
    for name in ("things/coffee", "space/rocket", "animals/cat", "people/astronaut"):
        files = {"image": ("q.png", encoded(photo(name, 150)))}
        found = client.post("search", files=files, params={"k": 9}).json()
        for one in found["matches"]:
            same = one["path"].startswith(name)
            body = {"ids": [one["id"]], "scores": [one["score"]], "query": found["uploads"][0]}
            assert client.post("marks", json={**body, "mark": "right" if same else "wrong"}).status_code == 200
            scores.append(one["score"])
            right.append(same)
    done = cooc("calibrate", "--marked", "--index", search.index_path, "--device", "cpu")
    assert done.code == 0, done.err
    assert f"{sum(right)} right and {len(right) - sum(right)} wrong marks" in done.out
    with ImageSearch.open(search.index_path, descriptor=descriptor()) as other:
        wanted = fit(scores, right)
        assert other.calibration is not None
        assert other.calibration.slope == pytest.approx(wanted.slope, rel=0.3)  # judged on halves, fitted on all


# Who may change


def test_nothing_is_changed_where_it_is_not_allowed(start: Start) -> None:
    client = start(folders=())
    for path, body in CHANGES.items():
        answer = client.post(path, json=body)
        assert answer.status_code == 403, path
        assert "--allow" in answer.json()["detail"]
    assert client.delete("indexing").status_code == 403


def test_changes_want_the_token(start: Start) -> None:
    client = start(token=TOKEN)
    for path, body in CHANGES.items():
        assert client.post(path, json=body).status_code == 401, path
        answer = client.post(path, json=body, headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code in (202, 404), path


def test_without_a_token_only_this_machine_changes_anything(search: ImageSearch) -> None:
    """However the server was made to listen: what counts is where a request comes from."""

    async def ask(client: str, token: str | None) -> list[int]:
        app = create_app(search, Settings(folders=HERE, rate=0, token=token, hosts=frozenset({"photos.example"})))
        transport = httpx.ASGITransport(app=app, client=(client, 50_000))
        head = {"Authorization": f"Bearer {token}"} if token else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://photos.example", headers=head) as asking:
            bodies = {path: body for path, body in CHANGES.items() if path != "indexing"}
            codes = [(await asking.post(f"{API}/{path}", json=body)).status_code for path, body in bodies.items()]
            upload = await asking.post(f"{API}/images", files={"image": ("a.jpg", b"no picture")})
            app.state.services.close()
            return [*codes, 404 if upload.status_code == 422 else upload.status_code]

    for here in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert set(asyncio.run(ask(here, None))) == {404}
    for elsewhere in ("192.168.1.5", "::ffff:192.168.1.5", "2001:db8::1", "testclient"):
        assert set(asyncio.run(ask(elsewhere, None))) == {403}
        assert set(asyncio.run(ask(elsewhere, TOKEN))) == {404}


def test_no_route_that_changes_something_is_forgotten() -> None:
    """Whatever is sent with POST or DELETE asks for permission, but for what only reads."""
    reads = r"search(/\w+)?|preview|session|images/zip|images/list|images/\{id\}/explanation"
    changing = []
    for route in (one for router in ROUTERS for one in router.routes if isinstance(one, APIRoute)):
        path = route.path.removeprefix(f"{API}/")
        if route.methods & {"POST", "PUT", "PATCH", "DELETE"} and not re.fullmatch(reads, path):
            assert any(one.call is _changing for one in route.dependant.dependencies), path
            changing.append(path)
    assert {*CHANGES, "images"} <= set(changing)


def test_pages_of_other_sites_and_foreign_names_change_nothing(start: Start, search: ImageSearch) -> None:
    """CSRF and DNS rebinding: a form, a script, and a name that was made to point here."""
    client, names = start(), ids(search)
    own = urlsplit(str(client.base_url)).netloc
    bodies = {**CHANGES, "images/tags": {"ids": [*names.values()], "add": ["theirs"]}}
    for path, body in bodies.items():
        for origin in ("http://evil.example", "null", "http://localhost", f"http://{own}.evil.example"):
            assert client.post(path, json=body, headers={"Origin": origin}).status_code == 403, (path, origin)
        for host in ("evil.example", "evil.example:80", f"evil.{own}"):
            assert client.post(path, json=body, headers={"Host": host}).status_code == 421, (path, host)
        form = client.post(path, data={"ids": "x"})  # what a form of another page can send
        assert form.status_code == 422
        plain = client.post(path, content=json.dumps(body), headers={"Content-Type": "text/plain"})
        assert plain.status_code == 422, path
    assert not any(record.tags for record in search.store.records())


# Copies


def test_groups_of_copies(start: Start, root: Path, search: ImageSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library finds and judges them, page by page; what is removed meanwhile moves no page."""
    client = start()
    for name in ("animals/cat", "things/coffee"):
        photo(name).save(root / f"{name}-copy.jpg", quality=60)
    client.post("indexing", json={})
    with client.stream("GET", "indexing/events") as stream:
        stream.read()
    wanted = [choose(group, search.collection) for group in search.duplicates(0.9)]
    assert len(wanted) >= 2

    def page(offset: int = 0, limit: int = 1, **where: str) -> dict[str, Any]:
        query = {"threshold": 0.9, "offset": offset, "limit": limit, **where}
        while True:
            found: dict[str, Any] = client.get("near-duplicates", params=query).json()
            if found["compared"] == 1:
                return found
            assert found["groups"] == []

    with monkeypatch.context() as patch:  # one that takes longer than anybody waits
        compare, go_on = search.duplicates, threading.Event()

        def slowly(*question: Any, progress: Callable[[int], None], **more: Any) -> Iterator[list[Record]]:
            progress(len(search.store) // 2)
            assert go_on.wait(60)
            return compare(*question, progress=progress, **more)

        patch.setattr(search, "duplicates", slowly)
        patch.setattr("cooc.api.copies.PATIENCE", 0.5)
        early = client.get("near-duplicates", params={"threshold": 0.9, "offset": 0}).json()
        assert early == {"groups": [], "next_offset": 0, "compared": 0.5}
        go_on.set()
        page()
    found, following = list[dict[str, Any]](), 0
    while following is not None:
        part = page(following)
        found += part["groups"]
        following = part["next_offset"]
    for group, choice in zip(found, wanted, strict=True):
        assert (group["keep"], group["why"]) == (choice.keep.id, choice.why)
        sizes = {one["id"]: (one["path"], one["bytes"]) for one in group["pictures"]}
        assert sizes == {record.id: (record.path, record.size) for record in (choice.keep, *choice.rest)}
    last = found[-1]
    (root / wanted[-1].keep.path).write_bytes(b"no picture")  # it is judged by what is there now
    assert page(len(found) - 1)["groups"][0]["keep"] != last["keep"]
    rest = [one["id"] for one in found[0]["pictures"] if one["id"] != found[0]["keep"]]
    client.post("images/remove", json={"ids": rest})
    assert page(len(found) - 1)["groups"][0]["pictures"] == last["pictures"]
    again = page(limit=50)
    assert [group["pictures"] for group in again["groups"]] == [group["pictures"] for group in found[1:]]
    monkeypatch.setattr("cooc.api.copies.COMPARED", 5)
    refused = client.get("near-duplicates")
    assert refused.status_code == 422
    assert "choose a folder" in refused.json()["detail"]
    assert page(folder="animals")["next_offset"] is None
