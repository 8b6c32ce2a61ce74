"""Problems asked by their outcomes: the chance that rows differ, the counts, and the state of a resumed run."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from prefixrl.common.journal.records import GroupOutcome, OutcomeCounts
from prefixrl.learner.broker.groups.outcomes import (
    FLOOR,
    Outcomes,
    added,
    differing_share,
    fitted_prior,
)

ROWS = 8


def outcome(seq: int, problem: int, right: float, source: str = "all") -> GroupOutcome:
    return GroupOutcome(seq, problem, source, right, ROWS)


@given(a=st.floats(0.1, 30), b=st.floats(0.1, 30), rows=st.integers(2, 16))
def test_the_share_is_the_mean_of_the_chance_that_rows_differ(
    a: float, b: float, rows: int
) -> None:
    def both_alike(p: float) -> float:
        return float(p**rows + (1.0 - p) ** rows)

    # With x = F^-1(u) the mean over Beta(a, b) has no infinite density at its ends.
    inverse = stats.beta(a, b).ppf
    alike, _ = integrate.quad(lambda u: both_alike(inverse(u)), 0.0, 1.0, limit=200)
    assert differing_share(a, b, rows) == pytest.approx(1.0 - alike, abs=2e-4)


@pytest.mark.parametrize("truth", [(0.2, 0.3), (2.0, 6.0), (1.0, 1.0)])
def test_a_source_is_fitted_by_the_problems_it_had(truth: tuple[float, float]) -> None:
    draws = np.random.default_rng(1)
    counts = Outcomes.of_run(1, ROWS, 10**6, 1)
    for problem in range(4000):
        right = draws.binomial(ROWS, draws.beta(*truth))
        before = counts.by_source.get("all", OutcomeCounts(0))
        counts.by_source["all"] = added(before, outcome(problem, problem, float(right)), 0)
    fitted = fitted_prior(counts.by_source["all"], ROWS)
    assert fitted == pytest.approx(truth, rel=0.15)


def test_before_any_outcome_a_source_is_jeffreys_distribution() -> None:
    assert fitted_prior(OutcomeCounts(0), ROWS) == pytest.approx((0.5, 0.5))


def asked_share(counts: Outcomes, problem: int, source: str = "all", turns: int = 20_000) -> float:
    return sum(counts.is_asked(place, problem, source) for place in range(turns)) / turns


def after_a_pass(rights: dict[int, float]) -> Outcomes:
    counts = Outcomes.of_run(1, ROWS, len(rights), 1)
    for iteration in range(3):
        for seq, (problem, right) in enumerate(rights.items()):
            counts.form_batch(iteration, [outcome(seq, problem, right)])
    return counts


def test_hopeless_and_solved_problems_keep_some_of_their_turns() -> None:
    counts = after_a_pass({0: 0.0, 1: 8.0, 2: 4.0, 3: 0.0, 4: 8.0})
    assert FLOOR - 0.02 < asked_share(counts, 0) < 0.2
    assert FLOOR - 0.02 < asked_share(counts, 1) < 0.2
    assert asked_share(counts, 2) > 0.9
    assert counts.pools == counts.pools.__class__(
        not_asked=0, never_right=2, mixed=1, always_right=2, passed_over=0
    )


def test_a_rarely_right_problem_is_asked_often() -> None:
    counts = Outcomes.of_run(1, ROWS, 40, 2)
    for iteration in range(20):
        rare = outcome(0, 0, float(iteration % 3 == 0))
        counts.form_batch(iteration, [rare, outcome(1, 1, 0.0), outcome(2, 2, 8.0)])
    assert asked_share(counts, 0) > 0.6 > 0.2 > asked_share(counts, 1)


def test_in_a_mixture_turns_go_to_problems_that_differ_rare_ones_among_them() -> None:
    draws, rows_right = random.Random(1), (0.0, 0.0, 1.0, 0.5, 0.05)
    counts = Outcomes.of_run(1, ROWS, 200, 20)
    turns, asked_turns = Counter[float](), Counter[float]()
    place = seq = 0
    for iteration in range(120):
        batch: list[GroupOutcome] = []
        while len(batch) < 20:
            problem = place * 7919 % 200
            chance, is_asked = rows_right[problem % 5], counts.is_asked(place, problem, "all")
            place += 1
            if iteration >= 60:
                turns[chance] += 1
                asked_turns[chance] += is_asked
            if is_asked:
                right = sum(draws.random() < chance for _ in range(ROWS))
                batch.append(outcome(seq, problem, float(right)))
                seq += 1
        counts.form_batch(iteration, batch)
    shares = {chance: asked_turns[chance] / turns[chance] for chance in turns}
    assert shares[0.5] > 0.95 and shares[0.05] > 0.55
    assert shares[0.0] < 0.35 and shares[1.0] < 0.5


def test_one_right_row_makes_a_hopeless_problem_worth_asking() -> None:
    counts = after_a_pass({0: 0.0, 1: 8.0, 2: 4.0, 3: 0.0, 4: 8.0})
    before = counts.differing_chance(0, "all")
    counts.form_batch(3, [outcome(0, 0, 1.0)])
    assert before < 0.2 < 0.5 < counts.differing_chance(0, "all")


def test_a_new_problem_is_judged_by_its_source() -> None:
    counts = Outcomes.of_run(1, ROWS, 200, 2)
    for iteration in range(20):
        pair = [outcome(0, iteration, 0.0, "hard"), outcome(1, 100 + iteration, 4.0, "fair")]
        counts.form_batch(iteration, pair)
    assert asked_share(counts, 50, "hard") < 0.2
    assert asked_share(counts, 150, "fair") > 0.8
    assert (
        counts.differing_chance(50, "hard")
        < counts.differing_chance(50, "new")
        < counts.differing_chance(50, "fair")
    )


def test_counts_fade_so_that_a_hopeless_problem_is_tried_again() -> None:
    counts = Outcomes.of_run(1, ROWS, 40, 2)
    counts.form_batch(0, [outcome(0, 7, 0.0), outcome(1, 8, 4.0)])
    for iteration in range(400):
        pair = [outcome(0, 7 if iteration < 5 else 9, 0.0 if iteration < 5 else 4.0)]
        counts.form_batch(iteration, [*pair, outcome(1, 8, 4.0)])
        if iteration == 5:
            at_once = counts.differing_chance(7, "all")
    assert at_once < 0.6 < 0.9 < counts.differing_chance(7, "all")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, ROWS)), min_size=1, max_size=12))
def test_the_order_of_arrival_decides_nothing(groups: list[tuple[int, int]]) -> None:
    outcomes = [outcome(seq, *group) for seq, group in enumerate(groups)]
    shuffled = random.Random(1).sample(outcomes, len(outcomes))
    cut = len(outcomes) // 2
    one, other = (Outcomes.of_run(1, ROWS, 6, 2) for _ in range(2))
    one.form_batch(0, outcomes)
    other.ended = shuffled[:cut]
    other.form_batch(0, shuffled[cut:])
    assert one.state() == other.state()


def test_a_restored_state_asks_the_same_problems() -> None:
    counts = after_a_pass({0: 0.0, 1: 8.0, 2: 4.0})
    counts.ended.append(outcome(9, 2, 8.0))
    resumed = Outcomes.of_run(1, ROWS, 3, 1)
    resumed.restore(counts.state())
    for either in (counts, resumed):
        either.form_batch(3, [outcome(10, 0, 0.0)])
    assert resumed.state() == counts.state()
    places = range(500)
    assert [resumed.is_asked(place, place % 3, "all") for place in places] == [
        counts.is_asked(place, place % 3, "all") for place in places
    ]


def test_rewards_between_0_and_1_count_as_parts_of_a_right_row() -> None:
    counts = Outcomes.of_run(1, ROWS, 2, 1)
    counts.form_batch(0, [outcome(0, 0, 0.5), outcome(1, 1, 3.5)])
    assert counts.differing_chance(0, "all") < counts.differing_chance(1, "all")
    assert all(value > 0.0 for value in fitted_prior(counts.by_source["all"], ROWS))
