"""The rows of open tasks that have not ended: credit of the others returns early."""

from collections.abc import Mapping

from prefixrl.common.wire.messages import RowsLeft
from prefixrl.common.worker.link import Link

REPORT_EVERY_S = 0.05
"""Least time between two reports: rows end one by one, and a message each would cost more than it brings."""


class RowsLeftReport:
    """Tells the broker which tasks have fewer rows left than when it was last told."""

    def __init__(self, link: Link, takes_runs: bool) -> None:
        """Report nothing where a task takes all seats until it ends."""
        self._link, self._takes_runs = link, takes_runs
        self._told: dict[str, int] = {}
        self._told_s = 0.0

    def report(self, left: Mapping[str, int], now_s: float) -> None:
        """Send what has changed among the open tasks, at most every `REPORT_EVERY_S`."""
        if self._takes_runs or now_s - self._told_s < REPORT_EVERY_S:
            return
        changed = tuple((task, rows) for task, rows in left.items() if self._told.get(task) != rows)
        self._told, self._told_s = dict(left), now_s
        if changed:
            self._link.send(RowsLeft(changed))
