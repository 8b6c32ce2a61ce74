"""What command lines share: `--set`, and the whole one of a worker, whose slow imports come after the flags are read."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

import click

from prefixrl.common.process import exit_codes, start_logging, stop_event

if TYPE_CHECKING:
    from prefixrl.common.worker import Joined


settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key, e.g. algorithm.kl=1e-3.",
)
"""Arrives as `settings`, a tuple of texts."""


class Worker(Protocol):
    """A loaded worker."""

    def run(self, stopping: Callable[[], bool]) -> str:
        """Work until the run is over or a stop is asked for; returns why it ended."""


def worker_command(
    role: Literal["rollout", "scorer"], text: str, load: "Callable[[Joined], Worker]"
) -> click.Command:
    """`prefixrl-ROLE`: say hello, learn the run, `load` the worker, run it until the end."""

    @click.command(name=f"prefixrl-{role}", help=text)
    @click.option(
        "--connect", required=True, help="The broker's endpoint, for example tcp://127.0.0.1:5555."
    )
    @click.option("--model", help="Where the model lies on this host, if not where the run says.")
    @click.option(
        "--engine",
        type=click.Choice(["auto", "vllm", "transformers", "simulated"]),
        help="Engine on this host.",
    )
    @click.option(
        "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Device on this host."
    )
    def command(connect: str, model: str | None, engine: str | None, device: str | None) -> None:
        stop = stop_event()
        with exit_codes():
            from prefixrl.common.transport import check_endpoint

            check_endpoint(connect)
            start_logging(f"prefixrl-{role}")
            from prefixrl.common.worker import Overrides, join, work

            joined = join(connect, role, Overrides(model, engine, device), stop.is_set)
            work(joined.link, lambda: load(joined).run(stop.is_set))

    return command
