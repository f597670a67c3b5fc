"""Visual words, against loops that say the same."""

from __future__ import annotations

import numpy as np

from cooc.verification.coding import vectors
from cooc.verification.engines import extract
from cooc.verification.words import SIDE, WORDS, signatures, similarity, vocabulary
from tests.verification.pictures import photo, turned, warp

SEEN = turned(12, 0.8, (200, 150), (40, 30))


def test_a_word_is_the_nearest_centre_of_the_nearest_cell() -> None:
    book = vocabulary()
    rows = vectors(extract("sift", photo("cat"), limit=60)[0].descriptors)
    words, left = book(rows)
    for row, word, rest in zip(rows, words.tolist(), left, strict=True):
        cell = min(range(SIDE), key=lambda step: float(((row - book.coarse[step]) ** 2).sum()))
        centre = min(range(SIDE), key=lambda step: float(((row - book.fine[cell][step]) ** 2).sum()))
        assert word == cell * SIDE + centre
        assert np.allclose(rest, (row - book.fine[cell][centre]) @ book.turn, atol=1e-5)
    assert np.allclose(book.turn @ book.turn.T, np.eye(64), atol=1e-5)


def test_a_signature_joins_the_features_of_a_word() -> None:
    """Each word once, in order, with the signs of the sum of its residuals; many pictures at once change nothing."""
    features = [extract("sift", photo(name), limit=300) for name in ("cat", "coffee")]
    features.insert(1, extract("sift", np.full((200, 200, 3), 90, np.uint8)))  # in which there is nothing
    found = signatures(features)
    for one, signature in zip(features, found, strict=True):
        assert (signatures([one])[0].bits == signature.bits).all()
        words, left = vocabulary()(vectors(one[0].descriptors))
        sums: dict[int, np.ndarray] = {}
        for word, rest in zip(words.tolist(), left, strict=True):
            sums[word] = sums.get(word, 0) + rest / np.linalg.norm(rest)
        assert signature.words.tolist() == sorted(sums)
        signs = [np.unpackbits(np.array([bits]).view(np.uint8)) for bits in signature.bits]
        assert all((row == (sums[word] > 0)).all() for word, row in zip(sorted(sums), signs, strict=True))
    assert len(found[1].words) == 0
    assert max(found[0].words) < WORDS


def test_similarity() -> None:
    one = np.array([0, 0, 0], np.uint64)
    other = np.array([0, (1 << 16) - 1, 2**64 - 1], np.uint64)  # 0, 16 and 64 bits differ
    assert similarity(one, other).tolist() == [1.0, 0.125, 0.0]


def test_another_view_shares_more_words_than_another_thing() -> None:
    mine, seen, other = signatures(
        [extract("sift", p) for p in (photo("cat"), warp(photo("cat"), SEEN, (600, 560)), photo("coffee"))]
    )

    def score(first: object, second: object) -> float:
        a, b = dict(zip(*first, strict=True)), dict(zip(*second, strict=True))  # type: ignore[call-overload]
        both = sorted(a.keys() & b.keys())
        alike = similarity(np.array([a[w] for w in both], np.uint64), np.array([b[w] for w in both], np.uint64))
        return float(alike.sum() / np.sqrt(len(a) * len(b)))

    assert score(mine, mine) > 0.999
    assert score(mine, seen) > 5 * score(mine, other)
