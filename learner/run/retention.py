"""Checkpoints that stay: the newest, geometric steps, the best on held-out problems.

A checkpoint is renamed before its files are removed: a folder called step_* is whole, also after a kill.
"""

import logging
import math
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from prefixrl.common.config.run import CheckpointConfig
from prefixrl.common.evaluation.accuracy import Point
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.run.directory_format import checkpoints

log = logging.getLogger(__name__)

BEST = "best"


def milestones(last: int, growth: float | None) -> list[int]:
    """Return the iterations up to the last whose checkpoints stay for good: 1, 2, 4, 8 with a growth of 2."""
    iterations: list[int] = []
    step = 1
    while growth and step <= last:
        iterations.append(step)
        step = max(step + 1, math.ceil(step * growth))
    return iterations


def is_milestone(iteration: int, growth: float | None) -> bool:
    """Return True if the checkpoint of an iteration stays for good."""
    return iteration in milestones(iteration, growth)[-1:]


def ranked(iterations: Collection[int], curve: Iterable[Point]) -> list[int]:
    """Return the judged iterations, the best first; of equals the earlier."""
    judged = {point.version: point.accuracy for point in curve if point.version in iterations}
    return sorted(judged, key=lambda iteration: (-judged[iteration], iteration))


def removable(
    iterations: Collection[int],
    section: CheckpointConfig,
    best: Sequence[int] = (),
    awaited: Collection[int] = (),
) -> list[int]:
    """Return the iterations that go, oldest first."""
    stay = {*sorted(iterations)[-section.keep :], *best[: section.keep_best or 0], *awaited}
    stay |= set(milestones(max(iterations, default=0), section.growth))
    return sorted(set(iterations) - stay)


def prune(
    directory: Path,
    section: CheckpointConfig,
    curve: Iterable[Point] = (),
    awaited: Collection[int] = (),
) -> list[int]:
    """Link the best checkpoint; remove the checkpoints that go, and return their iterations."""
    folders = checkpoints(directory)
    best = ranked(folders, curve) if section.keep_best else []
    removed = []
    try:
        # The link moves first: a kill in between must not leave it on a folder that is gone.
        _link(directory / BEST, folders[best[0]].name if best else "")
        if best:
            crash_point("checkpoint.best")
        for iteration in removable(folders, section, best, awaited):
            beside = directory / f".{folders[iteration].name}.partial"
            shutil.rmtree(beside, ignore_errors=True)
            # Under its name a folder is whole, so it loses the name before it loses a file.
            folders[iteration].rename(beside)
            removed.append(iteration)
            crash_point("checkpoint.removing")
            shutil.rmtree(beside)
    except OSError as fault:
        log.error("an old checkpoint could not be removed: %s", fault)
    crash_point("checkpoint.pruned")
    return removed


def _link(link: Path, target: str) -> None:
    """Have a link name a folder beside it, at once; without a target remove it."""
    if (str(link.readlink()) if link.is_symlink() else "") == target:
        return
    if not target:
        link.unlink()
        return
    temporary = link.with_name(f".{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
