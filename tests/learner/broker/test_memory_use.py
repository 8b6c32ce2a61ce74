"""The memory of each process of a run is in its status, as the processes told it."""

from msgspec.structs import replace

from prefixrl.common.config.run import RunConfig
from prefixrl.common.host.memory_use import memory_now
from prefixrl.common.wire.messages.learner import GetBatch
from prefixrl.common.wire.messages.worker import Heartbeat, MemoryUse
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.run.stop import StopSignal
from support.fakes import address_of, endpoint_of, learner, peers, serving, status, wait_until

MEMORY = MemoryUse(resident_bytes=300, own_bytes=100, share_bytes=120)
FIELDS = {"resident_bytes", "own_bytes", "share_bytes"}


def test_a_status_has_the_memory_of_the_broker_and_of_every_rank_and_worker_that_told_it(
    config: RunConfig,
) -> None:
    names = ("operator", "zero", "one", "r", "s")
    with (
        serving(config, ranks=2),
        peers(endpoint_of(config), *names) as (operator, zero, one, rollout, scorer),
    ):
        operator.join("operator")
        learner(zero)
        one.join("rank")
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        first = status(operator)["memory"]
        assert set(first) == {"broker"} and set(first["broker"]) == FIELDS
        assert 0 < first["broker"]["own_bytes"] <= first["broker"]["resident_bytes"]
        for rank, peer in enumerate((zero, one)):
            peer.say(GetBatch(0, rank, 2, memory=replace(MEMORY, resident_bytes=400 + rank)))
        rollout.say(Heartbeat(progress=0, busy_row_s=0.0, leases=(), state="", memory=MEMORY))
        wait_until(lambda: len(status(operator)["memory"]) == 4, "all reports")
        actual = status(operator)["memory"]
    assert {name: each["resident_bytes"] for name, each in actual.items() if name != "broker"} == {
        "rank-0": 400,
        "rank-1": 401,
        "rollout-0": 300,
    }


def test_a_rank_tells_its_memory_with_its_wish_for_a_batch(config: RunConfig) -> None:
    now = memory_now()
    with serving(config), peers(endpoint_of(config), "operator") as (operator,):
        operator.join("operator")
        rank = BrokerClient(address_of(config, "rank"), StopSignal(lambda: True))
        rank.next_batch(GetBatch(0, 0, 1), 60.0)  # Halt
        actual = status(operator)["memory"]["rank-0"]["resident_bytes"]
        rank.close()
    assert now is not None and now.resident_bytes / 2 < actual < now.resident_bytes * 2
