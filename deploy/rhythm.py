"""The rhythm of lines about a run, where it is watched by a file. Pure."""

import math

from prefixrl.common.run.status import StatusDocument
from prefixrl.deploy.view.console import NAMED_WAIT_S, Progress, held_up_by

EVERY_S = 10.0
"""Time between two lines of a run that goes well, about."""
SILENT_S = 60.0
"""Longest time without a line."""


class Rhythm:
    """Tells when a line is due: every so many iterations, and at once for what changes."""

    def __init__(self) -> None:
        self._said_s = -math.inf
        self._iteration = self._judged = -1
        self._phase = ""
        self._stuck: frozenset[str] = frozenset()
        self._wait_steps = 0

    def is_due(self, now_s: float, document: StatusDocument, progress: Progress) -> bool:
        """Return True if the line of this moment is to be printed; it is taken as printed then."""
        phase = {"loads": "loads", "ends": "ends"}.get(document.learner_phase, "trains")
        stuck = frozenset(each.name for each in document.workers if held_up_by(each))
        # A wait is named after 10 s and then each time that it has doubled.
        waits_s = document.learner_waits_s
        steps = 1 + int(math.log2(waits_s / NAMED_WAIT_S)) if waits_s >= NAMED_WAIT_S else 0
        judged_so_far = document.evaluations.get("judged", 0)
        is_new = phase != self._phase or bool(stuck - self._stuck) or steps > self._wait_steps
        passed_s = now_s - self._said_s
        every = iterations_per_line(progress.iteration_s)
        has_advanced = document.iteration // every > self._iteration // every and passed_s >= EVERY_S / 2
        is_judging = phase == "ends" or not document.total_iterations
        has_judged = is_judging and judged_so_far != self._judged and passed_s >= EVERY_S
        self._wait_steps = steps
        if not (is_new or has_advanced or has_judged or passed_s >= SILENT_S):
            return False
        self._said_s, self._phase, self._stuck = now_s, phase, stuck
        self._iteration, self._judged = document.iteration, judged_so_far
        return True


def iterations_per_line(iteration_s: float | None) -> int:
    """Return how many iterations take about `EVERY_S`: 1, 2 or 5 times a power of ten."""
    wanted = EVERY_S / iteration_s if iteration_s else 1.0
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power >= wanted:
                return step * power
        power *= 10
