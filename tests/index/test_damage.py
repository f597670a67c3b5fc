"""Damaged vectors, as a user meets them: wrong answers by none of the ways that vectors take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cooc.errors import VectorDamagedError
from cooc.index.embedded.store import EmbeddedStore, create_store, open_store
from cooc.index.records import Record
from cooc.index.shortlist import Options, find_duplicates, find_matches
from tests import servers
from tests.index.test_store import META, flip, random_vectors, record

RECORDS = [record(f"{i:03}.jpg") for i in range(120)]


def nan(data: bytes) -> bytes:
    """The first number becomes NaN by two bits, or what it takes."""
    changed = bytearray(data)
    changed[2:4] = b"\xc0\x7f"
    return bytes(changed)


@pytest.fixture(params=["one bit", "not a number"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> EmbeddedStore:
    """120 pictures, of which 007.jpg is damaged; its copy has a good vector, 008.jpg is similar to both."""
    vectors = random_vectors(120)
    vectors[8] = vectors[7] * np.float32(0.99) + vectors[9] * np.float32(0.1)
    vectors[8] /= np.linalg.norm(vectors[8])
    with create_store(str(tmp_path / "index"), META) as made:
        made.add([*RECORDS, record("copy.jpg", "007.jpg")], np.concatenate([vectors, vectors[7:8]]))
    harm = {"one bit": flip(30), "not a number": nan}[request.param]
    servers.Embedded().harm(tmp_path, RECORDS[7], harm)
    return open_store(str(tmp_path / "index"), write=True)


WAYS = [{}, {"expand": "alpha"}, {"expand": "average"}, {"augment": True}, {"rerank": "k-reciprocal"}]
WAYS += [{"rerank": "diffusion"}, {"rerank": "superglobal"}, {"offset": 3}]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_every_way_to_search(store: EmbeddedStore, options: dict[str, object]) -> None:
    """Seen: 55 of 120 answers wrong with scores above 1, or a raw ValueError for each."""
    vectors = random_vectors(120)
    with store:
        for row in range(0, 120, 9):
            found = find_matches(store, vectors[row], Options(k=20, **options)).matches  # type: ignore[arg-type]
            assert len(found) == 20
            assert "007.jpg" not in {match.path for match in found}
            assert all(-1.001 < match.score < 1.001 for match in found)
            if not options:
                assert found[0].path == f"{row:03}.jpg"


def test_duplicates(store: EmbeddedStore) -> None:
    with store:
        groups = list(find_duplicates(store, 0.9))
    assert [[one.path for one in group] for group in groups] == [["008.jpg", "copy.jpg"]]


def test_a_copy_of_the_picture_is_not_given_the_damaged_vector(store: EmbeddedStore) -> None:
    """As `cooc index` asks for it when it finds a picture that it knows under another name."""
    with store:
        twins = store.by_sha256(RECORDS[7].sha256)
        assert [twin.path for twin in twins] == ["007.jpg", "copy.jpg"]
        with pytest.raises(VectorDamagedError, match=r"007.jpg.*cooc index"):
            store.vectors([twins[0].id])
        np.testing.assert_array_equal(store.vectors([twins[1].id]), random_vectors(120)[7:8])


def test_moving_it_mends_nothing(store: EmbeddedStore, tmp_path: Path) -> None:
    """Nor do compacting, a graph, a snapshot or a copy: the checksum stays what it was."""
    with store:
        store.rename({"007.jpg": "moved.jpg"})
        assert list(store.damaged()) == ["moved.jpg"]
        store.remove([f"{i:03}.jpg" for i in range(60, 100)])
        store.compact()
        store.build_graph()
        assert list(store.damaged()) == ["moved.jpg"]
        moved = Record("moved.jpg", 0, 0, RECORDS[7].sha256, 0, 0).id
        for exact in (True, False):
            assert moved not in store.search(random_vectors(3), 200, exact=exact).ids[0]
        store.snapshot(str(tmp_path / "copy"))
    with open_store(str(tmp_path / "copy")) as copy:
        assert list(copy.damaged()) == ["moved.jpg"]
        assert len(copy.verify()) == 1
