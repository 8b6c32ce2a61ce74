"""The command line of a worker, and the option `--set` of all commands that read a run file."""

import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from prefixrl.common.errors import ConfigError, RunIsOver
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.common.host.log_lines import LineBudget
from prefixrl.common.host.process import AskedToStop, StopSignals, start_logging, without_gc
from prefixrl.common.host.service import Service

if TYPE_CHECKING:
    from prefixrl.common.worker.join import WorkerSession
PATH = click.Path(path_type=Path)
MOST_NUMBER = 999_999
GRACE_S = 20.0
"""Usual grace time; batch systems and service managers kill after 30 s."""
AHEAD_VARIABLE = "PREFIXRL_AHEAD_OF"
"""Environment variable set by `launch`: identifies the old endpoint file, so that the worker waits
for a new one."""
ALLOW_FUNCTION = (
    "Let the run's reward.function be executed here if it is this one; may be repeated."
)
SECRET = "Let the run use this environment variable: its endpoint's key, or one of reward.environment; may be repeated."
settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key, e.g. algorithm.kl=1e-3.",
)
"""Option that passes `settings`, a tuple of texts."""


def set_flags(settings: tuple[str, ...]) -> list[str]:
    """Return the values of `settings_option` as flags for another command."""
    return [flag for setting in settings for flag in ("--set", setting)]


def worker_command(role: Literal["rollout", "scorer"], text: str) -> click.Command:
    """Make the command `prefixrl-ROLE`: enrol, load the worker of `prefixrl.ROLE.start`, run it."""
    return click.Command(
        f"prefixrl-{role}", callback=partial(_start_worker, role), params=_options(role), help=text
    )


def _options(role: str) -> list[click.Parameter]:
    options: list[click.Parameter] = [
        click.Option(
            ["--run", "directory"],
            type=PATH,
            help="The run's directory, which names the broker's endpoint.",
        ),
        click.Option(
            ["--connect", "endpoint"],
            help="Without --run: the broker's endpoint, for example tcp://node7:5555.",
        ),
        click.Option(
            ["--key", "key_file"],
            type=PATH,
            help="With --connect: the key file of this worker.",
        ),
        click.Option(
            ["--model"], help="The model's folder on this host, if it differs from the run's."
        ),
        click.Option(
            ["--engine"],
            help=f"Engine on this host, as `{role}.engine` of a run file names it.",
        ),
        click.Option(
            ["--device"], type=click.Choice(["auto", "cpu", "cuda"]), help="Device on this host."
        ),
        click.Option(
            ["--number"],
            type=click.IntRange(0, MOST_NUMBER),
            help=f"This worker is {role}-NUMBER in logs and status, unless another has that name.  "
            "[default: the next]",
        ),
        click.Option(
            ["--grace-s"],
            type=click.FloatRange(0),
            default=GRACE_S,
            show_default=True,
            help="Longest time to finish open tasks after SIGTERM, SIGUSR1 or SIGUSR2; a second "
            "signal ends it.",
        ),
    ]
    # Rollouts execute no code of the user's, and send no keys.
    if role == "scorer":
        options += [
            click.Option(
                ["--allow-function", "functions"],
                multiple=True,
                metavar="FILE.py:NAME",
                help=ALLOW_FUNCTION,
            ),
            click.Option(["--secret", "secrets"], multiple=True, metavar="NAME", help=SECRET),
        ]
    return options


def _start_worker(
    role: Literal["rollout", "scorer"],
    directory: Path | None,
    endpoint: str | None,
    key_file: Path | None,
    grace_s: float,
    **settings: Any,
) -> None:
    """Join the run and work for it; `settings` are the options that `Overrides` holds."""
    stop = StopSignals()
    service = Service()
    with exit_codes():
        if (directory is None) == (endpoint is None) or (endpoint is None) != (key_file is None):
            raise ConfigError(
                "give --run DIRECTORY where the run's directory can be read, else --connect ENDPOINT --key FILE"
            )
        start_logging(f"prefixrl-{role}", LineBudget())
        # Slow imports only after the flags are read.
        from prefixrl.common.worker.allowed import Allowed
        from prefixrl.common.worker.join import Overrides, find_broker, join, work
        from prefixrl.common.worker.link import FIRST_CONTACT_S, ORPHAN_S

        find = find_broker(directory, endpoint, key_file, stop.is_set, _import_ahead(stop))
        # The file in the directory may be of an earlier start, while a learner reads its data and its journal.
        patience_s = FIRST_CONTACT_S if directory is None else ORPHAN_S
        functions = tuple(map(_absolute, settings.pop("functions", ())))
        allowed = Allowed(functions, settings.pop("secrets", ()))
        session = join(find, role, Overrides(allowed=allowed, **settings), stop.is_set, patience_s)
        work(session.link, lambda: _run(session, role, stop, service, grace_s))


def _import_ahead(stop: StopSignals) -> str | None:
    """Import an embedded engine if a launch asks for it; return the mark of the old endpoint file.

    Raises RunIsOver on a stop.
    """
    old = os.environ.pop(AHEAD_VARIABLE, None)
    if old is None:
        return None
    try:
        with stop.ending_at_once(), without_gc():
            from prefixrl.common.engines.embedded import continuous, fixed_rows  # noqa: F401
    except AskedToStop:
        raise RunIsOver("asked to stop before a run had begun") from None
    return old


def _absolute(function_ref: str) -> str:
    path, separator, name = function_ref.rpartition(":")
    return f"{Path(path).expanduser().resolve()}{separator}{name}"


def _run(
    session: "WorkerSession", role: str, stop: StopSignals, service: Service, grace_s: float
) -> str:
    """Load the worker and run it, with its numbers for Prometheus, watched by systemd from its Ready on."""
    from prefixrl.common.run.prometheus import exposed
    from prefixrl.common.worker.numbers import numbers_of_worker

    link = session.link
    worker = session.welcome.worker
    name = f"{worker} of run {session.welcome.run_id}"
    numbers = partial(numbers_of_worker, link, role, Path(session.config.directory))

    def alive(progress: int | None) -> None:
        service.alive(progress)
        service.status(f"{name}: {link.vitals.state}")
        if stop.is_set():
            service.stopping()

    with exposed(session.config.log, worker, numbers):
        service.status(f"{name}: loading {session.model}")
        with stop.ending_at_once():
            with without_gc():
                # Slow: only once the broker has answered.
                loading = import_module(f"prefixrl.{role}.start")
            loaded = loading.load(session)
        service.ready(f"{name}: ready")
        ended: str = loaded.run(lambda: stop.requests() + link.is_drained, grace_s, alive)
        return ended
