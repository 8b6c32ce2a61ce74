"""A policy that collapses is answered: once it is sure, with what the run file says, twice at most."""

from collections.abc import Sequence
from typing import get_args

import pytest

from prefixrl.learner.run.collapse import PATIENCE, RECOVERY, Collapse, OnCollapse

Trace = Sequence[tuple[float, float, float]]
"""Reward, entropy and share of the commonest text by iteration."""
HEALTHY: Trace = [(0.3 + 0.01 * i, 1.0 - 0.01 * i, 0.1) for i in range(30)]
ONE_TEXT: Trace = [(0.35, 0.3, 0.95)] * 12
LEARNED: Trace = [(0.95, 0.02, 0.95)] * 60


def answered(collapse: Collapse, trace: Trace, first: int = 0) -> list[int]:
    """The iterations that were answered."""
    return [
        first + i
        for i, (reward, entropy, share) in enumerate(trace)
        if collapse.add_iteration(
            first + i,
            {"reward": reward, "entropy": entropy, "commonest_text_fraction": share},
        )
    ]


def test_a_larger_bonus_answers_a_policy_that_writes_one_text() -> None:
    collapse = Collapse("raise_entropy", 0.001)
    at = answered(collapse, [*HEALTHY, *ONE_TEXT])
    assert len(at) == 1 and 30 + PATIENCE - 1 <= at[0] < 40
    assert (collapse.entropy, collapse.rate_scale) == (0.01, 1.0)


def test_going_back_halves_the_rates_and_names_the_best_iteration() -> None:
    collapse = Collapse("go_back", 0.03)
    assert len(answered(collapse, [*HEALTHY, *ONE_TEXT])) == 1
    assert (collapse.entropy, collapse.rate_scale) == (0.03, 0.5)
    assert 25 <= collapse.good_iteration <= 30


@pytest.mark.parametrize("on_collapse", get_args(OnCollapse))
def test_a_policy_that_learned_its_task_is_not_answered(on_collapse: OnCollapse) -> None:
    collapse = Collapse(on_collapse, 0.03)
    assert answered(collapse, [*HEALTHY, *LEARNED]) == []
    assert (collapse.entropy, collapse.rate_scale) == (0.03, 1.0)


def test_a_local_optimum_is_answered_although_the_reward_never_fell() -> None:
    """A task of four operations under GRPO: one text in nine rows of ten, and a reward of 0.575 to the end."""
    rising = [(0.3 + 0.005 * i, 1.0 - 0.015 * i, min(0.9, 0.1 + 0.02 * i)) for i in range(55)]
    collapse = Collapse("raise_entropy", 0.001)
    assert answered(collapse, [*rising, *[(0.575, 0.2, 0.9)] * 20])


def test_a_single_bad_iteration_is_no_collapse() -> None:
    trace = [*HEALTHY, *[ONE_TEXT[0], *HEALTHY[-3:]] * 5]
    assert answered(Collapse("go_back", 0.03), trace) == []


def test_a_warning_changes_nothing() -> None:
    collapse = Collapse("warn", 0.03)
    assert answered(collapse, [*HEALTHY, *ONE_TEXT * 9]) == []
    assert (collapse.entropy, collapse.rate_scale) == (0.03, 1.0)


@pytest.mark.parametrize("on_collapse", ["raise_entropy", "go_back"])
def test_an_answer_has_time_to_help_and_there_are_two(on_collapse: OnCollapse) -> None:
    collapse = Collapse(on_collapse, 0.03)
    at = answered(collapse, [*HEALTHY, *ONE_TEXT * 20])
    assert len(at) == 2 and at[1] - at[0] >= RECOVERY


def test_what_it_knows_follows_from_the_figures_alone() -> None:
    trace = [*HEALTHY, *ONE_TEXT * 3, *HEALTHY, *ONE_TEXT * 3]
    whole, resumed = Collapse("raise_entropy", 0.03), Collapse("raise_entropy", 0.03)
    at = answered(whole, trace)
    half = answered(resumed, trace[:50]) + answered(resumed, trace[50:], first=50)
    assert at == half and whole.entropy == resumed.entropy
