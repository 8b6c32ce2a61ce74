"""Runs of the arithmetic example as jobs of the tests' SLURM cluster."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixrl.deploy.slurm.script import Script, job_name
from support.paths import ROOT
from support.runs.run_helper import RUN_FILE, logs, trained_iterations, wait_for

SCRIPT = ROOT / "tests/cluster/slurm/mini_cluster.sh"
Install = Callable[..., tuple[str, ...]]
"""Texts by daemon in, settings out."""
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "unshare")
ON_A_CPU = (
    *(
        each
        for role in ("learner", "rollout", "scorer")
        for each in (f"{role}.device=cpu", f"slurm.{role}.cpus=1")
    ),
    "broker.listen=tcp://127.0.0.1:0",
)
"""Settings of every run: its nodes have no GPU, and all of them are this machine."""
SLOW_SCORERS = (
    "scorer.engine=simulated",
    "simulated.completion_s=0.5",
    "algorithm.groups_per_iteration=16",
    "evaluation.problems=16",
    "evaluation.selection_problems=16",
    "evaluation.sampled_candidates=0",
    "checkpoint.every=2",
)
"""Settings of runs that are about jobs: scorers that only wait, so that these runs prove nothing about training."""


@contextmanager
def four_nodes(**variables: str) -> Iterator[Path]:
    """A cluster whose GPUs are none; the folder with its logs. `variables`: those of the script."""
    missing = [each for each in NEEDED if shutil.which(each) is None]
    if missing or os.geteuid() != 0:
        pytest.fail(
            f"the tests on SLURM cannot run: missing commands: {', '.join(missing) or 'none'}, user id {os.geteuid()} "
            "(must be 0); `make slurm` installs slurm-wlm and munge as root"
        )
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        command = ["bash", str(SCRIPT), "start", str(folder)]
        started = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | variables
        )
        assert started.returncode == 0, started.stderr
        yield folder
    finally:
        subprocess.run(["bash", str(SCRIPT), "stop", str(folder)], check=False)
        del os.environ["SLURM_CONF"]
        os.environ |= {"SLURM_CONF": before} if before else {}
        shutil.rmtree(folder, ignore_errors=True)


def run_command(*command: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    """A command's end and output."""
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def prefixrl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """An operator's command."""
    return run_command(sys.executable, "-m", "prefixrl.deploy", *arguments, timeout_s=120)


def submit(directory: Path, layout: str, *settings: str) -> str:
    """`prefixrl slurm --submit`; the id of the learner's job."""
    given = (*ON_A_CPU, *settings, f"directory={directory}")
    flags = [flag for setting in given for flag in ("--set", setting)]
    done = prefixrl("slurm", str(RUN_FILE), "--submit", "--layout", layout, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.removeprefix("job ").partition(":")[0]


def states(*options: str) -> dict[str, str]:
    """Jobs in the queue: id, as `12`, `12_3` or `12+1`, and state."""
    done = run_command("squeue", "--array", "--noheader", "--format=%i|%T", *options)
    return dict(line.split("|") for line in done.stdout.split())


def role_states(directory: Path, role: Script) -> dict[str, str]:
    """Jobs of one role of a run."""
    return states(f"--name={job_name(directory, role)}")


def queue() -> str:
    """The queue as an operator sees it."""
    return "\n" + run_command("squeue", "--array").stdout


def end_of(job: str) -> str:
    """The last known state of a job and its exit code, for example `COMPLETED 0:0`."""
    shown = run_command("scontrol", "show", "job", "--oneliner", job).stdout
    fields = dict(each.partition("=")[::2] for each in shown.split() if "=" in each)
    return f"{fields.get('JobState', 'unknown')} {fields.get('ExitCode', '')}"


def wait_for_end(directory: Path, timeout_s: float = 240.0) -> None:
    """Wait for the summary of a run, and for its jobs to be gone."""
    try:
        wait_for(lambda: (directory / "summary.json").exists(), "the end of the run", timeout_s)
        wait_for(lambda: not states(), "the end of the jobs", 90)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{states()}\n{logs(directory)}") from None


def wait_for_iterations(directory: Path, count: int, timeout_s: float = 240.0) -> None:
    """Wait until so many iterations are trained."""
    try:
        wait_for(lambda: trained_iterations(directory) >= count, f"iteration {count}", timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{states()}\n{logs(directory)}") from None


def cancel_all() -> None:
    """Cancel every job of the cluster."""
    run_command("scancel", "--user=root")


def nodes_are_free() -> bool:
    """True once no job is left and every node is idle."""
    idle = run_command(
        "sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D"
    ).stdout.split()
    return not states() and idle == ["4"]
