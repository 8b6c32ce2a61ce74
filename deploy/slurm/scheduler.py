"""Calls of SLURM's commands, each with a time limit; a failure is one ConfigError."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from prefixrl.common.errors import ConfigError

ANSWER_S = 60.0
"""Longest wait for a command; a busy controller takes some seconds."""
NOT_SUBMITTED = "--test-only"


class QueuedJob(NamedTuple):
    """One job, or one task of an array, that has not ended."""

    job_id: str
    """As SLURM's commands take it, for example 12 or 12_3."""
    name: str
    state: str

    @property
    def is_waiting(self) -> bool:
        """True for a job that holds no node."""
        return self.state == "PENDING"


def submit(script: Path, *options: str) -> str:
    """Submit a script and return the job's id."""
    return _call("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def check(script: Path) -> None:
    """Raise ConfigError if the cluster could never run a script's job; submit nothing."""
    try:
        _call("sbatch", NOT_SUBMITTED, str(script))
    except ConfigError as error:
        pattern = r"(?m)^#SBATCH (--(?:[cg]pus-per|mem|nodes|ntasks=)\S*)"
        requests = re.findall(pattern, script.read_text("utf-8"))
        raise ConfigError(
            f"{error}; {script} asks for {' '.join(requests)}: lower [launch] or [slurm]"
        ) from None


def queued(*names: str) -> list[QueuedJob]:
    """List the jobs of these names by id, one entry per task of an array; none that is ending."""
    answer = _call(
        "squeue",
        "--array",
        "--noheader",
        "--sort=i",
        f"--name={','.join(names)}",
        "--format=%i|%j|%T",
    )
    return read_queue(answer)


def read_queue(answer: str) -> list[QueuedJob]:
    """Read the lines of squeue; a component of a heterogeneous job is `12+1` there."""
    jobs = [QueuedJob(*line.strip().split("|")) for line in answer.splitlines() if line.strip()]
    return [each for each in jobs if each.state != "COMPLETING"]


def end(jobs: Sequence[QueuedJob]) -> None:
    """Take waiting jobs out of the queue; end running ones cleanly: processes get SIGTERM, scripts go on."""
    for is_waiting, options in ((True, []), (False, ["--signal=TERM"])):
        if job_ids := [each.job_id for each in jobs if each.is_waiting == is_waiting]:
            _call("scancel", *options, *job_ids)


def _call(command: str, *arguments: str) -> str:
    try:
        result = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=ANSWER_S
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{command}: there is no such command on this machine; run this where SLURM's commands are, on a login "
            "node for example"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{command} gave no answer in {ANSWER_S:g} s; is SLURM's controller up (sinfo)?"
        ) from None
    if result.returncode:
        said = (result.stderr or result.stdout).strip() or "it gave no reason"
        raise ConfigError(f"{command} failed with exit code {result.returncode}: {said}")
    return result.stdout
