"""Commands that look after an index, where something is wrong with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.index.test_export import META as EXPORTED
from tests.index.test_export import RECORDS, create_store, export_index, random_vectors
from tests.shell import Shell
from tests.tiny import write_photos


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (x)")
    connection.close()


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "emptied": (lambda path: path.write_bytes(b""), "is empty, as a full disk"),
    "no database": (lambda path: path.write_bytes(b"x" * 9000), "file is not a database"),
    "another program's": (foreign, "is another program's database"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_every_command_says_the_same_of_a_spoilt_index(cooc: Shell, tmp_path: Path, kind: str) -> None:
    """Seen: "not an index" by one command, "there already" by another."""
    index, photos = tmp_path / "photos" / ".cooc", tmp_path / "photos"
    (photo, *_) = write_photos(photos, 2)
    with create_store(str(tmp_path / "source"), EXPORTED) as store:
        store.add(RECORDS, random_vectors(12))
        export_index(store, tmp_path / "out.npy")
    index.mkdir()
    make, message = SPOILT[kind]
    make(index / "index.sqlite")
    named = ("--index", index)
    said = set()
    for words in (
        ("index", photos),
        ("index", photos, *named),
        ("add", photo, *named),
        ("remove", photo, *named),
        ("tag", photo, "--add", "x", *named),
        ("status", *named),
        ("search", photo, *named),
        ("duplicates", *named),
        ("verify", *named),
        ("compact", *named),
        ("snapshot", index, tmp_path / "snapshot"),
        ("rebuild", *named),
        ("export", tmp_path / "again.npy", *named),
        ("import", tmp_path / "out.npy", *named),
        ("serve", *named),
    ):
        done = cooc(*words)
        assert done.code == 5, (words, done)
        assert message in done.err
        said.add(done.err)
    assert len(said) == 1
    (text,) = said
    assert (f"cooc restore SNAPSHOT {index}" in text) == (kind != "another program's")
