"""The start of a broker: its address, and its state from the journal."""

import tracemalloc
from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.journal.journal import Journal
from prefixrl.common.journal.records import (
    BatchFormed,
    GroupIssued,
    GroupScored,
    RunHeader,
    VersionPublished,
)
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.transport import Server
from prefixrl.learner.broker import __main__ as module
from prefixrl.learner.broker.__main__ import bind, build, prompt_order
from prefixrl.learner.broker.workers.identity import Start
from prefixrl.learner.data import problems
from support import messages
from support.fakes import NOTE, run_on_disk
from support.keys import keys

TOKENS = 8192
ITERATIONS = 40


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    iterations = {"groups_per_iteration": 4, "iterations": ITERATIONS + 1}
    return run_on_disk(tmp_path, problems=4 * ITERATIONS + 8, algorithm=iterations)


def test_a_broker_that_died_alone_takes_no_other_address_than_the_ranks_know(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REBIND_S", 0.2)
    config = config.model_copy(
        update={"broker": config.broker.model_copy(update={"listen": "tcp://127.0.0.1:0"})}
    )
    directory = Path(config.directory)
    taken: Server[ToBroker, FromBroker] = Server("tcp://127.0.0.1:0", ToBroker, keys())
    (directory / "endpoint").write_text(taken.endpoint)
    with pytest.raises(ConfigError, match=f"cannot listen on {taken.endpoint}"):
        bind(config, directory, is_restart=True)
    other = bind(config, directory, is_restart=False)
    assert other.endpoint != taken.endpoint, "a run that goes on may take another one"
    other.close()
    taken.close()
    same = bind(config, directory, is_restart=True)
    assert same.endpoint == taken.endpoint
    same.close()


def write_journal(config: RunConfig) -> Path:
    """Iterations of four long groups each, and one group more that waits for its batch."""
    loaded = problems.training(config)
    order = prompt_order(config, loaded)
    row, verdict = messages.row(range(TOKENS)), messages.verdict()
    folder = Path(config.directory) / "journal"
    journal = Journal(folder)
    journal.append([RunHeader("known", PROTOCOL, b"key"), VersionPublished(NOTE)])
    for seq in range(4 * ITERATIONS + 1):
        prefixes = messages.group(seq, row, row, prompt=order.prompt(seq))
        group = messages.scored_group(prefixes, verdict, verdict, version=seq // 4)
        journal.append([GroupIssued(seq, seq, 0), GroupScored(group)])
        if seq % 4 == 3:
            journal.append([BatchFormed(seq // 4, tuple(range(seq - 3, seq + 1)))])
    journal.close()
    return folder / "000000.msgpack"


def test_a_replay_holds_what_is_live_and_never_the_journal(config: RunConfig) -> None:
    path = write_journal(config)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\x92\xcftorn")
    server: Server[ToBroker, FromBroker] = Server("tcp://127.0.0.1:0", ToBroker, keys())
    tracemalloc.start()
    try:
        start = Start(ITERATIONS, "tcp://127.0.0.1:9")
        broker = build(config, Path(config.directory), start, lambda: server)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert broker.run.header.run_id == "known"
    assert (broker.ledger.counts.trained, broker.ledger.outstanding) == (4 * ITERATIONS, 1)
    assert path.stat().st_size == size, "the torn end is gone"
    assert peak < size / 2, f"{peak} bytes for a journal of {size}"
    broker.journal.close()
    server.close()


@pytest.mark.parametrize(
    ("is_there", "state"), [(True, f"ends at iteration {ITERATIONS}"), (False, "is empty")]
)
def test_a_journal_that_is_gone_or_ends_before_the_checkpoint_is_a_message_with_a_remedy(
    config: RunConfig, is_there: bool, state: str
) -> None:
    if is_there:
        write_journal(config)
    server: Server[ToBroker, FromBroker] = Server("tcp://127.0.0.1:0", ToBroker, keys())
    try:
        message = f"{state}.*, the learner's checkpoint is of iteration {ITERATIONS + 2}: .* remove"
        with pytest.raises(DataError, match=message):
            build(
                config,
                Path(config.directory),
                Start(ITERATIONS + 2, "tcp://127.0.0.1:9"),
                lambda: server,
            )
    finally:
        server.close()
