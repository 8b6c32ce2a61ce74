"""A policy that collapses is answered: once it is sure, with what the run file says, twice at most."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from prefixrl.common.run import json_lines
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


def test_a_new_one_that_reads_the_figures_again_goes_on_as_the_first(tmp_path: Path) -> None:
    trace = [*HEALTHY, *ONE_TEXT * 3, *HEALTHY, *ONE_TEXT * 3]
    whole = Collapse("raise_entropy", 0.03)
    at = answered(whole, trace)
    lines = [FigureLine(*figures) for figures in trace[:50]]
    json_lines.write(tmp_path / "lines.jsonl", lines)
    read = json_lines.read(tmp_path / "lines.jsonl", FigureLine)
    resumed = Collapse("raise_entropy", 0.03)
    answered(resumed, [(line.reward, line.entropy, line.share) for line in read])
    assert answered(resumed, trace[50:], first=50) == [i for i in at if i >= 50]
    assert (whole.entropy, whole.answers) == (resumed.entropy, resumed.answers)


class FigureLine(msgspec.Struct):
    reward: float
    entropy: float
    share: float


def test_what_a_person_sets_holds_until_the_next_answer() -> None:
    raised, halved = Collapse("raise_entropy", 0.03), Collapse("go_back", 0.03)
    for collapse in (raised, halved):
        assert len(answered(collapse, [*HEALTHY, *ONE_TEXT])) == 1
    raised.take_change(0.02, has_new_rate=False)
    halved.take_change(None, has_new_rate=True)
    assert (raised.entropy, halved.rate_scale) == (0.02, 1.0)
    answered(raised, ONE_TEXT * 3, first=42)
    assert raised.entropy == pytest.approx(0.08)


def test_rewards_below_0_have_a_best_iteration_too() -> None:
    collapse = Collapse("go_back", 0.03)
    trace = [(reward - 1.0, entropy, share) for reward, entropy, share in [*HEALTHY, *ONE_TEXT]]
    assert len(answered(collapse, trace)) == 1
    assert collapse.good_iteration > 20
