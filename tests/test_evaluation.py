from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cooc.errors import InputError, UnknownNameError
from cooc.evaluation import (
    PROTOCOLS,
    Query,
    average_precision,
    bootstrap_interval,
    evaluate,
    positive_ranks,
    precision_recall,
)
from tests.reference import evaluation as reference

KS = (1, 2, 5, 10, 100)

# What each protocol finds and passes over, written out a second time from SPEC 10.
RULES: dict[str, tuple[set[str], set[str]]] = {
    "plain": ({"positives"}, {"junk"}),
    "oxford": ({"positives"}, {"junk"}),
    "paris": ({"positives"}, {"junk"}),
    "roxford-easy": ({"easy"}, {"hard", "junk"}),
    "roxford-medium": ({"easy", "hard"}, {"junk"}),
    "roxford-hard": ({"hard"}, {"easy", "junk"}),
    "rparis-easy": ({"easy"}, {"hard", "junk"}),
    "rparis-medium": ({"easy", "hard"}, {"junk"}),
    "rparis-hard": ({"hard"}, {"easy", "junk"}),
    "holidays": ({"positives"}, {"itself", "junk"}),
}


@st.composite
def benchmarks(draw: st.DrawFn, protocol: str) -> tuple[list[list[int]], list[dict[str, list[int]]]]:
    """A database of n images; for each query a ranking, maybe cut short, and a group (or none) for every image."""
    n = draw(st.integers(1, 40))
    groups = sorted(RULES[protocol][0] | RULES[protocol][1])
    rankings, labels = [], []
    for _ in range(draw(st.integers(1, 5))):
        rankings.append(draw(st.permutations(range(n)))[: draw(st.integers(0, n) | st.just(n))])
        member = draw(st.lists(st.sampled_from(["wrong", *groups]), min_size=n, max_size=n))
        labels.append({group: [i for i in range(n) if member[i] == group] for group in groups})
    return rankings, labels


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_equals_the_official_rules(protocol: str, data: st.DataObject) -> None:
    rankings, labels = data.draw(benchmarks(protocol))
    positive, ignored = RULES[protocol]
    truth = [({i for g in positive for i in label[g]}, {i for g in ignored for i in label[g]}) for label in labels]
    result = evaluate(rankings, [Query(**label) for label in labels], protocol, KS)

    expected_map, expected_ap, expected_at = reference.revisited(rankings, truth, KS)
    np.testing.assert_allclose(result.ap, expected_ap, atol=1e-12, rtol=0)
    np.testing.assert_allclose(result.map, expected_map, atol=1e-12, rtol=0)
    for k in KS:
        np.testing.assert_allclose(result.mp_at_k[k], expected_at[k], atol=1e-12, rtol=0)
    expected_recall, expected_mrr = reference.recall_and_mrr(rankings, truth, KS)
    for k in KS:
        np.testing.assert_allclose(result.recall_at_k[k], expected_recall[k], atol=1e-12, rtol=0)
    np.testing.assert_allclose(result.mrr, expected_mrr, atol=1e-12, rtol=0)
    for ranked, (positives, junk), ap in zip(rankings, truth, result.ap, strict=True):
        if positives:
            assert ap == pytest.approx(reference.oxford_ap(ranked, positives, junk), abs=1e-12)
    assert result.queries == sum(bool(positives) for positives, _ in truth)


def test_every_protocol_is_checked() -> None:
    assert PROTOCOLS.keys() == RULES.keys()
    assert {name: (set(rule.positive), set(rule.ignored)) for name, rule in PROTOCOLS.items()} == RULES


