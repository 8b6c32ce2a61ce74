"""The bounded staleness window: three pure rules that make "never older than S" hold without discarding anything.

Version = number of completed iterations. B groups are trained per iteration, S is the window, `consumed` = B x completed
iterations, `outstanding` = every live group, batched ones included.

    admission   a worker with installed version v may start a group iff consumed + outstanding < B (v + S + 1)
    deadline    a group sampled at version v must be in iteration v + S at the latest
    choice      iteration t takes the smallest deadlines first, and only if afterwards, for every t' > t, at most
                B (t' - t) outstanding groups have a deadline <= t'; otherwise it waits, for named groups

Admission keeps "at most B (t' - t + 1) outstanding groups have a deadline <= t'" true, choice keeps it true across the step
to t + 1, and with it every group still fits the iteration of its deadline. Taking whatever is finished first is locally
harmless and breaks exactly this two iterations later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """B and S."""

    batch_groups: int
    max_staleness: int

    def room(self, version: int, completed: int, outstanding: int) -> int:
        """How many groups a worker that has `version` installed may start now (never negative)."""
        return max(
            0, self.batch_groups * (version + self.max_staleness + 1 - completed) - outstanding
        )

    def deadline(self, version: int) -> int:
        """The last iteration that may train a group sampled at `version`."""
        return version + self.max_staleness

    def overfull(self, iteration: int, deadlines: Iterable[int]) -> int | None:
        """First t' >= iteration by which more groups are due than iterations `iteration..t'` can train, or None.

        A deadline before `iteration` is reported as `iteration - 1`: that group is already late.
        """
        for count, due in enumerate(sorted(deadlines), start=1):
            if count > self.batch_groups * (due - iteration + 1):
                return max(due, iteration - 1)
        return None


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
        unscored: (deadline, seq) of every outstanding group whose version is fixed but which is not scored yet.

    Returns:
        The choice, or what to wait for. Removing the smallest deadlines lowers the count of due groups at every t' at once,
        so if this choice is not allowed none is.
    """
    ordered = sorted(scored)
    taken, left = ordered[:size], ordered[size:]
    late = window.overfull(iteration + 1, [due for due, _ in (*left, *unscored)])
    if late is not None:
        return Wait(tuple(seq for due, seq in sorted(unscored) if due <= late))
    if len(taken) < size:
        return Wait(tuple(seq for _, seq in sorted(unscored)))
    return Choice(tuple(seq for _, seq in taken))
