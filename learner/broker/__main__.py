"""`python -m prefixrl.learner.broker`: started by learner rank 0, never by hand; ends with its parent."""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import click

from prefixrl.common import journal as journals
from prefixrl.common.config import RunConfig, from_json
from prefixrl.common.errors import ConfigError
from prefixrl.common.messages import PROTOCOL, FromBroker, ToBroker, WeightsNote
from prefixrl.common.process import (
    die_with_parent,
    exit_codes,
    start_logging,
    stop_event,
    write_atomically,
)
from prefixrl.common.records import Record, RunHeader, VersionPublished
from prefixrl.common.transport import Server
from prefixrl.learner import problems
from prefixrl.learner.broker.dispatch import Dispatcher
from prefixrl.learner.broker.filtering import AccuracyFilter
from prefixrl.learner.broker.identity import IdentityCheck
from prefixrl.learner.broker.ledger import Ledger, Limits
from prefixrl.learner.broker.prompts import PromptOrder
from prefixrl.learner.broker.server import LINGER_S, Broker, RunState
from prefixrl.learner.broker.window import Window
from prefixrl.learner.rundir import REBIND_S, inputs

log = logging.getLogger(__name__)


@click.command()
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    required=True,
    help="Run directory with config.json.",
)
@click.option("--iteration", type=int, required=True, help="Iterations the learner has completed.")
@click.option("--weights-endpoint", required=True, help="Where workers fetch published weights.")
@click.option(
    "--again", is_flag=True, help="An earlier broker of this run died under the ranks of now."
)
@click.option("--no-training", is_flag=True, help="Issue no groups: serve evaluations alone.")
@click.option("--parent", type=int, required=True, help="Process that this one must not outlive.")
def main(
    directory: Path,
    iteration: int,
    weights_endpoint: str,
    again: bool,
    no_training: bool,
    parent: int,
) -> None:
    """Serve one run until told to stop."""
    die_with_parent(parent)
    start_logging("prefixrl-broker")
    stop = stop_event()
    with exit_codes():
        config = from_json((directory / "config.json").read_text(encoding="utf-8"))
        server = bind(config, directory, again)
        start = Start(iteration, weights_endpoint, again, trains=not no_training)
        broker = build(config, directory, start, server)
        write_atomically(directory / "endpoint", server.endpoint)
        broker.serve(stop.is_set)
        broker.journal.close()
        server.close(LINGER_S)


def bind(config: RunConfig, directory: Path, is_again: bool) -> Server[ToBroker, FromBroker]:
    """Bind the configured endpoint; a restarted broker takes the address the workers know.

    Raises:
        ConfigError: it is taken, and there are ranks that know no other.
    """
    endpoint, known = config.broker.listen, directory / "endpoint"
    if endpoint.endswith(":0") and known.exists():
        endpoint = known.read_text(encoding="utf-8").strip()
    deadline_s = time.monotonic() + (REBIND_S if known.exists() else 0.0)
    while True:
        try:
            return Server(endpoint, ToBroker)
        except ConfigError as error:
            if time.monotonic() > deadline_s:
                if is_again or endpoint == config.broker.listen:
                    raise
                log.warning("%s; taking a free port, workers must be started again", error)
                return Server(config.broker.listen, ToBroker)
            time.sleep(0.1)


def make_ledger(config: RunConfig, order: PromptOrder, trains: bool = True) -> Ledger:
    """An empty ledger with the window, the filter and the limits of a config; one that does not train has no room."""
    batch_groups = config.algorithm.groups_per_iteration
    window = Window(
        batch_groups,
        config.algorithm.max_staleness,
        Fraction(str(config.filter.over_sampling)),
        config.algorithm.iterations if trains else 0,
    )
    limits = Limits(
        config.rollout.groups_per_task,
        config.broker.attempts,
        config.broker.requeues,
        config.broker.max_failure_share,
    )
    if config.filter.accuracy is None:
        return Ledger(window, limits, order)
    judged = config.filter.limit_batches * batch_groups
    band = AccuracyFilter(*config.filter.accuracy, judged, config.filter.min_pass_rate)
    return Ledger(window, limits, order, band)


def prompt_order(config: RunConfig, loaded: Sequence[problems.Problem]) -> PromptOrder:
    """The order in which a run asks its training problems."""
    return PromptOrder(
        [problem.prompt() for problem in loaded],
        config.seed,
        config.data.epochs,
        problems.mixture(config, loaded),
    )


@dataclass(frozen=True)
class Start:
    """How a broker is started."""

    iteration: int
    """Iterations the learner has completed."""
    weights_endpoint: str
    is_again: bool = False
    trains: bool = True


def build(
    config: RunConfig, directory: Path, start: Start, server: Server[ToBroker, FromBroker]
) -> Broker:
    """A broker as the run directory describes it, its journal replayed."""
    loaded = problems.training(config)
    order = prompt_order(config, loaded)
    ledger = make_ledger(config, order, start.trains)
    path = directory / "journal.msgpack"
    identity = IdentityCheck(config, directory, inputs(directory))
    run_id, newest = (
        _replay(path, ledger, identity, start.iteration) if path.exists() else ("", None)
    )
    journal = journals.Journal(path)
    if not run_id:
        run_id = secrets.token_hex(6)
        journal.append([RunHeader(run_id, PROTOCOL)])
    begun = start.iteration if start.is_again else -1
    state = RunState(run_id, start.weights_endpoint, len(loaded), identity, begun)
    broker = Broker(
        config, state, Dispatcher(config, ledger, order, secrets.token_hex(3)), journal, server
    )
    # Only a broker that died alone takes its announcement up again; a learner that went back publishes anew.
    if newest is not None and newest.version == start.iteration:
        broker.announce(newest)
    return broker


def _replay(
    path: Path, ledger: Ledger, identity: IdentityCheck, iteration: int
) -> tuple[str, WeightsNote | None]:
    """Rebuild the ledger from the journal; the run's name ("" where none stands there) and its newest announcement."""
    log.info("replaying %s, %.0f MiB", path, path.stat().st_size / 2**20)
    run_id, newest = "", None

    def events() -> Iterator[Record]:
        # One record at a time: a journal may be larger than the memory.
        nonlocal run_id, newest
        for record in journals.recover(path):
            if isinstance(record, RunHeader):
                run_id = record.run_id
            elif isinstance(record, VersionPublished):
                newest = record.note
                identity.publish(newest.version, newest.digest)
            else:
                yield record

    ledger.replay(events(), iteration)
    ledger.check()
    return run_id, newest


if __name__ == "__main__":
    main()
