"""`RUN/slurm`: the scripts of a run, which `prefixrl scale` submits again, and its jobs."""

from pathlib import Path

import msgspec

from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import write_atomically
from prefixrl.deploy.slurm.script import Script

FOLDER = "slurm"
RECORD = "jobs.json"


class Submission(msgspec.Struct, kw_only=True):
    """The content of `RUN/slurm/jobs.json`."""

    layout: str
    learner_job: str
    """Id of the job that holds the learner."""
    fixed: dict[str, int]
    """Workers by role that belong to the learner's job, which `prefixrl scale` can neither add nor end."""
    leaving: list[str] = msgspec.field(default_factory=list)
    """Workers that were asked to end and may still be in the queue."""


def script_path(directory: Path, script: Script) -> Path:
    """Return the place of a job script."""
    return directory / FOLDER / f"{script}.sbatch"


def write_scripts(directory: Path, scripts: dict[Script, str]) -> None:
    """Write job scripts, and make the folders that their jobs write to."""
    for folder in ("logs", FOLDER):
        try:
            (directory / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"directory = {str(directory)!r} cannot be used: {error.strerror}"
            ) from None
    for script, text in scripts.items():
        write_atomically(script_path(directory, script), text)


def write_submission(directory: Path, submission: Submission) -> None:
    """Record the submitted jobs."""
    write_atomically(
        directory / FOLDER / RECORD, msgspec.json.format(msgspec.json.encode(submission))
    )


def read_submission(directory: Path) -> Submission:
    """Return the record of the submitted jobs; ConfigError if nothing was submitted."""
    path = directory / FOLDER / RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=Submission)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{directory} holds no run that was submitted to SLURM (no file {path}); submit one with `prefixrl slurm "
            "run.toml --submit`"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; submit the run again, which writes it anew"
        ) from None
