"""Drain: the orderly end of a worker that is asked to stop. Pure: time is passed in.

A draining worker takes no new task. What its engine has not begun it hands back at once, so that others begin it; what
has begun it finishes within its grace time, and hands back the rest.
"""

from collections.abc import Callable

from prefixrl.common.wire.messages.worker import PrefixTask, Refused, ScoreTask

GRACE_S = 20.0
"""Usual grace time; batch systems and service managers kill after 30 s."""


class Drain:
    """The requests to stop that a work loop has seen, and its deadline since the first."""

    def __init__(self, requests: Callable[[], int], grace_s: float) -> None:
        """Take the source of the number of requests so far: one drains, two end at once."""
        self._requests, self._grace_s = requests, grace_s
        self._until_s: float | None = None

    @property
    def is_on(self) -> bool:
        """True since `begins` said so."""
        return self._until_s is not None

    def begins(self, now_s: float) -> bool:
        """Return True once: at the first request to stop."""
        if self.is_on or not self._requests():
            return False
        self._until_s = now_s + self._grace_s
        return True

    def is_over(self, open_tasks: int, now_s: float) -> bool:
        """Return True when the worker is to leave: all is done, time is up, or asked twice."""
        if self._until_s is None:
            return False
        return not open_tasks or now_s >= self._until_s or self._requests() > 1


def handed_back(task: PrefixTask | ScoreTask) -> Refused:
    """Return the message that gives a task to another worker."""
    return Refused(task.task, "this worker was asked to stop")
