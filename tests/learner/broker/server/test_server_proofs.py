"""A rollout shows what it installed: by its logprobs where they tell versions apart, else by a checksum."""

import msgspec
import numpy as np
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.learner import Accepted, Published
from prefixrl.common.wire.messages.weights import EngineChecksum, PreviousProof, WeightsNote
from prefixrl.common.wire.messages.worker import Installed, PrefixTask, Probed, Staged, Swap
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens
from prefixrl.learner.broker.server import Broker
from support.fakes import Peer, endpoint_of, peers, sampled, status

TEXT = pack_tokens(np.arange(1, 66, dtype=np.int32))
RANDOM = np.random.default_rng(6)
LEARNER = [-RANDOM.random(64) - 0.1 * version * RANDOM.random(64) for version in range(3)]
NOTES = [
    WeightsNote(version, f"d{version}", TEXT, pack_logprobs(each))
    for version, each in enumerate(LEARNER)
]
BEFORE = PreviousProof(0, "d0", pack_logprobs(LEARNER[0]))


def swapping(config: RunConfig, rank: Peer, rollout: Peer, note: WeightsNote) -> None:
    """Let a rollout come to the installation of version 1."""
    rank.join("rank")
    rank.say(Published(NOTES[0]))
    rank.hear(Accepted)
    rollout.ready(config, "rollout")
    task = rollout.hear(PrefixTask)
    rank.say(Published(note))
    rank.hear(Accepted)
    rollout.say(Staged(1))
    rollout.say(sampled(task))
    assert rollout.hear(Swap) == Swap(1)


def test_a_change_like_the_learners_proves_a_version_and_the_status_says_so(
    config: RunConfig, broker: Broker
) -> None:
    with peers(endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout, NOTES[1])
        rollout.say(Installed(1, "d1", pack_logprobs(LEARNER[1]), BEFORE))
        assert rollout.hear(Probed) == Probed(version=1, outcome="proved", by="change")
        (worker,) = [each for each in status(rank)["workers"] if each["role"] == "rollout"]
        assert worker["proof"] == "change" and worker["probe_slope"] == pytest.approx(1.0, abs=1e-3)


def test_an_engine_that_kept_the_version_before_is_refused(
    config: RunConfig, broker: Broker
) -> None:
    with peers(endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout, NOTES[1])
        rollout.say(Installed(1, "d1", pack_logprobs(LEARNER[0]), BEFORE))
        assert rollout.hear(Probed).outcome == "refused"


@pytest.mark.parametrize("follows", ["snapshot", "other"])
def test_where_nothing_can_be_seen_the_checksum_decides(
    follows: str, config: RunConfig, broker: Broker
) -> None:
    unchanged = msgspec.structs.replace(NOTES[1], probe_logprobs=NOTES[0].probe_logprobs)
    with peers(endpoint_of(config), "rank", "rollout") as (rank, rollout):
        swapping(config, rank, rollout, unchanged)
        shown = Installed(1, "d1", NOTES[0].probe_logprobs, BEFORE)
        rollout.say(shown)
        assert rollout.hear(Probed) == Probed(version=1, outcome="unclear")
        assert rollout.hears_nothing_of(PrefixTask), "nothing is proved yet"
        checksum = EngineChecksum("c1", follows)  # type: ignore[arg-type]
        rollout.say(msgspec.structs.replace(shown, checksum=checksum))
        if follows == "snapshot":
            assert rollout.hear(Probed) == Probed(version=1, outcome="proved", by="checksum")
        else:
            assert rollout.hear(Probed).outcome == "refused"
