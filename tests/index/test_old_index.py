"""An index that an earlier cooc wrote opens, answers and can be changed.

Never write the fixture again: it is what users have.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from cooc.image_search import ImageSearch
from tests.tiny import descriptor, write_photos

FIXTURE = Path(__file__).parents[1] / "fixtures" / "index-v2"


def test_index_of_format_2(tmp_path: Path) -> None:
    photos = write_photos(tmp_path, 6)
    (tmp_path / "sub").mkdir()
    shutil.copy(photos[0], tmp_path / "sub" / "copy.jpg")
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    shutil.copytree(FIXTURE, tmp_path / ".cooc")
    with ImageSearch.open(tmp_path / ".cooc", write=True, descriptor=descriptor()) as search:
        names = [record.path for record in search.store.records()]
        assert names == ["00.jpg", "01.jpg", "02.jpg", "04.jpg", "05.jpg", "sub/copy.jpg"]
        assert [record.tags for record in search.records(["00.jpg"])] == [{"blue", "red"}]
        assert [bad.path for bad in search.store.bad_files()] == ["bad.jpg"]
        best = search.search(photos[2], k=1).matches[0]
        assert best.path == "02.jpg"
        assert best.score > 0.9999
        assert search.store.verify() == []
        report = search.index([tmp_path])
        assert (report.unchanged, report.described, report.removed) == (
            6,
            1,
            0,
        )  # their times are new, 03.jpg was not in
        assert [record.tags for record in search.records(["01.jpg"])] == [{"blue", "red"}]
