"""Jobs whose rows are worked on one by one, on an asyncio loop beside the worker's.

    worker's loop ── submit ──▶ asyncio loop in a thread ── a coroutine per row ──▶ whoever writes it, in their order
          ▲ step() ◀── queue of finished jobs ◀─────────────────────────────────────────────┘

Every row is handed on at once: the writer has a queue and fills an empty seat from it without a round trip.
"""

import asyncio
import queue
import time
from abc import abstractmethod
from concurrent.futures import Future
from itertools import takewhile

from prefixrl.common.engines.interface.base import (
    Continuation,
    Engine,
    Job,
    JobResult,
    OpenJob,
    room_of,
)


async def end_other_tasks() -> None:
    """Cancel every task of the loop but the present one, and wait for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RowJobs(Engine):
    """The jobs of an engine that queues rows itself."""

    takes_runs = False
    _loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self._futures: dict[str, Future[JobResult]] = {}
        self._finished = queue.SimpleQueue[tuple[str, Future[JobResult]]]()

    def offer(self, seats: int) -> None:
        """Set the number of rows that are written at once."""
        self.seats = seats
        self.room = room_of(seats)

    @property
    def open_rows(self) -> int:
        """Number of rows that have not ended."""
        return sum(entry.rows_left for entry in self._open.values())

    def submit(self, job: Job) -> None:
        """Hand on every row of a job."""
        entry = self._open[job.key] = OpenJob(job, len(job.rows))
        future = self._futures[job.key] = asyncio.run_coroutine_threadsafe(
            self._run(entry), self._loop
        )
        future.add_done_callback(lambda ended: self._finished.put((job.key, ended)))

    def cancel(self, key: str) -> bool:
        """Drop a job whose rows are too far back to have begun; return False for any other job."""
        if key not in self._open:
            return False
        before = sum(
            entry.rows_left
            for entry in takewhile(lambda each: each is not self._open[key], self._open.values())
        )
        if before < self.seats:
            return False
        del self._open[key]
        self._futures.pop(key).cancel()
        return True

    def _results(self, timeout_s: float) -> list[JobResult]:
        results: list[JobResult] = []
        while self._open:
            try:
                key, future = self._finished.get(timeout=0.0 if results else timeout_s)
            except queue.Empty:
                break
            if self._futures.get(key) is future:  # else it was dropped
                del self._open[key], self._futures[key]
                results.append(future.result())
        return results

    # --- on the asyncio loop -----------------------------------------------------------------------------------------

    async def _run(self, entry: OpenJob) -> JobResult:
        started_s = time.monotonic()
        job = entry.job

        async def row(index: int) -> Continuation:
            ended = await self._row(job, index)
            entry.rows_left -= 1
            return ended

        rows = await asyncio.gather(*map(row, range(len(job.rows))))
        return JobResult(job.key, tuple(rows), time.monotonic() - started_s)

    @abstractmethod
    async def _row(self, job: Job, index: int) -> Continuation:
        """Continue one row of a job."""
