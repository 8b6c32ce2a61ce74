"""`prefixrl keygen`, `prefixrl worker-command`: keys, and a worker's way to a run."""

import shlex
from pathlib import Path

import click

from prefixrl.common.config.load import from_json
from prefixrl.common.errors import ConfigError, to_copy
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.wire import keys
from prefixrl.common.wire.address import ENDPOINT_FILE, is_on_this_host
from prefixrl.common.worker.allowed import flags
from prefixrl.deploy.runs.checkpoints import run_directory_argument


@click.command()
@run_directory_argument
@click.option(
    "--worker", "added", metavar="NAME", help="Let one more worker in, by a key file of its own."
)
@click.option(
    "--remove",
    "removed",
    metavar="NAME",
    help="Let a key in no longer; its processes are refused at once.",
)
@click.option("--new", "is_new", is_flag=True, help="Make the keys of a run that has not begun.")
def keygen(run_directory: Path, added: str | None, removed: str | None, is_new: bool) -> None:
    """Add or remove a key of a run, also while the run goes on; list the keys."""
    change(run_directory, added, removed, is_new)
    click.echo(listing(run_directory))


@click.command("worker-command")
@run_directory_argument
@click.option(
    "--role", type=click.Choice(["rollout", "scorer"]), default="scorer", show_default=True
)
@click.option(
    "--key",
    "name",
    default="worker",
    metavar="NAME",
    help="Name of the key to use.",
    show_default=True,
)
def worker_command(run_directory: Path, role: str, name: str) -> None:
    """Print the command that starts a worker on another host, and the key file to copy there."""
    click.echo(command_for(run_directory, role, name))


def change(directory: Path, added: str | None, removed: str | None, is_new: bool = False) -> None:
    """Make the keys that are missing; let one more in, or one no longer; raises ConfigError.

    `is_new`: a directory without a run may get keys, too, before the run begins.
    """
    check_format(directory)
    if not is_new and not any(
        (directory / name).exists() for name in ("config.json", keys.KEYS_FOLDER)
    ):
        state = "holds no run" if directory.is_dir() else "does not exist"
        raise ConfigError(
            f"{directory} {state}; give the directory of a run, or --new to make the keys of one that is still to begin"
        )
    keys.make_keys(directory)
    if removed:
        keys.remove_client(directory, removed)
    if added:
        keys.add_client(directory, added)


def listing(directory: Path) -> str:
    """Return a line per key that is let in: its name, its role and its file."""
    return "\n".join(
        f"{each.name:<20} {each.role:<10} {keys.client_key_file(directory, each.name)}"
        for each in keys.clients(directory)
    )


def command_for(directory: Path, role: str, name: str) -> str:
    """Return what to do on another host, as lines of a shell; raises ConfigError."""
    check_format(directory)
    key_file = keys.client_key_file(directory, name)
    if keys.read_client_key(key_file).role != "worker":
        remedy = to_copy("prefixrl keygen", directory, "--worker", "NAME")
        raise ConfigError(f"{key_file} is no worker's key; make one with {remedy}")
    endpoint_file = directory / ENDPOINT_FILE
    if not endpoint_file.exists():
        raise ConfigError(f"{directory} names no endpoint yet: start the learner first")
    endpoint = endpoint_file.read_text(encoding="utf-8").strip()
    config = from_json((directory / "config.json").read_bytes())
    command = [f"prefixrl-{role}", "--connect", endpoint, "--key", key_file.name]
    if role == "scorer":
        command += flags(config)
    model = config.model_of("rollout" if role == "rollout" else "scorer")
    lines = [
        f"# copy {key_file} to the other host; only its user may read it (chmod 600 {shlex.quote(key_file.name)})",
        f"# where the model {model} lies in another folder there, add --model FOLDER",
        shlex.join(command),
    ]
    if is_on_this_host(endpoint):
        lines.insert(1, NOT_REACHABLE.format(endpoint=endpoint))
    return "\n".join(lines)


NOT_REACHABLE = """\
# {endpoint} is reached from this host alone: resume the run with --set broker.listen=tcp://0.0.0.0:0
# (or one of this host's addresses), or forward the ports of RUN/endpoint and RUN/weights_endpoint by ssh -L"""