def test_average_precision_by_hand() -> None:
    assert average_precision([0, 1, 2], 3) == 1
    assert average_precision([1], 1) == 0.25  # precision 0 before it, 1/2 after it
    # 1, 0, 1, of two: (1 + 1) / 2 over the first half, (1/2 + 2/3) / 2 over the second
    assert average_precision([0, 2], 2) == pytest.approx(0.5 + 7 / 24)
    assert average_precision([2, 0], 2) == average_precision([0, 2], 2)  # places are a set
    assert average_precision([0], 4) == 0.25  # three never found
    assert average_precision([], 4) == 0
    assert math.isnan(average_precision([], 0))


def test_trapezoid_lies_below_the_usual_average_precision() -> None:
    ranks = np.array([0, 3, 4, 9])
    assert average_precision(ranks, 4) < np.mean((np.arange(4) + 1) / (ranks + 1))


def test_protocols_by_hand() -> None:
    """Database 0..5; easy 0, hard 3, junk 1; ranking 1 3 2 0 4 5."""
    query, ranking = Query(easy=[0], hard=[3], junk=[1]), [[1, 3, 2, 0, 4, 5]]
    easy, medium, hard = (evaluate(ranking, [query], f"roxford-{level}") for level in ("easy", "medium", "hard"))
    assert easy.map == 0.25  # 2 0 4 5: place 1
    assert medium.map == average_precision([0, 2], 2)  # 3 2 0 4 5
    assert hard.map == 1  # 3 2 4 5
    assert medium.mp_at_k == {1: 1.0, 5: pytest.approx(2 / 3), 10: pytest.approx(2 / 3)}  # stops at place 3
    assert hard.mp_at_k == {1: 1.0, 5: 1.0, 10: 1.0}


def test_recall_and_mrr_by_hand() -> None:
    """First positives at places 1, 3 (its junk not counted) and nowhere; the fourth query has none to find."""
    queries = [Query(positives=[0, 9]), Query(positives=[5], junk=[7]), Query(positives=[8]), Query(positives=[])]
    result = evaluate([[0, 1, 2], [1, 7, 2, 5], [0, 1], [0, 1]], queries, "plain", ks=(1, 2, 3))
    assert result.recall_at_k == {1: pytest.approx(1 / 3), 2: pytest.approx(1 / 3), 3: pytest.approx(2 / 3)}
    assert result.mrr == pytest.approx((1 + 1 / 3 + 0) / 3)


def test_holidays_leaves_the_query_out() -> None:
    result = evaluate([[7, 2, 1, 3]], [Query(positives=[2, 3], itself=7)], "holidays")
    assert result.map == average_precision([0, 2], 2)


def test_queries_without_positives_are_left_out() -> None:
    queries = [Query(easy=[], hard=[1], junk=[]), Query(easy=[0], hard=[])]
    result = evaluate(np.array([[0, 1], [0, 1]]), queries, "roxford-easy", ks=[1])
    np.testing.assert_array_equal(result.ap, [np.nan, 1])
    assert (result.map, result.mp_at_k, result.queries) == (1.0, {1: 1.0}, 1)
    nothing = evaluate([[0, 1]], queries[:1], "roxford-easy")
    assert math.isnan(nothing.map)
    assert math.isnan(nothing.mp_at_k[5])
    assert nothing.queries == 0
    assert math.isnan(evaluate([], [], "plain").map)


def test_rankings_of_junk_only_and_empty_ones() -> None:
    query = Query(positives=[5], junk=[0, 1])
    result = evaluate([[0, 1], np.zeros(0, int)], [query, query], "oxford")
    assert result.map == 0
    assert result.mp_at_k == {1: 0.0, 5: 0.0, 10: 0.0}


