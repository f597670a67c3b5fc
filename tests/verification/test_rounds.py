from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cooc.errors import InputError
from cooc.reranking.diffusing import diffuse, knn_graph
from cooc.verification.rounds import ALPHA, ENOUGH, EXACT, GAMMA, rounds, seed
from tests.reference import verification as reference


def clusters(groups: int = 6, size: int = 8, dim: int = 24, noise: float = 0.5, seed: int = 0) -> np.ndarray:
    """Unit vectors of `groups` things, `size` pictures of each."""
    rng = np.random.default_rng(seed)
    rows = np.repeat(rng.normal(size=(groups, dim)), size, axis=0) + noise * rng.normal(size=(groups * size, dim))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


class World:
    """A collection whose true strengths are known, and a count of what was asked."""

    def __init__(self, vectors: np.ndarray, strengths: dict[int, float]) -> None:
        self.all, self.strengths, self.asked = vectors, strengths, []

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        return self.all[ids]

    def verify(self, ids: np.ndarray) -> list[Any]:
        self.asked += ids.tolist()
        return [SimpleNamespace(strength=self.strengths.get(i, 0.0)) for i in ids.tolist()]

    def nearest(self, vectors: np.ndarray, k: int) -> np.ndarray:
        return np.argsort(-(vectors @ self.all.T), axis=1, kind="stable")[:, :k]

    def search(self, query: np.ndarray, short: int, **options: Any) -> Any:
        cosines = self.all @ query
        ids = np.argsort(-cosines, kind="stable")[:short]
        functions = {"vectors": self.vectors, "verify": self.verify, "nearest": self.nearest}
        return rounds(ids, cosines[ids], **{**functions, **options})


@pytest.mark.parametrize("neighbours", [1, 4, 10, 100])
def test_the_graph_is_that_of_the_loops(neighbours: int) -> None:
    vectors = clusters()
    graph, whole = knn_graph(vectors, neighbours, GAMMA), np.zeros((len(vectors), len(vectors)))
    np.put_along_axis(whole, graph.indices, graph.weights, axis=1)
    np.testing.assert_allclose(whole, reference.mutual_graph(vectors, neighbours), atol=1e-6)


def test_diffusion_is_the_sum_over_all_paths() -> None:
    """As exact as `rounds` asks for it, on the graph that the loops give."""
    vectors = clusters()
    seeds = np.random.default_rng(1).random(len(vectors))
    found = diffuse(knn_graph(vectors, 5, GAMMA), seeds, alpha=ALPHA, iterations=ENOUGH, tolerance=EXACT)
    np.testing.assert_allclose(found, reference.diffusion(reference.mutual_graph(vectors, 5), seeds), rtol=1e-5)


def test_pictures_without_neighbours_keep_their_seed() -> None:
    vectors, seeds = np.eye(3, dtype=np.float32), np.array([1.0, 0.5, 0.0])
    np.testing.assert_allclose(diffuse(knn_graph(vectors, 2), seeds), seeds)
    np.testing.assert_allclose(diffuse(knn_graph(vectors[:1], 10), seeds[:1]), seeds[:1])


def test_seeds_are_the_verified_and_faintly_the_nearest() -> None:
    votes, cosines = np.array([0, 16.0, 4.0] + [0.0] * 12), np.linspace(0.9, -0.5, 15)
    seeds = seed(votes, cosines)
    assert seeds[1] == pytest.approx(1 + 0.05 * cosines[1] ** 3)
    assert seeds[2] == pytest.approx(0.5 + 0.05 * cosines[2] ** 3)
    assert (seeds[10:] == 0).all()
    assert (seed(np.zeros(15), cosines)[:9] > 0).all()
    assert len(seed(np.zeros(0), np.zeros(0))) == 0


@pytest.mark.parametrize("repeats", [1, 2, 3])
@pytest.mark.parametrize("trial", range(4))
def test_rounds_are_those_of_the_reference(repeats: int, trial: int) -> None:
    rng = np.random.default_rng(trial)
    vectors = clusters(seed=trial)
    strengths = {i: float(rng.integers(0, 40)) for i in rng.permutation(48)[:20].tolist()}
    world = World(vectors, strengths)
    found = world.search(vectors[3], 20, top=6, least=8, sure=16, repeats=repeats, neighbours=5, expansion=4)
    cosines = vectors @ vectors[3]
    ids = np.argsort(-cosines, kind="stable")[:20]
    expected, scores = reference.rounds(
        ids.tolist(),
        cosines[ids].tolist(),
        vectors,
        {i: strengths.get(i, 0.0) for i in range(48)},
        lambda i: world.nearest(vectors[[i]], 4)[0].tolist(),
        top=6,
        least=8,
        sure=16,
        repeats=repeats,
        neighbours=5,
    )
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-9)
    assert set(found.ids.tolist()) == set(expected)
    distinct = np.abs(np.diff(scores, prepend=9, append=-9))
    certain = (distinct[:-1] > 1e-6) & (distinct[1:] > 1e-6)  # where no two scores are equal the order is one
    assert (found.ids[certain] == np.array(expected)[certain]).all()


