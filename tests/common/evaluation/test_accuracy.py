"""Accuracies, pass@k and majorities against slow twins; intervals by how often they hold the truth."""

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.evaluation import accuracy as figures
from support.messages import evaluated


def rows(rewards: Sequence[float]) -> list[figures.EvaluatedRow]:
    return [evaluated(str(i), each) for i, each in enumerate(rewards)]


def answers(problem: str, *given: tuple[str, float]) -> list[figures.EvaluatedRow]:
    return [
        evaluated(problem, reward, text, sample=sample)
        for sample, (text, reward) in enumerate(given)
    ]


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40))
def test_where_every_reward_is_0_or_1_the_interval_is_wilsons(rewards: list[float]) -> None:
    actual = figures.accuracy(rows(rewards))
    assert actual is not None and actual.interval == "wilson"
    n, p = len(rewards), sum(rewards) / len(rewards)
    for end in actual.ci95:
        # The ends are where the score test just rejects: |p - end| = z sqrt(end (1 - end) / n).
        assert abs(p - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / n), abs=1e-6)


@pytest.mark.parametrize("truth", [0.05, 0.3, 0.5, 0.9, 0.98])
def test_wilsons_interval_holds_the_truth_19_times_in_20(truth: float) -> None:
    n = 100
    chances = [math.comb(n, k) * truth**k * (1 - truth) ** (n - k) for k in range(n + 1)]
    covered = sum(
        chance
        for k, chance in enumerate(chances)
        if figures.wilson(k, n)[0] <= truth <= figures.wilson(k, n)[1]
    )
    assert 0.92 <= covered <= 0.99


@pytest.mark.nightly
@pytest.mark.parametrize(("problems", "samples"), [(60, 4), (200, 8)])
def test_the_bootstrap_over_problems_holds_the_truth_19_times_in_20(
    problems: int, samples: int
) -> None:
    # Problems differ in how hard they are: to take their answers for independent would hold it far less often.
    generator = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(300):
        difficulty = generator.beta(0.4, 0.6, problems)
        rewards = generator.random((problems, samples)) < difficulty[:, None]
        low, high = figures.bootstrap(rewards.mean(axis=1).tolist())
        covered += low <= 0.4 <= high
        low, high = figures.wilson(int(rewards.sum()), rewards.size)
        naive += low <= 0.4 <= high
    assert 0.91 <= covered / 300 <= 0.985
    assert naive < covered - 30


def test_where_every_problem_has_one_mean_the_interval_is_not_a_point() -> None:
    assert figures.bootstrap([1.0] * 20) == figures.wilson(20, 20)
    low, high = figures.bootstrap([0.5])
    assert low < 0.1 and high > 0.9


@given(st.data())
def test_pass_at_k_is_the_share_of_draws_of_k_answers_that_hold_a_right_one(
    data: st.DataObject,
) -> None:
    rewards = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    k = data.draw(st.integers(1, len(rewards)))
    draws = [any(draw) for draw in itertools.combinations(rewards, k)]
    actual = figures.pass_at(sum(rewards), len(rewards), k)
    assert actual == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    # Over all outcomes of 6 answers that are right with chance p, its mean is 1 - (1 - p)^k.
    p, n = 0.3, 6
    for k in range(1, n + 1):
        mean = sum(
            math.comb(n, right) * p**right * (1 - p) ** (n - right) * figures.pass_at(right, n, k)
            for right in range(n + 1)
        )
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_the_majority_is_the_answer_that_stands_most_often() -> None:
    assert figures.majority_reward(answers("p", ("3", 0.0), ("4", 1.0), ("4", 1.0))) == 1.0
    assert figures.majority_reward(answers("p", ("3", 0.0), ("4", 1.0))) == 0.0, (
        "the earliest of equals"
    )
    assert figures.majority_reward(answers("p", ("", 0.0), ("", 0.0), ("4", 1.0))) == 1.0, (
        "no answer, no vote"
    )
    assert figures.majority_reward(answers("p", ("", 0.0))) == 0.0


def test_several_answers_to_a_problem_count_as_one_problem() -> None:
    actual = figures.accuracy(
        [
            *answers("p", ("1", 1.0), ("1", 1.0), ("2", 0.0), ("2", 0.0)),
            *answers("q", ("1", 1.0), ("1", 1.0), ("1", 1.0), ("3", 0.0)),
        ]
    )
    assert actual is not None
    assert (actual.problems, actual.samples, actual.interval) == (2, 4, "bootstrap")
    assert actual.accuracy == pytest.approx((0.5 + 0.75) / 2)
    assert actual.majority == 1.0
    assert actual.pass_at == {
        "1": pytest.approx(0.625),
        "2": pytest.approx((5 / 6 + 1) / 2),
        "4": 1.0,
    }


def test_pass_at_k_is_told_only_for_k_answers_that_every_problem_has() -> None:
    failed = evaluated("p", 0.0, status="error", sample=3)
    actual = figures.accuracy(
        [*answers("p", *[("1", 1.0)] * 3), failed, *answers("q", *[("1", 0.0)] * 4)]
    )
    assert actual is not None and actual.pass_at == {"1": 0.5, "2": 0.5, "3": 0.5}


def test_over_runs_the_interval_is_students() -> None:
    mean, (low, high) = figures.over_runs([0.70, 0.74, 0.72, 0.76])
    # 3 degrees of freedom: t = 3.1824, standard error 0.0258199 / 2.
    assert mean == pytest.approx(0.73)
    assert (low, high) == pytest.approx((0.73 - 0.041085, 0.73 + 0.041085), abs=1e-5)


def test_answers_that_the_verifier_finds_equal_vote_for_the_first_of_them() -> None:
    given = answers("p", ("7", 0.0), ("0.5", 1.0), (r"\frac12", 1.0), ("7", 0.0), ("1/2", 1.0))
    assert figures.majority_reward(given) == 0.0, "as text, 7 stands most often"
    votes = ("7", "0.5", "0.5", "7", "0.5")
    assert (
        figures.majority_reward(
            [
                msgspec.structs.replace(row, vote=vote)
                for row, vote in zip(given, votes, strict=True)
            ]
        )
        == 1.0
    )
