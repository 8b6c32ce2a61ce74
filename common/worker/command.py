"""The command line of a worker, and the option `--set` of all commands that read a run file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import click

from prefixrl.common.errors import ConfigError
from prefixrl.common.process import StopSignals, exit_codes, start_logging
from prefixrl.common.run.service import Service
from prefixrl.common.worker.drain import GRACE_S

if TYPE_CHECKING:
    from prefixrl.common.worker.join import WorkerSession


PATH = click.Path(path_type=Path)
settings_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. algorithm.kl=1e-3."
)
"""Option that passes `settings`, a tuple of texts."""


class LoadedWorker(Protocol):
    """A loaded worker."""

    def run(self, requests: Callable[[], int], grace_s: float, alive: Callable[[int | None], None]) -> str:
        """Work until the run is over or `requests` to stop end it; return why it ended."""


def worker_command(
    role: Literal["rollout", "scorer"], text: str, load: "Callable[[WorkerSession], LoadedWorker]"
) -> click.Command:
    """Make the command `prefixrl-ROLE`: enrol, `load` the worker, run it until the end."""

    @click.command(name=f"prefixrl-{role}", help=text)
    @click.option("--run", "directory", type=PATH, help="The run's directory, which names the broker's endpoint.")
    @click.option("--connect", help="Without --run: the broker's endpoint, for example tcp://127.0.0.1:5555.")
    @click.option("--model", help="The model's folder on this host, if it differs from the run's.")
    @click.option(
        "--engine", type=click.Choice(["auto", "vllm", "transformers", "simulated"]), help="Engine on this host."
    )
    @click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Device on this host.")
    @click.option(
        "--grace-s",
        type=click.FloatRange(0),
        default=GRACE_S,
        show_default=True,
        help="Longest time to finish open tasks after SIGTERM, SIGUSR1 or SIGUSR2; a second signal ends it.",
    )
    def command(
        directory: Path | None,
        connect: str | None,
        grace_s: float,
        model: str | None,
        engine: str | None,
        device: str | None,
    ) -> None:
        stop, service = StopSignals(), Service()
        with exit_codes():
            if (directory is None) == (connect is None):
                raise ConfigError("give --run DIRECTORY where the run's directory can be read, else --connect ENDPOINT")
            start_logging(f"prefixrl-{role}")
            # Slow imports only after the flags are read.
            from prefixrl.common.worker.join import Overrides, find_broker, join, work
            from prefixrl.common.worker.link import FIRST_CONTACT_S, ORPHAN_S

            find = find_broker(directory, connect, stop.is_set)
            # The file in the directory may be of an earlier start, while a learner reads its data and its journal.
            patience_s = FIRST_CONTACT_S if directory is None else ORPHAN_S
            session = join(find, role, Overrides(model, engine, device), stop.is_set, patience_s)
            work(session.link, lambda: _run(session, load, stop, service, grace_s))

    return command


def _run(
    session: "WorkerSession",
    load: "Callable[[WorkerSession], LoadedWorker]",
    stop: StopSignals,
    service: Service,
    grace_s: float,
) -> str:
    """Load the worker and run it, watched by systemd from its Ready on."""
    link, name = session.link, f"{session.welcome.worker} of run {session.welcome.run_id}"
    service.status(f"{name}: loading {session.model}")
    with stop.ending_at_once():
        loaded = load(session)
    service.ready(f"{name}: ready")

    def alive(progress: int | None) -> None:
        service.alive(progress)
        service.status(f"{name}: {link.vitals.state}")
        if stop.is_set():
            service.stopping()

    return loaded.run(stop.requests, grace_s, alive)
