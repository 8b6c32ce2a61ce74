"""The end of a broker: nobody misses its last message, and nobody who is gone keeps it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import PeerLost
from prefixrl.common.run.status import USAGE_FILE
from prefixrl.common.wire.messages.learner import Accepted, GetBatch, RunOver, Stop
from prefixrl.common.wire.messages.worker import Beat, Done, Goodbye, Heartbeat
from prefixrl.learner.broker import server, status
from prefixrl.learner.broker.client import BrokerClient
from support.fakes import address_of, endpoint_of, peers, serving
from support.messages import HEARTBEAT_WITH_USAGE

STOP = Stop("the run is finished")


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


def test_a_stop_is_accepted_each_time_it_is_sent_also_if_its_sender_reads_late(
    config: RunConfig,
) -> None:
    with serving(config), peers(endpoint_of(config), "rank") as (rank,):
        thread = broker_thread()
        rank.join("rank")
        for _ in range(3):
            rank.say(STOP)
            thread.join(0.5)  # a broker that went at once would be gone with its answer by now
            rank.hear(Accepted)
        with ends_within(thread, 20.0):
            rank.say(Goodbye("done"))


def test_a_broker_ends_at_once_after_the_goodbyes_of_the_learner(config: RunConfig) -> None:
    with serving(config), ends_within(broker_thread(), 20.0):
        client = BrokerClient(address_of(config, "rank"))
        client.stop("the run is finished")
        client.close()


def test_a_goodbye_that_comes_together_with_the_stop_counts(config: RunConfig) -> None:
    with serving(config), peers(endpoint_of(config), "rank") as (rank,):
        rank.join("rank")
        with ends_within(broker_thread(), 20.0):
            rank.say(STOP)
            rank.say(Goodbye("done"))


def test_a_rank_that_asks_for_a_batch_after_the_end_gets_run_over_and_rank_0_an_error(
    config: RunConfig,
) -> None:
    with serving(config), peers(endpoint_of(config), "rank", "worker") as (rank, worker):
        late = BrokerClient(address_of(config, "rank"))
        rank.join("rank")
        worker.ready(config, "scorer")
        rank.say(STOP)
        rank.hear(Accepted)
        assert late.next_batch(GetBatch(5, 1, 2), 60.0) == RunOver(5)
        with pytest.raises(PeerLost, match="no rank had stopped it: the run is finished"):
            late.next_batch(GetBatch(5, 0, 2), 60.0)
        late.close()
        for leaving in (rank, worker):
            leaving.say(Goodbye("done"))


def test_a_worker_gets_done_again_until_its_goodbye(config: RunConfig) -> None:
    with serving(config), peers(endpoint_of(config), "rank", "worker") as (rank, worker):
        thread = broker_thread()
        rank.join("rank")
        worker.ready(config, "scorer")
        rank.say(STOP)
        rank.hear(Accepted)
        rank.say(Goodbye("done"))
        worker.hear(Done)
        worker.say(Heartbeat(progress=0, busy_row_s=0.0, leases=(), state="idle"))
        worker.hear(Done)
        assert thread.is_alive()
        with ends_within(thread, 20.0):
            worker.say(Goodbye("done"))


def test_a_worker_that_is_gone_without_goodbye_delays_the_end_only_so_long(
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


def test_the_usage_is_saved_before_the_wait_for_goodbyes(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker whose supervisor has less patience is killed in that wait."""
    monkeypatch.setattr(status, "SAVE_EVERY_S", 1e9)
    with serving(config), peers(endpoint_of(config), "rank", "worker") as (rank, worker):
        thread = broker_thread()
        rank.join("rank")
        worker.ready(config, "scorer")
        worker.say(HEARTBEAT_WITH_USAGE)
        worker.hear(Beat)
        rank.say(STOP)
        rank.say(Goodbye("done"))
        worker.hear(Done)
        written = Path(config.directory) / USAGE_FILE
        assert thread.is_alive() and written.exists()
        with ends_within(thread, 20.0):
            worker.say(Goodbye("done"))
