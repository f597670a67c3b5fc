"""An index follows an object store, a real S3 server on loopback, and a set of tars as it follows a folder."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from PIL import Image

from cooc.api import Settings, create_app
from cooc.errors import InputError
from cooc.image_search import ImageSearch
from cooc.pictures import Entry, Folder, Objects, Tars, open_collection
from cooc.pictures import objects as objects_module
from cooc.pictures.decode import load_image
from tests.serving import serving
from tests.shell import Shell
from tests.tiny import RECIPE, descriptor, write_photos

BUCKET = "pictures"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield client
    for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=item["Key"])
    client.close()


def upload(client: Any, files: dict[str, bytes]) -> None:
    for key, data in files.items():
        client.put_object(Bucket=BUCKET, Key=key, Body=data)


def photos(tmp_path: Path, count: int, seed: int = 0) -> list[bytes]:
    return [path.read_bytes() for path in write_photos(tmp_path / f"files-{seed}", count, seed)]


def create(tmp_path: Path, root: str) -> ImageSearch:
    return ImageSearch.create(tmp_path / "index", recipe=RECIPE, root=root, descriptor=descriptor())


def paths(search: ImageSearch) -> list[str]:
    return [record.path for record in search.store.records()]


def entries(source: Any, folder: str = "") -> list[Entry]:
    return list(source.entries(folder, follow=False, on_error=lambda name, reason: pytest.fail(f"{name}: {reason}")))


# An object store


def test_an_index_follows_a_bucket(bucket: Any, tmp_path: Path) -> None:
    files = photos(tmp_path, 6)
    upload(bucket, {f"photos/{i}.jpg": data for i, data in enumerate(files[:4])})
    upload(bucket, {"photos/below/4.jpg": files[4], "photos/": b"", "photos/notes.txt": b"-", "other/5.jpg": files[5]})
    upload(bucket, {"photos/text.jpg": b"no picture", "photos/empty.jpg": b"", "photos/.hidden/x.jpg": files[5]})
    url = f"s3://{BUCKET}/photos"
    with create(tmp_path, url) as search:
        assert (search.meta.root, search.status().root) == (url, url)
        first = search.index([url])
        assert (first.described, first.bad, first.found) == (5, 2, 7)
        assert paths(search) == ["0.jpg", "1.jpg", "2.jpg", "3.jpg", "below/4.jpg"]
        assert {file.path for file in search.store.bad_files()} == {"text.jpg", "empty.jpg"}
        records = list(search.store.records())
        expected = descriptor()([io.BytesIO(data) for data in files[:5]]).numpy()
        np.testing.assert_allclose(search.vectors([record.id for record in records]), expected, atol=1e-5)

        second = search.index([url])
        assert (second.unchanged, second.bad, second.described) == (5, 2, 0)

        upload(bucket, {"photos/moved/0.jpg": files[0], "photos/1.jpg": files[5], "photos/text.jpg": files[3]})
        for key in ("photos/0.jpg", "photos/2.jpg"):
            bucket.delete_object(Bucket=BUCKET, Key=key)
        third = search.index([url])
        assert (third.moved, third.described, third.copied, third.removed) == (1, 1, 1, 1)
        assert paths(search) == ["1.jpg", "3.jpg", "below/4.jpg", "moved/0.jpg", "text.jpg"]
        assert search.index([f"{url}/below"]).unchanged == 1
        assert search.store.verify() == []

        upload(bucket, {"photos/new.jpg": files[2]})
        assert search.add([f"{url}/new.jpg", f"{url}/gone.jpg"]).described == 1
        assert search.name(f"{url}/below") == search.name("below") == "below"
        for key in ("photos/below/4.jpg", "photos/new.jpg"):
            bucket.delete_object(Bucket=BUCKET, Key=key)
        with pytest.raises(InputError, match="cannot be listed"):
            search.index([f"{url}/never"])
        report = search.index([f"{url}/below"])
        assert (report.removed, report.away, search.status().away.keys()) == (0, 1, {"below"})
        assert search.index([url], keep_missing=True).removed == 0
        report = search.index([url])
        assert (report.removed, report.away, search.status().away.keys()) == (1, 1, {"below"})
        assert search.index([url], prune=True).removed == 1
        assert search.status().away == {}


def test_worker_processes_read_from_the_bucket(bucket: Any, tmp_path: Path) -> None:
    upload(bucket, {f"{i}.jpg": data for i, data in enumerate(photos(tmp_path, 4))})
    with create(tmp_path, f"s3://{BUCKET}") as search:
        assert search.index([f"s3://{BUCKET}"], workers=1).described == 4


def test_an_object_of_the_same_size_and_second_is_another_by_its_etag(bucket: Any) -> None:
    source = open_collection(f"s3://{BUCKET}/")
    states = set()
    for content in (b"one", b"two"):
        upload(bucket, {"a.jpg": content})
        (listed,) = entries(source)
        assert listed == source.look("a.jpg")
        assert source.stamp(listed) == listed.stamp
        assert (
            abs(listed.mtime_ns / 1e9 - bucket.head_object(Bucket=BUCKET, Key="a.jpg")["LastModified"].timestamp()) < 1
        )
        states.add(listed.mtime_ns % 10**9)
    assert len(states) == 2


def test_large_objects_are_read_twice_instead_of_kept(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "KEPT", 10)
    (data,) = photos(tmp_path, 1)
    upload(bucket, {"a.jpg": data})
    source = Objects(f"s3://{BUCKET}")
    (file,) = entries(source)
    fetched = source.fetch(file)
    assert len(pickle.dumps(fetched.later)) < len(data)
    np.testing.assert_array_equal(load_image(fetched.later), load_image(fetched.now))
    upload(bucket, {"a.jpg": data[:-1]})
    with pytest.raises(OSError, match="changed"):
        source.fetch(file)
    monkeypatch.setattr(objects_module, "LARGEST", 10)
    with pytest.raises(OSError, match="larger"):
        source.fetch(file)


def test_what_cannot_be_reached_is_not_removed(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload(bucket, {"a/1.jpg": photos(tmp_path, 1)[0]})
    url = f"s3://{BUCKET}/a"
    with create(tmp_path, url) as search:
        search.index([url])
        source = search.collection

        def away(*args: object, **kwargs: object) -> None:
            raise ConnectionError("no route")

        monkeypatch.setattr(source.files, "ls", away)  # type: ignore[attr-defined]
        assert list(source.absent([Entry("1.jpg", 1, 1), Entry("b/2.jpg", 1, 1)])) == []
        with pytest.raises(ConnectionError):
            source.vacant("", follow=False)
        with pytest.raises(InputError, match=r"no route.*AWS_ENDPOINT_URL"):
            search.index([url])
        assert len(search.store) == 1


def test_addresses_outside_are_refused(bucket: Any) -> None:
    source = open_collection(f"s3://{BUCKET}/photos")
    for address in (f"s3://{BUCKET}/photosx", "s3://elsewhere/photos", "/photos", f"s3://{BUCKET}/photos/../other"):
        with pytest.raises(InputError, match="outside"):
            source.name(address)
    with pytest.raises(InputError, match="no address of pictures"):
        open_collection("nonsense://x")
    assert isinstance(open_collection("file:///tmp"), Folder)


# Tars


def write_tar(path: Path, members: dict[str, bytes], mtime: int = 1_700_000_000, **options: Any) -> None:
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    os.utime(path, (mtime, mtime))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_read_from_the_middle_of_a_tar(tmp_path: Path, form: int) -> None:
    long = "x" * 90 + "/" + "y" * 60 + ".png"
    members = {"a.jpg": b"one", "a.json": b"{}", "./b.jpg": b"", long: b"three" * 300, ".c.jpg": b"-", "a.jpg ": b"-"}
    write_tar(tmp_path / "s.tar", members, format=form)
    source = Tars(f"tar+{tmp_path}")
    found = entries(source)
    assert [file.name for file in found] == ["s.tar/a.jpg", "s.tar/b.jpg", f"s.tar/{long}"]
    assert [source.picture(file).read() for file in found] == [b"one", b"", b"three" * 300]  # type: ignore[union-attr]
    assert all(source.look(file.name) == file and source.stamp(file) == file.stamp for file in found)
    with pytest.raises(FileNotFoundError):
        source.look("s.tar/c.jpg")


def test_an_index_follows_tars(tmp_path: Path) -> None:
    files = photos(tmp_path, 5)
    shards = tmp_path / "shards"
    (shards / "more").mkdir(parents=True)
    write_tar(shards / "0.tar", {f"{i}.jpg": data for i, data in enumerate(files[:2])} | {"bad.jpg": b"no picture"})
    write_tar(shards / "more/1.tar", {"2.jpg": files[2], "3.jpg": files[3], "3.cls": b"7"})
    root = f"tar+{shards}"
    with create(tmp_path, root) as search:
        first = search.index([root])
        assert (first.described, first.bad) == (4, 1)
        assert paths(search) == ["0.tar/0.jpg", "0.tar/1.jpg", "more/1.tar/2.jpg", "more/1.tar/3.jpg"]
        expected = descriptor()([io.BytesIO(data) for data in files[:4]]).numpy()
        ids = [record.id for record in search.store.records()]
        np.testing.assert_allclose(search.vectors(ids), expected, atol=1e-5)
        assert search.index([root]).unchanged == 4

        # One is gone, one has moved to another place in the tar, one is new.
        write_tar(shards / "0.tar", {"4.jpg": files[4], "1.jpg": files[1]}, mtime=1_700_000_001)
        second = search.index([f"{root}/0.tar"])
        assert (second.described, second.unchanged, second.removed) == (1, 1, 1)
        assert paths(search) == ["0.tar/1.jpg", "0.tar/4.jpg", "more/1.tar/2.jpg", "more/1.tar/3.jpg"]
        assert list(search.store.bad_files()) == []
        (record,) = search.store.find(["0.tar/1.jpg"])
        assert record is not None
        np.testing.assert_array_equal(load_image(search.file(record.id)), load_image(io.BytesIO(files[1])))

        whole = (shards / "more/1.tar").read_bytes()
        (shards / "more/1.tar").write_bytes(whole[: len(files[2]) + 700])  # cut off within the second picture
        third = search.index([root])
        assert third.removed == 0
        assert {file.path for file in search.store.bad_files()} >= {"more/1.tar"}
        assert search.status().failed == 0  # a damaged tar is no failing machine
        (shards / "more/1.tar").unlink()
        report = search.index([root])
        assert (report.removed, report.away, search.status().away.keys()) == (0, 2, {"more"})
        assert search.index([root], prune=True).removed == 2


def test_a_pipe_among_tars_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.tar")
    write_tar(tmp_path / "real.tar", {"a.jpg": b"one"})
    (tmp_path / "1.tar").symlink_to(tmp_path / "0.tar")
    (tmp_path / "2.tar").symlink_to(tmp_path / "real.tar")
    source = Tars(f"tar+{tmp_path}")
    assert [file.name for file in entries(source)] == ["2.tar/a.jpg", "real.tar/a.jpg"]
    with pytest.raises(InputError, match="not a file"):
        source.entries("0.tar", on_error=print)


def test_a_tar_that_changed_is_noticed_by_its_headers(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", {"a.jpg": b"one"})
    source = Tars(f"tar+{tmp_path}")
    (file,) = entries(source)
    write_tar(tmp_path / "s.tar", {"a.jpg": b"other"})
    with pytest.raises(OSError, match="changed"):
        source.fetch(file)


def test_damage_in_the_middle_of_a_tar_is_no_end(tmp_path: Path) -> None:
    write_tar(tmp_path / "s.tar", {"a.jpg": b"one", "b.jpg": b"two", "a.jpg/": b""})
    data = bytearray((tmp_path / "s.tar").read_bytes())
    data[1024:1030] = b"\xff" * 6
    (tmp_path / "s.tar").write_bytes(data)
    problems: list[tuple[str, str]] = []
    found = Tars(f"tar+{tmp_path}").entries("", on_error=lambda name, error: problems.append((name, error.strerror)))
    assert [file.name for file in found] == ["s.tar/a.jpg"]
    assert problems == [("s.tar", "the tar is damaged at byte 1024")]


def test_tars_in_a_bucket(bucket: Any, tmp_path: Path) -> None:
    files = photos(tmp_path, 3)
    write_tar(tmp_path / "0.tar", {f"{i}.jpg": data for i, data in enumerate(files)})
    upload(bucket, {"shards/0.tar": (tmp_path / "0.tar").read_bytes()})
    with create(tmp_path, f"tar+s3://{BUCKET}/shards") as search:
        assert search.index([f"tar+s3://{BUCKET}/shards"]).described == 3
        assert paths(search) == ["0.tar/0.jpg", "0.tar/1.jpg", "0.tar/2.jpg"]
        assert search.index([f"tar+s3://{BUCKET}/shards/0.tar"]).unchanged == 3


# Commands and the server


def test_commands(bucket: Any, cooc: Shell, tmp_path: Path) -> None:
    upload(bucket, {f"photos/{i}.jpg": data for i, data in enumerate(photos(tmp_path, 3))})
    index, url = str(tmp_path / "index"), f"s3://{BUCKET}/photos"

    def run(*words: str) -> str:
        result = cooc(*words)
        assert result.code == 0, result
        return result.out

    assert "3 described" in run("index", url, "--index", index, "--recipe", RECIPE)
    query = str(tmp_path / "files-0/01.jpg")
    page, sheet = tmp_path / "page.html", tmp_path / "sheet.png"
    output = run("search", query, "--index", index, "--json", "--html", str(page), "--sheet", str(sheet))
    assert f'"file": "{url}/1.jpg"' in output
    assert f"href='{url}/1.jpg'" in page.read_text()
    tile = np.asarray(Image.open(sheet).convert("RGB"))[12:232, 12 + 232 : 12 + 452]  # the first result
    assert len(np.unique(tile.reshape(-1, 3), axis=0)) > 100  # no empty frame
    assert "1.jpg" in run("search", query, "--index", index, "--thumbnails")
    refused = cooc("index", url)
    assert refused.code == 2
    assert "need --index" in refused.err

    write_tar(tmp_path / "0.tar", {"a.jpg": Path(query).read_bytes()})
    assert "1 described" in run("index", str(tmp_path / "0.tar"), "--index", str(tmp_path / "t"), "--recipe", RECIPE)
    assert "0.tar/a.jpg" in run("search", query, "--index", str(tmp_path / "t"))


@pytest.mark.parametrize("kind", ["objects", "tars"])
def test_pictures_are_served_from_there(bucket: Any, tmp_path: Path, kind: str) -> None:
    files = photos(tmp_path, 3)
    if kind == "objects":
        upload(bucket, {f"photos/{i}.jpg": data for i, data in enumerate(files)})
        root = f"s3://{BUCKET}/photos"
    else:
        write_tar(tmp_path / "0.tar", {f"{i}.jpg": data for i, data in enumerate(files)})
        upload(bucket, {"photos/0.tar": (tmp_path / "0.tar").read_bytes()})
        root = f"tar+s3://{BUCKET}/photos"
    with create(tmp_path, root) as search:
        search.index([root])
        one, two, _ = (record.id for record in search.store.records())
        settings = Settings(folders=(Path("new"),))
        with serving(create_app(search, settings)) as address, httpx.Client(base_url=f"{address}/api/v1") as client:
            assert client.get("/status").json()["name"] == "photos"
            original = client.get(f"/images/{one}/file")
            assert (original.content, original.headers["content-type"]) == (files[0], "image/jpeg")
            again = client.get(f"/images/{one}/file", headers={"If-None-Match": original.headers["etag"]})
            assert again.status_code == 304
            small = client.get(f"/images/{one}/thumbnail")
            assert Image.open(io.BytesIO(small.content)).format == "JPEG"
            shares = client.get(f"/images/{one}/explanation", params={"query": two})
            assert shares.status_code == 200
            assert client.get(f"/images/{one}/similar", params={"box": "0,0,32,32"}).status_code == 200
            assert client.post("/indexing", json={"folder": "elsewhere"}).status_code == 403
            for key in ("photos/1.jpg", "photos/0.tar"):
                bucket.delete_object(Bucket=BUCKET, Key=key)
            assert client.get(f"/images/{two}/file").status_code == 404
            assert client.get(f"/images/{two}/thumbnail").status_code == 404
