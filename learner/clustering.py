"""Prefix Clustering: the target's own openings, one representative per cluster. Pure.

The baseline without training of Prefix-RL: sample an answer to each training problem, cut it after some tokens, cluster the
cuts by k-means (as many clusters as the elbow says), try one cut of each cluster as a fixed prefix on training problems. The
publication does not say what the vectors are; here an opening is the tf-idf of its tokens and pairs of tokens.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

MOST_CLUSTERS = 10
STARTS = 10

Vectors = NDArray[np.float64]


def elbow(inertias: Sequence[float]) -> int:
    """Index of the point of a falling curve that lies furthest below the line between its ends (Satopaa et al. 2011)."""
    if len(inertias) < 3 or inertias[0] <= inertias[-1]:
        return 0
    falls = (np.asarray(inertias) - inertias[-1]) / (inertias[0] - inertias[-1])
    line = np.linspace(1.0, 0.0, len(inertias))
    return int(np.argmax(line - falls))


def representatives(openings: Sequence[Sequence[int]], seed: int) -> list[int]:
    """One opening per cluster, the one nearest to its centre, largest cluster first.

    Args:
        openings: Token ids of each.

    Returns:
        Indices into `openings`.
    """
    if not any(openings):
        return [0]  # the target says nothing
    vectors = tf_idf(openings)
    distinct = len(np.unique(vectors.round(9), axis=0))
    random = np.random.default_rng(seed)
    fits = [
        _k_means(vectors, count, random) for count in range(1, min(MOST_CLUSTERS, distinct) + 1)
    ]
    # An inertia of 0 explains everything: more clusters than that cannot be.
    chosen = fits[elbow([fit.inertia for fit in fits])] if len(fits) > 2 else fits[-1]
    found = []
    sizes = np.bincount(chosen.labels)
    for cluster in np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]:
        members = np.flatnonzero(chosen.labels == cluster)
        found.append(int(members[np.argmin(chosen.distances[members])]))
    return found


@dataclass(frozen=True)
class _Fit:
    labels: NDArray[np.int64]
    """The nearest centre of each vector."""
    distances: NDArray[np.float64]
    """To that centre."""

    @property
    def inertia(self) -> float:
        return float((self.distances**2).sum())


def _k_means(vectors: Vectors, count: int, random: np.random.Generator) -> _Fit:
    """The best of several starts; a cluster may be empty."""
    # Late: only evaluations need it, and every process of a run would import it.
    from scipy.cluster.vq import kmeans2, vq

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cluster that is empty: such a start is not the best
        starts = [kmeans2(vectors, count, minit="++", rng=random)[0] for _ in range(STARTS)]
    return min((_Fit(*vq(vectors, centres)) for centres in starts), key=lambda fit: fit.inertia)


def tf_idf(openings: Sequence[Sequence[int]]) -> Vectors:
    """Rows of length 1: counts of tokens and pairs of neighbours, each times ln((1 + n) / (1 + openings with it)) + 1."""
    terms = [Counter([*opening, *pairwise(opening)]) for opening in openings]
    vocabulary = {term: place for place, term in enumerate(dict.fromkeys(chain(*terms)))}
    counts = np.zeros((len(openings), len(vocabulary)))
    for row, found in enumerate(terms):
        for term, count in found.items():
            counts[row, vocabulary[term]] = count
    weights = np.log((1 + len(openings)) / (1 + (counts > 0).sum(0))) + 1
    vectors: Vectors = counts * weights
    lengths: Vectors = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = vectors / np.maximum(lengths, 1e-300)
    return scaled
