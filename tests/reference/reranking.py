"""Expansion and re-ranking as the papers define them: explicit loops and dense matrices in float64."""

from __future__ import annotations

import math

import numpy as np


def ranking(query, database):
    """All rows, best first; equal scores in the order of the database."""
    return sorted(range(len(database)), key=lambda i: (-float(np.dot(query, database[i])), i))


def unit(vector):
    length = math.sqrt(sum(float(x) ** 2 for x in vector))
    return [x / length for x in vector] if length else list(vector)


def expansion(query, database, n, alpha, own=-1):
    total = [float(x) for x in query]
    counted = 0
    for i in ranking(query, database):
        if i == own or counted == n:
            continue
        counted += 1
        weight = max(float(np.dot(query, database[i])), 0.0) ** alpha
        for d in range(len(total)):
            total[d] += weight * float(database[i][d])
    return unit(total)


def k_reciprocal_distances(query, candidates, k1, k2, weight):
    """Zhong et al. 2017, equations 2 to 12, with distances scaled by the largest one of each row."""
    points = [query, *candidates]
    n = len(points)
    d = [[sum((float(a) - float(b)) ** 2 for a, b in zip(p, q, strict=True)) for q in points] for p in points]
    order = [sorted(range(n), key=lambda j: (j != i, d[i][j], j)) for i in range(n)]
    d = [[value / max(max(row), 1e-30) for value in row] for row in d]

    def reciprocal(p, k):
        return {q for q in order[p][: k + 1] if p in order[q][: k + 1]}

    codes = np.zeros((n, n))
    for p in range(n):
        base = reciprocal(p, k1)
        members = set(base)
        for q in base:
            small = reciprocal(q, round(k1 / 2))
            if 3 * len(base & small) >= 2 * len(small):
                members |= small
        for q in members:
            codes[p, q] = math.exp(-d[p][q])
        codes[p] /= codes[p].sum()
    smooth = np.array([np.mean([codes[q] for q in order[p][:k2]], axis=0) for p in range(n)])
    result = []
    for q in range(1, n):
        smaller = sum(min(a, b) for a, b in zip(smooth[0], smooth[q], strict=True))
        larger = sum(max(a, b) for a, b in zip(smooth[0], smooth[q], strict=True))
        result.append((1 - weight) * (1 - smaller / larger) + weight * d[0][q])
    return result


def superglobal_scores(query, candidates, neighbours, beta):
    """Shao et al. 2023, section 3.2."""
    m = len(candidates)
    refined = []
    for i in range(m):
        others = [j for j in ranking(candidates[i], candidates) if j != i][:neighbours]
        weights = [beta * max(float(np.dot(candidates[i], candidates[j])), 0.0) for j in others]
        total = np.array(candidates[i], float)
        for j, w in zip(others, weights, strict=True):
            total = total + w * np.array(candidates[j], float)
        refined.append(total / (1 + sum(weights)))
    nearest = ranking(query, refined)[: neighbours + 1]
    expanded = [max(refined[j][d] for j in nearest) for d in range(len(query))]
    return [(np.dot(query, r) + np.dot(expanded, r)) / 2 for r in refined]


def affinity(database, neighbours, gamma):
    """Dense D^-1/2 W D^-1/2 of the mutual nearest-neighbour graph."""
    n = len(database)
    near = [[j for j in ranking(database[i], database) if j != i][:neighbours] for i in range(n)]
    w = np.zeros((n, n))
    for i in range(n):
        for j in near[i]:
            if i in near[j]:
                w[i, j] = max(float(np.dot(database[i], database[j])), 0.0) ** gamma
    degree = w.sum(axis=1)
    for i in range(n):
        for j in range(n):
            if w[i, j]:
                w[i, j] /= math.sqrt(degree[i] * degree[j])
    return w


def diffusion_scores(query, database, s, gamma, seeds, alpha):
    """The closed form f = (I - alpha S)^-1 y."""
    y = np.zeros(len(database))
    for i in ranking(query, database)[:seeds]:
        y[i] = max(float(np.dot(query, database[i])), 0.0) ** gamma
    return np.linalg.solve(np.eye(len(database)) - alpha * s, y)
