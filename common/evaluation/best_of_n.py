"""Test-time search: one of several answers, chosen by scores of their steps. Pure.

    prm_last_max    the answer whose last step has the highest score
    prm_last_vote   the answer with the highest sum of such scores over all answers equal to it

`min` and `product` in place of `last` take the lowest score of the steps, and their product. The names are OpenR's.
Which answers are equal says the vote that each row has.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from prefixrl.common.wire.verdicts import Aggregate, aggregated

AGGREGATES: tuple[Aggregate, ...] = ("last", "min", "product")
CHOICES = tuple(f"prm_{how}_{by}" for by in ("max", "vote") for how in AGGREGATES)


class ScoredAnswer(Protocol):
    """A judged answer with the scores of its steps."""

    @property
    def reward(self) -> float:
        """The verifier's."""

    @property
    def ballot(self) -> str:
        """The answer that it votes for; "" without an answer."""

    @property
    def scores(self) -> tuple[float, ...] | None:
        """Score of every step; None where the text was not scored."""


def chosen_rewards(rows: Sequence[ScoredAnswer]) -> dict[str, float]:
    """Return the reward of the chosen answer to one problem, by each of CHOICES.

    Texts without an answer are not chosen; without any answer the reward is 0. A text that was not scored has score 0.
    Of several with one score the earliest is chosen.
    """
    answered = [row for row in rows if row.ballot]
    if not answered:
        return dict.fromkeys(CHOICES, 0.0)
    found: dict[str, float] = {}
    for how in AGGREGATES:
        scores = [aggregated(row.scores or (), how) for row in answered]
        best = max(range(len(answered)), key=scores.__getitem__)
        winner = _most_voted([row.ballot for row in answered], scores)
        found[f"prm_{how}_max"] = answered[best].reward
        found[f"prm_{how}_vote"] = next(row.reward for row in answered if row.ballot == winner)
    return found


def _most_voted(ballots: Sequence[str], scores: Sequence[float]) -> str:
    """Return the ballot with the highest sum of scores, the earliest of several."""
    parts: dict[str, list[float]] = defaultdict(list)
    for ballot, score in zip(ballots, scores, strict=True):
        parts[ballot].append(score)
    return max(parts, key=lambda ballot: math.fsum(parts[ballot]))
