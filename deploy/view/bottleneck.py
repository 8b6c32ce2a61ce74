"""The part of a run that holds it up, in one line of `prefixrl status`. Pure."""

import math
from collections.abc import Mapping

LEARNER = "learner"
FULL_SHARE = 0.9
"""Share of its time that a worker works where it keeps the learner busy. The rest evens out stragglers."""
IDLE_SHARE = 0.75
"""A run in which every part is busy for less of the time has no bottleneck."""


def bottleneck_words(busy: Mapping[str, float], counts: Mapping[str, int], window: int) -> str:
    """Return the busiest part of a run, and the number of workers that would keep the learner busy.

    Args:
        busy: share of its time that each role works, `learner` included.
        counts: workers by role.
        window: `algorithm.max_staleness`.

    Returns:
        one line, or "" where the share of the learner or of all workers is not measured yet.
    """
    if LEARNER not in busy or len(busy) == 1:
        return ""
    role = max(busy, key=lambda name: busy[name])
    busiest = f"{role}, busy for {busy[role]:.0%} of the time"
    if window == 0:
        return f"{busiest}; with algorithm.max_staleness = 0 the parts take turns"
    if busy[role] < IDLE_SHARE:
        return f"none (the busiest: {busiest}), so more workers change little"
    if role == LEARNER:
        return f"{busiest}: more workers change nothing"
    enough = math.ceil(counts[role] * busy[role] / (FULL_SHARE * max(busy[LEARNER], 0.01)))
    return (
        f"{busiest}: up to {enough} instead of {counts[role]} would keep the learner busy "
        f"(launch.{role}s), each on a device or core of its own"
    )
