"""The bounded staleness window: pure rules that make "never older than S" hold without discarding anything for its age.

Version = number of completed iterations. B groups are trained per iteration, S is the window, T the length of the run (where it
is known), `consumed` = B x completed iterations. A live group is *accepted* (scored, passed, not trained yet; batched included)
or *unverified* (everything before that). f is the over-sampling factor, 1 without a prompt filter.

    admission   a worker with installed version v may start a group iff
                unverified < ceil(f (B min(v + S + 1, T) - consumed - accepted))
    deadline    a group sampled at version v must be in iteration min(v + S, T - 1) at the latest
    choice      iteration t takes the smallest deadlines among the accepted, and only if afterwards, for every t' > t, at most
                B (t' - t) binding groups have a deadline <= t'; otherwise it waits, for named groups
    surplus     an unverified group is surplus once the accepted fill every iteration up to its deadline

With f = 1 every live group is binding. Admission keeps "for every t', at most B (t' - t + 1) live groups have a deadline <= t'"
true, choice keeps it true across the step to t + 1, and with it every group still fits the iteration of its deadline: none is
ever surplus. Taking whatever is finished first is locally harmless and breaks exactly this two iterations later.

With f > 1 more groups are under way than fit, so only the accepted are binding. The surplus rule keeps the same bound true for
them: whoever is accepted fits. Their smallest deadlines are then always an allowed choice, and it waits only for numbers.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Window:
    """B, S, f and T."""

    batch_groups: int
    max_staleness: int
    over_sampling: Fraction = Fraction(1)
    iterations: int | None = None
    """Length of the run in iterations; None: until the prompts are used up."""

    def room(self, version: int, completed: int, accepted: int, unverified: int) -> int:
        """How many groups a worker that has `version` installed may start now (never negative)."""
        until = version + self.max_staleness + 1
        if self.iterations is not None:
            until = min(until, self.iterations)
        needed = max(0, self.batch_groups * (until - completed) - accepted)
        return max(0, math.ceil(self.over_sampling * needed) - unverified)

    def deadline(self, version: int) -> int:
        """The last iteration that may train a group sampled at `version`."""
        due = version + self.max_staleness
        return due if self.iterations is None else min(due, self.iterations - 1)

    def overfull(self, iteration: int, deadlines: Iterable[int]) -> int | None:
        """First t' >= iteration by which more groups are due than iterations `iteration..t'` can train, or None.

        A deadline before `iteration` is reported as `iteration - 1`: that group is already late.
        """
        for count, due in enumerate(sorted(deadlines), start=1):
            if count > self.batch_groups * (due - iteration + 1):
                return max(due, iteration - 1)
        return None

    def full_until(self, iteration: int, deadlines: Iterable[int]) -> int:
        """Last t' such that the groups due by t' fill iterations `iteration..t'`: no other group with a deadline <= t' fits.

        `iteration - 1` where that is none. Once full, always full: training takes B of the groups and one iteration.
        """
        full = iteration - 1
        for count, due in enumerate(sorted(deadlines), start=1):
            if count >= self.batch_groups * (due - iteration + 1):
                full = due
        return full


@dataclass(frozen=True)
class Choice:
    """The groups of one iteration, in training order (deadline, then sequence number)."""

    seqs: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """No allowed choice yet: these groups must be scored first (empty: too few groups exist at all)."""

    for_seqs: tuple[int, ...]


def choose(
    window: Window,
    iteration: int,
    size: int,
    scored: Sequence[tuple[int, int]],
    unscored: Sequence[tuple[int, int]],
) -> Choice | Wait:
    """Choose the batch of `iteration`.

    Args:
        window: B and S.
        iteration: The iteration to fill.
        size: Groups it takes: B, or fewer when no further group can come.
        scored: (deadline, seq) of every group that could be taken.
        unscored: (deadline, seq) of every live group whose version is fixed but which is not scored yet.

    Returns:
        The choice, or what to wait for. Removing the smallest deadlines lowers the count of due groups at every t' at once,
        so if this choice is not allowed none is.
    """
    ordered = sorted(scored)
    taken, left = ordered[:size], ordered[size:]
    binding = [*left, *unscored] if window.over_sampling == 1 else left
    late = window.overfull(iteration + 1, [due for due, _ in binding])
    if late is not None:
        return Wait(tuple(seq for due, seq in sorted(unscored) if due <= late))
    if len(taken) < size:
        return Wait(tuple(seq for _, seq in sorted(unscored)))
    return Choice(tuple(seq for _, seq in taken))
