"""Prefix Clustering: the target's own openings, one representative per cluster. Pure.

The baseline without training of Prefix-RL: sample an answer to each training problem, cut it after some tokens, cluster the
cuts by k-means (as many clusters as the elbow says), try one cut of each cluster as a fixed prefix on training problems. The
publication does not say what the vectors are; here an opening is the tf-idf of its tokens and pairs of tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_CLUSTERS = 10

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
    from sklearn.cluster import KMeans

    vectors = _vectors(openings)
    distinct = len(np.unique(vectors.round(9), axis=0))
    fits = [
        KMeans(count, n_init=10, random_state=seed).fit(vectors)
        for count in range(1, min(MOST_CLUSTERS, distinct) + 1)
    ]
    # An inertia of 0 explains everything: more clusters than that cannot be.
    chosen = fits[elbow([fit.inertia_ for fit in fits])] if len(fits) > 2 else fits[-1]
    sizes = np.bincount(chosen.labels_)
    distances = chosen.transform(vectors)
    found = []
    for cluster in np.argsort(-sizes, kind="stable"):
        members = np.flatnonzero(chosen.labels_ == cluster)
        found.append(int(members[np.argmin(distances[members, cluster])]))
    return found


def _vectors(openings: Sequence[Sequence[int]]) -> Vectors:
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [" ".join(map(str, opening)) for opening in openings]
    made = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\d+").fit_transform(texts)
    vectors: Vectors = made.toarray()
    return vectors
