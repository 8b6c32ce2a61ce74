"""The open tasks of a worker: the message that hands one back, and reports of the rows that are left.

Pure but for the sending: time is passed in.
"""

from collections.abc import Mapping

from prefixrl.common.wire.messages.worker import PrefixTask, Refused, RowsLeft, ScoreTask
from prefixrl.common.worker.link import Link

REPORT_EVERY_S = 0.05
"""Least time between two reports: a message for every ended row would cost too much."""
SHARE_OF_SEATS = 4
"""A report that makes no room waits until one in so many seats is free."""


def handed_back(task: PrefixTask | ScoreTask) -> Refused:
    """Return the message that gives a task to another worker."""
    return Refused(task.task, "this worker was asked to stop")


class RowsLeftReport:
    """Tells the broker how many rows of the open tasks are left.

    The broker gives no task to a worker that it knows to have no room, and the same tasks for a row more or less where
    there is some. So it is told when room appears or goes, and in between only coarsely.
    """

    def __init__(self, link: Link, takes_runs: bool, seats: int, room: int) -> None:
        """Report nothing where a task takes all seats until it ends."""
        self._link = link
        self._takes_runs = takes_runs
        self._room = room
        self._many = max(1, seats // SHARE_OF_SEATS)
        self._told: dict[str, int] = {}
        self._told_s = 0.0

    def begin(self, task: str, rows: int) -> None:
        """Note a task of this many rows; the broker counts all of them as not ended."""
        self._told[task] = rows

    def report(self, rows_left: Mapping[str, int], now_s: float) -> None:
        """Send what has changed where it matters; every task was begun."""
        if self._takes_runs or now_s - self._told_s < REPORT_EVERY_S:
            return
        self._told = {task: self._told[task] for task in rows_left}
        reported = sum(self._told.values())
        total = sum(rows_left.values())
        if abs(reported - total) < self._many and (reported < self._room) == (total < self._room):
            return
        changed = tuple(
            (task, rows) for task, rows in rows_left.items() if self._told[task] != rows
        )
        self._told = dict(rows_left)
        self._told_s = now_s
        self._link.send(RowsLeft(changed))
