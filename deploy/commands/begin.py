"""The commands for who begins: a run file, the docs, completion in a shell."""

from pathlib import Path

import click

from prefixrl.common.host.process import exit_codes, printable

SIZE = "By the adapter's parameters: below 0.25, 4, or above 4 billion.  [default: by its files]"
MODEL = "A Hugging Face folder or hub name."
PATH = click.Path(path_type=Path)
DATA = "A problem set, file, folder or hf:OWNER/NAME."


@click.command()
@click.option("--size", type=click.Choice(["tiny", "1b", "7b"]), help=SIZE)
@click.option("--adapter", required=True, metavar="MODEL", help=MODEL)
@click.option("--target", required=True, metavar="MODEL", help=MODEL)
@click.option("--data", required=True, metavar="SET", help=DATA)
@click.option("--eval", "held_out", metavar="SET", help="Held-out problems, likewise.")
def init(size: str | None, adapter: str, target: str, data: str, held_out: str | None) -> None:
    """Print a run file to begin with, its values by the size of the adapter.

    For example: prefixrl init --adapter A --target T --data train.jsonl > run.toml
    """
    with exit_codes():
        from typing import cast

        from prefixrl.deploy.commands.init import Size, run_file

        click.echo(run_file(cast("Size | None", size), adapter, target, data, held_out), nl=False)


@click.command()
@click.argument("sweep_file", type=PATH)
@click.option("--index", type=int, help="Launch or resume this run alone.")
@click.option("--list", "action", flag_value="list", help="Print index, directory and settings of every run.")
@click.option("--table", "action", flag_value="table", help="Print the table of all runs, and means over seeds.")
@click.option("--print", "action", flag_value="print", help="Print the job script of a SLURM array.")
@click.option("--submit", "action", flag_value="submit", help="Submit the runs that are not finished as an array.")
def sweep(sweep_file: Path, index: int | None, action: str | None) -> None:
    """Run every combination of settings in SWEEP_FILE, one after another, and print their table.

    The same command goes on with a sweep that was stopped: what is finished is not run again.
    """
    with exit_codes():
        from prefixrl.common.errors import ConfigError
        from prefixrl.deploy.sweep import array, conduct, grid, outcome

        found = grid.read(sweep_file)
        if index is not None and action:
            raise ConfigError(f"--index {index} with --{action}: give one of them")
        if index is not None:
            raise SystemExit(conduct.one(found, found.at(index)))
        if action == "list":
            for line in conduct.listing(found):
                click.echo(printable(line))
        elif action == "print":
            click.echo(array.script(found))
        elif action == "submit":
            array.submit(found)
        else:
            code = 0 if action == "table" else conduct.conduct(found)
            outcome.print_tables(found)
            raise SystemExit(code)


@click.command()
@click.argument("topic", required=False)
def docs(topic: str | None) -> None:
    """Print the page TOPIC of the documentation; without one, list the pages."""
    with exit_codes():
        from prefixrl.deploy.commands.docs import page_of, topics

        if topic:
            click.echo(page_of(topic), nl=False)
        else:
            for line in topics():
                click.echo(line)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script by which SHELL completes commands and options.

    For example, in ~/.bashrc: eval "$(prefixrl completion bash)"
    """
    with exit_codes():
        from prefixrl.deploy.commands.docs import completion_script

        click.echo(completion_script(context.find_root().command, shell))


COMMANDS = (init, sweep, docs, completion)
