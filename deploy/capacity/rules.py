"""The broker's rules on counts of groups: admission, and the choice of a batch. Pure.

They are `learner/broker/groups/{window,admission}.py` without prompt filters, evaluations and drift. Commands import no
daemon, so the rules stand here once more; a test holds them equal (tests/deploy/capacity/test_capacity_rules.py).
"""

import math
from collections import Counter
from dataclasses import dataclass

SHORT_WAIT, LONG_WAIT = 0.01, 0.1
GROWTH, DECAY = 1 / 8, 1 / 64
AHEAD = 1 / 2
NEWEST_SHARE = 0.1


@dataclass
class Counts:
    """Live groups by version, before and after they are scored; those of the batch in training."""

    ahead: Counter[int]
    """Being sampled, or sampled and at no scorer."""
    scoring: Counter[int]
    scored: Counter[int]
    queued: int = 0
    """Handed back, to be sampled again at a newer version; they count in the window alone."""
    batched: int = 0

    @property
    def accepted(self) -> int:
        """Number of groups that are scored and not trained."""
        return self.scored.total() + self.batched

    @property
    def under_way(self) -> int:
        """Number of groups that have a version and are not scored."""
        return self.ahead.total() + self.scoring.total()


class Admittance:
    """The window, and the rule of admission inside it."""

    def __init__(self, batch_groups: int, max_staleness: int, is_just_in_time: bool = True) -> None:
        self.batch_groups, self.max_staleness = batch_groups, max_staleness
        self.is_active = is_just_in_time and max_staleness > 0
        self.widest = float(batch_groups * max_staleness)
        self.lead = float(batch_groups) + (0.0 if self.is_active else self.widest)
        self.sampling_s = self.scoring_s = 0.0
        """Mean times of a group at a rollout and at a scorer."""

    def may_begin(self, version: int, completed: int, counts: Counts, slots: float, rollouts: int) -> bool:
        """Return True if a new group may be sampled, with so many places for groups at scorers."""
        newer = version - completed
        if self._room(newer, self.widest, counts) - counts.queued < 1:
            return False
        if not self.is_active or self._room(newer, 0.0, counts) >= 1:
            return True
        under_way, scored = counts.under_way, counts.scored.total()
        if not under_way and scored < self.batch_groups:
            return True
        room = self.lead + self.batch_groups * newer - scored
        return under_way + 1 <= room and counts.ahead.total() + 1 <= self._most_ahead(slots, rollouts)

    def may_sample_again(self, version: int, completed: int, counts: Counts) -> bool:
        """Return True if a group that was handed back may be sampled at a version."""
        return self._room(version - completed, self.widest, counts) >= 1

    def _room(self, newer: int, cap: float, counts: Counts) -> int:
        needed = max(0, math.floor(self.batch_groups * (newer + 1) + cap) - counts.accepted)
        return needed - counts.under_way

    def _most_ahead(self, slots: float, rollouts: int) -> float:
        if not slots or not self.scoring_s:
            return math.inf
        return slots * (AHEAD + self.sampling_s / self.scoring_s) + rollouts

    def note_sampled(self, group_s: float) -> None:
        """Take the time of one more group at a rollout into the mean."""
        self.sampling_s += NEWEST_SHARE * (group_s - self.sampling_s) if self.sampling_s else group_s

    def note_scored(self, group_s: float) -> None:
        """Take the time of one more group at a scorer into the mean."""
        self.scoring_s += NEWEST_SHARE * (group_s - self.scoring_s) if self.scoring_s else group_s

    def finish_iteration(self, iteration_s: float, short_s: float) -> None:
        """Move the lead after an iteration in which the learner waited so long for numbers."""
        if not self.is_active or iteration_s <= 0:
            return
        if short_s > SHORT_WAIT * iteration_s:
            self.lead += GROWTH * self.batch_groups * (2 if short_s > LONG_WAIT * iteration_s else 1)
        else:
            self.lead -= DECAY * (self.lead - self.batch_groups)
        self.lead = min(max(self.lead, float(self.batch_groups)), self.batch_groups + self.widest)

    def choice(self, iteration: int, counts: Counts) -> Counter[int] | None:
        """Return the batch of an iteration, by version; None where it has to wait."""
        if counts.scored.total() < self.batch_groups:
            return None
        taken: Counter[int] = Counter()
        for version in sorted(counts.scored):
            taken[version] = min(counts.scored[version], self.batch_groups - taken.total())
        due = counts.scored - taken + counts.ahead + counts.scoring
        groups = 0
        for version in sorted(due):
            groups += due[version]
            if groups > self.batch_groups * (version + self.max_staleness - iteration):
                return None
        return +taken
