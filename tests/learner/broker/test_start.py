"""How a broker starts: on which address, and from what its journal says."""

import tracemalloc
from pathlib import Path

import pytest

from fakes import NOTE, run_on_disk
from prefixrl.common.config import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.journal import Journal
from prefixrl.common.messages import (
    PROTOCOL,
    FromBroker,
    GroupPrefixes,
    Row,
    ScoredGroup,
    ToBroker,
    Verdict,
    VersionSpan,
)
from prefixrl.common.packing import pack_logprobs, pack_tokens
from prefixrl.common.records import Batched, GroupScored, Issued, RunHeader, VersionPublished
from prefixrl.common.transport import Server
from prefixrl.learner import problems
from prefixrl.learner.broker import __main__ as module
from prefixrl.learner.broker.__main__ import Start, bind, build, prompt_order

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
    taken: Server[ToBroker, FromBroker] = Server("tcp://127.0.0.1:0", ToBroker)
    (directory / "endpoint").write_text(taken.endpoint)
    with pytest.raises(ConfigError, match=f"cannot listen on {taken.endpoint}"):
        bind(config, directory, is_again=True)
    other = bind(config, directory, is_again=False)
    assert other.endpoint != taken.endpoint, "a run that goes on may take another one"
    other.close()
    taken.close()
    same = bind(config, directory, is_again=True)
    assert same.endpoint == taken.endpoint
    same.close()


def write_journal(config: RunConfig) -> Path:
    """Iterations of four long groups each, and one group more that waits for its batch."""
    loaded = problems.training(config)
    order = prompt_order(config, loaded)
    row = Row(
        pack_tokens(range(TOKENS)),
        pack_logprobs([-1.0] * TOKENS),
        "length",
        (VersionSpan(0, "d0", TOKENS),),
    )
    verdicts = (Verdict(1.0, "ok", "1", "eos", 3, 5),) * 2
    path = Path(config.directory) / "journal.msgpack"
    journal = Journal(path)
    journal.append([RunHeader("known", PROTOCOL), VersionPublished(NOTE)])
    for seq in range(4 * ITERATIONS + 1):
        prefixes = GroupPrefixes(seq, order.prompt(seq), 1, pack_tokens([1]), (row, row))
        group = ScoredGroup(prefixes, seq // 4, "d0", verdicts, "scorer-0")
        journal.append([Issued(seq, seq, 0), GroupScored(group)])
        if seq % 4 == 3:
            journal.append([Batched(seq // 4, tuple(range(seq - 3, seq + 1)))])
    journal.close()
    return path


def test_a_replay_holds_what_is_live_and_never_the_journal(config: RunConfig) -> None:
    path = write_journal(config)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\x92\xcftorn")
    server: Server[ToBroker, FromBroker] = Server("tcp://127.0.0.1:0", ToBroker)
    tracemalloc.start()
    try:
        start = Start(ITERATIONS, "tcp://127.0.0.1:9")
        broker = build(config, Path(config.directory), start, server)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert broker.run.run_id == "known"
    assert (broker.ledger.counts.trained, broker.ledger.outstanding) == (4 * ITERATIONS, 1)
    assert path.stat().st_size == size, "the torn end is gone"
    assert peak < size / 2, f"{peak} bytes for a journal of {size}"
    broker.journal.close()
    server.close()
