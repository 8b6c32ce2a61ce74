"""The broker's window and admission, asked with counts of groups instead of groups. Pure."""

from collections import Counter
from dataclasses import dataclass

from prefixrl.learner.broker.groups.admission import Admission, Supply
from prefixrl.learner.broker.groups.window import Window


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


class GroupRules:
    """The rules for groups of a run without prompt filter, evaluations and drift."""

    def __init__(self, batch_groups: int, max_staleness: int, is_just_in_time: bool = True) -> None:
        self._window = Window(batch_groups, max_staleness)
        self.admission = Admission(
            self._window, "just_in_time" if is_just_in_time else "as_early_as_allowed"
        )

    def may_begin(
        self, version: int, completed: int, counts: Counts, slots: float, rollouts: int
    ) -> bool:
        """Return True if a new group may be sampled, with so many places for groups at scorers."""
        room = self._window.room(
            version, completed, counts.accepted, counts.under_way + counts.queued
        )
        if not room:
            return False
        self.admission.supply = Supply(rollouts, slots)
        states = {"sampling": counts.ahead.total(), "scoring": counts.scoring.total()}
        states |= {"scored": counts.scored.total(), "batched": counts.batched}
        return self.admission.size(1, version, completed, states) == 1

    def may_sample_again(self, version: int, completed: int, counts: Counts) -> bool:
        """Return True if a group that was handed back may be sampled at a version."""
        return self._window.room(version, completed, counts.accepted, counts.under_way) >= 1

    def choice(self, iteration: int, counts: Counts) -> Counter[int] | None:
        """Return the batch of an iteration, by version; None where it has to wait."""
        window = self._window
        if counts.scored.total() < window.batch_groups:
            return None
        taken = window.smallest(counts.scored, window.batch_groups)
        left = counts.scored - taken + counts.ahead + counts.scoring
        deadlines = Counter({window.deadline(version): groups for version, groups in left.items()})
        return None if window.overfull(iteration + 1, deadlines) is not None else +taken
