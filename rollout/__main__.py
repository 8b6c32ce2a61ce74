"""`prefixrl-rollout`: the adapter in an engine, at one version at a time. Stateless: kill and start it at will."""

import click

from prefixrl.common.process import exit_codes, start_logging, stop_event


@click.command()
@click.option(
    "--connect", required=True, help="The broker's endpoint, for example tcp://127.0.0.1:5555."
)
@click.option("--model", help="Where the adapter lies on this host, if not where the run says.")
@click.option(
    "--engine",
    type=click.Choice(["auto", "vllm", "transformers", "simulated"]),
    help="Engine on this host.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Device on this host.")
def main(connect: str, model: str | None, engine: str | None, device: str | None) -> None:
    """Sample prefixes for the run behind CONNECT until it is over."""
    stop = stop_event()
    with exit_codes():
        from prefixrl.common.transport import check_endpoint

        check_endpoint(connect)
        start_logging("prefixrl-rollout")
        from prefixrl.common.worker import Overrides, join, work

        joined = join(connect, "rollout", Overrides(model, engine, device))
        from prefixrl.rollout.start import load

        work(joined.link, lambda: load(joined).run(stop.is_set))


if __name__ == "__main__":
    main()
