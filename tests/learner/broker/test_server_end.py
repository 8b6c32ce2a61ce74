"""How a broker ends: nobody misses its last words, and nobody who is gone keeps it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fakes import endpoint_of, peers, run_on_disk, serving
from prefixrl.common.config import RunConfig
from prefixrl.common.errors import PeerLost
from prefixrl.common.messages import (
    Accepted,
    Beat,
    Done,
    GetBatch,
    Goodbye,
    Heartbeat,
    RunOver,
    Stop,
    Usage,
)
from prefixrl.common.status import USAGE_FILE
from prefixrl.learner.broker import server, spending
from prefixrl.learner.client import BrokerClient

STOP = Stop("the run is finished")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_on_disk(tmp_path)


def broker_thread() -> threading.Thread:
    return next(each for each in threading.enumerate() if each.name == "broker")


@contextmanager
def ends_within(thread: threading.Thread, limit_s: float) -> Iterator[None]:
    yield
    thread.join(limit_s)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than any test: only Goodbyes let the broker go."""
    monkeypatch.setattr(server, "GOODBYE_S", 60.0)


def test_who_said_stop_and_reads_late_still_hears_that_it_was_accepted(config: RunConfig) -> None:
    with serving(config), peers(endpoint_of(config), "rank") as (rank,):
        thread = broker_thread()
        rank.join("rank")
        rank.say(STOP)
        thread.join(1.5)  # a broker that went at once would be gone with its answer by now
        rank.hear(Accepted)
        with ends_within(thread, 20.0):
            rank.say(Goodbye("done"))


def test_a_stop_that_is_said_again_is_accepted_again(config: RunConfig) -> None:
    with serving(config), peers(endpoint_of(config), "rank") as (rank,):
        thread = broker_thread()
        rank.join("rank")
        for _ in range(3):
            rank.say(STOP)
            rank.hear(Accepted)
        with ends_within(thread, 20.0):
            rank.say(Goodbye("done"))


def test_a_learner_that_stops_the_run_lets_the_broker_go_at_once(config: RunConfig) -> None:
    with serving(config), ends_within(broker_thread(), 20.0):
        client = BrokerClient(endpoint_of(config))
        client.stop("the run is finished")
        client.close()


def test_a_goodbye_that_comes_together_with_the_stop_counts(config: RunConfig) -> None:
    with serving(config), peers(endpoint_of(config), "rank") as (rank,):
        rank.join("rank")
        with ends_within(broker_thread(), 20.0):
            rank.say(STOP)
            rank.say(Goodbye("done"))


def test_a_rank_that_asks_for_a_batch_when_all_is_over_is_told_so_but_rank_0_who_ends_it_is_not(
    config: RunConfig,
) -> None:
    with serving(config), peers(endpoint_of(config), "rank", "worker") as (rank, worker):
        late = BrokerClient(endpoint_of(config))
        rank.join("rank")
        worker.ready(config, "scorer")
        rank.say(STOP)
        rank.hear(Accepted)
        assert late.next_batch(GetBatch(5, 1, 2), 60.0, lambda: False) == RunOver(5)
        with pytest.raises(PeerLost, match="no rank told it to: the run is finished"):
            late.next_batch(GetBatch(5, 0, 2), 60.0, lambda: False)
        late.close()
        for leaving in (rank, worker):
            leaving.say(Goodbye("done"))


def test_a_worker_is_waited_for_and_told_again_until_it_goes(config: RunConfig) -> None:
    with serving(config), peers(endpoint_of(config), "rank", "worker") as (rank, worker):
        thread = broker_thread()
        rank.join("rank")
        worker.ready(config, "scorer")
        rank.say(STOP)
        rank.hear(Accepted)
        rank.say(Goodbye("done"))
        worker.hear(Done)
        worker.say(Heartbeat(0, 0.0, (), "idle"))
        worker.hear(Done)
        assert thread.is_alive()
        with ends_within(thread, 20.0):
            worker.say(Goodbye("done"))


def test_who_is_gone_without_goodbye_keeps_the_broker_only_so_long(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GOODBYE_S", 0.5)
    with serving(config), peers(endpoint_of(config), "rank", "worker") as (rank, worker):
        thread = broker_thread()
        rank.join("rank")
        worker.ready(config, "scorer")
        from_s = time.monotonic()
        with ends_within(thread, 20.0):
            rank.say(STOP)
        assert time.monotonic() - from_s >= 0.5


def test_what_the_endpoint_cost_is_written_down_before_the_wait_for_who_leaves(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker whose supervisor has less patience is killed in that wait."""
    monkeypatch.setattr(spending, "SAVE_EVERY_S", 1e9)
    with serving(config), peers(endpoint_of(config), "rank", "worker") as (rank, worker):
        thread = broker_thread()
        rank.join("rank")
        worker.ready(config, "scorer")
        worker.say(Heartbeat(1, 0.0, (), "scoring", Usage(3, 30, 8)))
        worker.hear(Beat)
        rank.say(STOP)
        rank.say(Goodbye("done"))
        worker.hear(Done)
        written = Path(config.directory) / USAGE_FILE
        assert thread.is_alive() and written.exists()
        with ends_within(thread, 20.0):
            worker.say(Goodbye("done"))
