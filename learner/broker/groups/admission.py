"""Admission, just in time: how much of what the window allows is begun now. Pure.

S is a promise, not a target. Begun as early as the window allows, every group waits for its iteration until it is
exactly S versions old, whatever is slow. Two things hide the latency, and no more than they need is under way:

    lead    groups under way or scored, without the batch in training: one batch + `_kept` x (largest number under way
            at the end of the last 8 iterations), at most B + cap. `_kept` shrinks while the learner never waits: on
            busy cores more groups at once are slower, and would ask for more
    ahead   groups begun and not at a scorer: one item per two that scorers hold, one per rollout, and what is sampled
            while an item is scored. This limit acts where scorers are the slowest part: there a longer lead would
            only be a longer queue
    cap     limit of the lead beyond one batch, from B S groups down to 0. It shrinks while old samples are worth too
            little of a fresh one, and grows again slowly. At 0 the run is synchronous: only the newest version is
            sampled

Groups that the next iteration itself lacks, at the newest version, are always begun: nothing can be younger. Two more
rules keep a run from a standstill. If nothing is under way and an iteration lacks groups, nothing is refused. Groups
that wait to be sampled again have their place already: neither they nor other groups wait for it.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prefixrl.common.config.algorithm import AdmissionRule
from prefixrl.learner.broker.groups.window import Window

RECENT_ITERATIONS = 8
"""Newest iterations that the lead looks at: it has followed a change after so many."""
SHORT_WAIT, KEPT, REGAINED = 0.01, 15 / 16, 4
"""Part of an iteration below which a wait does not count; part of the lead kept after an iteration without a wait; gain
per part waited."""
AHEAD = 1 / 2
"""Items that wait for scorers, per item that scorers hold."""
MOST_SHRINKAGE, LEAST_SHRINKAGE = 0.5, 0.9
"""Bounds of the factor on what is begun ahead where old samples are worth too little."""
RECOVERY = 1 / 16
"""Growth of the cap per iteration, in batches, while old samples are worth enough."""
LEAST_CAP = 1 / 16
"""A cap below this, in batches, is 0."""
NEWEST_SHARE = 0.1
"""Weight of the newest item in the mean times."""

Change = Literal["tightened", "restored"]


class Supply(NamedTuple):
    """The workers that are ready."""

    rollouts: int = 0
    scoring_slots: float = 0
    """Items that scorers hold at once."""


@dataclass
class ItemTimes:
    """Mean seconds of an item at a rollout and at a scorer; 0 until one is known."""

    sampling_s: float = 0.0
    scoring_s: float = 0.0

    def note_item(self, stage: Literal["sampling_s", "scoring_s"], item_s: float) -> None:
        """Add the time of one item to the mean."""
        before = getattr(self, stage)
        setattr(self, stage, before + NEWEST_SHARE * (item_s - before) if before else item_s)


class Admission:
    """The rule of a run, its lead and its cap.

    They are lost with the broker and found again: a new one begins with the shortest lead and the widest cap. Both only
    hold work back, so no value of them can break the window or bring a run to a standstill.
    """

    def __init__(
        self,
        window: Window,
        rule: AdmissionRule = "as_early_as_allowed",
        min_ess: float = 0.0,
        groups_per_item: int = 1,
    ) -> None:
        self._window, self._min_ess, self._groups_per_item = window, min_ess, groups_per_item
        self.rule = rule
        self.is_active = rule == "just_in_time" and window.max_staleness > 0
        """False: everything that the window allows is begun."""
        self.widest = float(window.batch_groups * window.max_staleness)
        self.cap = self.widest
        """Most groups of lead beyond one batch, by drift."""
        self.lead = float(window.batch_groups) + (0.0 if self.is_active else self.widest)
        self._under_way = deque[float](maxlen=RECENT_ITERATIONS)
        """Groups under way at the end of an iteration, as many as without the learner's waits."""
        self._kept = 1.0
        self.waited_s = 0.0
        """Seconds that the learner waited for numbers in the newest iteration."""
        self.supply = Supply()
        self.times = ItemTimes()
        self._unmoved = 0
        """Iterations until a change of the cap shows in what is trained."""

    def size(
        self, item_groups: int, version: int, completed: int, states: Mapping[str, int]
    ) -> int:
        """Return how many of `item_groups` groups to begin at the installed `version`; the window allows all."""
        if not self.is_active or not item_groups:
            return item_groups
        scored = states.get("scored", 0)
        accepted = scored + states.get("batched", 0)
        under_way = _under_way(states)
        ahead = under_way - states.get("scoring", 0)
        lacking = self._room(version - completed, 0.0, accepted, under_way)
        fewest = max(0, min(item_groups, lacking))
        if self._room(version - completed, self.cap, accepted, under_way) < item_groups:
            return fewest
        if not under_way and scored < self._window.batch_groups:
            return item_groups  # the learner will wait for groups that no worker has begun
        # The lead counts as of the newest version: a rollout that will install it soon has a batch less to begin.
        room = self.lead - self._window.batch_groups * (completed - version) - scored
        is_needed = under_way + item_groups <= self._window.over_sampling * room
        times, slots = self.times, self.supply.scoring_slots
        if slots and times.scoring_s:
            items = slots * (AHEAD + times.sampling_s / times.scoring_s) + self.supply.rollouts
            is_needed &= ahead + item_groups <= self._groups_per_item * items
        return item_groups if is_needed else fewest

    def may_resample(self, version: int, completed: int) -> bool:
        """Return True if groups that have a place already may be sampled at this version."""
        return (
            not self.is_active
            or self._window.batch_groups * (version + 1 - completed) + self.cap > 0
        )

    def _room(self, newer: int, cap: float, accepted: int, under_way: int) -> int:
        """Return the room of a window that is `cap` groups wide instead of B S."""
        needed = max(0, math.floor(self._window.batch_groups * (newer + 1) + cap) - accepted)
        return math.ceil(self._window.over_sampling * needed) - under_way

    def finish_iteration(
        self, iteration_s: float, waited_s: float, states: Mapping[str, int], old_ess: float | None
    ) -> Change | None:
        """Adjust lead and cap after an iteration; return the change that the log tells.

        Args:
            iteration_s: Time since the iteration before was finished; 0: unknown.
            waited_s: Time of it that the learner waited for numbers (fewer than B were scored).
            states: Number of live groups by state.
            old_ess: Effective sample size of old samples as a fraction of that of fresh ones; None without old samples.
        """
        self.waited_s = waited_s
        if not self.is_active:
            return None
        was_widest = self.cap == self.widest
        self._move_cap(None if old_ess is None or math.isnan(old_ess) else old_ess)
        if (worked_s := iteration_s - waited_s) > 0.0:
            # By Little's law it grows with the throughput, which the wait has lowered.
            self._under_way.append(
                _under_way(states) * iteration_s / worked_s / float(self._window.over_sampling)
            )
            part = waited_s / iteration_s
            self._kept = (
                KEPT * self._kept if part <= SHORT_WAIT else min(1.0, self._kept + REGAINED * part)
            )
        self.lead = self._window.batch_groups + min(
            self.cap, math.ceil(self._kept * max(self._under_way, default=0.0))
        )
        if was_widest == (self.cap == self.widest):
            return None
        return "tightened" if was_widest else "restored"

    def _move_cap(self, old_ess: float | None) -> None:
        batch = self._window.batch_groups
        if self._unmoved:
            self._unmoved -= 1
        elif old_ess is not None and old_ess < self._min_ess:
            ahead = min(self.cap, self.lead)
            # What is trained in the next iterations was begun before: its ESS says nothing about the new cap.
            self._unmoved = math.ceil(ahead / batch)
            # The factor on the age that leads to the least ESS; each version costs alike.
            factor = math.log(self._min_ess) / math.log(old_ess) if old_ess > 0 else 0.0
            cap = ahead * min(max(factor, MOST_SHRINKAGE), LEAST_SHRINKAGE)
            self.cap = cap if cap >= LEAST_CAP * batch else 0.0
        else:
            self.cap = min(self.widest, self.cap + RECOVERY * batch)


def _under_way(states: Mapping[str, int]) -> int:
    return sum(states.get(state, 0) for state in ("sampling", "sampled", "scoring"))
