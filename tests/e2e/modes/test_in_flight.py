"""Updates in the middle of answers.

Every token of every trained answer is of the version its span says, none too old.
"""

import time
from pathlib import Path

import pytest

from e2e.modes import in_flight_run
from prefixrl.common.engines.embedded.continuous import TransformersEngine
from prefixrl.common.engines.interface.base import JobResult
from support.fakes import wait_until

pytestmark = [pytest.mark.timeout(500), pytest.mark.nightly]

ANSWER_TOKENS = 48
PART_TOKENS = ANSWER_TOKENS // (in_flight_run.STALENESS + 1)


class Held(TransformersEngine):
    """Writes part v + 1 of its first answer only when it has version v."""

    is_first = True
    newest = -1
    """Version of the newest token of the first answer."""

    def step(self, timeout_s: float) -> list[JobResult]:
        rows = [*self._seated, *self._uncached]
        if self.is_first and rows and len(rows[0].tokens) // PART_TOKENS > self._version:
            time.sleep(0.005)
            return []
        done = super().step(timeout_s)
        if rows or done:
            self.newest = self._version
        self.is_first = self.is_first and not done
        return done


def test_answers_that_cross_updates_are_recorded_token_by_token_and_never_older_than_the_window(
    tmp_path: Path,
) -> None:
    """The slow answer crosses as many updates as the window is wide.

    Then the learner waits for it, and none overtakes it.
    """
    here = in_flight_run.world(tmp_path, ANSWER_TOKENS, iterations=8)
    held = Held(str(here.model), "cpu", "float32", 1, seats=1)

    def until_written(iteration: int) -> None:
        wait_until(lambda: not held.is_first or held.newest >= iteration, "a token", 120.0)

    trained = in_flight_run.run(here, held, until_written)
    assert max(trained.ages) == in_flight_run.STALENESS and min(trained.ages) >= 0
    versions = {
        tuple(span.version for span in row.spans)
        for group in trained.groups
        for row in group.prefixes.rows
    }
    assert (0, 1, 2, 3) in versions
    assert in_flight_run.largest_gap(here) < 1e-3
