"""The arithmetic example with learner, rollout and scorer on one GPU, and a rollout killed in the middle."""

import time
from pathlib import Path

import pytest

from gpu.on_device import whole_run, write_report

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(580)]


def test_the_example_trains_on_one_gpu_although_a_rollout_is_killed(tmp_path: Path) -> None:
    started_s = time.monotonic()
    write_report("launch", whole_run("cuda", tmp_path / "run", 20), started_s)
