"""Prefix clustering finds what was planted: one opening of each kind, as many kinds as there are."""

import random

import pytest

from prefixrl.learner.clustering import elbow, representatives

KINDS = ((1, 2, 3, 4), (10, 11, 12, 13), (20, 21, 22, 23), (30, 31, 32, 33))


def planted(seed: int) -> tuple[list[list[int]], list[int]]:
    """40 openings of four kinds of unequal sizes, each with a tail of its own, and the kind of each."""
    chance = random.Random(seed)
    kinds = chance.choices(range(len(KINDS)), weights=(5, 3, 2, 2), k=40)
    return [[*KINDS[kind], chance.randrange(100, 120)] for kind in kinds], kinds


@pytest.mark.parametrize("seed", range(5))
def test_planted_kinds_are_found_one_opening_each_the_most_frequent_first(seed: int) -> None:
    openings, kinds = planted(seed)
    found = [kinds[index] for index in representatives(openings, seed)]
    assert sorted(found) == sorted(set(kinds))
    assert kinds.count(found[0]) == max(kinds.count(kind) for kind in set(kinds))


@pytest.mark.parametrize(
    ("openings", "kinds"), [([[1]], 1), ([[1, 2]] * 9, 1), ([[1, 2], [3, 4], [1, 2]], 2)]
)
def test_few_distinct_openings_are_all_there_is(openings: list[list[int]], kinds: int) -> None:
    found = representatives(openings, 0)
    assert len(found) == kinds
    assert {tuple(openings[index]) for index in found} == set(map(tuple, openings))


def test_the_same_openings_and_seed_give_the_same_choice() -> None:
    openings, _ = planted(1)
    assert representatives(openings, 7) == representatives(openings, 7)


def test_the_elbow_is_where_the_curve_stops_falling() -> None:
    assert elbow([100.0, 50.0, 10.0, 9.0, 8.0, 7.0]) == 2
    assert elbow([100.0, 12.0, 11.0, 10.0, 9.0]) == 1
    assert elbow([0.0, 0.0, 0.0]) == 0
