"""Prefix clustering finds what was planted: one opening of each kind, as many kinds as there are."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.learner.evaluation.clustering import elbow, representatives, tf_idf

KINDS = ((1, 2, 3, 4), (10, 11, 12, 13), (20, 21, 22, 23), (30, 31, 32, 33))


def planted(seed: int) -> tuple[list[list[int]], list[int]]:
    """40 openings of four kinds of unequal sizes, each with a tail of its own, and the kind of each."""
    chance = random.Random(seed)
    kinds = chance.choices(range(len(KINDS)), weights=(5, 3, 2, 2), k=40)
    return [[*KINDS[kind], chance.randrange(100, 120)] for kind in kinds], kinds


@pytest.mark.parametrize("seed", range(5))
def test_planted_kinds_are_found_one_opening_each_the_most_frequent_first(seed: int) -> None:
    openings, kinds = planted(seed)
    actual = [kinds[index] for index in representatives(openings, seed)]
    assert sorted(actual) == sorted(set(kinds))
    assert kinds.count(actual[0]) == max(kinds.count(kind) for kind in set(kinds))


@pytest.mark.parametrize(
    ("openings", "kinds"),
    [([[1]], 1), ([[1, 2]] * 9, 1), ([[], []], 1), ([[1, 2], [3, 4], [1, 2]], 2)],
)
def test_few_distinct_openings_are_all_there_is(openings: list[list[int]], kinds: int) -> None:
    actual = representatives(openings, 0)
    assert len(actual) == kinds
    assert {tuple(openings[index]) for index in actual} == set(map(tuple, openings))


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=8))
def test_vectors_are_the_tf_idf_of_tokens_and_pairs_of_neighbours(
    openings: list[list[int]],
) -> None:
    """Term by term, as in the definition; the places of terms are free, so inner products are compared."""

    def terms(opening: list[int]) -> list[tuple[int, ...]]:
        return [tuple(opening[i : i + n]) for n in (1, 2) for i in range(len(opening) - n + 1)]

    def weight(term: tuple[int, ...], opening: list[int]) -> float:
        having = sum(term in terms(other) for other in openings)
        return terms(opening).count(term) * (math.log((1 + len(openings)) / (1 + having)) + 1)

    def product(one: list[int], other: list[int]) -> float:
        shared = set(terms(one)) & set(terms(other))
        return sum(weight(term, one) * weight(term, other) for term in shared)

    expected = [
        [
            product(one, other) / math.sqrt(product(one, one) * product(other, other))
            if one and other
            else 0.0
            for other in openings
        ]
        for one in openings
    ]
    vectors = tf_idf(openings)
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=1e-9)


def test_the_same_openings_and_seed_give_the_same_choice() -> None:
    openings, _ = planted(1)
    assert representatives(openings, 7) == representatives(openings, 7)


def test_the_elbow_is_where_the_curve_stops_falling() -> None:
    assert elbow([100.0, 50.0, 10.0, 9.0, 8.0, 7.0]) == 2
    assert elbow([100.0, 12.0, 11.0, 10.0, 9.0]) == 1
    assert elbow([0.0, 0.0, 0.0]) == 0
