"""`prefixrl slurm` and `prefixrl scale` without a cluster: the queue read, changes planned, failures in one message."""

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.common.config.load import load
from prefixrl.common.errors import ConfigError
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.slurm import scheduler
from prefixrl.deploy.slurm.jobs import Submission, read_submission, write_scripts, write_submission
from prefixrl.deploy.slurm.scale import leaving
from prefixrl.deploy.slurm.scheduler import QueuedJob, read_queue
from prefixrl.learner.run.directory import RunDirectory
from support.fakes import run_on_disk
from support.runs.run_helper import RUN_FILE

QUEUE = """
12_0|scorer.run-1a2b3c4d|RUNNING
12_1|scorer.run-1a2b3c4d|COMPLETING
15_0|scorer.run-1a2b3c4d|PENDING
9+1|run.run-1a2b3c4d|RUNNING
"""


def workers(*jobs: str) -> list[QueuedJob]:
    """Workers from texts such as `12_3` or `12_3 PENDING`."""
    return [
        QueuedJob(job.partition(" ")[0], "scorer", job.partition(" ")[2] or "RUNNING")
        for job in jobs
    ]


def test_the_queue_is_read_without_jobs_that_are_ending() -> None:
    assert [(each.job_id, each.is_waiting) for each in read_queue(QUEUE)] == [
        ("12_0", False),
        ("15_0", True),
        ("9+1", False),
    ]
    assert read_queue("\n") == []


def test_those_that_wait_end_first_and_then_the_newest() -> None:
    there = workers("7_0", "7_10", "7_9", "12_0", "12_1", "3_0 PENDING")
    assert [each.job_id for each in leaving(there, 6)] == [
        "3_0",
        "12_1",
        "12_0",
        "7_10",
        "7_9",
        "7_0",
    ]
    assert leaving(there, 0) == []


def stand_in(folder: Path, name: str, text: str) -> None:
    """A program of that name."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is searched for SLURM's commands."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/no-slurm")
    os.symlink("/bin/bash", folder / "bash")
    os.symlink("/bin/sleep", folder / "sleep")
    return folder


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code and error of an operator's command."""
    done = CliRunner().invoke(main, list(arguments))
    return done.exit_code, done.stderr


def test_without_slurm_there_is_one_message(tmp_path: Path, programs: Path) -> None:
    code, said = invoke("slurm", str(RUN_FILE), "--submit", "--set", f"directory={tmp_path}/run")
    assert code == 2
    assert said.startswith("error: squeue: there is no such command on this machine")
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_scripts_can_be_printed_without_slurm(tmp_path: Path, programs: Path) -> None:
    done = CliRunner().invoke(
        main, ["slurm", str(RUN_FILE), "--print", "--set", f"directory={tmp_path}/run"]
    )
    assert done.exit_code == 0
    assert done.stdout.count("#!/bin/bash\n") == 3
    assert f"# ==== {tmp_path}/run/slurm/scorer.sbatch\n" in done.stdout
    assert not (tmp_path / "run").exists()


def test_one_of_print_and_submit_must_be_given() -> None:
    assert invoke("slurm", str(RUN_FILE)) == (
        2,
        "error: give --print to see the job scripts, or --submit to submit them\n",
    )


def test_a_command_that_fails_is_named_with_its_own_words(programs: Path) -> None:
    stand_in(
        programs,
        "squeue",
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
    )
    with pytest.raises(
        ConfigError,
        match="squeue failed with exit code 1: slurm_load_jobs error: Unable to contact",
    ):
        scheduler.queued("scorer.run")


def test_a_command_that_hangs_is_given_up(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "ANSWER_S", 0.5)
    stand_in(programs, "squeue", "exec sleep 60")
    with pytest.raises(
        ConfigError, match=r"squeue gave no answer in 0.5 s; is SLURM's controller up"
    ):
        scheduler.queued("scorer.run")


def test_a_run_with_jobs_in_the_queue_is_not_submitted_again(
    tmp_path: Path, programs: Path
) -> None:
    stand_in(programs, "squeue", "echo '12_0|scorer.run|RUNNING'")
    code, said = invoke("slurm", str(RUN_FILE), "--submit", "--set", f"directory={tmp_path}/run")
    assert code == 2
    assert (
        "has jobs in the queue: 12_0 (scorer.run, RUNNING); change their number with `prefixrl scale`"
        in said
    )


def submitted(directory: Path, **given: int) -> None:
    write_scripts(directory, {"scorer": "#!/bin/bash\n"})
    write_submission(directory, Submission(layout="het", learner_job="9", fixed=given))


def test_workers_that_belong_to_the_learners_job_cannot_be_ended_apart(
    tmp_path: Path, programs: Path
) -> None:
    submitted(tmp_path, scorer=2)
    code, said = invoke("scale", str(tmp_path), "scorers", "1")
    assert code == 2
    assert (
        "1 scorers are wanted, but 2 belong to the heterogeneous job 9 and end with it only; give 2 or more"
        in said
    )


def test_workers_without_a_learner_are_not_submitted(tmp_path: Path, programs: Path) -> None:
    submitted(tmp_path)
    stand_in(programs, "squeue", "exit 0")
    code, said = invoke("scale", str(tmp_path), "scorers", "1")
    assert code == 2
    assert "has no learner in the queue (it was job 9), so that workers would wait in vain" in said


def test_a_worker_that_was_asked_to_end_is_not_counted_while_it_is_still_there(
    tmp_path: Path, programs: Path
) -> None:
    submitted(tmp_path)
    name = "scorer." + scheduler_name(tmp_path)
    stand_in(programs, "squeue", f"echo '12_0|{name}|RUNNING'; echo '12_1|{name}|RUNNING'")
    stand_in(programs, "scancel", f'echo "$@" >>{tmp_path}/cancelled')
    for _ in range(2):
        assert invoke("scale", str(tmp_path), "scorers", "1")[0] == 0
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 12_1\n"
    assert read_submission(tmp_path).leaving == ["12_1"]


def scheduler_name(directory: Path) -> str:
    """The part of a job's name that stands for its run."""
    from prefixrl.deploy.slurm.script import job_name

    return job_name(directory, "run").removeprefix("run.")


def test_a_directory_without_a_submission_or_with_a_damaged_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run that was submitted to SLURM"):
        read_submission(tmp_path)
    submitted(tmp_path)
    (tmp_path / "slurm/jobs.json").write_text("{")
    with pytest.raises(ConfigError, match=r"jobs.json cannot be read: .*; submit the run again"):
        read_submission(tmp_path)


def test_a_run_may_move_to_other_nodes_when_it_resumes(tmp_path: Path) -> None:
    config = run_on_disk(tmp_path)
    moved = load(RUN_FILE, ("slurm.account=other", "slurm.scorer.gpus=4")).slurm
    RunDirectory(config.model_copy(update={"slurm": moved}))._lock.close()
