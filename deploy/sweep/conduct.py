"""Runs of a sweep: all of them in sequence on this machine, the run of an index, or an array of SLURM jobs."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import click

from prefixrl.common.config.load import CONFIG_FILE
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, Halted, PrefixRLError
from prefixrl.common.host.exit_codes import printable
from prefixrl.common.host.process import stop_event
from prefixrl.deploy.launch.launch import STOPPED, launch
from prefixrl.deploy.runs.checkpoints import PLACE, config_of, flat_settings
from prefixrl.deploy.slurm import scheduler
from prefixrl.deploy.slurm.jobs import script_path, write_scripts
from prefixrl.deploy.slurm.script import RunOnSlurm, whole_runs
from prefixrl.deploy.slurm.submit import with_memory
from prefixrl.deploy.sweep.grid import Sweep, SweptRun, read
from prefixrl.deploy.sweep.outcome import print_tables
from prefixrl.deploy.view.run_state import is_locked, state_of

SOME_FAILED = 5
"""Exit code of a sweep that is over, if some of its runs ended with an error."""
FREE = (*PLACE, "checkpoint", "evaluation")
"""Sections that may differ from the config of a finished run."""


def conduct(sweep: Sweep) -> int:
    """Run every unfinished run, in the order of the indices; return the exit code.

    A run that fails is reported, and the others go on; the same command begins or resumes every unfinished run.
    """
    for run in sweep.runs:
        sweep.config(run)  # all are right, or none begins
    failed = []
    stop = stop_event()
    for run in sweep.runs:
        try:
            # A stop between two runs is heard, too.
            code = Halted.exit_code if stop.is_set() else run_one(sweep, run, stop)
        except (PrefixRLError, OSError) as error:
            click.echo(f"run {run.index}: {error}", err=True)
            code = getattr(error, "exit_code", 1)
        if code == Halted.exit_code:
            click.echo(f"the sweep is stopped at run {run.index}; the same command resumes it")
            return STOPPED
        if code:
            failed.append(run.index)
    if failed:
        click.echo(
            f"runs that did not end well: {', '.join(map(str, failed))}; the same command tries them again"
        )
    return SOME_FAILED if failed else 0


def run_one(sweep: Sweep, run: SweptRun, stop: threading.Event | None = None) -> int:
    """Launch or resume a run unless it is finished; return its exit code, 143 for a stop.

    `stop`: as for `launch`.
    """
    config = sweep.config(run)
    title = f"run {run.index} of {len(sweep.runs)}, {run.directory}"
    if _is_finished(run):
        _check_same(config_of(run.directory, ()), config)
        click.echo(f"{title}: finished before")
        return 0
    if is_locked(run.directory):
        click.echo(f"{title}: is running in another process", err=True)
        return 0
    click.echo(title)
    code = launch(sweep.run_file, run.settings, fresh=False, stop=stop)
    # By this code a batch system knows that the run saved and goes on at its next start.
    return Halted.exit_code if code == STOPPED else code


def _is_finished(run: SweptRun) -> bool:
    return (run.directory / CONFIG_FILE).exists() and state_of(run.directory).state == "finished"


def _check_same(before: RunConfig, now: RunConfig) -> None:
    """Raise ConfigError if a run finished with other settings than the sweep has for it now."""
    old, new = (flat_settings(each.model_dump(mode="json")) for each in (before, now))
    changed = {key for key, _ in old.items() ^ new.items() if key.split(".")[0] not in FREE}
    differing = [f"{key}: {old.get(key)} -> {new.get(key)}" for key in sorted(changed)]
    if differing:
        raise ConfigError(
            f"{before.directory} holds a finished run with other settings: {'; '.join(differing)}; restore the sweep "
            f"file, or give the sweep another directory"
        )


def listing(sweep: Sweep) -> Iterator[str]:
    """Yield a line per run: index, directory, settings."""
    for run in sweep.runs:
        sweep.config(run)
        yield f"{run.index}\t{run.directory}\t{' '.join(run.settings[:-1])}"


# --- as jobs of SLURM: each task of an array is one whole run on one node -------------------------------------------


def job_script(sweep: Sweep) -> str:
    """Return the job script of the whole array."""
    configs = with_memory([sweep.config(run) for run in sweep.runs])
    run = _on_slurm(sweep)
    return whole_runs(run, configs, ["prefixrl", "sweep", str(sweep.file), "--index"])


def submit(sweep: Sweep) -> None:
    """Submit the unfinished runs; ConfigError if runs are queued, or every run is finished."""
    run = _on_slurm(sweep)
    if jobs := scheduler.queued(run.job_name("sweep")):
        names = ", ".join(f"{each.job_id} ({each.state})" for each in jobs)
        raise ConfigError(
            f"the sweep in {sweep.directory} is in the queue: {names}; cancel it first (scancel)"
        )
    unfinished = [each.index for each in sweep.runs if not _is_finished(each)]
    if not unfinished:
        raise ConfigError(f"every run of {sweep.file} is finished; --table shows them")
    write_scripts(sweep.directory, {"sweep": job_script(sweep)})
    path = script_path(sweep.directory, "sweep")
    scheduler.check(path)
    job = scheduler.submit(path, f"--array={_ranges(unfinished)}")
    click.echo(
        f"job {job}: runs {_ranges(unfinished)} of {sweep.file}; logs of the jobs are in {path.parent}"
    )


def _on_slurm(sweep: Sweep) -> RunOnSlurm:
    config = sweep.config(sweep.runs[0]).model_copy(update={"directory": str(sweep.directory)})
    return RunOnSlurm(config, sweep.file, (), Path(sys.executable).parent)


def _ranges(indices: list[int]) -> str:
    """Return numbers as sbatch takes them: 0-3,7."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][-1] + 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


@click.command("sweep")
@click.argument("sweep_file", type=click.Path(path_type=Path))
@click.option("--index", type=int, help="Launch or resume this run alone.")
@click.option(
    "--list", "action", flag_value="list", help="Print index, directory and settings of every run."
)
@click.option(
    "--table",
    "action",
    flag_value="table",
    help="Print the table of all runs, and means over seeds.",
)
@click.option(
    "--print", "action", flag_value="print", help="Print the job script of a SLURM array."
)
@click.option(
    "--submit",
    "action",
    flag_value="submit",
    help="Submit the runs that are not finished as an array.",
)
def sweep_command(sweep_file: Path, index: int | None, action: str | None) -> None:
    """Run every combination of settings in SWEEP_FILE, one after another, and print their table.

    The same command goes on with a sweep that was stopped: what is finished is not run again.
    """
    sweep = read(sweep_file)
    if index is not None and action:
        raise ConfigError(f"--index {index} with --{action}: give one of them")
    if index is not None:
        raise SystemExit(run_one(sweep, sweep.at(index)))
    if action == "list":
        for line in listing(sweep):
            click.echo(printable(line))
    elif action == "print":
        click.echo(job_script(sweep))
    elif action == "submit":
        submit(sweep)
    else:
        code = 0 if action == "table" else conduct(sweep)
        print_tables(sweep)
        raise SystemExit(code)
