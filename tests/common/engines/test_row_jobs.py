"""Jobs whose rows end one by one on an asyncio loop."""

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from prefixrl.common.engines.interface.base import Continuation, Job, JobResult
from prefixrl.common.engines.interface.row_jobs import RowJobs
from prefixrl.common.wire.messages.groups import Sampling
from support.fakes import wait_until


class Writer(RowJobs):
    """Two seats; a row ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.offer(2)
        self._loop = asyncio.new_event_loop()
        self.begun: list[tuple[str, int]] = []
        self.dropped: list[tuple[str, int]] = []
        self.ends: dict[tuple[str, int], asyncio.Event] = {}
        self.thread = threading.Thread(target=self._loop.run_forever)
        self.thread.start()

    async def _row(self, job: Job, index: int) -> Continuation:
        self.begun.append((job.key, index))
        ended = self.ends.setdefault((job.key, index), asyncio.Event())
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self.dropped.append((job.key, index))
            raise
        if job.key == "broken":
            raise ConnectionError("no answer")
        return Continuation(np.asarray([index], np.int32), np.zeros(0, np.float32), "length", ())

    def end(self, key: str, index: int) -> None:
        wait_until(lambda: (key, index) in self.begun, "its begin")
        left = self.rows_left(key)
        self._loop.call_soon_threadsafe(self.ends[key, index].set)
        wait_until(lambda: self.rows_left(key) < left or key == "broken", "its end")

    def step(self, timeout_s: float) -> list[JobResult]:
        return self._results(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join()
        self._loop.close()


@pytest.fixture
def writer() -> Iterator[Writer]:
    engine = Writer()
    yield engine
    engine.close()


def job(key: str, rows: int) -> Job:
    sampling = Sampling(temperature=1.0, max_new_tokens=1)
    return Job(key, (np.zeros(1, np.int32),) * rows, np.zeros((rows, 1)), sampling, frozenset())


def test_every_row_is_handed_on_at_once_and_counted_until_it_ends(writer: Writer) -> None:
    writer.submit(job("a", 2))
    writer.submit(job("b", 3))
    wait_until(lambda: len(writer.begun) == 5, "all rows")
    assert writer.open_rows == 5 and (writer.seats, writer.room) == (2, 3)
    writer.end("b", 1)
    assert (writer.rows_left("a"), writer.rows_left("b"), writer.rows_left("c")) == (2, 2, 0)
    writer.end("b", 0)
    writer.end("b", 2)
    (result,) = writer.step(1.0)
    assert result.key == "b" and [int(row.tokens[0]) for row in result.rows] == [0, 1, 2], (
        "in their order"
    )
    assert writer.rows_left("b") == 0 and writer.step(0.0) == []
    writer.end("a", 0)
    writer.end("a", 1)
    assert [each.key for each in writer.step(1.0)] == ["a"] and not writer.open_rows


def test_only_a_job_behind_all_seats_is_dropped_and_its_rows_with_it(writer: Writer) -> None:
    for key, rows in (("a", 1), ("b", 1), ("c", 2)):
        writer.submit(job(key, rows))
    wait_until(lambda: len(writer.begun) == 4, "all rows")
    assert not writer.cancel("a") and not writer.cancel("b") and not writer.cancel("unknown")
    assert writer.cancel("c") and not writer.cancel("c") and writer.rows_left("c") == 0
    wait_until(lambda: len(writer.dropped) == 2, "its rows")
    writer.submit(job("d", 1))
    writer.end("a", 0)
    assert [each.key for each in writer.step(1.0)] == ["a"]
    assert not writer.cancel("d"), "a seat is free for it now"
    writer.end("b", 0)
    writer.end("d", 0)
    done = {each.key for _ in range(3) for each in writer.step(0.5)}
    assert done == {"b", "d"} and not writer.open_rows


def test_the_error_of_a_row_is_raised_where_its_job_would_come(writer: Writer) -> None:
    writer.submit(job("broken", 1))
    writer.end("broken", 0)
    with pytest.raises(ConnectionError, match="no answer"):
        writer.step(1.0)
