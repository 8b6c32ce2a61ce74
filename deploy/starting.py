"""The commands for who begins: a run file, the docs, completion in a shell."""

import click

from prefixrl.common.process import exit_codes

SIZE = "By the adapter's parameters: below 0.25, 4, or above 4 billion.  [default: by its files]"
MODEL = "A Hugging Face folder or hub name."
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

        from prefixrl.deploy.recipe import Size, run_file

        click.echo(run_file(cast("Size | None", size), adapter, target, data, held_out), nl=False)


@click.command()
@click.argument("topic", required=False)
def docs(topic: str | None) -> None:
    """Print the page TOPIC of the documentation; without one, list the pages."""
    with exit_codes():
        from prefixrl.deploy.pages import page_of, topics

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
        from prefixrl.deploy.pages import completion_script

        click.echo(completion_script(context.find_root().command, shell))


COMMANDS = (init, docs, completion)
