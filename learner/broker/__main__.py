"""The command `python -m prefixrl.learner.broker`, started by learner rank 0, never by hand."""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

from prefixrl.common.config.load import from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.process import return_large_blocks, write_atomically
from prefixrl.common.host.serving import run
from prefixrl.common.journal import journal as journals
from prefixrl.common.journal.records import (
    AnswerKept,
    LedgerState,
    Record,
    RunHeader,
    SegmentStart,
    VersionPublished,
)
from prefixrl.common.run.directory_format import ANSWERS_FOLDER, check_format
from prefixrl.common.wire.address import (
    ENDPOINT_FILE,
    REBIND_S,
    advertised,
    beside,
    bindable,
    bound_within,
)
from prefixrl.common.wire.keys import server_keys
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.common.wire.transport import Server
from prefixrl.learner.broker.groups.admission import Admission
from prefixrl.learner.broker.groups.answers import KeptAnswers
from prefixrl.learner.broker.groups.drafts import DraftedPrompts, Drafts
from prefixrl.learner.broker.groups.filtering import AccuracyFilter
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.outcomes import Outcomes
from prefixrl.learner.broker.groups.states import LedgerLimits, PromptSource
from prefixrl.learner.broker.groups.window import Window
from prefixrl.learner.broker.server import LINGER_S, Broker
from prefixrl.learner.broker.workers.dispatch import Dispatcher
from prefixrl.learner.broker.workers.identity import IdentityCheck, RunState, Start, target_digest
from prefixrl.learner.broker.workers.task_names import TaskNames
from prefixrl.learner.data import problems
from prefixrl.learner.data.order import PromptOrder
from prefixrl.learner.data.rows import prompts
from prefixrl.learner.run.directory import inputs

log = logging.getLogger(__name__)

Listen = Callable[[], Server[ToBroker, FromBroker]]


def main(directory: Path, start: Start, is_stopped: Callable[[], bool]) -> None:
    """Serve one run until it is stopped."""
    return_large_blocks()  # of the journal's compressor, for example
    check_format(directory)
    config = from_json((directory / "config.json").read_text(encoding="utf-8"))
    broker = build(config, directory, start, partial(bind, config, directory, start.is_restart))
    broker.server.shut()
    write_atomically(directory / ENDPOINT_FILE, advertised(broker.server.endpoint))
    broker.serve(is_stopped)
    broker.close_journals()
    broker.server.close(LINGER_S)


def bind(config: RunConfig, directory: Path, is_restart: bool) -> Server[ToBroker, FromBroker]:
    """Bind the endpoint, after a restart the former one; ConfigError if ranks need a taken one."""
    listen, endpoint_file = bindable(config.broker.listen), directory / ENDPOINT_FILE
    endpoint = listen
    # Workers know the former port, so a restarted broker takes it again.
    if (
        endpoint.endswith(":0")
        and endpoint_file.exists()
        and endpoint_file.read_text(encoding="utf-8").startswith("tcp://")
    ):
        endpoint = beside(endpoint_file.read_text(encoding="utf-8").strip(), endpoint)
    keys = server_keys(directory)
    try:
        return bound_within(
            REBIND_S if endpoint_file.exists() else 0.0, lambda: Server(endpoint, ToBroker, keys)
        )
    except ConfigError as error:
        if is_restart or endpoint == listen:
            raise
        log.warning("%s; taking a free port, workers must be started again", error)
        return Server(listen, ToBroker, keys)


def make_ledger(
    config: RunConfig, order: PromptSource, problem_count: int, trains: bool = True
) -> Ledger:
    """Return an empty ledger for a config and so many problems; without training its window has no room."""
    algorithm, section, band = config.algorithm, config.broker, None
    # From the decimal text: the binary value of 1.1 is larger, and would round up to a group more.
    batch_groups, over_sampling = (
        algorithm.groups_per_iteration,
        Fraction(str(config.filter.over_sampling)),
    )
    window = Window(
        batch_groups, algorithm.max_staleness, over_sampling, algorithm.iterations if trains else 0
    )
    limits = LedgerLimits(
        config.rollout.groups_per_task,
        section.attempts,
        section.requeues,
        section.max_failure_share,
    )
    section_filter = config.filter
    if section_filter.is_on:
        low, high = section_filter.accuracy or (0.0, 1.0)
        judged = section_filter.limit_batches * batch_groups
        band = AccuracyFilter(
            low,
            high,
            judged,
            section_filter.min_pass_rate,
            section_filter.truncated,
            fills=section_filter.fill == "prioritise",
        )
    admission = Admission(window, algorithm.admission, algorithm.min_ess, limits.groups_per_item)
    outcomes = None
    if config.data.sampling == "by_outcome":
        rows = algorithm.samples_per_prompt
        outcomes = Outcomes.of_run(config.seed, rows, problem_count, batch_groups)
    return Ledger(window, limits, order, band, admission, outcomes)


def prompt_order(config: RunConfig, loaded: Sequence[problems.Problem]) -> PromptOrder:
    """Return the order in which a run asks its training problems."""
    return PromptOrder(
        prompts(loaded), config.seed, config.data.epochs, problems.mixture(config, loaded)
    )


def build(config: RunConfig, directory: Path, start: Start, listen: Listen) -> Broker:
    """Return a broker for a run directory, its journal replayed."""
    loaded = problems.training(config)
    answers = kept_answers(config, directory)
    drafts = None
    order: PromptSource = prompt_order(config, loaded)
    if config.adapter.sees_draft:
        sampling = config.scorer_sampling(0.0)
        drafts = Drafts(answers, sampling, config.seed, config.broker.attempts)
        order = DraftedPrompts(order, drafts)
    ledger = make_ledger(config, order, len(loaded), start.trains)
    folder = directory / journals.FOLDER
    identity = IdentityCheck(config, directory, inputs(directory))
    header, newest = (
        _replay(folder, ledger, identity, start.iteration)
        if journals.exists(folder)
        else (None, None)
    )
    # A journal that ends earlier has lost groups that the learner's weights were trained on.
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
    dispatcher = Dispatcher(config, ledger, order, names, answers, drafts)
    has_target = config.target is not None
    answer_journal = journals.Journal(directory / ANSWERS_FOLDER) if has_target else None
    broker = Broker(config, state, dispatcher, (journal, answer_journal), listen())
    # Only a broker that died alone announces the newest version again. A learner that resumed publishes it again.
    if newest is not None and newest.version == start.iteration:
        broker.versions.announce(newest)
    return broker


def kept_answers(config: RunConfig, directory: Path) -> KeptAnswers:
    """Return the answers of the target that a run has kept; DataError for a damaged file."""
    # Whatever draws a simulated target's text, its question does not.
    has_target = config.target is not None and config.scorer.record.has_tokenizer
    keeps_evaluations = has_target and not config.bitwise
    answers = KeptAnswers(target_digest(config), config.has_advice, keeps_evaluations)
    folder = directory / ANSWERS_FOLDER
    if config.target is None or not journals.exists(folder):
        return answers
    try:
        records = journals.recover(folder, 0)
        answers.restore(record for record in records if isinstance(record, AnswerKept))
    except DataError as error:
        raise DataError(
            f"{error}; or remove {folder}: what it holds is asked of the target again"
        ) from None
    return answers


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
                case SegmentStart() | AnswerKept():
                    pass  # all that it says was read already; answers have a journal of their own
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
    run("prefixrl-broker", Start, main)
