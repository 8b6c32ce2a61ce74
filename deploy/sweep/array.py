"""The runs of a sweep as an array of SLURM jobs: each task is one whole run on one node."""

import sys
from pathlib import Path

import click

from prefixrl.common.errors import ConfigError
from prefixrl.deploy.slurm import scheduler
from prefixrl.deploy.slurm.jobs import script_path, write_scripts
from prefixrl.deploy.slurm.script import RunOnSlurm, whole_runs
from prefixrl.deploy.sweep.grid import Sweep
from prefixrl.deploy.view.run_state import state_of


def script(sweep: Sweep) -> str:
    """Return the job script of the whole array."""
    configs = [sweep.config(run) for run in sweep.runs]
    run = _on_slurm(sweep)
    return whole_runs(run, configs, ["prefixrl", "sweep", str(sweep.file), "--index"])


def submit(sweep: Sweep) -> None:
    """Submit the runs that are not finished; ConfigError if some are queued, or none is left."""
    run = _on_slurm(sweep)
    if there := scheduler.queued(run.job_name("sweep")):
        shown = ", ".join(f"{each.job_id} ({each.state})" for each in there)
        raise ConfigError(f"the sweep in {sweep.directory} is in the queue: {shown}; cancel it first (scancel)")
    left = [each.index for each in sweep.runs if not _is_finished(each.directory)]
    if not left:
        raise ConfigError(f"every run of {sweep.file} is finished; --table shows them")
    write_scripts(sweep.directory, {"sweep": script(sweep)})
    path = script_path(sweep.directory, "sweep")
    scheduler.check(path)
    job = scheduler.submit(path, f"--array={_ranges(left)}")
    click.echo(f"job {job}: runs {_ranges(left)} of {sweep.file}; logs of the jobs are in {path.parent}")


def _on_slurm(sweep: Sweep) -> RunOnSlurm:
    config = sweep.config(sweep.runs[0]).model_copy(update={"directory": str(sweep.directory)})
    return RunOnSlurm(config, sweep.file, (), Path(sys.executable).parent)


def _is_finished(directory: Path) -> bool:
    return (directory / "config.json").exists() and state_of(directory).state == "finished"


def _ranges(indices: list[int]) -> str:
    """Return numbers as sbatch takes them: 0-3,7."""
    spans: list[list[int]] = []
    for each in indices:
        if spans and each == spans[-1][-1] + 1:
            spans[-1].append(each)
        else:
            spans.append([each])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)
