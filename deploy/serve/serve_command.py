"""The command `prefixrl serve`; its imports are late, so that --help is quick."""

from typing import Any

import click

from prefixrl.common.worker.command import PATH, settings_option
from prefixrl.deploy.runs.checkpoints import SERVED, ema_option


@click.command()
@click.argument("run", type=PATH)
@click.option("--checkpoint", metavar="N", help=SERVED)
@ema_option
@click.option("--suffix", default="", help="Append this to every problem.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at; others need a key.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="0: any free one.",
)
@click.option("--name", help="Name of the model for clients.  [default: that of the run directory]")
@click.option("--key-variable", metavar="NAME", help="Environment variable with the API key.")
@click.option("--key-file", type=PATH, help="File with the API key, mode 0600.")
@click.option(
    "--most-answers",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Most open at once.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(1),
    default=600.0,
    show_default=True,
    help="Seconds per request.",
)
@click.option("--prefix-only", is_flag=True, help="Write the prefix alone: clients ask the target.")
@click.option(
    "--best-of",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Sample so many answers, send the best: by scorer.prm, else by vote.",
)
@settings_option
def serve(**options: Any) -> None:
    """Serve the adapter of RUN and its target on OpenAI's HTTP interface.

    Loads both models in this process, or asks a served target at its endpoint. SIGTERM or Ctrl-C lets open requests
    end.
    """
    from prefixrl.deploy.serve import server

    raise SystemExit(server.serve(server.ServeOptions(**options)))
