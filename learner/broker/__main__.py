"""The command `python -m prefixrl.learner.broker`, started by learner rank 0, never by hand."""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

import click

from prefixrl.common.config.load import from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.log_lines import LineBudget
from prefixrl.common.host.process import (
    END_SIGNAL,
    allow_many_files,
    die_with_parent,
    exit_codes,
    return_large_blocks,
    start_logging,
    stop_event,
    write_atomically,
)
from prefixrl.common.journal import journal as journals
from prefixrl.common.journal.records import LedgerState, Record, RunHeader, SegmentStart, VersionPublished
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.wire.address import ENDPOINT_FILE, REBIND_S, advertised, beside, bindable, bound_within
from prefixrl.common.wire.keys import server_keys
from prefixrl.common.wire.messages.fields import PROTOCOL
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.transport import Server
from prefixrl.learner.broker.groups.admission import Admission
from prefixrl.learner.broker.groups.filtering import AccuracyFilter
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.states import LedgerLimits
from prefixrl.learner.broker.groups.window import Window
from prefixrl.learner.broker.server import LINGER_S, Broker
from prefixrl.learner.broker.workers.dispatch import Dispatcher
from prefixrl.learner.broker.workers.identity import IdentityCheck, RunState, Start
from prefixrl.learner.broker.workers.task_names import TaskNames
from prefixrl.learner.data import problems
from prefixrl.learner.data.order import PromptOrder
from prefixrl.learner.data.rows import prompts
from prefixrl.learner.run.directory import inputs

log = logging.getLogger(__name__)

Listen = Callable[[], Server[ToBroker, FromBroker]]


@click.command()
@click.option("--directory", type=click.Path(path_type=Path), required=True, help="Run directory with config.json.")
@click.option("--iteration", type=int, required=True, help="Iterations the learner has completed.")
@click.option("--weights-endpoint", required=True, help="Where workers fetch published weights.")
@click.option("--local-weights-endpoint", default="", help="Where workers on this host fetch them.")
@click.option("--ranks", type=int, default=1, help="Learner ranks that ask for batches.")
@click.option("--restart", is_flag=True, help="An earlier broker of this run died while its ranks lived on.")
@click.option("--no-training", is_flag=True, help="Issue no groups: serve evaluations alone.")
@click.option("--parent", type=int, required=True, help="Process that this one must not outlive.")
def main(  # noqa: PLR0913 -- one per flag
    directory: Path,
    iteration: int,
    weights_endpoint: str,
    local_weights_endpoint: str,
    ranks: int,
    restart: bool,
    no_training: bool,
    parent: int,
) -> None:
    """Serve one run until it is stopped."""
    die_with_parent(parent)
    start_logging("prefixrl-broker", LineBudget())
    return_large_blocks()  # of the journal's compressor, for example
    stop = stop_event([END_SIGNAL])
    with exit_codes():
        allow_many_files()
        check_format(directory)
        config = from_json((directory / "config.json").read_text(encoding="utf-8"))
        start = Start(iteration, weights_endpoint, local_weights_endpoint, ranks, restart, trains=not no_training)
        broker = build(config, directory, start, partial(bind, config, directory, restart))
        broker.server.shut()
        write_atomically(directory / ENDPOINT_FILE, advertised(broker.server.endpoint))
        broker.serve(stop.is_set)
        broker.journal.close()
        broker.server.close(LINGER_S)


def bind(config: RunConfig, directory: Path, is_restart: bool) -> Server[ToBroker, FromBroker]:
    """Bind the endpoint, after a restart the former one; ConfigError if ranks need a taken one."""
    listen, known = bindable(config.broker.listen), directory / ENDPOINT_FILE
    endpoint = listen
    if endpoint.endswith(":0") and known.exists() and known.read_text(encoding="utf-8").startswith("tcp://"):
        endpoint = beside(known.read_text(encoding="utf-8").strip(), endpoint)
    keys = server_keys(directory)
    try:
        return bound_within(REBIND_S if known.exists() else 0.0, lambda: Server(endpoint, ToBroker, keys))
    except ConfigError as error:
        if is_restart or endpoint == listen:
            raise
        log.warning("%s; taking a free port, workers must be started again", error)
        return Server(listen, ToBroker, keys)