@given(n=st.integers(2, 60), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_shortened_ranking_keeps_mp_at_k_and_bounds_ap(n: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    ranking, query = rng.permutation(n), Query(positives=rng.permutation(n)[: rng.integers(1, n)])
    k = data.draw(st.integers(1, n))
    whole, short = (evaluate([r], [query], "plain", [k]) for r in (ranking, ranking[:k]))
    assert short.mp_at_k == whole.mp_at_k
    assert short.map <= whole.map + 1e-12


@given(ranks=st.sets(st.integers(0, 50), min_size=1, max_size=20), missing=st.integers(0, 5))
@settings(deadline=None)
def test_area_under_the_precision_recall_line_is_ap(ranks: set[int], missing: int) -> None:
    n = len(ranks) + missing
    precision, recall = precision_recall(sorted(ranks), n)
    assert precision.shape == recall.shape == (2 * len(ranks),)
    assert recall[0] == 0
    assert recall[-1] == pytest.approx(len(ranks) / n)
    assert np.all(np.diff(recall) >= 0)
    area = sum((recall[i + 1] - recall[i]) * (precision[i + 1] + precision[i]) / 2 for i in range(len(recall) - 1))
    assert average_precision(sorted(ranks), n) == pytest.approx(area, abs=1e-12)


def test_positive_ranks_feed_the_curve() -> None:
    ranks, count = positive_ranks([4, 0, 9, 2], Query(positives=[0, 2, 6], junk=[4]), "oxford")
    np.testing.assert_array_equal(ranks, [0, 2])
    assert count == 3
    assert [len(line) for line in precision_recall(ranks, count)] == [4, 4]
    assert [len(line) for line in precision_recall([], 0)] == [0, 0]


def test_bootstrap() -> None:
    ap = np.random.default_rng(3).uniform(size=70)
    low, high = bootstrap_interval(ap)
    error = ap.std() / math.sqrt(70)  # the normal approximation
    assert (low, high) == pytest.approx((ap.mean() - 1.96 * error, ap.mean() + 1.96 * error), abs=0.1 * error)
    assert bootstrap_interval([*ap, np.nan]) == (low, high)
    assert bootstrap_interval(ap, seed=1) != (low, high)
    narrow = bootstrap_interval(ap, level=0.5)
    assert low < narrow[0] < ap.mean() < narrow[1] < high
    assert bootstrap_interval([0.4, 0.4], n=10) == (0.4, 0.4)
    assert all(math.isnan(bound) for bound in bootstrap_interval([np.nan]))
    for wrong in ({"n": 0}, {"level": 1.0}, {"level": 0.0}):
        with pytest.raises(InputError, match="bootstrap"):
            bootstrap_interval(ap, **wrong)


def test_mistakes_are_named() -> None:
    query = Query(positives=[0])
    with pytest.raises(UnknownNameError, match="Did you mean 'roxford-medium'"):
        evaluate([], [], "roxford-medum")
    with pytest.raises(InputError, match="2 rankings for 1 queries"):
        evaluate([[0], [1]], [query], "plain")
    with pytest.raises(InputError, match="at least 1, not 0"):
        evaluate([[0]], [query], "plain", ks=[5, 0])
    with pytest.raises(
        InputError, match="Query 1: Protocol roxford-medium needs easy, hard, but the query has positives"
    ):
        evaluate([[0], [0]], [Query(easy=[0], hard=[]), query], "roxford-medium")
    with pytest.raises(InputError, match="the query has no groups"):
        evaluate([[0]], [Query()], "plain")
    with pytest.raises(InputError, match="Query 0: Index 3 is positive and ignored"):
        evaluate([[0, 3]], [Query(positives=[0, 3], itself=3)], "holidays")
    with pytest.raises(InputError, match="2 ranks, but only 1 positives"):
        average_precision([0, 1], 1)


@pytest.mark.parametrize(
    ("ranking", "message"),
    [
        ([0, 1, 0], "appears twice in a ranking"),
        ([0, -1], "Index -1 in a ranking"),
        ([0.5, 1.0], "list of integers, not float64"),
        ([[0, 1], [2, 3]], "list of integers"),
    ],
)
def test_bad_rankings(ranking: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"Query 0: .*{message}"):
        evaluate([ranking], [Query(positives=[0])], "plain")
    with pytest.raises(InputError, match="group 'hard' of a query"):
        Query(hard=ranking)
