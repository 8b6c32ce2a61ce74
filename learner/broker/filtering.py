"""Which groups are worth training, and when so few pass, or so many fail, that the run must end. Pure.

PRIME (Cui et al. 2025) and DAPO (Yu et al. 2025) drop prompts whose samples are all right or all wrong: with a group baseline
their advantages are zero. The band is inclusive on both sides, as in PRIME's code.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefixrl.common.filtering import is_within


@dataclass(frozen=True)
class AccuracyFilter:
    """An inclusive band on the mean reward of a group, and the least share of groups that must pass."""

    low: float
    high: float
    limit_groups: int
    """The share is taken over this many judged groups, the newest ones."""
    min_pass_rate: float

    def objection(self, rewards: Sequence[float]) -> str | None:
        """Why a group is not trained, None where it passes. `rewards`: of the rows that could be judged, at least one."""
        mean = math.fsum(rewards) / len(rewards)
        if is_within(mean, self.low, self.high):
            return None
        if mean <= 0:
            return "accuracy 0"
        return "accuracy 1" if mean >= 1 else "accuracy outside band"


@dataclass
class PassRate:
    """How many of the newest judged groups passed a filter."""

    filter: AccuracyFilter
    _newest: deque[bool] = field(init=False)

    def __post_init__(self) -> None:
        self._newest = deque(maxlen=self.filter.limit_groups)

    def note(self, has_passed: bool) -> None:
        """Count a judged group."""
        self._newest.append(has_passed)

    @property
    def passed(self) -> int:
        """How many of `judged` passed."""
        return sum(self._newest)

    @property
    def judged(self) -> int:
        """Groups looked at: at most `limit_groups`."""
        return len(self._newest)

    @property
    def is_too_low(self) -> bool:
        """Whether enough groups were judged, and none or too small a share of them passed."""
        if self.judged < self.filter.limit_groups:
            return False
        return not self.passed or self.passed < self.filter.min_pass_rate * self.judged


class FailureShare:
    """Share of rows that could not be sampled or judged, over the newest groups that ended or were accepted."""

    def __init__(self, groups: int, most: float) -> None:
        self._newest: deque[float] = deque(maxlen=groups)
        self.most = most

    def note(self, share: float) -> None:
        """Count a group of whose rows this share failed."""
        self._newest.append(share)

    @property
    def groups(self) -> int:
        """Groups looked at."""
        return len(self._newest)

    @property
    def share(self) -> float:
        """Of the rows of these groups, each group counting the same."""
        return math.fsum(self._newest) / max(1, self.groups)

    @property
    def is_too_high(self) -> bool:
        """Whether enough groups were looked at, and more than `most` of them failed."""
        return self.groups == self._newest.maxlen and self.share > self.most


@dataclass(frozen=True)
class Starved:
    """There will be no next batch as things stand."""

    why: Literal["filter", "failures", "data"]
    """data: no prompt is left and nothing was trained at all."""
