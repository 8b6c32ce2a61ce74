"""Several learner ranks as real processes.

A dead one is named and the run resumes; none waits in a collective for a scorer.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from support.processes import titled
from support.runs.run_helper import (
    SMALL,
    check_books,
    child,
    finish,
    launched,
    logs,
    trained_iterations,
    wait_for,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.nightly]

TWO_RANKS = (*SMALL, "launch.learner_ranks=2", "launch.scorers=1")


def test_a_killed_rank_ends_the_learner_with_its_name_and_the_run_resumes(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *TWO_RANKS, "algorithm.iterations=10") as process:
        wait_for(lambda: trained_iterations(directory) >= 3, "the third iteration")
        victim = wait_for(lambda: child(process, "prefixrl-learner-1"), "rank 1")
        survivor = wait_for(lambda: child(process, "prefixrl-learner-0"), "rank 0")
        victim.kill()
        wait_for(lambda: not survivor.is_running(), "the end of rank 0", timeout_s=30)
        said = f"learner rank 1 (pid {victim.pid}) was killed by signal 9"
        wait_for(
            lambda: said in (directory / "logs/learner.log").read_text(),
            "the name of the dead rank",
            30,
        )
        summary = finish(process, directory)
    check_books(summary, directory)
    assert trained_iterations(directory) == 10
    logs_there = {
        name: (directory / f"logs/{name}.log").read_text()
        for name in ("learner", "rollout-0", "scorer-0")
    }
    assert all(
        f"; rank {rank} of 2; DeepSpeed, ZeRO stage 0; sdpa " in logs_there["learner"]
        for rank in (0, 1)
    )
    assert all(
        re.search(r" (loaded|are loaded at iteration 0): cpu \([\w ]+\), \d+ threads; ", s)
        for s in logs_there.values()
    )


@pytest.mark.chaos
def test_a_rank_that_is_told_to_stop_halts_all_and_none_is_taken_for_lost(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with launched(directory, *TWO_RANKS, "algorithm.iterations=10") as process:
        wait_for(lambda: trained_iterations(directory) >= 2, "the second iteration")
        wait_for(lambda: child(process, "prefixrl-learner-1"), "rank 1").terminate()
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output + logs(directory)
    assert "the learner was asked to stop" in output
    said = (directory / "logs/learner.log").read_text()
    assert said.count("iterations, not finished; everything is saved") == 2 and "error" not in said
    assert trained_iterations(directory) < 10


@pytest.mark.chaos
def test_a_straggling_scorer_makes_no_rank_wait_inside_a_collective(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    settings = (*TWO_RANKS, "broker.silence_s=120", "learner.collective_timeout_s=20")
    with launched(directory, *settings) as process:
        wait_for(lambda: trained_iterations(directory) >= 2, "the second iteration")
        scorers = titled(process.pid, "prefixrl-scorer")
        for scorer in scorers:
            os.kill(scorer.pid, signal.SIGSTOP)
        time.sleep(60)  # three times as long as a collective may take
        stopped_at = trained_iterations(directory)
        for scorer in scorers:
            os.kill(scorer.pid, signal.SIGCONT)
        summary = finish(process, directory)
    assert stopped_at < 8, logs(directory)
    check_books(summary, directory)
