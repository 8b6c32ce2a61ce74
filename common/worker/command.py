"""The command line of a worker, and the option `--set` of all commands that read a run file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import click

from prefixrl.common.errors import ConfigError
from prefixrl.common.process import exit_codes, start_logging, stop_event

if TYPE_CHECKING:
    from prefixrl.common.worker.join import WorkerSession


Command = TypeVar("Command", bound=Callable[..., None])
PATH = click.Path(path_type=Path)
ALLOW_FUNCTION = "Let the run's reward.function be executed here if it is this one; may be repeated."
SECRET = "Let the run send this environment variable to its endpoint, as its key; may be repeated."
settings_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. algorithm.kl=1e-3."
)
"""Option that passes `settings`, a tuple of texts."""


class LoadedWorker(Protocol):
    """A loaded worker."""

    def run(self, stopping: Callable[[], bool]) -> str:
        """Work until the run is over or the process is asked to stop; returns why it ended."""


def worker_command(
    role: Literal["rollout", "scorer"], text: str, load: "Callable[[WorkerSession], LoadedWorker]"
) -> click.Command:
    """Make the command `prefixrl-ROLE`: enrol, `load` the worker, run it until the end."""

    @click.command(name=f"prefixrl-{role}", help=text)
    @click.option("--run", "directory", type=PATH, help="The run's directory, which names the broker's endpoint.")
    @click.option("--connect", help="Without --run: the broker's endpoint, for example tcp://node7:5555.")
    @click.option("--key", "key_file", type=PATH, help="With --connect: the key file of this worker.")
    @click.option("--model", help="The model's folder on this host, if it differs from the run's.")
    @click.option(
        "--engine", type=click.Choice(["auto", "vllm", "transformers", "simulated"]), help="Engine on this host."
    )
    @click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Device on this host.")
    @_scorer_option(role, "--allow-function", "functions", metavar="FILE.py:NAME", help=ALLOW_FUNCTION)
    @_scorer_option(role, "--secret", "secrets", metavar="NAME", help=SECRET)
    def command(  # noqa: PLR0913 -- one per flag
        directory: Path | None,
        connect: str | None,
        key_file: Path | None,
        model: str | None,
        engine: str | None,
        device: str | None,
        functions: tuple[str, ...] = (),
        secrets: tuple[str, ...] = (),
    ) -> None:
        stop = stop_event()
        with exit_codes():
            if (directory is None) == (connect is None) or (connect is None) != (key_file is None):
                raise ConfigError(
                    "give --run DIRECTORY where the run's directory can be read, else --connect ENDPOINT --key FILE"
                )
            start_logging(f"prefixrl-{role}")
            # Slow imports only after the flags are read.
            from prefixrl.common.worker.allowed import Allowed
            from prefixrl.common.worker.join import Overrides, find_broker, join, work
            from prefixrl.common.worker.link import FIRST_CONTACT_S, ORPHAN_S

            find = find_broker(directory, connect, key_file, stop.is_set)
            # The file in the directory may be of an earlier start, while a learner reads its data and its journal.
            patience_s = FIRST_CONTACT_S if directory is None else ORPHAN_S
            allowed = Allowed(tuple(map(_absolute, functions)), secrets)
            session = join(find, role, Overrides(model, engine, device, allowed), stop.is_set, patience_s)
            work(session.link, lambda: load(session).run(stop.is_set))

    return command


def _scorer_option(role: str, *names: str, metavar: str, help: str) -> Callable[[Command], Command]:
    """Return a repeatable option that scorers have alone: rollouts execute and send nothing."""
    if role == "scorer":
        return click.option(*names, multiple=True, metavar=metavar, help=help)
    return lambda command: command


def _absolute(function_ref: str) -> str:
    """Return FILE.py:NAME with an absolute path, as the run's config has it."""
    path, separator, name = function_ref.rpartition(":")
    return f"{Path(path).expanduser().resolve()}{separator}{name}"