def test_sure_ones_stand_first_by_their_strength() -> None:
    vectors = clusters()
    world = World(vectors, {5: 17.0, 40: 90.0, 6: 12.0})
    found = world.search(vectors[0], 48, top=48)
    assert found.ids[:2].tolist() == [40, 5]
    assert found.scores[1] > 1 >= found.scores[2]
    assert set(found.agreements) == set(range(48))


def test_a_second_round_looks_where_the_first_has_led() -> None:
    """A chain: the query is near to one end only; what the first round verifies brings its neighbours."""
    angles = np.deg2rad(np.arange(0, 90, 6))
    chain = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    world = World(chain, dict.fromkeys(range(15), 20.0))
    once = world.search(chain[0], 4, top=4, repeats=1, neighbours=2, expansion=3)
    assert len(once.agreements) == 4
    asked, world.asked = world.asked, []
    twice = world.search(chain[0], 4, top=6, repeats=2, neighbours=2, expansion=3)
    assert set(asked) < set(twice.agreements)
    assert set(twice.agreements) == set(range(5))
    assert len(world.asked) == len(set(world.asked))  # nothing is verified twice


def test_without_anything_verified_it_is_diffusion_from_the_nearest() -> None:
    vectors = clusters()
    found = World(vectors, {}).search(vectors[0], 30)
    assert (found.scores <= 1).all()
    assert found.ids[0] < 8
    assert len(found.ids) == 30


def test_without_nearest_nothing_joins_and_minus_one_is_nobody() -> None:
    vectors = clusters()
    world = World(vectors, {0: 50.0})
    assert len(world.search(vectors[0], 10, nearest=None).ids) == 10
    found = world.search(vectors[0], 10, nearest=lambda rows, k: np.full((len(rows), k), -1))
    assert len(found.ids) == 10


def test_an_empty_shortlist_has_an_empty_ranking() -> None:
    found = World(clusters(), {}).search(clusters()[0], 0)
    assert len(found.ids) == len(found.scores) == 0
    assert found.agreements == {}


@pytest.mark.parametrize(
    ("ids", "cosines", "options"),
    [([1, 1], [0.5, 0.5], {}), ([1, 2], [0.5], {}), ([1], [0.5], {"repeats": 0}), ([1], [0.5], {"top": 0})],
)
def test_what_makes_no_sense_is_refused(ids: list[int], cosines: list[float], options: dict[str, int]) -> None:
    world = World(clusters(), {})
    with pytest.raises(InputError):
        rounds(ids, cosines, vectors=world.vectors, verify=world.verify, **options)


def test_what_agrees_with_one_that_is_sure_is_found() -> None:
    """Picture 3 agrees with the query, 40 with 3 alone: it comes second, though nothing near the query leads to it."""
    vectors = clusters()
    world = World(vectors, {3: 50.0, 5: 9.0})
    onward: list[tuple[list[int], set[int]]] = []

    def look(numbers: list[int], without: Any) -> list[dict[int, Any]]:
        onward.append((numbers, set(without)))
        return [{40: SimpleNamespace(strength=30.0), 41: SimpleNamespace(strength=4.0)} for _ in numbers]

    plain = world.search(vectors[0], 8, nearest=None)
    assert 40 not in plain.ids
    found = world.search(vectors[0], 8, nearest=None, onward=look)
    assert found.ids[:2].tolist() == [3, 40]
    assert onward == [([3], {3})]  # 5 is verified, but not sure; and nobody is asked twice
    assert 41 not in found.ids
    assert found.agreements[40].strength == 0  # the second round looked at it: it agrees with another picture alone
    assert world.search(vectors[0], 8, onward=look).ids[:2].tolist() == [3, 40]


def test_what_a_sure_one_leads_to_may_agree_with_the_query_itself() -> None:
    """The round that follows looks at it; of two votes the greater counts."""
    vectors = clusters()
    world = World(vectors, {3: 50.0, 40: 24.0, 41: 90.0})

    def search(strength: float, **options: Any) -> Any:
        led = {number: SimpleNamespace(strength=strength) for number in (40, 41, 42)}
        return world.search(vectors[0], 8, nearest=None, onward=lambda numbers, _: [led] * len(numbers), **options)

    found = search(50.0)
    assert found.ids[0] == 41
    assert set(found.ids[:4].tolist()) == {3, 40, 41, 42}
    np.testing.assert_array_equal(found.scores, search(70.0).scores)  # no vote is stronger than that of who leads
    assert found.agreements[41].strength == 90
    assert 41 not in search(50.0, repeats=1).agreements


def test_nobody_who_is_sure_leads_nowhere() -> None:
    vectors = clusters()

    def look(numbers: list[int], without: Any) -> list[dict[int, Any]]:
        raise AssertionError

    world = World(vectors, {3: 15.0})
    assert world.search(vectors[0], 8, onward=look).ids.tolist() == world.search(vectors[0], 8).ids.tolist()
