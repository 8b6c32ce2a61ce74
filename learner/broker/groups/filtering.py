"""The prompt filter (PRIME, DAPO), and the shares of passing and failing groups that end a run. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prefixrl.common.config.algorithm import is_within
from prefixrl.common.wire.messages.groups import ScoredGroup, TextVerdict

CUT: dict[Literal["any", "all"], str] = {
    "any": "a text cut by the length limit",
    "all": "all texts cut by the length limit",
}
TRUNCATED = "every row cut by the length limit"


@dataclass(frozen=True)
class AccuracyFilter:
    """Band on the mean reward of a group, rule for cut texts, and least share to pass."""

    low: float
    high: float
    limit_groups: int
    """Number of newest judged groups that the share is taken over."""
    min_pass_rate: float
    truncated: Literal["any", "all"] | None = None
    """Groups of which any text was cut by the length limit, or all, do not pass."""
    fills: bool = False
    """Groups that do not pass are kept as spares, for an iteration that lacks others (`filter.fill`)."""

    def objection(self, rewards: Sequence[float]) -> str | None:
        """Return why a group is not trained, None if it passes; `rewards`: of its judged rows."""
        mean = math.fsum(rewards) / len(rewards)
        if is_within(mean, self.low, self.high):
            return None
        if mean <= 0:
            return "accuracy 0"
        return "accuracy 1" if mean >= 1 else "accuracy outside band"

    def objection_to_cuts(self, texts: Sequence[TextVerdict]) -> str | None:
        """Return why cut texts keep a group from training; None if they do not."""
        cut = [
            text.finish == "length"
            for text in texts
            if text.is_judged or text.status == "truncated"
        ]
        if self.truncated is None or not (
            any(cut) if self.truncated == "any" else cut and all(cut)
        ):
            return None
        return CUT[self.truncated]


class Objection(NamedTuple):
    """The reason why a scored group is not trained, and the state in which it ends."""

    state: Literal["failed", "filtered", "expired"]
    cause: str


def objection(group: ScoredGroup, band: AccuracyFilter | None) -> Objection | None:
    """Return why a scored group is not trained, by right and wrong answers; None where it is accepted."""
    outcomes = group.outcomes
    cut = [verdict.status for verdict in group.verdicts].count("truncated")
    if band and (cause := band.objection_to_cuts(group.texts)):
        return Objection("filtered", cause)
    if cut == len(group.verdicts):
        # Its prompt would most likely be cut again: it fails at once, and counts against broker.max_failure_share.
        return Objection("failed", TRUNCATED)
    if not outcomes:
        faults = group.faults
        commonest = max(faults, key=lambda fault: (faults[fault], fault))
        rows = "every row that was not cut" if cut else "every row"
        return Objection(
            "expired", f"verifier error on {rows}{f': {commonest}' if commonest else ''}"
        )
    cause = band.objection(outcomes) if band else None
    return Objection("filtered", cause) if cause else None


def spare_cause(group: ScoredGroup, band: AccuracyFilter | None) -> str | None:
    """Return why a scored group is only a spare; None if it is trained or ends."""
    fault = objection(group, band) if band and band.fills else None
    if fault is None or fault.state != "filtered":
        return None
    return fault.cause if group.outcomes else None


@dataclass
class PassRate:
    """Counts of the newest judged groups that passed a filter."""

    filter: AccuracyFilter
    newest: deque[bool] = field(init=False)
    """True for each group that passed."""
    passed: int = 0
    """Number of groups that passed."""

    def __post_init__(self) -> None:
        self.newest = deque(maxlen=self.filter.limit_groups)

    def count_groups(self, *passed: bool) -> None:
        """Count judged groups, the oldest first."""
        for has_passed in passed:
            self.passed += has_passed - (
                self.newest[0] if len(self.newest) == self.newest.maxlen else False
            )
            self.newest.append(has_passed)

    @property
    def judged(self) -> int:
        """Number of groups counted, at most `limit_groups`."""
        return len(self.newest)

    @property
    def is_too_low(self) -> bool:
        """True if enough groups were judged, and no group or too small a share passed."""
        is_full, passed = self.judged == self.filter.limit_groups, self.passed
        return (
            is_full
            and not self.filter.fills
            and (not passed or passed < self.filter.min_pass_rate * self.judged)
        )


class FailureShare:
    """Share of rows without sample or verdict, over the newest groups ended or accepted."""

    def __init__(self, groups: int, most: float) -> None:
        self.newest = deque[float](maxlen=groups)
        """Share of failed rows of each group."""
        self.most = most
        self._failing = 0
        """Number of these groups with a failed row."""
        self.is_too_high = False
        """True if enough groups were counted, and more than `most` of them failed."""

    def count_groups(self, *shares: float) -> None:
        """Count groups that ended or were accepted, the oldest first."""
        for share in shares:
            is_full = len(self.newest) == self.newest.maxlen
            self._failing += (share > 0) - (is_full and self.newest[0] > 0)
            self.newest.append(share)
        # The share is a sum over hundreds of groups, and at most that of the groups with a failed row.
        may_be = (
            len(self.newest) == self.newest.maxlen and self._failing / len(self.newest) > self.most
        )
        self.is_too_high = may_be and self.failed_fraction > self.most

    @property
    def failed_fraction(self) -> float:
        """Share of failed rows of these groups, each group counting the same."""
        return math.fsum(self.newest) / max(1, len(self.newest))


class Starved(NamedTuple):
    """The finding that there will be no next batch."""

    why: Literal["filter", "failures", "data"]
    """`data`: no prompt is left and nothing was trained at all."""
