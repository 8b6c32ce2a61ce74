"""The work loop of every worker: messages in, steps of the work between them, an orderly end."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from prefixrl.common.wire.messages.learner import FromBroker
from prefixrl.common.wire.messages.worker import (
    Done,
    Leaving,
    PrefixTask,
    Refused,
    Revoke,
    ScoreTask,
    Welcome,
)
from prefixrl.common.worker.link import Link
from prefixrl.common.worker.open_tasks import RowsLeftReport, handed_back

IDLE_S = 0.05
Task = TypeVar("Task", PrefixTask, ScoreTask)


class WorkLoop(ABC, Generic[Task]):
    """The loop around a worker's work.

    A draining worker takes no new task. It hands back at once what its engine has not begun, finishes the rest within
    its grace time, and hands back what is left then.
    """

    def __init__(self, link: Link, kind: type[Task], rows_left: RowsLeftReport) -> None:
        """Take tasks of one kind; `_start` reports each of them to `rows_left`."""
        self._link = link
        self._rows_left = rows_left
        self._leaves_s: float | None = None
        """Latest time at which a draining worker leaves; None before it was asked to stop."""
        self._kind: type[Task] = kind

    def run(
        self,
        requests: Callable[[], int],
        grace_s: float = 0.0,
        alive: Callable[[int | None], None] = lambda _: None,
    ) -> str:
        """Work until the run is over or `requests` to stop end the drain; return why it ended.

        `alive` is called every turn with the progress, None while there is nothing to do.
        """
        self._leaves_s = None
        while not self._is_over(requests()):
            if self._leaves_s is None and requests():
                self._leaves_s = time.monotonic() + grace_s
                self._link.send(Leaving())
                # Tasks that were not begun go to other workers now; begun ones have the grace.
                for task in self._tasks():
                    if self._take_back(task.task):
                        self._link.send(handed_back(task))
            message = self._link.receive(self._patience_s())
            # All messages come before the next step, or a Revoke would wait behind a long forward.
            while message is not None:
                if isinstance(message, Done):
                    return message.reason
                self._handle(message)
                message = self._link.receive(0.0)
            self._turn()
            alive(self._link.vitals.progress if self._is_busy else None)
        # The broker gives these to others at once, without counting a loss of their worker.
        for task in self._tasks():
            self._link.send(handed_back(task))
        return "asked to stop"

    def _is_over(self, requests: int) -> bool:
        """Return True when a draining worker is to leave: all is done, time is up, or asked twice."""
        if self._leaves_s is None:
            return False
        return not self._tasks() or time.monotonic() >= self._leaves_s or requests > 1

    def _turn(self) -> None:
        self._step()
        rows_left = self._unended()
        vitals = self._link.vitals
        self._rows_left.report(rows_left, time.monotonic())
        vitals.leases = tuple(rows_left)
        if self._leaves_s is not None:
            vitals.state += f", leaving, {len(rows_left)} open"

    def _handle(self, message: FromBroker) -> None:
        if isinstance(message, self._kind):
            if self._leaves_s is not None:  # it was on its way when the broker was told
                self._link.send(handed_back(message))
            else:
                self._start(message)
        elif isinstance(message, Revoke) and self._take_back(message.task):
            self._link.send(Refused(message.task, "revoked before it started"))
        elif isinstance(message, Welcome):  # after a restart of the broker
            if self._leaves_s is not None:
                self._link.send(Leaving())
            self.say_ready()

    @property
    def _is_busy(self) -> bool:
        return bool(self._tasks())

    @abstractmethod
    def say_ready(self) -> None:
        """Report to the broker what is loaded; open tasks are delivered as usual."""

    @abstractmethod
    def _tasks(self) -> Sequence[Task]:
        """Return the open tasks."""

    @abstractmethod
    def _patience_s(self) -> float:
        """Return the longest wait for a message."""

    @abstractmethod
    def _start(self, task: Task) -> None: ...

    @abstractmethod
    def _take_back(self, task: str) -> bool:
        """Forget a task that has not begun; False for one that has, or is unknown."""

    @abstractmethod
    def _step(self) -> None:
        """Do a piece of the work, deliver what is done, write the vitals."""

    @abstractmethod
    def _unended(self) -> dict[str, int]:
        """Return the rows of every open task that have not ended."""
