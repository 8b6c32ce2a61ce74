"""The commands `prefixrl launch` and `prefixrl doctor`."""

import subprocess
import sys
from pathlib import Path

import click

from prefixrl.common.worker.command import PATH, set_flags, settings_option


@click.command("launch")
@click.argument("run_file", type=PATH)
@settings_option
@click.option("--fresh", is_flag=True, help="Throw the run directory away and start anew.")
@click.option(
    "--check", is_flag=True, help="Start nothing: print what `prefixrl-learner --check` prints."
)
def launch_command(run_file: Path, settings: tuple[str, ...], fresh: bool, check: bool) -> None:
    """Run learner, rollouts and scorers on this machine, with a live view; resume a run.

    Executes the Python files that RUN_FILE names (reward.function, algorithm.advantage_function and loss_function).
    """
    if check:
        command = [
            sys.executable,
            "-m",
            "prefixrl.learner",
            str(run_file),
            "--check",
            *set_flags(settings),
        ]
        raise SystemExit(subprocess.call(command))
    # Late: a check needs nothing of it.
    from prefixrl.deploy.launch.launch import launch

    raise SystemExit(launch(run_file, settings, fresh))


@click.command("doctor")
@click.argument("run_file", type=PATH, required=False)
@settings_option
def doctor_command(run_file: Path | None, settings: tuple[str, ...]) -> None:
    """Tell what this host has and lacks for the run of RUN_FILE, or for any; exit code 2 if it would fail."""
    arguments = [str(run_file)] * bool(run_file) + set_flags(settings)
    raise SystemExit(
        subprocess.call([sys.executable, "-m", "prefixrl.learner.commands.doctor", *arguments])
    )
