"""`prefixrl slurm`: the job scripts of a run, printed or submitted."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, to_copy
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.worker.command import PATH, settings_option
from prefixrl.deploy.slurm import scheduler
from prefixrl.deploy.slurm.jobs import Submission, script_path, write_scripts, write_submission
from prefixrl.deploy.slurm.script import ROLES, WORKERS, RunOnSlurm, Script, arrays, heterogeneous

Layout = Literal["arrays", "het"]
_NAMES: tuple[Script, ...] = ("run", *ROLES)


def run_on_slurm(run_file: Path, settings: tuple[str, ...]) -> RunOnSlurm:
    """Read a run file. Jobs use the programs in this Python's `bin` folder."""
    (config,) = with_memory([load(run_file, settings)])
    check_format(Path(config.directory))
    return RunOnSlurm(config, run_file.resolve(), settings, Path(sys.executable).parent)


def with_memory(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """Return configs with `memory_gib` for every role: given, else the learner's forecast; raise ConfigError."""
    if all(getattr(each.slurm, role).memory_gib is not None for each in configs for role in ROLES):
        return list(configs)
    command = [sys.executable, "-m", "prefixrl.learner.check.host_memory"]
    lines = "".join(f"{each.model_dump_json()}\n" for each in configs)
    forecast = subprocess.run(command, input=lines, capture_output=True, text=True)
    if forecast.returncode:
        raise ConfigError(forecast.stderr.removeprefix("error: ").strip())
    completed = []
    for config, needed in zip(configs, json.loads(forecast.stdout), strict=True):
        sections = {
            role: getattr(config.slurm, role).model_copy(update={"memory_gib": gib})
            for role, gib in needed.items()
        }
        slurm = config.slurm.model_copy(update=sections)
        completed.append(config.model_copy(update={"slurm": slurm}))
    return completed


def scripts_of(run: RunOnSlurm, layout: Layout) -> dict[Script, str]:
    """Return the scripts by name; with `het` the arrays are there too, for `prefixrl scale`."""
    apart: dict[Script, str] = {role: text for role, text in arrays(run).items()}
    if layout == "het":
        del apart["learner"]
        apart["run"] = heterogeneous(run)
    return apart


def submit(run: RunOnSlurm, layout: Layout) -> None:
    """Submit the jobs of a run and remember them. Submit no job if one of them could never run."""
    directory = run.directory
    if jobs := scheduler.queued(*(run.job_name(role) for role in _NAMES)):
        in_queue = ", ".join(f"{each.job_id} ({each.name}, {each.state})" for each in jobs)
        raise ConfigError(
            f"the run in {directory} has jobs in the queue: {in_queue}; change their number with `prefixrl scale`, or "
            "cancel them first (scancel)"
        )
    if not os.access(run.run_file, os.R_OK):
        raise ConfigError(f"cannot read the run file {run.run_file}")
    write_scripts(directory, scripts_of(run, layout))
    for script in _submitted(layout):
        scheduler.check(script_path(directory, script))
    first = _submitted(layout)[0]
    learner = scheduler.submit(script_path(directory, first))
    fixed: dict[str, int] = {
        role: run.processes(role) if layout == "het" else 0 for role in WORKERS
    }
    # Before the workers: if their submission fails, the learner's job is known all the same.
    write_submission(directory, Submission(layout=layout, learner_job=learner, fixed=fixed))
    click.echo(f"job {learner}: {run.job_name(first)}")
    for role in WORKERS if layout == "arrays" else ():
        job = scheduler.submit(script_path(directory, role), f"--dependency=after:{learner}")
        click.echo(f"job {job}: {run.job_name(role)}, {run.processes(role)} of them")
    status_call = to_copy("prefixrl status", directory)
    click.echo(f"logs are in {directory / 'logs'}; {status_call} shows the run once it has started")
    if run.is_alone:
        click.echo(
            f"broker.listen = {run.listen}: only workers on the learner's own machine can join",
            err=True,
        )


def _submitted(layout: Layout) -> tuple[Script, ...]:
    return ROLES if layout == "arrays" else ("run",)


LAYOUT = "A job of the learner and arrays of workers, or one heterogeneous job of all."


@click.command("slurm")
@click.argument("run_file", type=PATH)
@click.option("--print", "action", flag_value="print", help="Print the job scripts.")
@click.option(
    "--submit", "action", flag_value="submit", help="Submit them; the same command resumes a run."
)
@click.option(
    "--layout",
    type=click.Choice(["arrays", "het"]),
    default="arrays",
    show_default=True,
    help=LAYOUT,
)
@settings_option
def slurm_command(
    run_file: Path, action: str | None, layout: Layout, settings: tuple[str, ...]
) -> None:
    """Run the run of RUN_FILE as jobs of SLURM."""
    if action is None:
        raise ConfigError("give --print to see the job scripts, or --submit to submit them")
    run = run_on_slurm(run_file, settings)
    if action == "submit":
        return submit(run, layout)
    scripts = scripts_of(run, layout)
    for script in _submitted(layout):
        click.echo(f"# ==== {script_path(run.directory, script)}\n{scripts[script]}")
