"""`prefixrl scale`: more or fewer workers of a run under SLURM, while it goes on."""

import heapq
from pathlib import Path
from typing import Literal

import click

from prefixrl.common.errors import ConfigError
from prefixrl.common.run.directory_format import check_format
from prefixrl.deploy.runs.checkpoints import run_directory_argument
from prefixrl.deploy.slurm import scheduler
from prefixrl.deploy.slurm.jobs import Submission, read_submission, script_path, write_submission
from prefixrl.deploy.slurm.scheduler import QueuedJob
from prefixrl.deploy.slurm.script import WORKERS, Worker, job_name


def leaving(workers: list[QueuedJob], count: int) -> list[QueuedJob]:
    """Return the workers that end first: waiting workers, then the newest, by array and index."""
    return heapq.nlargest(
        count, workers, lambda job: (job.is_waiting, [int(part) for part in job.job_id.split("_")])
    )


def scale(directory: Path, roles: Literal["rollouts", "scorers"], count: int) -> None:
    """Set the number of a run's rollouts or scorers; print what was done."""
    directory = directory.resolve()
    check_format(directory)
    role: Worker = "rollout" if roles == "rollouts" else "scorer"
    submission = read_submission(directory)
    fixed = submission.fixed.get(role, 0)
    if count < fixed:
        raise ConfigError(
            f"{count} {roles} are wanted, but {fixed} belong to the heterogeneous job {submission.learner_job} and "
            f"end with it only; give {fixed} or more"
        )
    workers = _workers(directory, role, submission)
    missing = count - fixed - len(workers)
    if missing > 0:
        if not scheduler.queued(*(job_name(directory, each) for each in ("learner", "run"))):
            raise ConfigError(
                f"the run in {directory} has no learner in the queue (it was job {submission.learner_job}), so that "
                f"workers would wait in vain; `prefixrl slurm run.toml --submit` submits the run again, and resumes it"
            )
        array = f"--array=0-{missing - 1}"
        job = scheduler.submit(
            script_path(directory, role), array, f"--dependency=after:{submission.learner_job}"
        )
        click.echo(f"job {job}: {missing} more {roles}, {count} in all")
        return
    ended = leaving(workers, -missing)
    names = [each.job_id for each in ended]
    # Remembered first: a worker takes its time to leave, and must not be counted meanwhile.
    submission.leaving += names
    write_submission(directory, submission)
    scheduler.end(ended)
    change = f"{len(ended)} {roles} end ({', '.join(names)}), {count} stay"
    click.echo(change if ended else f"{count} {roles}, as before")


def _workers(directory: Path, role: Worker, submission: Submission) -> list[QueuedJob]:
    """List the workers of a role that stay; forget leaving workers that are gone."""
    jobs = scheduler.queued(*(job_name(directory, each) for each in WORKERS))
    submission.leaving = [job.job_id for job in jobs if job.job_id in submission.leaving]
    name = job_name(directory, role)
    return [job for job in jobs if job.name == name and job.job_id not in submission.leaving]


@click.command("scale")
@run_directory_argument
@click.argument("role", type=click.Choice(["rollouts", "scorers"]))
@click.argument("count", type=click.IntRange(0))
def scale_command(run_directory: Path, role: Literal["rollouts", "scorers"], count: int) -> None:
    """Have COUNT rollouts or scorers in the run in RUN_DIRECTORY.

    The run is one that `prefixrl slurm` submitted. Ends the newest workers first; what they hold is handed back.
    """
    scale(run_directory, role, count)
