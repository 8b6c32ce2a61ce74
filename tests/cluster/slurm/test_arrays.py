"""A job of the learner and arrays of workers: scaled, queued again and preempted in mid-run."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.slurm import on_slurm
from support.runs.run_helper import SMALL, check_books, logs, status, trained_iterations, wait_for

Figure = Callable[[str, object], None]
"""Shows a text at the end of the tests."""
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def scorers_at_work(directory: Path) -> int:
    """Scorers that the broker knows and that have loaded."""
    return sum(
        each["role"] == "scorer" and bool(each["engine"]) for each in status(directory)["workers"]
    )


def books(directory: Path, iterations: int) -> None:
    """Check that a run ended with every iteration and every group trained once."""
    assert trained_iterations(directory) == iterations
    summary = json.loads((directory / "summary.json").read_text())
    check_books(summary, directory)
    assert summary["groups"]["trained"] == 16 * iterations


def test_scorers_join_and_leave_a_run_that_goes_on(
    cluster: Path, tmp_path: Path, record_property: Figure
) -> None:
    directory = tmp_path / "a run"
    on_slurm.submit(
        directory, "arrays", *on_slurm.SLOW_SCORERS, "algorithm.iterations=60", "launch.scorers=1"
    )
    on_slurm.wait_for_iterations(directory, 1)
    joined = on_slurm.prefixrl("scale", str(directory), "scorers", "4")
    assert "3 more scorers, 4 in all" in joined.stdout, joined.stderr
    wait_for(lambda: scorers_at_work(directory) == 4, "four scorers at work")
    record_property("figure", on_slurm.queue())
    assert sorted(on_slurm.role_states(directory, "scorer").values()) == ["RUNNING"] * 4
    trained = trained_iterations(directory)

    left = on_slurm.prefixrl("scale", str(directory), "scorers", "1")
    assert "3 scorers end" in left.stdout, left.stderr
    # Those that are leaving do not count, although they may still be there.
    assert (
        "1 scorers, as before" in on_slurm.prefixrl("scale", str(directory), "scorers", "1").stdout
    )
    wait_for(lambda: len(on_slurm.role_states(directory, "scorer")) == 1, "one scorer left")
    for job in re.findall(r"\d+_\d", left.stdout):
        assert on_slurm.end_of(job) == "COMPLETED 0:0", logs(directory)
    on_slurm.wait_for_iterations(directory, trained + 2)
    assert scorers_at_work(directory) == 1
    on_slurm.wait_for_end(directory)
    books(directory, 60)


def test_a_learner_that_is_queued_again_resumes_and_its_workers_stay(
    cluster: Path, tmp_path: Path, record_property: Figure
) -> None:
    directory = tmp_path / "run"
    job = on_slurm.submit(directory, "arrays", *SMALL, "algorithm.iterations=40")
    on_slurm.wait_for_iterations(directory, 5)
    workers = on_slurm.role_states(directory, "scorer") | on_slurm.role_states(directory, "rollout")
    assert on_slurm.run_command("scontrol", "requeue", job).returncode == 0
    wait_for(
        lambda: on_slurm.role_states(directory, "learner").get(job) == "PENDING",
        "the learner in the queue",
        60,
    )
    record_property("figure", on_slurm.queue())
    wait_for(
        lambda: on_slurm.role_states(directory, "learner").get(job) == "RUNNING",
        "the learner's second start",
        90,
    )
    on_slurm.wait_for_end(directory)
    assert "Restarts=1" in on_slurm.run_command("scontrol", "show", "job", job).stdout
    said = (directory / "logs/learner.log").read_text()
    assert re.search(r"stopped as asked after \d+ iterations, not finished", said)
    assert re.search(r"models are loaded at iteration [1-9]", said)
    books(directory, 40)
    for worker in workers:
        assert on_slurm.end_of(worker) == "COMPLETED 0:0", logs(directory)
        assert "Restarts=0" in on_slurm.run_command("scontrol", "show", "job", worker).stdout


def test_a_learner_near_its_time_limit_saves_and_queues_itself_again(
    cluster: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    # USR1 comes up to a minute early: nearly at once.
    limit = ("slurm.learner.time=2:00", "slurm.warn_s=60")
    job = on_slurm.submit(
        directory,
        "arrays",
        *on_slurm.SLOW_SCORERS,
        "algorithm.iterations=100",
        "simulated.completion_s=3",
        *limit,
    )
    on_slurm.wait_for_iterations(directory, 1)
    wait_for(
        lambda: on_slurm.role_states(directory, "learner").get(job) == "PENDING",
        "the learner in the queue",
        150,
    )
    said = (directory / "logs/learner.log").read_text()
    assert "the time limit is near: asking to save" in said
    assert re.search(r"stopped as asked after \d+ iterations, not finished", said)
    assert "asked to leave before the time limit: queueing the job again" in said
    before = trained_iterations(directory)
    on_slurm.wait_for_iterations(directory, before + 3)
    assert (
        f"models are loaded at iteration {before}" in (directory / "logs/learner.log").read_text()
    )


def test_a_preempted_scorer_hands_back_its_work_and_comes_back(
    cluster: Path, tmp_path: Path, record_property: Figure
) -> None:
    directory = tmp_path / "run"
    preemptible = ("slurm.scorer.partition=low", "slurm.scorer.cpus=4", "launch.scorers=2")
    on_slurm.submit(
        directory, "arrays", *on_slurm.SLOW_SCORERS, *preemptible, "algorithm.iterations=80"
    )
    wait_for(
        lambda: len(on_slurm.role_states(directory, "scorer")) == 2, "the scorers in the queue", 60
    )
    on_slurm.wait_for_iterations(directory, 2)
    wait_for(lambda: scorers_at_work(directory) == 2, "two scorers at work")
    # The learner and the rollout share the first node; each scorer needs a whole one.
    other = on_slurm.run_command(
        "sbatch", "--parsable", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 25"
    )
    wait_for(
        lambda: on_slurm.end_of(other.stdout.strip()).startswith("RUNNING"),
        "the other job's start",
        60,
    )
    record_property("figure", on_slurm.queue())
    assert set(on_slurm.role_states(directory, "scorer").values()) == {"PENDING"}
    said = "".join(path.read_text() for path in (directory / "logs").glob("scorer-*.log"))
    assert said.count("preempted: queueing the job again") == 2, said
    wait_for(lambda: scorers_at_work(directory) == 2, "two scorers at work again", 120)
    on_slurm.wait_for_end(directory)
    books(directory, 80)
