"""Indexing on a real Ray cluster of two nodes gives the index of one process, whatever dies on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from PIL import Image
from ray.cluster_utils import Cluster
from torch import Tensor

from cooc.descriptor import Descriptor
from cooc.errors import CoocError, InputError, StoreMismatchError
from cooc.image_search import ImageSearch
from cooc.index import ray as on_ray
from cooc.index import run
from cooc.index.examine import Candidate
from cooc.index.ray import OnRay, Worker
from cooc.index.report import Problem, Report
from cooc.pictures import Folder
from tests.shell import Shell
from tests.starving import BROKEN
from tests.tiny import BACKBONE, RECIPE, descriptor, make_descriptor, write_photos

MEMORY = 80 << 20  # of an object store, in bytes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    head = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    write_photos(folder, 60)
    (folder / "text.jpg").write_text("no picture")
    whole = (folder / "00.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    return folder


def build(device: str, threads: int) -> Descriptor:
    assert device == "cpu"
    return make_descriptor()


class Fragile(Descriptor):
    """Ends its process when it sees a white picture, as a decoder does that a file makes crash."""

    def __init__(self) -> None:
        self.__dict__.update(make_descriptor().__dict__)

    def raw(self, images: Tensor) -> Tensor:
        if bool((images.float().mean(dim=(1, 2, 3)) > 250).any()):
            os._exit(1)
        return super().raw(images)


def fragile(device: str, threads: int) -> Descriptor:
    return Fragile()


class Failing(Fragile):
    """Has no memory for a white picture."""

    def raw(self, images: Tensor) -> Tensor:
        if bool((images.float().mean(dim=(1, 2, 3)) > 250).any()):
            raise MemoryError
        return Descriptor.raw(self, images)


def failing(device: str, threads: int) -> Descriptor:
    return Failing()


def broken(device: str, threads: int) -> Descriptor:
    raise CoocError("there are no weights on this machine")


def create(index: Path, root: Path) -> ImageSearch:
    return ImageSearch.create(index, recipe=RECIPE, root=root, descriptor=descriptor())


def contents(search: ImageSearch) -> dict[str, np.ndarray]:
    records = list(search.store.records())
    return dict(zip([r.id for r in records], search.vectors([r.id for r in records]), strict=True))


def bad(search: ImageSearch) -> dict[str, str]:
    return {file.path: file.reason for file in search.store.bad_files()}


def test_a_node_that_is_killed_loses_nothing_and_doubles_nothing(
    cluster: Cluster, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "PROGRESS_SECONDS", 0)
    monkeypatch.setattr(on_ray, "LARGEST", 4)  # small chunks: some are at both nodes when one is killed
    node = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    committed: list[int] = []
    with create(tmp_path / "plain", photos) as plain, create(tmp_path / "ray", photos) as search:

        def kill(report: Report) -> None:
            if report.described >= 8 and not committed:
                committed.append(report.described)
                cluster.remove_node(node, allow_graceful=False)

        alone = plain.index([photos], workers=0)
        on_cluster = OnRay(build, search.meta.weights_hash, extraction=search.extraction)
        report = search.index([photos], engine=on_cluster, progress=kill)
        assert 0 < committed[0] < 60
        assert (report.described, report.bad, report.done) == (alone.described, alone.bad, 62)
        expected, found = contents(plain), contents(search)
        assert found.keys() == expected.keys()
        np.testing.assert_allclose(
            np.stack([found[id] for id in expected]), np.stack(list(expected.values())), atol=1e-5
        )
        assert bad(search) == bad(plain)
        assert None not in search.store.features(list(expected))
        assert search.store.features(list(expected)) == plain.store.features(list(expected))
        assert search.store.verify() == []

        (photos / "00.jpg").rename(photos / "moved.jpg")
        (photos / "01.jpg").unlink()
        (photos / "copy.jpg").write_bytes((photos / "02.jpg").read_bytes())
        again = search.index([photos], engine=OnRay(build, workers=1))
        assert (again.moved, again.copied, again.removed, again.described) == (1, 1, 1, 0)


def test_a_picture_that_kills_its_worker_is_found_out(
    cluster: Cluster, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "SUSPECT", 1)
    monkeypatch.setattr(on_ray, "GUILTY", 2)
    Image.new("RGB", (64, 48), "white").save(photos / "30-white.png")
    with create(tmp_path / "index", photos) as search:
        report = search.index([photos], engine=OnRay(fragile, workers=1))
        assert (report.described, report.bad, report.failed) == (60, 2, 1)
        assert Problem("30-white.png", on_ray.LOST, machine=True) in report.problems
        assert "30-white.png" not in bad(search)  # it may be the workers' memory: the next run tries again


def test_what_a_workers_machine_fails_on_is_no_bad_file(cluster: Cluster, photos: Path, tmp_path: Path) -> None:
    Image.new("RGB", (64, 48), "white").save(photos / "30-white.png")
    (photos / "31-broken.jpg").symlink_to(BROKEN)
    with create(tmp_path / "index", photos) as search:
        report = search.index([photos], engine=OnRay(failing, workers=1), follow=True)
        assert (report.described, report.bad, report.failed) == (60, 2, 2)
        assert bad(search).keys() == {"text.jpg", "cut.jpg"}
        reasons = {problem.path: problem.reason for problem in report.problems if problem.machine}
        assert "MemoryError" in reasons["30-white.png"]
        assert "Input/output error" in reasons["31-broken.jpg"]
        (photos / "31-broken.jpg").unlink()
        assert search.index([photos], engine=OnRay(build, workers=1)).described == 1


def test_workers_that_cannot_describe(cluster: Cluster, photos: Path, tmp_path: Path) -> None:
    with create(tmp_path / "index", photos) as search:
        with pytest.raises(CoocError, match="no weights on this machine"):
            search.index([photos], engine=OnRay(broken, workers=1))
        with pytest.raises(InputError, match="no GPU"):
            search.index([photos], engine=OnRay(build, device="cuda"))
        with pytest.raises(StoreMismatchError, match="other weights"):
            search.index([photos], engine=OnRay(build, "0" * 32, workers=1))
        assert len(search.store) == 0


def decode_in_processes(folder: Path) -> list[object]:
    worker = Worker(build, Folder(folder), 1, 0)
    worker.decoders = 1  # as beside a GPU
    files = [Candidate(file, None) for file in worker.collection.entries("", follow=False, on_error=print)]
    return worker.describe(worker.examine(files))[0]


def test_a_worker_may_decode_in_processes(cluster: Cluster, tmp_path: Path) -> None:
    paths = write_photos(tmp_path / "photos", 3)
    made = ray.get(ray.remote(decode_in_processes).remote(tmp_path / "photos"))
    vectors = [one.vector for one in made]
    np.testing.assert_allclose(np.stack(vectors), descriptor()(paths).numpy(), atol=1e-5)


def test_no_cluster_is_needed_where_nothing_changed(photos: Path, tmp_path: Path) -> None:
    with create(tmp_path / "index", photos) as search:
        search.index([photos], workers=0)
        report = search.index([photos], engine=OnRay(build, address="nowhere:1"))
        assert (report.unchanged, report.bad) == (60, 2)


def test_command(cluster: Cluster, cooc: Shell, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", 5)
    recipe = f"paper-linear+backbone={BACKBONE}+raw+size=64"
    command = ["index", str(tmp_path / "photos"), "--recipe", recipe, "--engine", "ray", "--workers", "1"]
    assert "5 described" in cooc(*command).out
