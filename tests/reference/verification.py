"""Verification, slow and obvious: loops written from the definitions."""

from __future__ import annotations

import math

import numpy as np


def mutual_matches(query, picture, ratio=None, similarity=None):
    """{(i, j)}: each other's nearest by cosine; under `ratio` times the second distance, over `similarity`."""
    found = set()
    if not len(picture):
        return found
    for i, q in enumerate(query):
        cosines = [float(np.dot(q, p)) for p in picture]
        j = int(np.argmax(cosines))
        if max(range(len(query)), key=lambda k: float(np.dot(query[k], picture[j]))) != i:
            continue
        if similarity is not None and cosines[j] <= similarity:
            continue
        if ratio is not None:
            if len(picture) < 2:
                continue
            distances = sorted(math.sqrt(max(2 - 2 * c, 0)) for c in cosines)
            if distances[0] >= ratio * distances[1]:
                continue
        found.add((i, j))
    return found


def close_pairs(here, there, near):
    return {
        (i, j)
        for i, a in enumerate(here)
        for j, b in enumerate(there)
        if (a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 <= near**2
    }


def map_point(transform, x, y):
    u, v, w = transform @ np.array([x, y, 1.0])
    return u / w, v / w


def numeric_map(transform, x, y, h=1e-4):
    """The Jacobian at a point, by differences."""
    columns = []
    for dx, dy in ((h, 0), (0, h)):
        (a, b), (c, d) = map_point(transform, x + dx, y + dy), map_point(transform, x - dx, y - dy)
        columns.append(((a - c) / (2 * h), (b - d) / (2 * h)))
    return np.array(columns).T


def mutual_graph(vectors, neighbours, gamma=3):
    n = len(vectors)
    near = []
    for i in range(n):
        others = sorted((j for j in range(n) if j != i), key=lambda j: (-float(vectors[i] @ vectors[j]), j))
        near.append(set(others[:neighbours]))
    weights = np.zeros((n, n))
    for i in range(n):
        for j in near[i]:
            if i in near[j]:
                weights[i, j] = max(float(vectors[i] @ vectors[j]), 0) ** gamma
    degree = weights.sum(1)
    for i in range(n):
        for j in range(n):
            if weights[i, j]:
                weights[i, j] /= math.sqrt(degree[i] * degree[j])
    return weights


def diffusion(graph, seeds, alpha=0.99, steps=4000):
    """f = sum of (alpha S)^k seeds, term by term: what flows along paths of k edges."""
    flow, term = np.zeros(len(seeds)), np.array(seeds, float)
    for _ in range(steps):
        flow += term
        term = alpha * graph @ term
    return flow


def rounds(ids, cosines, vectors, strengths, nearest, *, top, least, sure, repeats, neighbours=50):
    """The whole procedure with dictionaries: ids best first, and their scores."""
    ids, cosine = list(ids), dict(zip(ids, cosines, strict=True))
    known, score = {}, dict(cosine)
    for _ in range(repeats):
        order = sorted(ids, key=lambda i: -score[i])
        for i in order[:top]:
            known[i] = strengths[i]
        for i in [i for i in known if known[i] >= least]:
            for j in nearest(i):
                if j not in cosine:
                    cosine[j] = 0.0
        ids = [*ids, *sorted(set(cosine) - set(ids))]
        votes = {i: known.get(i, 0.0) if known.get(i, 0.0) >= least else 0.0 for i in ids}
        most = max(votes.values())
        ten = sorted(ids, key=lambda i: -cosine[i])[:10]
        seeds = [
            (math.sqrt(votes[i] / most) if most else 0.0) + (0.05 * max(cosine[i], 0) ** 3 if i in ten else 0.0)
            for i in ids
        ]
        flow = diffusion(mutual_graph([vectors[i] for i in ids], neighbours), seeds)
        score = {i: f / flow.max() for i, f in zip(ids, flow, strict=True)}
        for i in ids:
            if votes[i] >= sure:
                score[i] += 1 + votes[i] / (1 + most)
    order = sorted(ids, key=lambda i: -score[i])
    return order, [score[i] for i in order]
