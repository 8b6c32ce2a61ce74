"""Scores of steps as rewards of the tokens that end them, and their baselines: pure.

    row            step 1      step 2          A_t = sum_{s >= t} gamma^(s-t) (reward of s), beside the outcome's
    tokens         . . . .|. . . . . .|        reward of s: scale x (score - offset) at the token that ends a step
    rewards              r_1         r_2

A row's mean score is mu_j. Baselines are those of `implicit_reward.py` with these means, but for "zscore": that is
group normalisation with process supervision (Shao et al. 2024, section 4.1.3), over all steps of the group.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from prefixrl.learner.models.batch import Sample
from prefixrl.learner.training.implicit_reward import BaselineForm, RowBaseline, row_baselines
from prefixrl.learner.training.plan import by_group


class StepMoments(NamedTuple):
    """The scores of one row: their number, mean, and sum of squared deviations from it."""

    number: float
    mean: float
    deviations: float


def row_steps(sample: Sample) -> tuple[tuple[int, float], ...]:
    """Return where a row's steps end, and their scores; without steps score 0 at its last token.

    Raises:
        ValueError: a step ends outside the row.
    """
    for end, _ in sample.steps:
        if not 0 < end <= len(sample.tokens):
            raise ValueError(
                f"a step of group {sample.group} ends after {end} tokens; its row has {len(sample.tokens)}"
            )
    return sample.steps or ((len(sample.tokens), 0.0),)


def step_moments(steps: Sequence[tuple[int, float]]) -> StepMoments:
    """Return the moments of a row's steps."""
    scores = [score for _, score in steps]
    mean = math.fsum(scores) / len(scores)
    return StepMoments(len(scores), mean, math.fsum((score - mean) ** 2 for score in scores))


def step_baselines(
    moments: Sequence[StepMoments], groups: Sequence[int], form: BaselineForm, floor: float
) -> list[RowBaseline]:
    """Return the baselines of the scores of every row.

    Args:
        moments: of all rows of the iteration.
        groups: the group of each.
        form: "zscore": a score less the mean of the group's scores, divided by their unbiased deviation and `floor`;
            the others as in `row_baselines`.
        floor: added to the deviation.
    """
    if form != "zscore":
        return row_baselines([row.mean for row in moments], groups, form)
    of_groups = {group: _zscore(rows, floor) for group, rows in by_group(moments, groups).items()}
    return [of_groups[group] for group in groups]


def _zscore(rows: Sequence[StepMoments], floor: float) -> RowBaseline:
    """Return the baseline of a group; scale 0 where a row is alone or all scores are equal."""
    count = sum(each.number for each in rows)
    mean = math.fsum(each.number * each.mean for each in rows) / count
    deviations = math.fsum(each.deviations + each.number * (each.mean - mean) ** 2 for each in rows)
    if len(rows) == 1 or deviations == 0.0:
        return RowBaseline(mean, 0.0)
    return RowBaseline(mean, 1.0 / (math.sqrt(deviations / (count - 1)) + floor))
