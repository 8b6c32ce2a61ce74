"""Learner ranks on several nodes find each other by SLURM's variables; a task sees the GPUs that it was given."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from cluster.slurm.on_slurm import (
    end_of,
    run_command,
    states,
    submit,
    wait_for_end,
    wait_for_iterations,
)
from support.runs.run_helper import SMALL, check_books, logs, trained_iterations, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TWO_NODES = (*SMALL, "launch.learner_ranks=2", "slurm.learner.nodes=2", "algorithm.iterations=30")


def processes(job: str, title: str) -> list[psutil.Process]:
    """Processes of a job by their title; other runs of this machine have the same titles."""
    results = [
        each
        for each in psutil.process_iter(["cmdline"])
        if (each.info["cmdline"] or [])[:1] == [title]
    ]
    return [
        each
        for each in results
        if any(f"slurmstepd: [{job}." in " ".join(up.cmdline()) for up in each.parents())
    ]


def test_two_ranks_on_two_nodes_train_and_a_dead_one_is_started_again_with_the_other(
    cluster: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    job = submit(directory, "arrays", *TWO_NODES)
    wait_for_iterations(directory, 3)
    (victim,) = processes(job, "prefixrl-learner-1")
    victim.send_signal(signal.SIGKILL)
    wait_for_end(directory)
    said = (directory / "logs/learner.log").read_text()
    assert "learner ended with exit code 137: starting it again (9 left)" in said
    assert trained_iterations(directory) == 30
    check_books(json.loads((directory / "summary.json").read_text()), directory)
    assert end_of(job) == "COMPLETED 0:0", logs(directory)


def test_ranks_that_are_asked_to_stop_all_save_and_the_job_says_so(
    cluster: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    job = submit(directory, "arrays", *TWO_NODES)
    wait_for_iterations(directory, 3)
    run_command("scancel", "--signal=TERM", job)
    wait_for(lambda: job not in states(), "the end of the learner", 240)
    said = (directory / "logs/learner.log").read_text()
    assert said.count("iterations, not finished; everything is saved") == 2
    assert "learner was asked to stop" in said
    assert end_of(job) == "FAILED 143:0"
