"""A pool in a thread of its own judges on while an engine takes its steps."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixrl.common.errors import PeerLost
from prefixrl.common.run.digests import function_digest
from prefixrl.scorer.verifier.pool import RewardFunction, VerifierPool
from prefixrl.scorer.verifier.pool_thread import PoolThread
from prefixrl.scorer.verifier.rules.verify import Judgement
from support.fakes import wait_until

FUNCTION = """
import time
def score(question, answer, gold):
    time.sleep(float(question))
    return float(answer == gold)
"""
ROWS = 64


class EndingPool(VerifierPool):
    """A pool that can be told to close itself in its own thread, so that a test leaves no child to the next one."""

    is_over = False

    def poll(self) -> list[tuple[int, Judgement]]:
        if self.is_over:
            self.close()
            raise PeerLost("closed")
        return super().poll()


@pytest.fixture
def thread(tmp_path: Path) -> Iterator[PoolThread]:
    """A pool with one child of `FUNCTION`, which has judged an answer."""
    file = tmp_path / "reward.py"
    file.write_text(FUNCTION)
    made: list[EndingPool] = []

    def make() -> VerifierPool:
        made.append(
            EndingPool(1, 5, RewardFunction(f"{file}:score", function_digest(f"{file}:score")))
        )
        return made[0]

    thread = PoolThread(make)
    thread.submit(-1, "7", "7", "0")
    assert verdicts(thread, 1)[-1].reward == 1.0
    yield thread
    made[0].is_over = True
    with pytest.raises(PeerLost, match="closed"):
        wait_until(lambda: bool(thread.poll()), 60.0)


def verdicts(thread: PoolThread, count: int) -> dict[int, Judgement]:
    results: dict[int, Judgement] = {}

    def are_all_there() -> bool:
        results.update(thread.poll())
        return len(results) == count

    wait_until(are_all_there, 60.0)
    return results


@pytest.mark.slow
def test_all_answers_are_judged_within_one_step_of_an_engine(thread: PoolThread) -> None:
    for row in range(ROWS):
        thread.submit(row, str(row), "7", "0.001")
    # The step of an engine, in which nothing of the pool is called.
    time.sleep(5.0)
    actual = dict(thread.poll())
    assert {row: judged.reward for row, judged in actual.items()} == {
        row: float(row == 7) for row in range(ROWS)
    }


@pytest.mark.slow
def test_a_function_that_is_quick_is_no_trouble_and_one_that_hangs_is(thread: PoolThread) -> None:
    for row in range(ROWS):
        thread.submit(row, str(row), "7", "0")
    verdicts(thread, ROWS)
    assert thread.trouble == ""
    thread.submit(ROWS, "7", "7", "600")
    wait_until(lambda: bool(thread.trouble), 60.0)
    assert "reward.py:score" in thread.trouble
    judged = verdicts(thread, 1)[ROWS]
    assert (judged.status, judged.fault) == ("error", "function overran")


def test_what_ends_the_thread_is_raised_where_verdicts_are_taken() -> None:
    def make() -> VerifierPool:
        raise PeerLost("no child starts")

    thread = PoolThread(make)
    with pytest.raises(PeerLost, match="no child starts"):
        wait_until(lambda: bool(thread.poll()), 60.0)
