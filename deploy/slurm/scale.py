"""`prefixrl scale`: more or fewer workers of a run under SLURM, while it goes on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from prefixrl.common.errors import ConfigError
from prefixrl.common.run.directory_format import check_format
from prefixrl.deploy.slurm import scheduler
from prefixrl.deploy.slurm.jobs import Submission, read_submission, script_path, write_submission
from prefixrl.deploy.slurm.scheduler import QueuedJob
from prefixrl.deploy.slurm.script import WORKERS, Worker, job_name


@dataclass(frozen=True)
class Change:
    """The difference between the workers there are and those wanted."""

    submitted: int = 0
    """Number of workers to submit."""
    cancelled: tuple[str, ...] = ()
    """Waiting workers to take out of the queue."""
    stopped: tuple[str, ...] = ()
    """Running workers to end cleanly."""


def plan(workers: list[QueuedJob], wanted: int) -> Change:
    """Return the change to `wanted` workers: waiting ones end first, then the newest."""
    surplus = len(workers) - wanted
    if surplus <= 0:
        return Change(submitted=-surplus)
    leaving = sorted(workers, key=lambda each: (each.is_waiting, _age_order(each.job_id)), reverse=True)[:surplus]
    return Change(
        cancelled=tuple(each.job_id for each in leaving if each.is_waiting),
        stopped=tuple(each.job_id for each in leaving if not each.is_waiting),
    )


def _age_order(job_id: str) -> tuple[int, int]:
    """Return a key that is larger for a newer task: of a later array, or with a higher index."""
    array, _, task = job_id.partition("_")
    return int(array), int(task or 0)


def scale(directory: Path, roles: Literal["rollouts", "scorers"], wanted: int) -> None:
    """Bring the number of a run's rollouts or scorers to `wanted`; say what was done."""
    directory = directory.resolve()
    check_format(directory)
    role: Worker = "rollout" if roles == "rollouts" else "scorer"
    submission = read_submission(directory)
    fixed = submission.fixed.get(role, 0)
    if wanted < fixed:
        raise ConfigError(
            f"{wanted} {roles} are wanted, but {fixed} belong to the heterogeneous job {submission.learner_job} and "
            f"end with it only; give {fixed} or more"
        )
    change = plan(_workers(directory, role, submission), wanted - fixed)
    if change.submitted:
        _check_learner(directory, submission)
        array = f"--array=0-{change.submitted - 1}"
        job = scheduler.submit(script_path(directory, role), array, f"--dependency=after:{submission.learner_job}")
        click.echo(f"job {job}: {change.submitted} more {roles}, {wanted} in all")
        return
    # Remembered first: a worker takes its time to leave, and must not be counted meanwhile.
    submission.leaving += [*change.cancelled, *change.stopped]
    write_submission(directory, submission)
    scheduler.cancel(list(change.cancelled))
    scheduler.stop(list(change.stopped))
    if ended := [*change.cancelled, *change.stopped]:
        click.echo(f"{len(ended)} {roles} end ({', '.join(ended)}), {wanted} stay")
    else:
        click.echo(f"{wanted} {roles}, as before")


def _workers(directory: Path, role: Worker, submission: Submission) -> list[QueuedJob]:
    """List a role's workers that stay; forget those asked to end that are gone."""
    there = scheduler.queued(*(job_name(directory, each) for each in WORKERS))
    submission.leaving = [each for each in submission.leaving if each in {job.job_id for job in there}]
    name = job_name(directory, role)
    return [job for job in there if job.name == name and job.job_id not in submission.leaving]


def _check_learner(directory: Path, submission: Submission) -> None:
    """Raise ConfigError where new workers would find no learner."""
    names = [job_name(directory, "learner"), job_name(directory, "run")]
    if not scheduler.queued(*names):
        raise ConfigError(
            f"the run in {directory} has no learner in the queue (it was job {submission.learner_job}), so that "
            "workers would wait in vain; submit the run again with `prefixrl slurm run.toml --submit`, which resumes it"
        )
