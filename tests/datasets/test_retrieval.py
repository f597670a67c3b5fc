from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cooc.datasets.published import CORRUPT_PARIS, DATASETS
from cooc.datasets.retrieval import check, image_set, load_dataset, where
from cooc.errors import DatasetError, UnknownNameError
from cooc.evaluation import PROTOCOLS, evaluate

OXFORD = [
    "all_souls_000013",
    "all_souls_000026",
    "balliol_000051",
    "new_000001",
    "oxford_000002",
    "radcliffe_camera_000158",
]
QUERIES = ["all_souls_000006", "oxford_002416"]  # of the revisited set: not in the database
TRUTH = [
    {"bbx": [136.5, 34.1, 648.5, 955.7], "easy": [0, 1], "hard": [4], "junk": [2]},
    {"bbx": [1, 2, 30, 40], "easy": [], "hard": [3], "junk": []},
]


def pictures(folder, names, suffix=".jpg"):
    for i, name in enumerate(names):
        path = folder / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (i % 256, 100, 200)).save(path)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The published formats with a handful of pictures: only the published counts are smaller."""
    for name, size, queries in [
        ("oxford5k", 6, 2),
        ("roxford5k", 6, 2),
        ("paris6k", 4, 1),
        ("rparis6k", 3, 1),
        ("holidays", 7, 3),
    ]:
        monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], size=size, queries=queries))


def write_pickle(folder, name="roxford5k", protocol=3, arrays=False, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    truth = [{k: np.array(v) if arrays and v else v for k, v in entry.items()} for entry in TRUTH]
    content = {"imlist": OXFORD, "qimlist": QUERIES, "gnd": truth} | changes
    (folder / f"gnd_{name}.pkl").write_bytes(pickle.dumps(content, protocol=protocol))


@pytest.fixture
def revisited(tmp_path):
    pictures(tmp_path / "oxbuild_images", OXFORD + QUERIES)
    write_pickle(tmp_path)
    return tmp_path


def groups(query):
    return {name: getattr(query, name).tolist() for name in query.groups}


# the revisited sets


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_revisited_pickle(revisited, protocol, arrays):
    write_pickle(revisited, protocol=protocol, arrays=arrays)
    dataset = load_dataset("roxford5k", revisited)
    assert dataset.name == "roxford5k"
    assert dataset.image_paths == [revisited / "oxbuild_images" / f"{name}.jpg" for name in OXFORD]
    assert [query.path.stem for query in dataset.queries] == QUERIES
    assert [query.box for query in dataset.queries] == [(136.5, 34.1, 648.5, 955.7), (1, 2, 30, 40)]
    assert groups(dataset.ground_truth[0]) == {"easy": [0, 1], "hard": [4], "junk": [2]}
    assert groups(dataset.ground_truth[1]) == {"easy": [], "hard": [3], "junk": []}
    assert dataset.protocols == ("roxford-easy", "roxford-medium", "roxford-hard")
    assert dataset.reencoded == 0


def test_numbers_and_names_of_numpy_are_read_too(revisited):
    truth = [entry | {"easy": [np.int64(i) for i in entry["easy"]]} for entry in TRUTH]
    write_pickle(revisited, imlist=np.array(OXFORD), gnd=truth, protocol=2)
    assert groups(load_dataset("roxford5k", revisited).ground_truth[0])["easy"] == [0, 1]


def test_what_is_loaded_can_be_evaluated(revisited):
    dataset = load_dataset("roxford5k", revisited)
    perfect = [[0, 1, 4, 2, 3, 5], [3, 0, 1, 2, 4, 5]]
    assert set(dataset.protocols) <= set(PROTOCOLS)
    assert [evaluate(perfect, dataset.ground_truth, p).map for p in dataset.protocols] == [1, 1, 1]


@pytest.mark.parametrize(
    "layout", ["roxford5k/jpg", "oxford5k/images", "roxford5k", "oxbuildings/oxbuild_images", "jpg/a/b"]
)
@pytest.mark.parametrize("truth", ["", "roxford5k", "oxford/gt", "groundtruth"])
def test_usual_places_are_searched(tmp_path, layout, truth):
    pictures(tmp_path / layout, OXFORD + QUERIES)
    write_pickle(tmp_path / truth)
    assert len(load_dataset("roxford5k", tmp_path).image_paths) == 6


def test_pictures_and_ground_truth_may_lie_apart(revisited, tmp_path):
    pictures(tmp_path / "elsewhere", OXFORD + QUERIES)
    write_pickle(tmp_path / "here")
    assert (
        load_dataset("roxford5k", [tmp_path / "here", tmp_path / "elsewhere"]).image_paths[0].parent.name == "elsewhere"
    )


def test_reencoded_copies_are_used_and_said(tmp_path):
    pictures(tmp_path / "jpg", OXFORD[:4] + QUERIES, ".webp")
    pictures(tmp_path / "jpg", OXFORD[4:], ".png")
    pictures(tmp_path / "jpg", OXFORD[3:4], ".jpg")  # the original is preferred to its copy
    write_pickle(tmp_path)
    dataset = load_dataset("roxford5k", tmp_path)
    assert [path.suffix for path in dataset.image_paths] == [".webp", ".webp", ".webp", ".jpg", ".png", ".png"]
    assert dataset.reencoded == 7
    assert "7 of them are re-encoded copies" in str(check("roxford5k", tmp_path))


def test_distractors_come_last(revisited, tmp_path):
    pictures(tmp_path / "revisitop1m" / "jpg", ["b/2", "a/1", "c/1"])
    with_all = load_dataset("roxford5k", revisited, distractors=tmp_path / "revisitop1m")
    assert [path.stem for path in with_all.image_paths[:6]] == OXFORD
    assert [path.parent.name for path in with_all.image_paths[6:]] == ["a", "b", "c"]
    assert with_all.name == "roxford5k+3"
    assert groups(with_all.ground_truth[0])["easy"] == [0, 1]
    (tmp_path / "revisitop1m.txt").write_text("c/1.jpg\na/1.jpg\n")
    listed = load_dataset("roxford5k", revisited, distractors=tmp_path / "revisitop1m")
    assert [path.parent.name for path in listed.image_paths[6:]] == ["c", "a"]
    (tmp_path / "revisitop1m.txt").write_text("c/1.jpg\nc/2.jpg\n")
    with pytest.raises(DatasetError, match=r"1 of 2 distractors .* missing: c/2.jpg"):
        load_dataset("roxford5k", revisited, distractors=tmp_path / "revisitop1m")
    with pytest.raises(DatasetError, match="no folder of distractors"):
        load_dataset("roxford5k", revisited, distractors=tmp_path / "nowhere")


# pickles from strangers


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


class Shell:
    def __reduce__(self):
        return eval, ("__import__('os').getpid()",)


def hostile(content):
    return pickle.dumps({"imlist": OXFORD, "qimlist": QUERIES, "gnd": content})


def test_a_pickle_cannot_run_anything(revisited, tmp_path):
    target = tmp_path / "touched"
    for content, named in [
        (Touch(target), "pathlib"),
        (Shell(), "eval"),
        (np.random.default_rng(0), "numpy.random"),
        (io.BytesIO(b""), "BytesIO"),
        (Path("x"), "pathlib"),
        (np.memmap, "memmap"),
        (np.load, "load"),
    ]:
        (revisited / "gnd_roxford5k.pkl").write_bytes(hostile(content))
        with pytest.raises(DatasetError, match=rf"gnd_roxford5k\.pkl .* asks for .*{named}"):
            load_dataset("roxford5k", revisited)
    assert not target.exists()


def test_another_encoding_is_refused(revisited):
    code = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R."
    (revisited / "gnd_roxford5k.pkl").write_bytes(code)
    with pytest.raises(DatasetError, match="encoding 'zlib'"):
        load_dataset("roxford5k", revisited)


def test_damaged_pickles_are_refused(revisited, monkeypatch):
    file = revisited / "gnd_roxford5k.pkl"
    write_pickle(revisited, protocol=5, arrays=True)
    whole = file.read_bytes()
    for length in range(0, len(whole), 37):
        file.write_bytes(whole[:length])
        with pytest.raises(DatasetError, match="Fetch it again"):
            load_dataset("roxford5k", revisited)
    file.write_bytes(b"<html>302 Found</html>")
    with pytest.raises(DatasetError, match="Fetch it again"):
        load_dataset("roxford5k", revisited)
    file.write_bytes(whole)
    monkeypatch.setattr("cooc.datasets.ground_truth.LARGEST_PICKLE", 100)
    with pytest.raises(DatasetError, match="larger than any ground truth"):
        load_dataset("roxford5k", revisited)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gnd": TRUTH[:1]}, "shorter"),
        ({"gnd": [TRUTH[0], TRUTH[1] | {"easy": [6]}]}, "0 to 5"),
        ({"gnd": [TRUTH[0], TRUTH[1] | {"hard": [-1]}]}, "0 to 5"),
        ({"gnd": [TRUTH[0], TRUTH[1] | {"hard": [0.5]}]}, "0 to 5"),
        ({"gnd": [TRUTH[0], TRUTH[1] | {"bbx": [1, 2, 3]}]}, "box of oxford_002416 is not four numbers"),
        ({"gnd": [TRUTH[0], TRUTH[1] | {"bbx": [9, 2, 3, 4]}]}, "box of oxford_002416.* is empty"),
        ({"gnd": [TRUTH[0], TRUTH[1] | {"bbx": [float("nan"), 2, 3, 4]}]}, "is empty"),
        ({"gnd": None}, "not a ground truth"),
        ({"imlist": [*OXFORD[:5], OXFORD[0]]}, "all_souls_000013 is twice"),
        ({"imlist": OXFORD[:5]}, "5 pictures instead of the published 6"),
        ({"qimlist": QUERIES[:1], "gnd": TRUTH[:1]}, "1 queries instead of the published 2"),
    ],
)
def test_wrong_contents_are_named(revisited, changes, message):
    write_pickle(revisited, **changes)
    with pytest.raises(DatasetError, match=message):
        load_dataset("roxford5k", revisited)


# what is missing


def test_missing_pictures_are_named(tmp_path):
    pictures(tmp_path / "jpg", OXFORD[1:] + QUERIES[:1])
    write_pickle(tmp_path)
    report = check("roxford5k", tmp_path)
    assert not report.complete
    assert report.missing == ("all_souls_000013", "oxford_002416")
    assert report.expected == 8
    assert report.ground_truth == tmp_path / "gnd_roxford5k.pkl"
    with pytest.raises(DatasetError) as error:
        load_dataset("roxford5k", tmp_path)
    assert str(error.value) == str(report)
    for part in ("6 of 8 pictures", "Missing 2: all_souls_000013, oxford_002416\n", "oxbuildings", "revisitop"):
        assert part in str(report)


def test_many_missing_pictures_are_counted(tmp_path):
    write_pickle(tmp_path)
    assert "Missing 8: all_souls_000013, all_souls_000026, balliol_000051, new_000001, oxford_000002, ..." in str(
        check("roxford5k", tmp_path)
    )


def test_missing_ground_truth_says_where_it_is_published(tmp_path):
    for name in ("oxford5k", "roxford5k", "paris6k", "rparis6k"):
        report = check(name, tmp_path)
        assert not report.complete
        assert f"No ground truth of {name}" in str(report)
        assert where(name) in str(report)
    assert "no folder that exists" in str(check("roxford5k", tmp_path / "nowhere"))
    assert not check("holidays", None).complete


def test_unknown_names(tmp_path):
    for ask in (load_dataset, check, where):
        with pytest.raises(UnknownNameError, match="Did you mean 'roxford5k'"):
            ask("roxfrod5k")
    with pytest.raises(DatasetError, match=r"ground_truth\.json is missing"):
        load_dataset(tmp_path)


def test_a_complete_set_is_reported_complete(revisited):
    report = check("roxford5k", revisited)
    assert report.complete
    assert str(report) == "roxford5k: complete.\n8 of 8 pictures found."


def test_where_names_the_official_pages():
    pages = {
        "oxford5k": "www.robots.ox.ac.uk/~vgg/data/oxbuildings",
        "roxford5k": "cmp.felk.cvut.cz/revisitop",
        "paris6k": "www.robots.ox.ac.uk/~vgg/data/parisbuildings",
        "rparis6k": "cmp.felk.cvut.cz/revisitop",
        "holidays": "lear.inrialpes.fr/people/jegou/data.php",
    }
    assert set(pages) == set(DATASETS)
    for name, page in pages.items():
        assert page in where(name)


# the original Oxford and Paris


def write_texts(folder, name, query, good=(), ok=(), junk=()):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_query.txt").write_text(query + "\n")
    for group, names in (("good", good), ("ok", ok), ("junk", junk)):
        (folder / f"{name}_{group}.txt").write_text("".join(f"{entry}\n" for entry in names))


@pytest.fixture
def original(tmp_path):
    pictures(tmp_path / "oxbuild_images", OXFORD)
    gt = tmp_path / "gt_files_170407"
    write_texts(gt, "all_souls_1", "oxc1_all_souls_000013 136.5 34.1 648.5 955.7", OXFORD[:1], OXFORD[1:2], OXFORD[4:5])
    write_texts(gt, "balliol_1", "oxc1_balliol_000051 1 2 3 4", [OXFORD[2], OXFORD[3]], OXFORD[3:4])
    return tmp_path


def test_original_oxford(original):
    dataset = load_dataset("oxford5k", original)
    assert [path.stem for path in dataset.image_paths] == OXFORD  # all pictures, in the order of their names
    assert [(query.path.stem, query.box) for query in dataset.queries] == [
        ("all_souls_000013", (136.5, 34.1, 648.5, 955.7)),
        ("balliol_000051", (1, 2, 3, 4)),
    ]
    assert groups(dataset.ground_truth[0]) == {"positives": [0, 1], "junk": [4], "itself": [0]}
    assert groups(dataset.ground_truth[1]) == {"positives": [2, 3], "junk": [], "itself": [2]}
    assert dataset.protocols == ("oxford",)


def test_original_oxford_in_the_layout_of_the_revisited_pickle(original):
    texts = load_dataset("oxford5k", original)
    truth = [
        {"bbx": [136.5, 34.1, 648.5, 955.7], "ok": [0, 1], "junk": [4]},
        {"bbx": [1, 2, 3, 4], "ok": [2, 3], "junk": []},
    ]
    write_pickle(original, "oxford5k", qimlist=["all_souls_000013", "balliol_000051"], gnd=truth)
    pickled = load_dataset("oxford5k", original)
    assert pickled.queries == texts.queries
    assert [groups(q) for q in pickled.ground_truth] == [groups(q) for q in texts.ground_truth]


def test_a_missing_picture_of_the_original_set(original):
    (original / "oxbuild_images" / "all_souls_000026.jpg").unlink()
    assert check("oxford5k", original).missing == ("all_souls_000026",)
    pictures(original / "oxbuild_images", ["all_souls_000026"])
    (original / "oxbuild_images" / "radcliffe_camera_000158.jpg").unlink()  # no query mentions it
    assert "5 pictures instead of the published 6" in check("oxford5k", original).problem


def test_strange_files_among_the_pictures_are_not_part_of_the_set(original):
    pictures(original / "oxbuild_images", ["thumbnail", "paris_defense_000605"])
    (original / "oxbuild_images" / "README.txt").write_text("hello")
    assert len(load_dataset("oxford5k", original).image_paths) == 6


def test_damaged_text_files(original):
    gt = original / "gt_files_170407"
    (gt / "balliol_1_ok.txt").unlink()
    assert "balliol_1_ok.txt is missing" in check("oxford5k", original).problem
    write_texts(gt, "balliol_1", "oxc1_balliol_000051 1 2 3")
    assert "balliol_1_query.txt: expected a name and four numbers" in check("oxford5k", original).problem
    (gt / "balliol_1_query.txt").write_bytes(b"\xff\xfe\x00")
    assert "balliol_1_query.txt cannot be read" in check("oxford5k", original).problem


def test_corrupt_paris_files_are_dropped(tmp_path):
    corrupt = sorted(CORRUPT_PARIS)
    good = [f"paris_defense_{i:06d}" for i in range(4)]
    pictures(tmp_path / "paris" / "defense", good)  # the archives have a folder for each place
    for name in corrupt[1:]:  # a web page, as published; the first is not even there
        (tmp_path / "paris" / f"{name}.jpg").write_text("<html>302 Found</html>")
    query = f"{good[0]} 1 2 3 4"
    write_texts(
        tmp_path / "paris_120310", "defense_1", query, [good[0], corrupt[0]], [good[1], corrupt[3]], [corrupt[5]]
    )
    dataset = load_dataset("paris6k", tmp_path)
    assert [path.stem for path in dataset.image_paths] == good
    assert groups(dataset.ground_truth[0]) == {"positives": [0, 1], "junk": [], "itself": [0]}
    assert dataset.protocols == ("paris",)
    write_pickle(tmp_path, "rparis6k", imlist=[*good[1:], corrupt[0]], qimlist=good[:1], gnd=[TRUTH[0] | {"hard": [3]}])
    revisited = load_dataset("rparis6k", tmp_path)
    assert groups(revisited.ground_truth[0]) == {"easy": [0, 1], "hard": [], "junk": [2]}
    assert revisited.protocols == ("rparis-easy", "rparis-medium", "rparis-hard")


def test_the_list_of_corrupt_files_has_the_published_length():
    assert len(CORRUPT_PARIS) == 20
    assert {"paris_louvre_000136", "paris_museedorsay_001059", "paris_triomphe_000867"} <= CORRUPT_PARIS


def test_oxford_and_paris_beside_each_other(original):
    write_texts(original / "paris_120310", "defense_1", "paris_defense_000000 1 2 3 4", ["paris_defense_000000"])
    pictures(original / "paris", [f"paris_defense_{i:06d}" for i in range(4)])
    assert load_dataset("oxford5k", original).queries[0].path.stem == "all_souls_000013"
    assert load_dataset("paris6k", original).queries[0].path.stem == "paris_defense_000000"


# Holidays

HOLIDAYS = ["100000", "100001", "100002", "100100", "100101", "149900", "149901"]


@pytest.mark.parametrize("dat", [None, "holidays_images.dat", "perfect_result.dat"])
def test_holidays(tmp_path, dat):
    pictures(tmp_path / "holidays" / "jpg", HOLIDAYS)
    lines = {
        "holidays_images.dat": [f"{name}.jpg" for name in HOLIDAYS],
        "perfect_result.dat": [
            "100000.jpg 0 100001.jpg 1 100002.jpg",
            "100100.jpg 0 100100.jpg 1 100101.jpg",  # the query itself may be ranked
            "149900.jpg\t0\t149901.jpg",
        ],
    }
    if dat:
        (tmp_path / "holidays" / dat).write_text("\n".join(lines[dat]) + "\n")
    dataset = load_dataset("holidays", tmp_path)
    assert [path.stem for path in dataset.image_paths] == HOLIDAYS
    assert [query.path.stem for query in dataset.queries] == ["100000", "100100", "149900"]
    assert [groups(query) for query in dataset.ground_truth] == [
        {"positives": [1, 2], "itself": [0]},
        {"positives": [4], "itself": [3]},
        {"positives": [6], "itself": [5]},
    ]
    assert all(query.box is None for query in dataset.queries)
    rankings = [[0, 1, 2, 3, 4, 5, 6], [4, 3, 0, 1, 2, 5, 6], [5, 6, 0, 1, 2, 3, 4]]
    assert evaluate(rankings, dataset.ground_truth, *dataset.protocols).map == 1


def test_incomplete_holidays(tmp_path):
    pictures(tmp_path / "jpg", HOLIDAYS[:-1])
    assert "6 pictures instead of the published 7" in check("holidays", tmp_path).problem
    (tmp_path / "holidays_images.dat").write_text("".join(f"{name}.jpg\n" for name in HOLIDAYS))
    assert check("holidays", tmp_path).missing == ("149901.jpg",)
    (tmp_path / "holidays_images.dat").write_text("100000.jpg\nbeach.jpg\n")
    assert "beach.jpg is no picture of Holidays" in check("holidays", tmp_path).problem
    (tmp_path / "perfect_result.dat").write_text("100000.jpg 0 100001.jpg\n100100.jpg 100101.jpg\n")
    assert "perfect_result.dat, line 2: expected" in check("holidays", tmp_path).problem


# ground_truth.json


def write_json(folder, name="mine", file="ground_truth.json", **changes):
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "name": name,
        "database": ["a.jpg", "b.jpg", "c.jpg", "d.jpg"],
        "queries": [
            {"image": "q.jpg", "bbox": None, "positives": ["c.jpg", "a.jpg"], "junk": ["d.jpg"]},
            {"image": "b.jpg", "bbox": [0, 0, 4, 5], "positives": ["b.jpg"], "junk": []},
        ],
    } | changes
    (folder / file).write_text(json.dumps(content))


def test_a_labelled_folder(tmp_path):
    pictures(tmp_path / "jpg", "abcdq")
    write_json(tmp_path)
    dataset = load_dataset(tmp_path)
    assert dataset.name == "mine"
    assert [path.name for path in dataset.image_paths] == ["a.jpg", "b.jpg", "c.jpg", "d.jpg"]
    assert [(query.path.name, query.box) for query in dataset.queries] == [("q.jpg", None), ("b.jpg", (0, 0, 4, 5))]
    assert groups(dataset.ground_truth[0]) == {"positives": [0, 2], "junk": [3]}
    assert groups(dataset.ground_truth[1]) == {"positives": [1], "junk": [], "itself": [1]}
    assert dataset.protocols == ("plain",)
    assert load_dataset(str(tmp_path)).queries == dataset.queries


def test_names_may_have_folders(tmp_path):
    pictures(tmp_path / "jpg", ["x/1", "y/1", "y/2"])
    queries = [{"image": "y/1.jpg", "positives": ["x/1.jpg"]}]
    write_json(tmp_path, database=["y/1.jpg", "x/1.jpg"], queries=queries)
    dataset = load_dataset(tmp_path)
    assert [path.parent.name for path in dataset.image_paths] == ["y", "x"]
    assert groups(dataset.ground_truth[0]) == {"positives": [1], "junk": [], "itself": [0]}
    write_json(tmp_path, database=["y/1.jpg", "x/2.jpg"], queries=queries[:0])  # y/2.jpg is another picture
    assert check(tmp_path).missing == ("x/2.jpg",)


def test_json_of_the_revisited_kind_equals_the_pickle(revisited):
    pickled = load_dataset("roxford5k", revisited)
    (revisited / "gnd_roxford5k.pkl").unlink()
    write_json(
        revisited / "roxford5k",
        "roxford5k",
        database=[f"{name}.jpg" for name in OXFORD],
        queries=[
            {
                "image": f"{image}.jpg",
                "bbox": entry["bbx"],
                "positives": [f"{OXFORD[i]}.jpg" for i in entry["easy"] + entry["hard"]],
                **{group: [f"{OXFORD[i]}.jpg" for i in entry[group]] for group in ("easy", "hard", "junk")},
            }
            for image, entry in zip(QUERIES, TRUTH, strict=True)
        ],
    )
    for written in (load_dataset("roxford5k", revisited), load_dataset(revisited / "roxford5k", revisited)):
        assert written.image_paths == pickled.image_paths
        assert written.queries == pickled.queries
        assert [groups(q) for q in written.ground_truth] == [groups(q) for q in pickled.ground_truth]
        assert written.protocols == pickled.protocols


def test_json_of_the_original_set_beside_the_revisited_one(original, tmp_path):
    texts = load_dataset("oxford5k", original)
    data = tmp_path / "json"
    write_json(data / "roxford5k", "roxford5k")
    queries = [
        {
            "image": f"{OXFORD[0]}.jpg",
            "bbox": [136.5, 34.1, 648.5, 955.7],
            "positives": OXFORD[:2],
            "junk": OXFORD[4:5],
        },
        {"image": f"{OXFORD[2]}.jpg", "bbox": [1, 2, 3, 4], "positives": OXFORD[2:4], "junk": []},
    ]
    write_json(data / "roxford5k", "oxford5k", "ground_truth_original.json", database=OXFORD, queries=queries)
    written = load_dataset("oxford5k", [data, original])
    assert written.queries == texts.queries
    assert [groups(q) for q in written.ground_truth] == [groups(q) for q in texts.ground_truth]


def test_own_sets_with_easy_and_hard(tmp_path):
    pictures(tmp_path, "abq")  # the folder itself may hold the pictures
    write_json(
        tmp_path, database=["a.jpg", "b.jpg"], queries=[{"image": "q.jpg", "easy": ["a.jpg"], "hard": ["b.jpg"]}]
    )
    dataset = load_dataset(tmp_path)
    assert dataset.protocols == ("roxford-easy", "roxford-medium", "roxford-hard")
    assert groups(dataset.ground_truth[0]) == {"easy": [0], "hard": [1], "junk": []}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"database": ["a.jpg", "b.jpg", "c.jpg"]}, r"query q\.jpg has d under 'junk', which is not in the database"),
        ({"database": ["a.jpg", "b.jpg", "c.jpg", "d.jpg", "a.jpg"]}, r"a\.jpg is twice"),
        ({"database": "a.jpg"}, "a list of names was expected"),
        ({"queries": [{"positives": []}]}, "'image'"),
        ({"queries": ["q.jpg"]}, "not as expected"),
        ({"queries": [{"image": "q.jpg", "positives": [1]}]}, "a list of names was expected"),
        ({"queries": [{"image": "q.jpg", "bbox": 5, "positives": []}]}, "not as expected"),
        ({"queries": [{"image": "q.jpg", "bbox": "abcd", "positives": []}]}, "not four numbers"),
        ({"queries": None}, "not as expected"),
    ],
)
def test_wrong_json_is_named(tmp_path, changes, message):
    pictures(tmp_path / "jpg", "abcdq")
    write_json(tmp_path, **changes)
    with pytest.raises(DatasetError, match=message) as error:
        load_dataset(tmp_path)
    assert "ground_truth.json" in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "\ufeff", ""])
def test_what_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "ground_truth.json").write_text(text, encoding="utf-8")
    with pytest.raises(DatasetError, match=r"ground_truth\.json"):
        load_dataset(tmp_path)


def test_no_name_leads_out_of_the_folder(tmp_path):
    pictures(tmp_path, ["secret", "set/jpg/a"])
    for name in ("../../secret.jpg", str(tmp_path / "secret.jpg")):
        write_json(tmp_path / "set", database=["a.jpg", name], queries=[])
        assert check(tmp_path / "set").missing == (name,)


# sets of pictures to fit on


@pytest.fixture
def landmarks(tmp_path):
    root = tmp_path / "train"
    for i, label in enumerate(["07.Stonehenge", "16.Eiffel_Tower", "37.Atomium"]):
        pictures(root / label, [f"{i}{j}00000000000abc" for j in range(3)])
    return root


def test_image_set_is_sorted_and_leaves_labels_out(landmarks):
    everything = image_set(landmarks)
    assert everything == sorted(landmarks.rglob("*.jpg"))
    for spelling in ("Eiffel Tower", "eiffel_tower", "16.Eiffel_Tower"):
        left = image_set(landmarks, exclude_labels=[spelling])
        assert left == [path for path in everything if path.parent.name != "16.Eiffel_Tower"]
    with pytest.raises(DatasetError, match=r"no label 'Eifel Tower'.*eiffel_tower"):
        image_set(landmarks, exclude_labels=["Eifel Tower"])
    with pytest.raises(DatasetError, match="is no folder"):
        image_set(landmarks / "nowhere")


def test_photos_of_a_test_set_are_left_out(landmarks, tmp_path):
    tested = ["atomium_2000000000000abc", "stonehenge_0100000000000abc", "stonehenge_ffffffffffffffff"]
    assert [len(name.rsplit("_", 1)[1]) for name in tested] == [16, 16, 16]
    pictures(tmp_path / "dev" / "jpg", tested)
    queries = [{"image": f"{tested[0]}.jpg", "positives": []}]
    write_json(tmp_path / "dev", database=[f"{name}.jpg" for name in tested[1:]], queries=queries)
    for other in (load_dataset(tmp_path / "dev"), tmp_path / "dev" / "jpg"):
        left = [path.stem for path in image_set(landmarks, exclude_names_of=other)]
        assert len(left) == 7
        assert not {"2000000000000abc", "0100000000000abc"} & set(left)


def test_photos_of_the_same_name_are_left_out(tmp_path):
    pictures(tmp_path / "train" / "a", ["all_souls_000013", "000013", "x"])
    pictures(tmp_path / "test", ["all_souls_000013"])
    left = image_set(tmp_path / "train", exclude_names_of=tmp_path / "test")
    assert [path.stem for path in left] == ["000013", "x"]


def test_the_table_has_protocols_that_exist():
    for spec in DATASETS.values():
        assert set(spec.protocols) <= set(PROTOCOLS)
