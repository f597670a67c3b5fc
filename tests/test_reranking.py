from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cooc.errors import InputError, UnknownNameError
from cooc.reranking import (
    EXPANSIONS,
    RERANKERS,
    alpha_expansion,
    average_expansion,
    database_augmentation,
    diffusion,
    diffusion_scores,
    expand,
    k_reciprocal,
    k_reciprocal_scores,
    knn_graph,
    rank,
    ranking,
    rerank,
    superglobal,
    superglobal_scores,
)
from tests.reference import reranking as reference


def vectors(count, dimensions=8, seed=0, clusters=3):
    """Unit vectors around a few centres, as descriptors are."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clusters, dimensions))
    x = centres[rng.integers(clusters, size=count)] + 0.6 * rng.normal(size=(count, dimensions))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def on_circle(*degrees):
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(ranking, "QUERY_BLOCK", 3)
    monkeypatch.setattr(ranking, "DATABASE_BLOCK", 7)


QUERIES, DATABASE = vectors(5, seed=1), vectors(40, seed=1)
sizes = st.integers(0, 30)


# rank


@pytest.mark.parametrize("k", [None, 0, 1, 6, 40, 1000])
def test_rank_is_the_loop(small_blocks, k):
    indices, scores = rank(QUERIES, DATABASE, k)
    expected = [reference.ranking(q, DATABASE)[: len(DATABASE) if k is None else k] for q in QUERIES]
    assert indices.tolist() == expected
    assert indices.dtype == np.int64
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, np.take_along_axis(QUERIES @ DATABASE.T, indices, 1), atol=1e-6)


def test_blocks_do_not_change_a_ranking(monkeypatch):
    whole = rank(QUERIES, DATABASE, 12)
    for rows, columns in [(1, 1), (2, 5), (4, 39), (5, 41)]:
        monkeypatch.setattr(ranking, "QUERY_BLOCK", rows)
        monkeypatch.setattr(ranking, "DATABASE_BLOCK", columns)
        blocked = rank(QUERIES, DATABASE, 12)
        np.testing.assert_array_equal(blocked[0], whole[0])
        np.testing.assert_allclose(blocked[1], whole[1], atol=1e-6)


@pytest.mark.parametrize("k", [None, 1, 4, 10])
def test_equal_scores_keep_the_order_of_the_database(small_blocks, k):
    database = np.tile(on_circle(0, 90), (11, 1))  # products with axes are exact, so these are true ties
    indices, _ = rank(on_circle(0), database, k)
    assert indices[0].tolist() == [*range(0, 22, 2), *range(1, 22, 2)][:k]


@given(st.integers(0, 6), sizes, st.integers(0, 35), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_rank_properties(queries, database, k, seed):
    indices, scores = rank(vectors(queries, seed=seed), vectors(database, seed=seed), k)
    assert indices.shape == scores.shape == (queries, min(k, database))
    assert all(len(set(row)) == len(row) for row in indices.tolist())
    assert (np.diff(scores, axis=1) <= 0).all()


# expansion


@pytest.mark.parametrize("n", [0, 1, 10, 40, 500])
@pytest.mark.parametrize("alpha", [0, 1, 3])
def test_expansion_is_the_loop(small_blocks, n, alpha):
    expected = [reference.expansion(q, DATABASE, n, alpha) for q in QUERIES]
    np.testing.assert_allclose(alpha_expansion(QUERIES, DATABASE, n, alpha), expected, atol=1e-6)
    if alpha == 0:
        np.testing.assert_allclose(average_expansion(QUERIES, DATABASE, n), expected, atol=1e-6)


@pytest.mark.parametrize("n", [3, 39, 40, 60])
def test_the_querys_own_image_is_not_counted(n):
    own = np.array([rank(QUERIES, DATABASE, 1)[0][0, 0], 3, -1, 0, 39])
    expected = [reference.expansion(q, DATABASE, n, 3, own=o) for q, o in zip(QUERIES, own, strict=True)]
    np.testing.assert_allclose(alpha_expansion(QUERIES, DATABASE, n, exclude=own), expected, atol=1e-6)


@pytest.mark.parametrize("expansion", [average_expansion, alpha_expansion])
def test_a_search_result_can_be_given(expansion):
    indices, scores = rank(QUERIES, DATABASE, 7)
    np.testing.assert_array_equal(
        expansion(QUERIES, DATABASE, 7, found=(indices, scores)), expansion(QUERIES, DATABASE, 7)
    )
    short = np.hstack([indices[:, :4], np.full((5, 6), -1)])  # what an index answers when it has no more
    padded = np.hstack([scores[:, :4], np.full((5, 6), np.nan, np.float32)])
    np.testing.assert_allclose(
        expansion(QUERIES, DATABASE, 7, found=(short, padded)), expansion(QUERIES, DATABASE, 4), atol=1e-6
    )


def test_a_search_result_may_hold_only_the_vectors_that_were_found():
    indices, scores = rank(QUERIES, DATABASE, 5)
    ids, rows = np.unique(indices, return_inverse=True)
    few = average_expansion(QUERIES, DATABASE[ids], 5, found=(rows.reshape(indices.shape), scores))
    np.testing.assert_allclose(few, average_expansion(QUERIES, DATABASE, 5), atol=1e-6)


@pytest.mark.parametrize("n", [0, 4, 100])
def test_database_augmentation_is_the_loop(small_blocks, n):
    database = np.vstack([DATABASE[:20], DATABASE[:2]])  # with duplicates, a row is not always its own first match
    expected = [reference.expansion(x, database, n, 3, own=i) for i, x in enumerate(database)]
    np.testing.assert_allclose(database_augmentation(database, n), expected, atol=1e-6)


def test_opposite_matches_count_in_the_average_only():
    query, database = on_circle(0), on_circle(120)
    np.testing.assert_allclose(average_expansion(query, database), on_circle(60), atol=1e-6)
    np.testing.assert_allclose(alpha_expansion(query, database), query, atol=1e-6)


@given(st.integers(0, 5), sizes, st.integers(0, 40), st.sampled_from(sorted(EXPANSIONS)), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_expansions_give_unit_vectors_and_change_no_input(queries, database, n, name, seed):
    q, x = vectors(queries, seed=seed), vectors(database, seed=seed)
    before = q.copy(), x.copy()
    new = expand(name, q, x, **({} if name == "none" else {"n": n}))
    assert new.shape == q.shape
    assert new.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(new, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(q, before[0])
    np.testing.assert_array_equal(x, before[1])


def test_a_zero_vector_stays_zero():
    zero = np.zeros((1, 8), np.float32)
    assert not alpha_expansion(zero, DATABASE).any()


# re-ranking


@pytest.mark.parametrize(("k1", "k2", "weight"), [(20, 6, 0.3), (5, 3, 0.0), (4, 1, 1.0), (100, 50, 0.5)])
def test_k_reciprocal_is_the_loop(k1, k2, weight):
    for query in QUERIES:
        expected = reference.k_reciprocal_distances(query, DATABASE, k1, k2, weight)
        scores = k_reciprocal_scores(query, DATABASE, k1=k1, k2=k2, weight=weight)
        np.testing.assert_allclose(-scores, expected, atol=2e-6)


@pytest.mark.parametrize(("neighbours", "beta"), [(9, 0.15), (0, 0.15), (3, 1.0), (99, 0.5)])
def test_superglobal_is_the_loop(neighbours, beta):
    for query in QUERIES:
        expected = reference.superglobal_scores(query, DATABASE, neighbours, beta)
        scores = superglobal_scores(query, DATABASE, neighbours=neighbours, beta=beta)
        np.testing.assert_allclose(scores, expected, atol=1e-6)


@pytest.mark.parametrize("neighbours", [1, 5, 39, 80])
def test_the_graph_is_the_dense_one(small_blocks, neighbours):
    graph = knn_graph(DATABASE, neighbours)
    dense = np.zeros((40, 40))
    np.add.at(dense, (np.arange(40)[:, None], graph.indices), graph.weights)
    np.testing.assert_allclose(dense, reference.affinity(DATABASE, neighbours, 3), atol=1e-6)
    np.testing.assert_allclose(dense, dense.T, atol=1e-6)
    assert np.linalg.eigvalsh(dense).max() <= 1 + 1e-6


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.99])
def test_conjugate_gradients_solve_the_system(alpha):
    graph, dense = knn_graph(DATABASE, 6), reference.affinity(DATABASE, 6, 3)
    for query in QUERIES:
        expected = reference.diffusion_scores(query, DATABASE, dense, 3, 10, alpha)
        flow = diffusion_scores(DATABASE @ query, graph, alpha=alpha, iterations=200, tolerance=1e-9)
        np.testing.assert_allclose(flow, expected, rtol=1e-5, atol=1e-6)


def test_truncated_diffusion_is_the_part_of_the_matrix():
    dense, shortlist = reference.affinity(DATABASE, 6, 3), 15
    order = diffusion(QUERIES, DATABASE, shortlist=shortlist, neighbours=6, iterations=200)
    for query, row in zip(QUERIES, order, strict=True):
        head = reference.ranking(query, DATABASE)[:shortlist]
        flow = reference.diffusion_scores(query, DATABASE[head], dense[np.ix_(head, head)], 3, 10, 0.99)
        got = dict(zip(head, flow, strict=True))
        assert sorted(row[:shortlist].tolist()) == sorted(head)
        assert (np.diff([got[i] for i in row[:shortlist].tolist()]) <= 1e-5).all()
        assert row[shortlist:].tolist() == reference.ranking(query, DATABASE)[shortlist:]


def test_a_graph_is_made_once():
    graph = knn_graph(DATABASE, 50)
    np.testing.assert_array_equal(diffusion(QUERIES, DATABASE, graph=graph), diffusion(QUERIES, DATABASE))
    with pytest.raises(InputError, match="40 rows for 39 vectors"):
        diffusion(QUERIES, DATABASE[:39], graph=graph)


@pytest.mark.parametrize(
    ("name", "score", "options"),
    [
        ("k-reciprocal", reference.k_reciprocal_distances, {"k1": 6, "k2": 3, "weight": 0.3}),
        ("superglobal", reference.superglobal_scores, {"neighbours": 4, "beta": 0.15}),
    ],
)
def test_only_the_shortlist_is_seen_and_moved(name, score, options):
    order = rerank(name, QUERIES, DATABASE, shortlist=12, **options)
    sign = -1 if name == "superglobal" else 1
    for query, row in zip(QUERIES, order, strict=True):
        plain = reference.ranking(query, DATABASE)
        values = np.array(score(query, DATABASE[plain[:12]], *options.values())) * sign
        place = dict(zip(plain[:12], values, strict=True))
        assert (np.diff([place[i] for i in row[:12].tolist()]) >= -1e-6).all()
        assert row[12:].tolist() == plain[12:]


@pytest.mark.parametrize("name", sorted(RERANKERS))
@given(st.integers(0, 4), sizes, st.none() | st.integers(0, 40), st.integers(0, 1000))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_an_order_is_a_permutation(name, queries, database, k, seed):
    q, x = vectors(queries, seed=seed), vectors(database, seed=seed)
    order = rerank(name, q, x, k)
    whole = rerank(name, q, x)
    assert order.shape == (queries, database if k is None else min(k, database))
    assert all(sorted(row) == list(range(database)) for row in whole.tolist())
    np.testing.assert_array_equal(order, whole[:, : order.shape[1]])
    one_by_one = [rerank(name, q[i : i + 1], x)[0] for i in range(queries)]
    assert [row.tolist() for row in one_by_one] == whole.tolist()


@pytest.mark.parametrize("name", sorted(set(RERANKERS) - {"none"}))
def test_a_shortlist_of_nothing_or_one_is_the_plain_ranking(name):
    plain = rank(QUERIES, DATABASE)[0]
    for shortlist in (0, 1):
        np.testing.assert_array_equal(rerank(name, QUERIES, DATABASE, shortlist=shortlist), plain)


# what they are for: a chain leads from the query to an item that a stranger of equal similarity has no part in


def test_expansion_brings_up_what_a_chain_connects():
    query, database = on_circle(0), on_circle(20, 40, 60, -50)  # the item at 60 belongs to the chain, -50 is a stranger
    assert rank(query, database)[0][0].tolist() == [0, 1, 3, 2]
    for expansion in (average_expansion, alpha_expansion):
        assert rank(expansion(query, database, n=2), database)[0][0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rerank_all", [diffusion, k_reciprocal, superglobal])
def test_reranking_brings_up_what_a_chain_connects(rerank_all):
    database = on_circle(12, 24, 36, 48, 60, -58, -70, -82, -94, -106)  # 4 ends the chain, 5 has company of its own
    options = {
        diffusion: {"neighbours": 2, "seeds": 2},
        k_reciprocal: {"k1": 3, "k2": 3, "weight": 0.1},
        superglobal: {"neighbours": 3},
    }[rerank_all]
    plain = rank(on_circle(0), database)[0][0].tolist()
    assert plain.index(5) < plain.index(4)
    order = rerank_all(on_circle(0), database, **options)[0].tolist()
    assert order.index(4) < order.index(5)


# bad input


@pytest.mark.parametrize("call", [rank, *EXPANSIONS.values(), *RERANKERS.values()])
def test_bad_vectors_are_refused(call):
    bad = DATABASE.copy()
    bad[7, 2] = np.nan
    with pytest.raises(InputError, match="database: row 7 holds NaN"):
        call(QUERIES, bad)
    bad[7, 2] = np.inf
    with pytest.raises(InputError, match="queries: row 7 holds NaN"):
        call(bad, DATABASE)
    with pytest.raises(InputError, match="8 dimensions, the database 5"):
        call(QUERIES, DATABASE[:, :5])
    with pytest.raises(InputError, match="shape"):
        call(QUERIES[0], DATABASE)


def test_bad_options_are_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'alpha'"):
        expand("alhpa", QUERIES, DATABASE)
    with pytest.raises(UnknownNameError, match="Did you mean 'diffusion'"):
        rerank("difusion", QUERIES, DATABASE)
    for wrong in (
        lambda: rank(QUERIES, DATABASE, -1),
        lambda: average_expansion(QUERIES, DATABASE, -1),
        lambda: alpha_expansion(QUERIES, DATABASE, alpha=float("nan")),
        lambda: alpha_expansion(QUERIES, DATABASE, exclude=[0, 1]),
        lambda: alpha_expansion(QUERIES, DATABASE, exclude=[40, 0, 0, 0, 0]),
        lambda: alpha_expansion(QUERIES, DATABASE, found=(np.zeros((5, 2)), np.zeros((5, 3)))),
        lambda: alpha_expansion(QUERIES, DATABASE, found=(np.full((5, 2), 40), np.zeros((5, 2)))),
        lambda: alpha_expansion(QUERIES, DATABASE, found=(np.zeros((5, 2)), np.full((5, 2), np.nan))),
        lambda: database_augmentation(DATABASE[0]),
        lambda: k_reciprocal(QUERIES, DATABASE, k1=0),
        lambda: k_reciprocal(QUERIES, DATABASE, shortlist=-1),
        lambda: superglobal(QUERIES, DATABASE, neighbours=-1),
        lambda: diffusion(QUERIES, DATABASE, alpha=1.0),
        lambda: knn_graph(DATABASE, -1),
    ):
        with pytest.raises(InputError):
            wrong()


def test_a_memory_mapped_float16_database_is_as_good(tmp_path):
    np.save(tmp_path / "x.npy", DATABASE.astype(np.float16))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(k_reciprocal(QUERIES, mapped), k_reciprocal(QUERIES, np.asarray(mapped, np.float32)))
