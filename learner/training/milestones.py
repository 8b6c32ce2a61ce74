"""Checkpoints that stay: the newest, and those at geometric steps. Pure."""

import math
from collections.abc import Iterable


def milestones(last: int, growth: float | None) -> list[int]:
    """Return the iterations up to the last whose checkpoints stay for good.

    The first is 1, each other `growth` times the one before, rounded up: with 2 they are 1, 2, 4, 8, with 1.5 they are
    1, 2, 3, 5, 8. None without a growth.
    """
    found: list[int] = []
    step = 1
    while growth and step <= last:
        found.append(step)
        step = max(step + 1, math.ceil(step * growth))
    return found


def is_milestone(iteration: int, growth: float | None) -> bool:
    """Return True if the checkpoint of an iteration stays for good."""
    return iteration in milestones(iteration, growth)[-1:]


def removable(iterations: Iterable[int], keep: int, growth: float | None) -> list[int]:
    """Return the iterations that go: no milestones, nor among the newest `keep`."""
    oldest_first = sorted(iterations)
    return [each for each in oldest_first[:-keep] if not is_milestone(each, growth)]
