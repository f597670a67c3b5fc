"""Words and pictures in one space: the real open_clip, a small model of it with random weights."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from cooc.api import Settings, create_app
from cooc.errors import InputError, UnknownNameError
from cooc.image_search import ImageSearch
from cooc.index.records import Filter
from cooc.index.shortlist import Options, Results
from cooc.text import Model, _loaded, are_words, find, update
from tests.shell import Shell
from tests.tiny import open_index, write_photos

SMALL = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "patch_size": 16, "head_width": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}


def write_model(folder: Path, seed: int = 0) -> Path:
    """As open_clip publishes its models: a folder with a config and the weights."""
    from cooc.text import _open_clip

    clip = _open_clip()
    torch.manual_seed(seed)
    network = clip.CLIP(SMALL["embed_dim"], SMALL["vision_cfg"], SMALL["text_cfg"])
    folder.mkdir()
    about = {"model_cfg": SMALL, "preprocess_cfg": {"size": [64, 64], "mean": [0.5] * 3, "std": [0.25] * 3}}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    save_file(
        {name: value.contiguous() for name, value in network.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("clip") / "small")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_photos(tmp_path / "photos", 6)
    with open_index(tmp_path / "photos/.cooc", tmp_path / "photos") as search:
        search.index([tmp_path / "photos"], workers=0)
    return tmp_path / "photos"


def describe_for_words(photos: Path, given: object = "") -> Any:
    with open_index(photos / ".cooc") as search:
        return update(search.index_path, search.store, search.collection, str(given), device="cpu")


def ask(photos: Path, text: str, **options: Any) -> Results:
    with open_index(photos / ".cooc") as search:
        return find(search.index_path, search.store, text, Options(**options), device="cpu")


def names(photos: Path, text: str, **options: Any) -> list[str]:
    return [match.path for match in ask(photos, text, **options).matches]


def test_vectors_are_open_clips_own(model: Path, photos: Path) -> None:
    """Found in the order that its own functions give, picture by picture."""
    from cooc.text import _open_clip

    report = describe_for_words(photos, model)
    assert report.described == 6
    clip = _open_clip()
    network, _, prepare = clip.create_model_and_transforms(f"local-dir:{model}")
    with torch.inference_mode():
        text = network.eval().encode_text(clip.get_tokenizer(f"local-dir:{model}")(["a red car"]), normalize=True)[0]
        files = sorted(photos.glob("*.jpg"))
        rows = [network.encode_image(prepare(Image.open(file))[None], normalize=True)[0] for file in files]
        scores = (torch.stack(rows) @ text).numpy()
    found = ask(photos, "a red car", k=6)
    assert [match.path for match in found.matches] == [files[n].name for n in np.argsort(-scores)]
    np.testing.assert_allclose([match.score for match in found.matches], np.sort(scores)[::-1], atol=1e-5)


def test_it_follows_the_index(model: Path, photos: Path) -> None:
    assert describe_for_words(photos) is None
    describe_for_words(photos, model)
    (photos / "00.jpg").unlink()
    (photos / "01.jpg").rename(photos / "one.jpg")
    write_photos(photos / "more", 2, seed=1)
    with open_index(photos / ".cooc") as search:
        search.index([photos], workers=0)
        wanted = {record.path for record in search.store.records()}
    report = describe_for_words(photos)
    assert (report.described, report.moved, report.removed) == (2, 1, 1)
    assert set(names(photos, "anything", k=50)) == wanted
    assert describe_for_words(photos).described == 0


def test_tags_and_removal_are_those_of_the_index(model: Path, photos: Path) -> None:
    describe_for_words(photos, model)
    best, second, third, *others = names(photos, "a red car", k=6)
    with open_index(photos / ".cooc") as search:
        search.tag([best, third, others[0]], add="mine")
        search.remove([best])
    mine = Filter(tags=frozenset({"mine"}))
    assert names(photos, "a red car", k=6) == [second, third, *others]
    assert names(photos, "a red car", where=mine) == [third, others[0]]
    assert names(photos, "a red car", where=mine, k=1, offset=1) == [others[0]]


def test_the_api(model: Path, photos: Path) -> None:
    """The same pictures, page by page; the model is loaded once. Without one it is said what to do."""

    async def words(search: ImageSearch, *pages: dict[str, Any]) -> list[httpx.Response]:
        app = create_app(search, Settings(rate=0))
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1") as client:
            answers = [await client.get("status")]
            for page in pages:
                answers.append(await client.get("search/words", params={"text": "a red car", **page}))
        app.state.services.close()
        return answers

    with open_index(photos / ".cooc") as search:
        status, refused = asyncio.run(words(search, {}))
    assert not status.json()["words"]
    assert refused.status_code == 422
    assert "open_clip_torch" in refused.json()["detail"]
    describe_for_words(photos, model)
    wanted = ask(photos, "a red car", k=6)
    _loaded.cache_clear()
    with open_index(photos / ".cooc") as search:
        status, first, second = asyncio.run(words(search, {"k": 4}, {"k": 4, "offset": 4}))
    assert status.json()["words"]
    assert (first.json()["next_offset"], second.json()["next_offset"]) == (4, None)
    found = first.json()["matches"] + second.json()["matches"]
    assert [one["id"] for one in found] == [match.id for match in wanted.matches]
    assert _loaded.cache_info().misses == 1


def test_another_model_is_refused(model: Path, photos: Path, tmp_path: Path) -> None:
    describe_for_words(photos, model)
    with pytest.raises(InputError, match="another model"):
        describe_for_words(photos, write_model(tmp_path / "other", seed=1))
    with pytest.raises(UnknownNameError, match="Did you mean 'ViT-B-32'"):
        Model("ViT-B-33=weights.pt")
    with pytest.raises(InputError, match="cannot be read"):
        Model(f"ViT-B-32={tmp_path / 'nothing.pt'}")
    damaged = Path(shutil.copytree(model, tmp_path / "damaged"))
    (damaged / "open_clip_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="open_clip cannot make"):
        Model(str(damaged))


def test_weights_that_have_changed_are_noticed(photos: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "mine")
    describe_for_words(photos, model)
    write_model(tmp_path / "other", seed=1)
    (tmp_path / "other/open_clip_model.safetensors").replace(model / "open_clip_model.safetensors")
    with pytest.raises(InputError, match="not what it was"):
        names(photos, "a red car")


def test_commands(cooc: Shell, model: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    write_photos(photos, 4)
    recipe = ("-r", "light+size=96", "--verify", "none", "--device", "cpu")
    assert cooc("index", photos, *recipe).code == 0
    none = cooc("search", "a red car", "--index", photos / ".cooc", "--device", "cpu")
    assert none.code == 2
    assert "There is no file 'a red car'" in none.err
    assert "open_clip_torch" in none.err
    assert "--text" in none.err
    done = cooc("index", photos, "--text", model, "--device", "cpu")
    assert done.code == 0, done.err
    assert "4 pictures described for words" in done.out
    found = cooc("search", "a red car", "--index", photos / ".cooc", "-k", 3, "--json", "--device", "cpu")
    assert found.code == 0, found.err
    assert found.json["query"] == "a red car"
    assert len(found.json["matches"]) == 3
    assert not any(match["verified"] for match in found.json["matches"])
    missing = cooc("search", "nothing.jpg", "--index", photos / ".cooc", "--device", "cpu")
    assert "nothing.jpg" in missing.err
    assert "words" not in missing.err


@pytest.mark.parametrize(
    ("text", "words"),
    [("a red car", True), ("car", True), ("Mr. Smith", True), ("car.jpg", False), ("a/red/car", False), ("-", False),
     ("photo.HEIC", False), ("https://a.b/c", False)],
)  # fmt: skip
def test_what_looks_like_words(text: str, words: bool) -> None:
    assert are_words(text) == words


def test_a_file_is_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a red car").write_bytes(b"")
    assert not are_words("a red car")