def make_ledger(config: RunConfig, order: PromptOrder, trains: bool = True) -> Ledger:
    """Return an empty ledger for a config; without training its window has no room."""
    algorithm, section, band = config.algorithm, config.broker, None
    batch_groups, over_sampling = algorithm.groups_per_iteration, Fraction(str(config.filter.over_sampling))
    window = Window(batch_groups, algorithm.max_staleness, over_sampling, algorithm.iterations if trains else 0)
    limits = LedgerLimits(config.rollout.groups_per_task, section.attempts, section.requeues, section.max_failure_share)
    section_filter = config.filter
    if section_filter.is_on:
        low, high = section_filter.accuracy or (0.0, 1.0)
        judged = section_filter.limit_batches * batch_groups
        band = AccuracyFilter(
            low, high, judged, section_filter.min_pass_rate, section_filter.truncated,
            fills=section_filter.fill == "prioritise",
        )  # fmt: skip
    admission = Admission(window, algorithm.admission, algorithm.min_ess, limits.groups_per_item)
    return Ledger(window, limits, order, band, admission)


def prompt_order(config: RunConfig, loaded: Sequence[problems.Problem]) -> PromptOrder:
    """Return the order in which a run asks its training problems."""
    return PromptOrder(prompts(loaded), config.seed, config.data.epochs, problems.mixture(config, loaded))


def build(config: RunConfig, directory: Path, start: Start, listen: Listen) -> Broker:
    """Return a broker for a run directory, its journal replayed."""
    loaded = problems.training(config)
    order = prompt_order(config, loaded)
    ledger = make_ledger(config, order, start.trains)
    folder = directory / journals.FOLDER
    identity = IdentityCheck(config, directory, inputs(directory))
    header, newest = _replay(folder, ledger, identity, start.iteration) if journals.exists(folder) else (None, None)
    if ledger.completed != start.iteration:
        raise DataError(
            f"{folder} {'is empty or missing' if header is None else f'ends at iteration {ledger.completed}'}, the "
            f"learner's checkpoint is of iteration {start.iteration}: the journal, or its end, is lost; restore it, "
            f"remove the checkpoints after iteration {ledger.completed} ({folder.parent / 'checkpoints'}), or start a "
            f"new run"
        )
    journal = journals.Journal(folder, int(config.broker.journal_segment_mib * 2**20))
    if header is None:
        header = RunHeader(secrets.token_hex(6), PROTOCOL, secrets.token_bytes(32))
        journal.append([header])
    state = RunState(header, start, len(loaded), identity)
    names = TaskNames(secrets.token_hex(3), header.task_key)
    # It listens last: strangers could take the descriptors that all of this needs.
    broker = Broker(config, state, Dispatcher(config, ledger, order, names), journal, listen())
    # Only a broker that died alone announces the newest version again. A learner that resumed publishes it again.
    if newest is not None and newest.version == start.iteration:
        broker.versions.announce(newest)
    return broker


def _replay(
    folder: Path, ledger: Ledger, identity: IdentityCheck, iteration: int
) -> tuple[RunHeader | None, WeightsNote | None]:
    """Rebuild the ledger from the journal; return its header, if any, and the newest note."""
    log.info("replaying %s", folder)
    header, newest, is_first = None, None, True

    def events() -> Iterator[Record | LedgerState]:
        # One record at a time: a journal may be larger than the memory.
        nonlocal header, newest, is_first
        for record in journals.recover(folder, iteration):
            match record:
                case RunHeader():
                    header = record
                case SegmentStart() if is_first:
                    header, newest = record.run, record.newest
                    identity.restore(record.digests)
                    yield record.ledger
                case SegmentStart():
                    pass  # all that it says was read already
                case VersionPublished(note):
                    newest = note
                    identity.publish(note.version, note.digest)
                case _:
                    yield record
            is_first = False

    ledger.replay(events(), iteration)
    ledger.check()
    return header, newest


if __name__ == "__main__":
    main()
