from __future__ import annotations

import numpy as np
import pytest

from cooc.verification.coding import quantise, unit, vectors
from cooc.verification.features import LocalFeatures
from cooc.verification.matching import match
from cooc.verification.on_device import match_on_device
from tests.reference import verification as reference


def features(rows: np.ndarray, engine: str = "sift") -> LocalFeatures:
    count = len(rows)
    return LocalFeatures(
        points=np.ones((count, 2), np.float32),
        scales=np.ones(count, np.float32),
        angles=np.zeros(count, np.float32),
        descriptors=quantise(unit(rows)) if count else np.zeros((0, 16), np.uint8),
        width=9,
        height=9,
        engine=engine,
    )


def sets(sizes: list[int], seed: int) -> tuple[LocalFeatures, list[LocalFeatures]]:
    """A query, and pictures that share some of its features, with noise."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(40, 16))
    pictures = []
    for size in sizes:
        rows = rng.normal(size=(size, 16))
        shared = min(size, 25)
        rows[:shared] = query[rng.permutation(40)[:shared]] + 0.3 * rng.normal(size=(shared, 16))
        pictures.append(features(rows))
    return features(query), pictures


RULES = [{"ratio": 0.9}, {"ratio": 0.7}, {"similarity": 0.5}, {"similarity": 0.9}, {"ratio": 0.9, "similarity": 0.8}]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_as_two_loops_do(rule: dict, device: str | None) -> None:
    query, pictures = sets([30, 1, 50, 2, 0, 700], seed=1)
    found = match_on_device(query, pictures, device, **rule) if device else [match(query, p, **rule) for p in pictures]
    for picture, matches in zip(pictures, found, strict=True):
        pairs = set(zip(matches.query.tolist(), matches.picture.tolist(), strict=True))
        expected = reference.mutual_matches(vectors(query.descriptors), vectors(picture.descriptors), **rule)
        assert pairs == expected
        assert len(pairs) == len(matches.query)
    assert len(found[2].query) > 5


def test_more_rows_than_a_block_are_matched_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    query, (picture,) = sets([60], seed=2)
    whole = match(query, picture)
    monkeypatch.setattr("cooc.verification.matching.ROWS", 7)
    parts = match(query, picture)
    assert whole.query.tolist() == parts.query.tolist()
    assert whole.picture.tolist() == parts.picture.tolist()


@pytest.mark.parametrize("batch", [2500, 1250])  # two pictures, or one: one of them has no features
def test_more_pictures_than_a_batch_are_matched_alike(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, pictures = sets([20, 30, 10, 0, 25], seed=3)
    whole = match_on_device(query, pictures, "cpu")
    monkeypatch.setattr("cooc.verification.on_device.BATCH", batch)
    for a, b in zip(whole, match_on_device(query, pictures, "cpu"), strict=True):
        assert a.query.tolist() == b.query.tolist()


def test_the_most_certain_come_first() -> None:
    query, (picture,) = sets([30], seed=4)
    matches = match(query, picture, ratio=0.95)
    cosines = vectors(query.descriptors) @ vectors(picture.descriptors).T
    near = np.sort(cosines, axis=1)[:, ::-1]
    ratios = ((1 - near[:, 0]) / (1 - near[:, 1]))[matches.query]
    assert (np.diff(ratios) >= -1e-5).all()


def test_nothing_matches_nothing() -> None:
    query, (picture,) = sets([30], seed=5)
    empty = features(np.zeros((0, 16)))
    assert len(match(empty, picture).query) == len(match(query, empty).query) == 0
    assert match_on_device(query, [], "cpu") == []
    assert [len(m.query) for m in match_on_device(empty, [picture, empty], "cpu")] == [0, 0]


def test_repeated_patterns_match_one_to_one_or_not_at_all() -> None:
    """Forty windows that look alike: no ratio is under 0.9, and of a similarity alone each takes part once."""
    same = features(np.ones((40, 16)))
    assert len(match(same, same, ratio=0.9).query) == 0
    matches = match(same, same, similarity=0.5)
    assert len(set(matches.picture.tolist())) == len(matches.picture) == len(set(matches.query.tolist()))
