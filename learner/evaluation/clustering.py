"""Prefix Clustering: the target's own openings, one representative per cluster. Pure.

The baseline without training of Prefix-RL: cut an answer to each training problem, cluster the cuts by k-means, try one
of each cluster as a fixed prefix. Here an opening is the tf-idf of its tokens and pairs of tokens.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

MOST_CLUSTERS = 10
STARTS = 10

Vectors = NDArray[np.float64]
Fit = tuple[NDArray[np.int64], Vectors]
"""The nearest centre of each vector, and the distance to it."""


def elbow(inertias: Sequence[float]) -> int:
    """Return the index furthest below the line between a falling curve's ends (Satopaa 2011)."""
    if len(inertias) < 3 or inertias[0] <= inertias[-1]:
        return 0
    falls = (np.asarray(inertias) - inertias[-1]) / (inertias[0] - inertias[-1])
    line = np.linspace(1.0, 0.0, len(inertias))
    return int(np.argmax(line - falls))


def representatives(openings: Sequence[Sequence[int]], seed: int) -> list[int]:
    """Return the index of the opening (token ids) nearest to each centre, largest cluster first."""
    if not any(openings):
        return [0]  # the target writes nothing
    vectors = tf_idf(openings)
    distinct = len(np.unique(vectors.round(9), axis=0))
    random = np.random.default_rng(seed)
    fits = [
        _k_means(vectors, count, random) for count in range(1, min(MOST_CLUSTERS, distinct) + 1)
    ]
    # With an inertia of 0 more clusters cannot fit better.
    labels, distances = fits[elbow(list(map(_inertia, fits)))] if len(fits) > 2 else fits[-1]
    central = []
    sizes = np.bincount(labels)
    for cluster in np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]:
        members = np.flatnonzero(labels == cluster)
        central.append(int(members[np.argmin(distances[members])]))
    return central


def _inertia(fit: Fit) -> float:
    return float((fit[1] ** 2).sum())


def _k_means(vectors: Vectors, count: int, random: np.random.Generator) -> Fit:
    """Return the best of several starts; a cluster may be empty."""
    # Late: only evaluations need it, and every process of a run would import it.
    from scipy.cluster.vq import kmeans2, vq

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an empty cluster: such a start is not the best
        starts = [kmeans2(vectors, count, minit="++", rng=random)[0] for _ in range(STARTS)]
    fits: list[Fit] = [vq(vectors, centres) for centres in starts]
    return min(fits, key=_inertia)


def tf_idf(openings: Sequence[Sequence[int]]) -> Vectors:
    """Return rows of length 1: counts of tokens and neighbouring pairs, by their rareness."""
    terms = [Counter([*opening, *pairwise(opening)]) for opening in openings]
    vocabulary = {term: index for index, term in enumerate(dict.fromkeys(chain(*terms)))}
    counts = np.zeros((len(openings), len(vocabulary)))
    for row, term_counts in enumerate(terms):
        counts[row, [vocabulary[term] for term in term_counts]] = list(term_counts.values())
    weights = np.log((1 + len(openings)) / (1 + (counts > 0).sum(0))) + 1
    vectors: Vectors = counts * weights
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)
    return vectors
