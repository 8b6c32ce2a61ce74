"""Jobs whose rows are worked on one by one, on an asyncio loop beside the worker's.

    worker's loop ── submit ──▶ asyncio loop in a thread ── a coroutine per row ──▶ whoever writes it, in their order
          ▲ step() ◀── queue of finished jobs ◀─────────────────────────────────────────────┘

Every row is handed on at once: who writes has a queue of its own, and fills an empty seat from it without a round trip.
"""

import asyncio
import queue
import time
from abc import abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from prefixrl.common.engines.interface.base import Continuation, Engine, Job, JobResult, room_of


@dataclass
class _Open:
    """A job under way."""

    left: int
    """Rows that have not ended; only the asyncio loop changes it."""
    future: "Future[JobResult] | None" = None


class RowJobs(Engine):
    """The jobs of an engine that queues rows itself."""

    takes_runs = False
    _loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, _Open] = {}
        """Jobs in the order in which they came."""
        self._finished: queue.SimpleQueue[tuple[str, Future[JobResult]]] = queue.SimpleQueue()

    def offer(self, seats: int) -> None:
        """Announce the rows that are written at once."""
        self.seats, self.room = seats, room_of(seats)

    def rows_left(self, key: str) -> int:
        """Return how many rows of a job have not ended; 0 for an unknown one."""
        return self._open[key].left if key in self._open else 0

    @property
    def open_rows(self) -> int:
        """Number of rows that have not ended."""
        return sum(entry.left for entry in self._open.values())

    def submit(self, job: Job) -> None:
        """Hand on every row of a job."""
        entry = self._open[job.key] = _Open(len(job.rows))
        entry.future = future = asyncio.run_coroutine_threadsafe(self._run(job, entry), self._loop)
        future.add_done_callback(partial(self._hand_over, job.key))

    def cancel(self, key: str) -> bool:
        """Drop a job that is too far back to have begun; False when it may have, or is unknown."""
        if key not in self._open:
            return False
        before = sum(entry.left for entry in takewhile(lambda each: each is not self._open[key], self._open.values()))
        if before < self.seats:
            return False
        future = self._open.pop(key).future
        assert future is not None, "it was submitted"
        future.cancel()
        return True

    def _hand_over(self, key: str, future: "Future[JobResult]") -> None:
        self._finished.put((key, future))

    def _results(self, timeout_s: float) -> list[JobResult]:
        results: list[JobResult] = []
        while self._open:
            try:
                key, future = self._finished.get(timeout=0.0 if results else timeout_s)
            except queue.Empty:
                break
            if key in self._open and self._open[key].future is future:  # else it was dropped
                del self._open[key]
                results.append(future.result())
        return results

    # --- on the asyncio loop -----------------------------------------------------------------------------------------

    async def _run(self, job: Job, entry: _Open) -> JobResult:
        started_s = time.monotonic()

        async def row(index: int) -> Continuation:
            ended = await self._row(job, index)
            entry.left -= 1
            return ended

        rows = await asyncio.gather(*map(row, range(len(job.rows))))
        return JobResult(job.key, tuple(rows), time.monotonic() - started_s)

    @abstractmethod
    async def _row(self, job: Job, index: int) -> Continuation:
        """Continue one row of a job."""
