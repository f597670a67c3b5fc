from __future__ import annotations

import multiprocessing
import warnings

import numpy as np
import pytest
import torch

from cooc.errors import InputError
from cooc.verification.engines import extract
from cooc.verification.features import pack, unpack
from cooc.verification.geometry import agree
from cooc.verification.matching import match
from cooc.verification.verifier import gpu_of, verify
from tests.verification.pictures import photo, turned, warp


@pytest.fixture(scope="module")
def view() -> np.ndarray:
    return warp(photo("astronaut"), turned(12, 0.8, (256, 256)), (512, 512))


@pytest.mark.parametrize("device", [None, "cpu"])
def test_one_agreement_for_each_picture_in_order(view: np.ndarray, device: str | None) -> None:
    pictures = [extract("sift", photo(name)) for name in ("cat", "astronaut", "rocket")]
    query = extract("sift", view, limit=2000)
    found = verify(query, pictures, device=device)
    assert [a.inliers > 0 for a in found] == [False, True, False]
    alone = agree(query[0], pictures[1][0], match(query[0], pictures[1][0]))
    assert found[1].inliers == alone.inliers
    np.testing.assert_array_equal(found[1].transform, alone.transform)
    assert [a.picture_size for a in found] == [(451, 300), (512, 512), (640, 427)]


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_nothing(view: np.ndarray, workers: int) -> None:
    pictures = [extract("sift", photo("astronaut"), limit=n) for n in (200, 400, 800)]
    query = extract("sift", view)
    assert [a.inliers for a in verify(query, pictures, workers=workers)] == [a.inliers for a in verify(query, pictures)]


@pytest.mark.parametrize(("name", "expected"), [("cuda:1", "cuda:1"), ("cpu", None), ("mps", None)])
def test_only_a_gpu_of_cuda_verifies(name: str, expected: str | None) -> None:
    """Apple's has no numbers of 64 bits: features of a picture described there are compared by the CPU."""
    assert gpu_of(torch.device(name)) == expected


def test_a_forked_process_has_threads_of_its_own(view: np.ndarray) -> None:
    """Those of its parent are not there: it would wait for them for ever."""
    query, picture = extract("sift", view, limit=200), extract("sift", photo("astronaut"), limit=200)
    (expected,) = verify(query, [picture])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: that forking beside threads is a risk
        child = multiprocessing.get_context("fork").Process(target=verify, args=(query, [picture]))
        child.start()
    child.join(60)
    alive = child.is_alive()
    child.kill()
    assert not alive
    assert child.exitcode == 0
    assert expected.inliers > 0


def test_of_several_engines_the_strongest_counts(view: np.ndarray) -> None:
    query, picture = extract("sift+xfeat", view), extract("sift+xfeat", photo("astronaut"))
    each = [verify([a], [[b]])[0] for a, b in zip(query, picture, strict=True)]
    (both,) = verify(query, [picture])
    assert both.strength == max(a.strength for a in each)
    assert both.engine == max(each, key=lambda a: a.strength).engine


def test_a_picture_is_verified_by_what_it_has(view: np.ndarray) -> None:
    """An index may hold pictures with features of one engine only, and some without any."""
    (sift, xfeat) = extract("sift+xfeat", photo("astronaut"))
    found = verify(extract("sift+xfeat", view), [[sift], [xfeat], []])
    assert [a.engine for a in found[:2]] == ["sift", "xfeat"]
    assert [a.inliers > 0 for a in found] == [True, True, False]


def test_of_the_turns_of_a_query_the_best_counts() -> None:
    pixels = photo("astronaut")
    picture = extract("xfeat", pixels)
    turned_query = np.ascontiguousarray(np.rot90(pixels))
    (plain,) = verify(extract("xfeat", turned_query), [picture])
    (any_turn,) = verify(extract("xfeat", turned_query, turns=4), [picture])
    assert any_turn.inliers > 300
    assert any_turn.inliers > 5 * plain.inliers


def test_what_an_index_keeps_is_verified_alike(view: np.ndarray) -> None:
    """4 bits a value lose a few inliers, no more."""
    query, picture = extract("sift", view), extract("sift", photo("astronaut"))
    fresh, kept = verify(query, [picture, unpack(pack(picture))])
    assert kept.inliers > 0.9 * fresh.inliers


def test_an_empty_shortlist_has_no_agreements_and_a_query_without_features_is_refused(view: np.ndarray) -> None:
    assert verify(extract("sift", view), []) == []
    with pytest.raises(InputError, match="no local features"):
        verify([], [])


def test_a_query_of_one_colour_agrees_with_nothing() -> None:
    grey = np.full((200, 300, 3), 128, np.uint8)
    (found,) = verify(extract("sift+xfeat", grey), [extract("sift+xfeat", photo("cat"))])
    assert found.inliers == 0
    assert found.query_box is None
    assert len(found.query_region) == 0
