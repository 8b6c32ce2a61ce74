"""The commands for runs that were started, of whoever looks after them."""

import sys
from pathlib import Path

import click

from prefixrl.common.host.process import exit_codes, printable, stop_event

STOP_S = "Longest wait in seconds; the run stops after it too, as soon as it can."
DRAIN_S = "Longest wait in seconds for a worker that leaves."
run_argument = click.argument("run_directory", type=click.Path(path_type=Path))


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="The whole document, for programs.")
@click.option("--watch", "watches", is_flag=True, help="Go on until the run ends.")
def status(run_directory: Path, as_json: bool, watches: bool) -> None:
    """Show the state of the run in RUN_DIRECTORY: how it goes on, or how it ended."""
    with exit_codes():
        from prefixrl.common.errors import ConfigError
        from prefixrl.deploy.commands.status_command import show, watch

        if watches and as_json:
            raise ConfigError("give --watch or --json, not both")
        if watches:
            watch(run_directory, stop_event().is_set)
        else:
            show(run_directory, as_json)


@click.command()
@run_argument
@click.argument("name", required=False)
@click.option("-n", "--lines", "count", type=click.IntRange(0), default=20, show_default=True, help="Lines per log.")
@click.option("--follow", "-f", "follows", is_flag=True, help="Go on with the lines that come, until Ctrl-C.")
def logs(run_directory: Path, name: str | None, count: int, follows: bool) -> None:
    """Print the newest lines of the logs of a run.

    NAME is a process (scorer-1) or a role (learner, rollout, scorer). The learner's log holds those of broker and
    weight server too.
    """
    with exit_codes():
        from prefixrl.deploy.commands import logs as reading

        paths = reading.logs_of(run_directory, name)
        lines = reading.follow(paths, count, stop_event().is_set) if follows else reading.newest_lines(paths, count)
        for line in lines:
            click.echo(printable(line))


@click.command()
@run_argument
@click.option("--timeout", "timeout_s", type=click.FloatRange(0), default=600.0, show_default=True, help=STOP_S)
def stop(run_directory: Path, timeout_s: float) -> None:
    """Have the run in RUN_DIRECTORY save and stop, on whatever host it is.

    The learner ends its iteration and saves; `prefixrl launch` then ends the workers it started.
    """
    with exit_codes():
        from prefixrl.deploy.commands import stop_and_drain as fleet

        fleet.stop(run_directory, timeout_s)


@click.command()
@run_argument
@click.argument("action", required=False, type=click.Choice(["drain"]))
@click.argument("name", required=False, metavar="[ID]")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0), default=60.0, show_default=True, help=DRAIN_S)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per worker.")
def workers(run_directory: Path, action: str | None, name: str | None, timeout_s: float, as_json: bool) -> None:
    """List the workers of a running run, or have the worker ID leave it (drain).

    A worker that `prefixrl launch` started stays away then, until the next launch.
    """
    with exit_codes():
        import msgspec
        from rich.console import Console

        from prefixrl.common.errors import ConfigError
        from prefixrl.deploy.commands import stop_and_drain as fleet

        if (action is None) != (name is None):
            raise ConfigError(f"give `prefixrl workers {run_directory} drain ID`, with an ID of the list")
        if name:
            fleet.drain(run_directory, name, timeout_s)
        elif as_json:
            for each in fleet.workers(run_directory):
                click.echo(printable(msgspec.json.encode(each).decode()))
        else:
            # A pipe has no width: a row must not be cut there.
            width = None if sys.stdout.isatty() else fleet.PIPE_CHARS
            Console(width=width).print(fleet.table_of(fleet.workers(run_directory)))


@click.command()
@run_argument
def advise(run_directory: Path) -> None:
    """Say who holds the run in RUN_DIRECTORY up, and how many of whom would balance it.

    From its measured rates, while it goes on and afterwards.
    """
    with exit_codes():
        from rich.console import Console

        from prefixrl.deploy.commands.advise import advice_for

        table, sentences = advice_for(run_directory)
        Console().print(table)
        for each in sentences:
            click.echo(each)


COMMANDS = (status, logs, stop, workers, advise)
