"""Answers chosen by scores of their steps, against slow twins; the figures of an arm."""

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.evaluation.accuracy import (
    CHOICES,
    EvaluatedRow,
    accuracy,
    chosen_rewards,
    majority_reward,
)
from support.messages import evaluated

SCORES = st.none() | st.lists(st.sampled_from([0.125, 0.25, 0.5, 0.75, 1.0]), max_size=3).map(tuple)


def row(
    extracted: str,
    reward: float,
    scores: tuple[float, ...] | None,
    problem: str = "p",
    vote: str = "",
) -> EvaluatedRow:
    return evaluated(problem, reward, extracted, vote=vote, scores=scores)


def slow_score(scores: tuple[float, ...] | None, how: str) -> float:
    if not scores:
        return 0.0
    product = 1.0
    for score in scores:
        product *= score
    return {"last": scores[-1], "min": sorted(scores)[0], "product": product}[how]


def slow_choice(rows: list[EvaluatedRow], how: str, by: str) -> float:
    """Try every answer: it is chosen if no other one is better, and no earlier one as good."""
    worth: list[tuple[float, float]] = []
    for one in rows:
        ballot = one.vote or one.extracted
        if not ballot:
            continue
        if by == "max":
            worth.append((slow_score(one.scores, how), one.reward))
            continue
        together = [other for other in rows if (other.vote or other.extracted) == ballot]
        worth.append((sum(slow_score(other.scores, how) for other in together), together[0].reward))
    for index, (value, reward) in enumerate(worth):
        if all(value > other for other, _ in worth[:index]) and all(
            value >= other for other, _ in worth[index:]
        ):
            return reward
    return 0.0


@st.composite
def judged(draw: st.DrawFn) -> list[EvaluatedRow]:
    """Answers of which some are equal, with the votes of some compared ones; equal ones may differ in their reward."""
    given_rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["", "1", "2", "3"]), st.sampled_from([0.0, 0.5, 1.0]), SCORES
            ),
            max_size=7,
        )
    )
    same = draw(st.sampled_from(["", "1"]))
    return [row(*each, vote=same if each[0] == "3" else "") for each in given_rows]


@given(judged())
def test_every_choice_is_the_one_that_no_other_answer_beats(rows: list[EvaluatedRow]) -> None:
    ways = [(how, by) for how in ("last", "min", "product") for by in ("max", "vote")]
    slow = {f"prm_{how}_{by}": slow_choice(rows, how, by) for how, by in ways}
    assert chosen_rewards(rows) == slow
    assert set(slow) == set(CHOICES)


@given(judged())
def test_where_all_scores_are_equal_the_vote_is_the_majority(rows: list[EvaluatedRow]) -> None:
    flat = [msgspec.structs.replace(each, scores=(0.5,)) for each in rows]
    assert chosen_rewards(flat)["prm_last_vote"] == majority_reward(flat)


def test_the_ways_to_choose_differ_where_the_steps_say_different_things() -> None:
    given_rows = [
        row("1", 0.25, (0.3, 0.9)),  # best at its end
        row("2", 0.5, (0.6, 0.6)),  # no bad step
        row("3", 0.75, (0.5, 0.8)),
        row("3.0", 0.75, (0.5, 0.7), vote="3"),  # the same answer
    ]
    actual = chosen_rewards(given_rows)
    assert (actual["prm_last_max"], actual["prm_min_max"], actual["prm_product_max"]) == (
        0.25,
        0.5,
        0.75,
    )
    assert {actual[name] for name in CHOICES if name.endswith("vote")} == {0.75}


def test_a_text_without_an_answer_is_not_chosen_however_good_its_steps_are() -> None:
    given_rows = [row("", 0.0, (1.0, 1.0)), row("4", 1.0, (0.1,)), row("5", 0.0, None)]
    assert set(chosen_rewards(given_rows).values()) == {1.0}
    assert set(chosen_rewards(given_rows[:1]).values()) == {0.0}


def test_the_figures_of_an_arm_are_means_over_problems_and_absent_without_scores() -> None:
    p = [row("1", 1.0, (0.9,)), row("2", 0.0, (0.5,)), row("2", 0.0, (0.6,))]
    q = [row("1", 0.0, (0.9,), "q"), row("2", 1.0, (0.2,), "q"), row("2", 1.0, (0.1,), "q")]
    actual = accuracy([*p, *q])
    assert actual is not None and actual.majority == 0.5
    assert actual.chosen == {name: 0.5 if name.endswith("max") else 0.0 for name in CHOICES}
    without = accuracy([msgspec.structs.replace(each, scores=None) for each in (*p, *q)])
    assert without is not None and without.chosen == {}
    alone = accuracy([p[0], q[0]])
    assert alone is not None and alone.chosen == {}


@pytest.mark.parametrize(
    ("how", "by"), [(how, by) for how in ("last", "min", "product") for by in ("max", "vote")]
)
def test_a_model_that_knows_right_from_wrong_does_better_than_a_majority(how: str, by: str) -> None:
    rng, rows = random.Random(f"{how} {by}"), []
    for problem in range(200):
        for _ in range(8):
            is_right = rng.random() < 0.3
            answer = "right" if is_right else rng.choice(["a", "a", "b"])
            good = tuple(
                min(1.0, max(0.0, rng.gauss(0.7 if is_right else 0.4, 0.15))) for _ in range(3)
            )
            rows.append(row(answer, float(is_right), good, str(problem)))
    actual = accuracy(rows)
    assert actual is not None and actual.majority is not None
    assert math.isfinite(actual.chosen[f"prm_{how}_{by}"])
    assert actual.chosen[f"prm_{how}_{by}"] > actual.majority + 0.15 > actual.accuracy
