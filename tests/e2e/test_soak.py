"""Workers, brokers and learners are killed at random: the history has no fault.

The long form is `python -m benchmarks.soak`.
"""

from pathlib import Path

import pytest

from benchmarks.soak import Size, soak
from prefixrl.deploy.inspect import checked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_whoever_is_killed_every_group_is_trained_once_within_the_window(tmp_path: Path) -> None:
    size = Size(scorers=8, rollouts=3, learners=4, samples=12_000, mean_gap_s=0.7)
    outcome = soak(tmp_path, size, seed=1)
    assert outcome.faults == []
    assert outcome.history.rows >= size.samples
    assert outcome.kills["scorer"] and outcome.kills["learner"]
    assert checked(tmp_path / "run").endswith("no fault")
