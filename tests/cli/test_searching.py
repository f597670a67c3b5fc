"""The commands around an index, with the real network on small pictures, through `main` as a shell would."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from cooc.cli import searching
from cooc.cli.showing import blocks, shown, thumbnail
from cooc.descriptor import Descriptor
from cooc.image_search import ImageSearch
from cooc.index import open_store
from cooc.index.calibration import Calibration
from tests.labelled import write_labelled_folder
from tests.shell import Shell
from tests.starving import BROKEN

RECIPE = "paper-linear+raw+size=96"


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three things, three views of each, and their index; made by the real program in a process of its own."""
    folder = write_labelled_folder(tmp_path_factory.mktemp("things")) / "jpg"
    command = [sys.executable, "-m", "cooc.cli", "index", str(folder), "-r", RECIPE, "--device", "cpu"]
    command += ["--verify", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "9 described" in done.stdout
    assert "9 in the index" in done.stdout
    return folder


@pytest.fixture
def photos(indexed: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(indexed, tmp_path / "photos"))


@pytest.fixture(autouse=True)
def _no_index_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COOC_INDEX", raising=False)


# search


def test_search_finds_a_changed_view(cooc: Shell, indexed: Path, tmp_path: Path) -> None:
    for name in ("arch_000000.jpg", "gate_000001.jpg"):
        with Image.open(indexed / name) as picture:
            picture.point(lambda value: value * 0.9).save(tmp_path / "view.jpg", quality=70)
        found = cooc("search", tmp_path / "view.jpg", "--index", indexed / ".cooc", "-k", 3, "--json")
        assert found.code == 0
        assert found.json["matches"][0]["path"] == name
        assert found.json["calibrated"] is False
        assert 0.5 < found.json["matches"][0]["score"] < 0.9999


def test_ranking_is_the_plain_matrix_product(cooc: Shell, indexed: Path) -> None:
    paths = sorted(indexed.glob("*.jpg"))
    vectors = Descriptor.from_recipe(RECIPE, device="cpu")(paths).numpy()
    found = cooc("search", indexed, "--index", indexed / ".cooc", "-k", 9, "--json")
    lines = [json.loads(line) for line in found.out.splitlines()]
    assert [line["query"] for line in lines] == [str(path) for path in paths]
    for line, query in zip(lines, vectors, strict=True):
        scores = vectors @ query
        assert [m["path"] for m in line["matches"]] == [paths[i].name for i in np.argsort(-scores, kind="stable")]
        np.testing.assert_allclose([m["score"] for m in line["matches"]], np.sort(scores)[::-1], atol=1e-5)


def test_the_index_is_found(cooc: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (photos / "deep/down").mkdir(parents=True)
    monkeypatch.chdir(photos / "deep/down")
    assert cooc("status", "--json").json["images"] == 9
    monkeypatch.chdir(tmp_path)
    missing = cooc("status")
    assert missing.code == 5
    assert "cooc index FOLDER" in missing.err
    monkeypatch.setenv("COOC_INDEX", str(photos / ".cooc"))
    assert cooc("status", "--json").json["root"] == str(photos)


def test_table_says_similar(cooc: Shell, indexed: Path) -> None:
    found = cooc("search", indexed / "arch_000000.jpg", "--index", indexed / ".cooc", "-k", 2, "--no-thumbnails")
    assert re.search(r"1 +similar 1\.000 +arch_000000\.jpg", found.out)
    assert "no calibration" in found.err


@pytest.mark.parametrize("width", [40, 80, None])
def test_a_long_name_leaves_room_for_the_score(
    cooc: Shell, photos: Path, monkeypatch: pytest.MonkeyPatch, width: int | None
) -> None:
    """In a terminal it takes several lines; in a pipe it stays whole."""
    name = f"{'long ' * 40}name.jpg"
    (photos / "arch_000000.jpg").rename(photos / name)
    cooc("index", photos, "-q")
    if width is not None:
        monkeypatch.setattr(searching, "out", Console(highlight=False, width=width, force_terminal=True, no_color=True))
    found = cooc("search", photos / name, "--index", photos / ".cooc", "-k", 1, "--no-thumbnails")
    table = re.sub(r"\x1b\[[^m]*m|\x1b\]8;[^\x1b]*\x1b\\", "", found.out.partition("picture")[2])
    assert "1  similar 1.000  long" in table
    assert "".join(table.replace("similar 1.000", "").split())[1:] == name.replace(" ", "")
    if width is None:
        assert name in table


def keep(photos: Path, curve: Calibration) -> None:
    with ImageSearch.open(photos / ".cooc", write=True) as search:
        search.calibrate(curve)


def test_no_match_is_said(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    words = ("search", photos / "arch_000000.jpg", "--index", photos / ".cooc", "--no-thumbnails")
    keep(photos, Calibration(10.0, -20.0))
    assert "merely similar" in cooc(*words).out
    page = tmp_path / "page.html"
    assert cooc(*words, "--json", "--html", page).json["no_match"] is True
    assert "merely similar" in page.read_text()
    keep(photos, Calibration(10.0, -5.0))
    found = cooc(*words, "--html", page)
    assert "merely" not in found.out
    for told in (found.out, re.sub(r"<style>.*?</style>|base64,[^\"]*", "", page.read_text(), flags=re.DOTALL)):
        assert "similar 1.000" in told
        assert not re.search(r"\bmatch|%", told)
    first = cooc(*words, "--json").json["matches"][0]
    assert first["probability"] == pytest.approx(Calibration(10.0, -5.0)(first["score"]))
    assert first["verified"] is False


def test_options_change_the_ranking(cooc: Shell, photos: Path) -> None:
    base = ("search", photos / "arch_000000.jpg", "--index", photos / ".cooc", "--json")
    assert cooc("tag", "gate_000001.jpg", "tower_000001.jpg", "-a", "mine", "--index", photos / ".cooc").code == 0
    assert len(cooc(*base, "--tag", "mine").json["matches"]) == 2
    assert len(cooc(*base, "--min-score", 0.999).json["matches"]) == 1
    assert cooc(*base, "--from", "2020").json["matches"] == []
    for words in (("--expand", "alpha"), ("--rerank", "superglobal"), ("--database-augmentation",)):
        assert len(cooc(*base, *words).json["matches"]) == 9
    part = cooc(*base, "--box", "0,0,40,40").json
    assert part["box"] == [0, 0, 40, 40]
    assert part["matches"][0]["score"] < 0.9999
    joined = cooc("search", photos / "arch_000000.jpg", photos / "gate_000000.jpg", *base[2:], "-k", 2).json
    assert {match["path"] for match in joined["matches"]} == {"arch_000000.jpg", "gate_000000.jpg"}
    shown_tags = cooc("tag", "gate_000001.jpg", "arch_000000.jpg", "--index", photos / ".cooc").out
    assert shown_tags.splitlines() == ["gate_000001.jpg: mine", "arch_000000.jpg: -"]


def test_standard_input(cooc: Shell, indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.TextIOWrapper(io.BytesIO((indexed / "gate_000002.jpg").read_bytes()))
    monkeypatch.setattr(sys, "stdin", data)
    assert cooc("search", "-", "--index", indexed / ".cooc", "--json").json["matches"][0]["path"] == "gate_000002.jpg"


class Pictures(BaseHTTPRequestHandler):
    folder: ClassVar[Path]

    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write((self.folder / "tower_000000.jpg").read_bytes())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def web(indexed: Path) -> Iterator[str]:
    handler = type("Handler", (Pictures,), {"folder": indexed})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_address(cooc: Shell, indexed: Path, web: str) -> None:
    words = ("--index", indexed / ".cooc", "--json")
    assert cooc("search", f"{web}/tower.jpg", *words).json["matches"][0]["path"] == "tower_000000.jpg"
    for path, says in (("/missing", "Not Found"), ("/away", "only http and https")):
        refused = cooc("search", web + path, *words)
        assert refused.code == 2
        assert says in refused.err
    for odd in ("http://", "http://[", "http://a:b/", "http://user:word@example.org/", "http://\x7f/"):
        refused = cooc("search", odd, *words)
        assert refused.code == 2
        assert len(refused.err.splitlines()) < 5


def test_page_and_sheet(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    odd = photos / "<b>odd & name\n.jpg"
    shutil.copy(photos / "arch_000000.jpg", odd)
    assert cooc("index", photos, "-q").code == 0
    (photos / "gate_000000.jpg").unlink()  # a file that is gone still has a line
    page, sheet = tmp_path / "page.html", tmp_path / "sheet.jpg"
    words = ("--index", photos / ".cooc", "--no-thumbnails", "--html", page, "--sheet", sheet)
    found = cooc("search", photos / "arch_000000.jpg", "--box", "5,5,60,60", *words)
    assert found.code == 0
    text = page.read_text()
    assert "&lt;b&gt;odd &amp; name\\n.jpg" in text
    assert "<b>odd" not in text
    assert text.count("<img ") == 11
    assert not re.findall(r'(?:src|href)="?http', text)
    with Image.open(sheet) as picture:
        assert picture.width > 1000


def test_wrong_words(cooc: Shell, indexed: Path, tmp_path: Path) -> None:
    index, one = ("--index", indexed / ".cooc"), indexed / "arch_000000.jpg"
    for words, says in (
        ((one, indexed), "not both"),
        ((indexed, "--box", "0,0,5,5"), "not of a folder"),
        ((one, one, "--box", "0,0,5,5"), "one at a time"),
        ((one, "--expand", "alfa"), "'alpha'"),
        ((one, "--rerank", "nothing"), "Choices"),
        ((one, "--from", "yesterday"), "no date"),
        ((tmp_path / "none.jpg",), "does not exist"),
        ((one, "--html", tmp_path / "x.txt"), ".html"),
    ):
        refused = cooc("search", *words, *index)
        assert (refused.code, says in refused.err) == (2, True), refused
    (tmp_path / "queries").mkdir()
    shutil.copy(one, tmp_path / "queries")
    (tmp_path / "queries/bad.jpg").write_text("none")
    partly = cooc("search", tmp_path / "queries", *index, "--json")
    assert partly.code == 3
    assert "bad.jpg" in partly.err
    assert len(partly.out.splitlines()) == 1


# the index


def test_index_again_with_bad_files(cooc: Shell, photos: Path) -> None:
    (photos / "text.jpg").write_text("no picture")
    (photos / "arch_000000.jpg").rename(photos / "renamed.jpg")
    (photos / "gate_000000.jpg").unlink()
    done = cooc("index", photos, "--verify", "none")
    assert done.code == 3
    assert done.out.startswith("1 moved, 7 unchanged, 1 removed, 1 bad in ")
    assert "text.jpg" in done.err
    listed = cooc("status", "--bad", "--json", "--index", photos / ".cooc").json
    assert listed["path"] == "text.jpg"
    assert "not a picture" in listed["reason"]
    assert abs(datetime.now(UTC) - datetime.fromisoformat(listed["since"])) < timedelta(minutes=10)
    day = listed["since"][:10]
    assert re.search(
        rf"text\.jpg: .*not a picture.* \(since {day} \d\d:\d\d UTC\)",
        cooc("status", "--bad", "--index", photos / ".cooc").out,
    )
    assert "left out" in cooc("status", "--index", photos / ".cooc").out
    lines = [json.loads(line) for line in cooc("index", photos, "--json").out.splitlines()]
    assert [line["event"] for line in lines][-2:] == ["bad", "done"]
    assert (lines[-1]["unchanged"], lines[-1]["bad"], lines[-1]["images"]) == (8, 1, 8)
    quiet = cooc("index", photos, "--quiet")
    assert (quiet.code, quiet.out) == (3, "")
    good = (photos / "arch_000001.jpg").read_bytes()
    state = (photos / "text.jpg").stat()
    (photos / "text.jpg").write_bytes(good[: state.st_size])
    os.utime(photos / "text.jpg", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert "not a picture" in cooc("index", photos).err  # not tried again
    assert "damaged or incomplete" in cooc("index", photos, "--retry").err


def test_a_failing_machine_has_an_exit_code_of_its_own(cooc: Shell, photos: Path) -> None:
    """The disk gives read errors: nothing is bad, and what was done is said and kept."""
    Image.new("RGB", (80, 60), (200, 30, 30)).save(photos / "a.png")
    for i in range(8):
        (photos / f"b-{i}.jpg").symlink_to(BROKEN)
    done = cooc("index", photos, "--follow")
    assert done.code == 7
    assert done.out.startswith("1 described, 9 unchanged, 8 failed in ")
    assert "failed: b-0.jpg: " in done.err
    assert "cooc: 8 files in a row could not be read on this machine" in done.err
    assert "run it again" in done.err
    lines = [json.loads(line) for line in cooc("index", photos, "--follow", "--json").out.splitlines()]
    assert [line["event"] for line in lines][-9:] == ["failed"] * 8 + ["stopped"]
    assert (lines[-1]["unchanged"], lines[-1]["failed"], lines[-1]["images"]) == (10, 8, 10)
    index = ("--index", photos / ".cooc")
    assert re.search(r"failed +8 ", cooc("status", *index).out)
    assert cooc("status", "--bad", *index).out == ""
    (photos / "b-0.jpg").unlink()
    assert cooc("index", photos, "--follow").code == 3  # seven in a row are not yet a failing machine
    for path in photos.glob("b-*.jpg"):
        path.unlink()
    assert cooc("index", photos).code == 0
    assert cooc("status", "--json", *index).json["failed"] == 0


def test_no_file_handles_is_the_machines_failure(photos: Path) -> None:
    """The real program, as after `ulimit -n 12`: two good pictures were bad for ever."""
    for i in range(2):
        Image.new("RGB", (80, 60), (200, 30, i)).save(photos / f"new-{i}.jpg")
    command = [sys.executable, "-m", "cooc.cli", "index", str(photos), "--json", "--device", "cpu", "--workers", "0"]
    limited = ["sh", "-c", 'ulimit -n 12; exec "$@"', "sh", *command]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 3
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["failed"], last["bad"], last["unchanged"]) == (2, 0, 9)
    assert "Too many open files" in done.stdout
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["described"], last["bad"], last["images"]) == (2, 0, 11)


def test_a_folder_that_is_away(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    index = ("--index", tmp_path / "index")
    for thing in ("arch", "gate", "tower"):
        (photos / thing).mkdir()
        for path in photos.glob(f"{thing}_*.jpg"):
            path.rename(photos / thing / path.name)
    assert cooc("index", photos, *index, "-r", RECIPE, "--device", "cpu").code == 0
    shutil.move(photos / "gate", tmp_path / "unplugged")
    done = cooc("index", photos, *index)
    assert (done.code, done.out.startswith("6 unchanged, 3 away in ")) == (3, True)
    assert "3 pictures of" in done.err
    assert "mounted" in done.err
    assert re.search(r"away +gate, since \d{4}-\d\d-\d\d \d\d:\d\d UTC", cooc("status", *index).out)
    query = ("search", photos / "arch/arch_000000.jpg", *index, "-k", 9)
    found = {match["path"]: match["away"] for match in cooc(*query, "--json").json["matches"]}
    assert len(found) == 9
    assert {path for path, away in found.items() if away} == {f"gate/gate_00000{i}.jpg" for i in range(3)}
    assert cooc(*query, "--no-thumbnails").out.count("(away)") == 3

    both = cooc("index", photos / "gate", photos / "arch", *index)  # of two folders, one is missing
    assert (both.code, both.out.startswith("3 unchanged, 3 away in ")) == (3, True)
    assert cooc("index", photos / "never", *index).code == 2
    assert cooc("index", photos / "gate").code == 2
    assert cooc("index", photos / "gate", "--index", tmp_path / "new").code == 2
    assert not (tmp_path / "new").exists()

    shutil.move(tmp_path / "unplugged", photos / "gate")
    assert cooc("index", photos, *index).out.startswith("9 unchanged in ")
    shutil.rmtree(photos / "gate")
    assert cooc("index", photos, *index, "--prune", "--keep-missing").code == 2
    assert cooc("index", photos, *index, "--prune").out.startswith("6 unchanged, 3 removed in ")
    assert cooc("status", "--json", *index).json["away"] == {}


def test_index_refuses(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    other = cooc("index", photos, "--recipe", "ucrow+raw")
    assert other.code == 5
    assert "build another one" in other.err
    assert cooc("index", tmp_path / "nowhere").code == 2
    assert not (tmp_path / "nowhere").exists()
    assert "--index" in cooc("index", photos, tmp_path).err
    outside = cooc("index", tmp_path, "--index", photos / ".cooc")
    assert outside.code == 2
    assert "outside" in outside.err
    shutil.move(photos / "gate_000000.jpg", tmp_path / "gate.jpg")
    for file in photos.glob("*.jpg"):
        file.unlink()
    empty = cooc("index", photos)
    assert (empty.code, "mounted" in empty.err) == (3, True)
    assert cooc("status", "--json", "--index", photos / ".cooc").json["images"] == 9


def test_several_folders_share_an_index(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    shutil.copy(photos / "arch_000000.jpg", tmp_path / "one")
    shutil.copy(photos / "gate_000000.jpg", tmp_path / "two")
    index = tmp_path / "index"
    done = cooc("index", tmp_path / "one", tmp_path / "two", "--index", index, "-r", RECIPE, "--device", "cpu")
    assert done.code == 0
    found = cooc("search", tmp_path / "one/arch_000000.jpg", "--index", index, "--folder", "two", "--json").json
    assert [match["path"] for match in found["matches"]] == ["two/gate_000000.jpg"]


def test_add_says_what_is_bad_of_its_own_files(cooc: Shell, photos: Path) -> None:
    (photos / "old.jpg").write_text("no picture")
    assert "old.jpg" in cooc("index", photos).err
    (photos / "new.jpg").write_text("none, either")
    added = cooc("add", photos / "new.jpg", "--index", photos / ".cooc")
    assert (added.code, "new.jpg" in added.err, "old.jpg" in added.err) == (3, True, False)
    lines = [
        json.loads(line)
        for line in cooc("add", photos / "new.jpg", "--index", photos / ".cooc", "--json").out.splitlines()
    ]
    assert [line["path"] for line in lines if line["event"] == "bad"] == ["new.jpg"]


def test_add_does_not_wait_for_a_pipe(photos: Path) -> None:
    os.mkfifo(photos / "pipe.jpg")
    command = [sys.executable, "-m", "cooc.cli", "add", str(photos / "pipe.jpg"), "--index", str(photos / ".cooc")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert "not a regular file" in done.stderr


def test_add_remove_verify_compact(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    index = ("--index", photos / ".cooc")
    Image.new("RGB", (80, 60), (200, 30, 30)).save(photos / "new.png")
    assert "1 described" in cooc("add", photos / "new.png", *index).out
    assert cooc("add", photos / "none.png", *index).code == 3
    assert cooc("add", photos, *index).code == 2
    assert "1 picture removed" in cooc("remove", "new.png", *index).out
    assert cooc("remove", "new.png", *index).code == 2
    assert "All is well: 9 pictures." in cooc("verify", *index).out
    assert "MB now" in cooc("compact", *index).out
    with open_store(photos / ".cooc") as store:
        vector = store.vectors([next(store.records()).id]).tobytes()
    database = photos / ".cooc/index.sqlite"
    content = database.read_bytes()
    assert content.count(vector) == 1
    database.write_bytes(content.replace(vector, bytes(len(vector))))
    broken = cooc("verify", *index)
    assert broken.code == 5
    assert "arch_000000.jpg: the vector is damaged" in broken.err


def test_export_import_duplicates(cooc: Shell, photos: Path, tmp_path: Path) -> None:
    shutil.copy(photos / "arch_000000.jpg", photos / "copy.jpg")
    cooc("index", photos, "-q")
    index = ("--index", photos / ".cooc")
    groups = [json.loads(line) for line in cooc("duplicates", "--threshold", 0.9999, "--json", *index).out.splitlines()]
    assert [[one["path"] for one in group] for group in groups] == [["arch_000000.jpg", "copy.jpg"]]
    listed = cooc("duplicates", "--threshold", 0.9999, *index).out
    assert "same content" in listed
    assert "1 group, 2 pictures." in listed
    for name in ("out.npy", "out.parquet"):
        assert "10 pictures" in cooc("export", tmp_path / name, *index).out
        other = tmp_path / f"{name}-index"
        assert "10 pictures" in cooc("import", tmp_path / name, "--index", other, "--root", photos).out
        query = ("search", photos / "gate_000001.jpg", "--json")
        assert cooc(*query, "--index", other).json["matches"] == cooc(*query, *index).json["matches"]
    assert cooc("export", tmp_path / "out.csv", *index).code == 2


def test_ctrl_c(photos: Path) -> None:
    """The real program: what is done is kept, 130 is its answer, and the next run goes on."""
    rng = np.random.default_rng(5)
    for i in range(10):
        pixels = rng.integers(0, 256, (60 + i, 70, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / f"more-{i:02}.jpg")
    command = [sys.executable, "-m", "cooc.cli", "index", str(photos), "--json", "--device", "cpu", "--workers", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert json.loads(first)["event"] == "progress"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    last = json.loads(([first, *out.splitlines()])[-1])
    assert "Traceback" not in err
    assert last["event"] == "done"
    assert process.returncode == (130 if last["interrupted"] else 0)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["images"] == 19


# showing


def test_names_are_shown_on_one_line() -> None:
    assert shown(os.fsdecode(b"a\xff\n\x1b[31m.jpg")) == "a\\xff\\n\\x1b[31m.jpg"
    assert shown("Zürich 東京.jpg") == "Zürich 東京.jpg"


def test_thumbnails_in_characters(indexed: Path) -> None:
    text = blocks(thumbnail(indexed / "arch_000000.jpg", 32))
    lines = text.plain.splitlines()
    assert len(lines) == 4
    assert set(text.plain) == {"▀", "\n"}
    assert thumbnail(indexed / "none.jpg", 32).size == (32, 21)


@pytest.mark.parametrize("command", ["add", "tag", "remove"])
def test_a_name_that_does_not_exist(cooc: Shell, photos: Path, tmp_path: Path, command: str) -> None:
    """It is not said to lie outside of something; what exists and does, is."""
    done = cooc(command, tmp_path / "nothing.jpg", "--index", photos / ".cooc")
    assert done.code == 2
    assert "nothing.jpg' does not exist" in done.err
    (tmp_path / "other.jpg").write_bytes(b"")
    assert "lies outside" in cooc(command, tmp_path / "other.jpg", "--index", photos / ".cooc").err


def test_a_port_that_is_taken(cooc: Shell, indexed: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cooc("serve", "--index", indexed / ".cooc", "--port", port)
    assert done.code == 2
    assert f"Port {port} is taken" in done.err
    assert "--port 0" in done.err
    elsewhere = cooc("serve", "--index", indexed / ".cooc", "--host", "192.0.2.1", "--token", "t" * 40)
    assert "'192.0.2.1' is no address of this machine" in elsewhere.err
