"""One heterogeneous job trains for real; its roles are restarted or not, as their exit codes say."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.slurm import on_slurm
from support.runs.run_helper import SMALL, check_books, logs, trained_iterations, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
BAR = 0.9
"""Accuracy after training; without it, and with the best fixed prefix, it is 0.25."""


def test_a_heterogeneous_job_trains_the_arithmetic_example_to_its_bar(
    cluster: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    directory = tmp_path / "it's a run"
    job = on_slurm.submit(directory, "het", "launch.scorers=2")
    on_slurm.wait_for_iterations(directory, 1)
    assert set(on_slurm.states()) == {f"{job}+0", f"{job}+1", f"{job}+2"}
    record_property("figure", on_slurm.queue() + on_slurm.run_command("squeue", "--steps").stdout)
    on_slurm.wait_for_end(directory, 700)
    summary = json.loads((directory / "summary.json").read_text())
    check_books(summary, directory)
    accuracy = summary["accuracy"]
    record_property("figure", on_slurm.prefixrl("report", str(directory)).stdout)
    assert max(accuracy["no_prefix"], accuracy["fixed_prefix"], accuracy["untrained_adapter"]) < 0.5
    assert accuracy["trained_adapter"] >= BAR
    assert on_slurm.end_of(job) == "COMPLETED 0:0", logs(directory)


def steps(job: str, name: str) -> list[str]:
    """Steps of a job by their name."""
    shown = on_slurm.run_command(
        "squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i|%j"
    ).stdout
    return [step for step, called in (line.split("|") for line in shown.split()) if called == name]


@pytest.mark.parametrize(
    ("name", "offset"), [pytest.param("learner", 0, marks=pytest.mark.proof), ("scorer_1", 2)]
)
def test_a_process_that_is_killed_is_started_again_while_the_others_go_on(
    cluster: Path, tmp_path: Path, name: str, offset: int
) -> None:
    directory = tmp_path / "run"
    job = on_slurm.submit(directory, "het", *SMALL, "launch.scorers=2", "algorithm.iterations=30")
    on_slurm.wait_for_iterations(directory, 3)
    (victim,) = steps(str(int(job) + offset), name)
    on_slurm.run_command("scancel", "--signal=KILL", victim)
    on_slurm.wait_for_end(directory)
    said = (directory / "logs" / f"slurm-{job}.log").read_text()
    assert f"{name} ended with exit code 137: starting it again (9 left)" in said
    assert said.count("starting it again") == 1
    assert trained_iterations(directory) == 30
    check_books(json.loads((directory / "summary.json").read_text()), directory)


def test_an_error_of_the_users_ends_the_job_with_its_exit_code(
    cluster: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    job = on_slurm.submit(directory, "het", *SMALL, "learner.device=cuda")
    wait_for(lambda: not on_slurm.states(), "the end of the job", 120)
    assert on_slurm.end_of(job) == "FAILED 2:0", logs(directory)
    said = (directory / "logs" / f"slurm-{job}.log").read_text()
    assert "learner ended with exit code 2, which a restart would not change" in said
    on_slurm.cancel_all()
