"""Jobs restart what crashed and nothing else, and their processes see their own GPUs: stand-ins for the daemons."""

from pathlib import Path

import pytest

from cluster.slurm.on_slurm import Install, end_of, prefixrl, run_command, states, submit
from support.runs.run_helper import RUN_FILE, logs, wait_for

pytestmark = pytest.mark.slurm


def run_to_its_end(directory: Path, layout: str, *settings: str) -> str:
    """Submit a run and wait until its jobs are gone; the id of the learner's job."""
    job = submit(directory, layout, *settings)
    wait_for(lambda: not states(), "the end of the jobs", 90)
    return job


def starts(folder: Path, role: str) -> int:
    """Count the starts that a daemon has noted."""
    path = folder / role
    return path.read_text().count("start") if path.exists() else 0


def test_ranks_see_the_gpus_of_their_node_and_every_worker_its_own(
    cluster: Path, tmp_path: Path, daemons: Install
) -> None:
    shown = 'echo "$0 rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS sees $CUDA_VISIBLE_DEVICES on $(hostname)"; sleep 2'
    given = (
        "launch.learner_ranks=2",
        "launch.scorers=3",
        *(f"slurm.{role}.gpus=1" for role in ("learner", "scorer")),
    )
    directory = tmp_path / "run"
    run_to_its_end(directory, "het", *daemons(learner=shown, rollout=shown, scorer=shown), *given)
    ranks = sorted(
        line.partition("rank ")[2]
        for line in (directory / "logs/learner.log").read_text().splitlines()
    )
    assert ranks == ["0 of 2 sees 0,1 on n1", "1 of 2 sees 0,1 on n1"], logs(directory)
    scorers = [
        path.read_text().partition("sees ")[2].strip()
        for path in (directory / "logs").glob("scorer-*.log")
    ]
    assert len(set(scorers)) == 3 and {each.partition(" ")[0] for each in scorers} <= {"0", "1"}
    assert "sees  on" in (directory / "logs/rollout-0.log").read_text()


@pytest.mark.parametrize("code", [2, 3, 5, 1])
def test_a_learner_that_would_fail_again_ends_its_job_with_its_exit_code(
    cluster: Path, tmp_path: Path, daemons: Install, code: int
) -> None:
    noted = daemons(
        learner=f"echo start >>{tmp_path}/learner; exit {code}",
        rollout="sleep 60",
        scorer="sleep 60",
    )
    job = run_to_its_end(tmp_path / "run", "het", *noted)
    assert end_of(job) == f"FAILED {code}:0", logs(tmp_path / "run")
    assert starts(tmp_path, "learner") == 1


def test_a_worker_that_is_refused_ends_the_heterogeneous_job(
    cluster: Path, tmp_path: Path, daemons: Install
) -> None:
    job = run_to_its_end(tmp_path / "run", "het", *daemons(learner="sleep 60", scorer="exit 3"))
    assert end_of(job) == "FAILED 3:0", logs(tmp_path / "run")


def test_what_crashes_is_started_again_until_its_restarts_are_used_up(
    cluster: Path, tmp_path: Path, daemons: Install
) -> None:
    note = f"echo start >>{tmp_path}/"
    settings = daemons(
        learner=f"{note}learner; sleep 5; kill -9 $$",
        scorer=f"{note}scorer; exit 1",
        rollout="sleep 9",
    )
    directory = tmp_path / "run"
    job = run_to_its_end(directory, "arrays", *settings, "slurm.restarts=2", "launch.scorers=1")
    assert end_of(job) == "FAILED 137:0", logs(directory)
    assert starts(tmp_path, "learner") == starts(tmp_path, "scorer") == 3
    said = "".join(path.read_text() for path in (directory / "logs").glob("scorer-*.log"))
    assert "starting it again (0 left)" in said and "exit code 1, after 2 restarts" in said
    assert not list((directory / "slurm").glob("*.code")), "leftovers"


def test_a_worker_that_finds_nobody_goes_back_to_the_queue_only_if_a_learner_is_there(
    cluster: Path, tmp_path: Path, daemons: Install
) -> None:
    settings = daemons(
        learner="sleep 12", scorer=f"echo start >>{tmp_path}/scorer; sleep 1; exit 4"
    )
    directory = tmp_path / "run"
    run_to_its_end(directory, "arrays", *settings, "launch.scorers=1")
    said = "".join(path.read_text() for path in (directory / "logs").glob("scorer-*.log"))
    assert "the learner is waiting for its turn: queueing the job again" in said, said
    assert "no learner of this run is queued" in said
    assert starts(tmp_path, "scorer") >= 2


@pytest.mark.parametrize("layout", ["arrays", "het"])
def test_a_job_that_is_warned_of_its_time_limit_stops_its_processes_and_is_queued_again(
    cluster: Path, tmp_path: Path, daemons: Install, layout: str
) -> None:
    text = f"""echo start >>{tmp_path}/learner
[ -z "$SLURM_RESTART_COUNT" ] || exit 0
trap "exit 143" TERM
sleep 60 & wait $!"""
    job = submit(
        tmp_path / "run", layout, *daemons(learner=text, rollout="sleep 40", scorer="sleep 40")
    )
    wait_for(lambda: starts(tmp_path, "learner") == 1, "the learner's start", 60)
    warned = run_command("scancel", "--batch", "--signal=USR1", job)
    assert warned.returncode == 0, warned.stderr
    wait_for(lambda: starts(tmp_path, "learner") == 2, "the learner's second start", 90)
    wait_for(lambda: end_of(job) == "COMPLETED 0:0", "the end of the learner's job", 60)


def test_a_run_in_the_queue_is_not_submitted_twice(
    cluster: Path, tmp_path: Path, daemons: Install
) -> None:
    settings = daemons(learner="sleep 30")
    job = submit(tmp_path / "run", "arrays", *settings)
    flags = [flag for each in (*settings, f"directory={tmp_path}/run") for flag in ("--set", each)]
    again = prefixrl("slurm", str(RUN_FILE), "--submit", *flags)
    assert again.returncode == 2
    assert f"has jobs in the queue: {job} (learner.run-" in again.stderr
