"""The commands for runs that were started, of whoever looks after them."""

from pathlib import Path

import click

from prefixrl.common.process import exit_codes, stop_event

run_argument = click.argument("run_directory", type=click.Path(path_type=Path))


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="The whole document, for programs.")
@click.option("--watch", "watches", is_flag=True, help="Go on until the run ends.")
def status(run_directory: Path, as_json: bool, watches: bool) -> None:
    """Show the state of the run in RUN_DIRECTORY: how it goes on, or how it ended."""
    with exit_codes():
        from prefixrl.common.errors import ConfigError
        from prefixrl.deploy.standing import show, watch

        if watches and as_json:
            raise ConfigError("give --watch or --json, not both")
        if watches:
            watch(run_directory, stop_event().is_set)
        else:
            show(run_directory, as_json)


COMMANDS = (status,)
