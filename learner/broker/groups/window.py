"""The window: no sample is trained later than S, none is discarded for its age. Pure.

Version = number of completed iterations. B groups are trained per iteration, S is the window, T the length of the run
(where it is known), `consumed` = B x iterations whose batch is chosen. A live group in no batch yet is *accepted*
(scored, passed) or *unverified* (everything before that). f is the over-sampling factor, 1 without a prompt filter.

    admission   a worker with installed version v may start a group iff
                unverified < ceil(f (B min(v + S + 1, T) - consumed - accepted))
    deadline    a group sampled at version v must be in iteration min(v + S, T - 1) at the latest
    choice      iteration t takes the smallest deadlines among the accepted, and only if afterwards, for every t' > t,
                at most B (t' - t) binding groups have a deadline <= t'; otherwise it waits, for named groups
    surplus     an unverified group is surplus once the accepted fill every iteration up to its deadline

With f = 1 every live group is binding. Admission keeps "for every t', at most B (t' - t + 1) live groups have a
deadline <= t'" true, choice keeps it true across the step to t + 1, and with it every group still fits the iteration of
its deadline: none is ever surplus. Taking whatever is finished first is locally harmless and breaks exactly this two
iterations later.

A judged group that a filter objects to may be a *spare* (`filter.fill`): it takes room as an unverified one does, binds
nobody, and stands in where accepted groups are missing; a batch ends the spares that it leaves.

With f > 1 more groups are under way than fit, so only the accepted are binding. The surplus rule keeps the same bound
true for them: every accepted group fits. Their smallest deadlines are then always an allowed choice, and an iteration
waits only until there are enough of them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from prefixrl.learner.broker.groups.states import Group

Entry = tuple[int, int]
"""Deadline and sequence number of a group."""
Deadlines = Iterable[int] | Counter[int]
"""One per group, or the number of groups by deadline."""


@dataclass(frozen=True)
class Window:
    """The values B, S, f and T."""

    batch_groups: int
    max_staleness: int
    over_sampling: Fraction = Fraction(1)
    iterations: int | None = None
    """Length of the run in iterations; None: until the prompts are used up."""

    def room(self, version: int, chosen: int, accepted: int, unverified: int) -> int:
        """Return how many groups a worker with `version` installed may start now (never negative).

        `chosen` is the number of iterations that have their batch, trained or not.
        """
        until = version + self.max_staleness + 1
        if self.iterations is not None:
            until = min(until, self.iterations)
        needed = max(0, self.batch_groups * (until - chosen) - accepted)
        return max(0, math.ceil(self.over_sampling * needed) - unverified)

    def deadline(self, version: int) -> int:
        """Return the last iteration that may train a group sampled at `version`."""
        due = version + self.max_staleness
        return due if self.iterations is None else min(due, self.iterations - 1)

    def overfull(self, iteration: int, deadlines: Deadlines) -> int | None:
        """Return the first t' with more groups due than trained by then (late: `iteration` - 1)."""
        for due, count in _due_by(deadlines):
            if count > self.batch_groups * (due - iteration + 1):
                return max(due, iteration - 1)
        return None

    def full_until(self, iteration: int, deadlines: Deadlines) -> int:
        """Return the last t' whose due groups fill iterations `iteration..t'`, else `iteration - 1`."""
        # Once full, always full: training takes B groups and one iteration.
        full = iteration - 1
        for due, count in _due_by(deadlines):
            if count >= self.batch_groups * (due - iteration + 1):
                full = due
        return full

    @staticmethod
    def smallest(deadlines: Counter[int], size: int) -> Counter[int]:
        """Return the `size` smallest deadlines, or all if there are fewer."""
        smallest = Counter[int]()
        for due in sorted(deadlines):
            smallest[due] = min(deadlines[due], size - smallest.total())
        return smallest

    def entries(self, live: Iterable[Group]) -> tuple[list[Entry], list[Entry], list[Entry]]:
        """Return the entries of scored groups, of spares, and of unverified groups with a version."""
        scored, spares, unscored = (list[Entry]() for _ in range(3))
        for group in live:
            if group.version is not None and group.state != "batched":
                kind = {"scored": scored, "spare": spares}.get(group.state, unscored)
                kind.append((self.deadline(group.version), group.seq))
        return scored, spares, unscored

    def fillers(
        self, iteration: int, missing: int, spares: Iterable[Entry], may_come: bool
    ) -> list[Entry]:
        """Return the spares, as (deadline, seq), that replace `missing` groups of an iteration.

        None before f times as many spares as missing groups were judged, unless nothing else `may_come`.
        """
        usable = sorted(each for each in spares if each[0] >= iteration)
        if missing <= 0 or (may_come and len(usable) < math.ceil(self.over_sampling * missing)):
            return []
        return usable[:missing]


def _due_by(deadlines: Deadlines) -> Iterator[tuple[int, int]]:
    """Yield each deadline with the number of groups due by then."""
    groups, total = Counter(deadlines), 0
    for due in sorted(groups):
        total += groups[due]
        if groups[due]:
            yield due, total


class Choice(NamedTuple):
    """Groups of one iteration, in training order (deadline, then sequence number)."""

    seqs: tuple[int, ...]


class NotYetChosen(NamedTuple):
    """Groups that must be scored before a choice is allowed; empty: too few groups exist."""

    for_seqs: tuple[int, ...]


def choose(
    window: Window,
    iteration: int,
    size: int,
    scored: Sequence[Entry],
    unscored: Sequence[Entry],
) -> Choice | NotYetChosen:
    """Choose the batch of `iteration`, or what to wait for.

    Removing the smallest deadlines lowers the count of due groups at every t' at once, so if this choice is not allowed
    none is.

    Args:
        window: B and S.
        iteration: The iteration to fill.
        size: Groups it takes: B, or fewer when no further group can come.
        scored: (deadline, seq) of every group that could be taken.
        unscored: (deadline, seq) of every live group whose version is fixed but which is not scored yet.
    """
    ordered = sorted(scored)
    chosen, remaining = ordered[:size], ordered[size:]
    binding = [*remaining, *unscored] if window.over_sampling == 1 else remaining
    late = window.overfull(iteration + 1, [due for due, _ in binding])
    if late is not None:
        return NotYetChosen(tuple(seq for due, seq in sorted(unscored) if due <= late))
    if len(chosen) < size:
        return NotYetChosen(tuple(seq for _, seq in sorted(unscored)))
    return Choice(tuple(seq for _, seq in chosen))
