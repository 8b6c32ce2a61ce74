"""The broker tells what the learner does, from its messages; a long wait is in the log a few times only."""

import logging
from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import PeerLost
from prefixrl.common.wire.messages.learner import Accepted, Batch, GetBatch, IterationDone, NotYet
from prefixrl.learner.broker import batches, client
from prefixrl.learner.broker.client import BrokerClient
from support.fakes import address_of, endpoint_of, learner, peers, score_one_item, serving, status


def test_a_status_tells_whether_the_learner_loads_waits_trains_or_publishes(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "NOT_YET_EVERY_S", 0.05)
    with (
        serving(config),
        peers(endpoint_of(config), "rank", "operator", "r", "s") as (
            rank,
            operator,
            rollout,
            scorer,
        ),
    ):
        operator.join("operator")

        def phase() -> tuple[str, bool]:
            result = status(operator)
            return result["learner_phase"], result["learner_waits_s"] > 0.0

        learner(rank)
        assert phase() == ("loading", False)
        rank.say(GetBatch(0, 0, 1))
        rank.hear(NotYet)
        rank.say(GetBatch(0, 0, 1))
        rank.hear(NotYet)
        assert phase() == ("waiting", True)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(2):
            score_one_item(rollout, scorer)
        rank.say(GetBatch(0, 0, 1))
        rank.hear(Batch)
        assert phase() == ("training", False)
        rank.say(IterationDone(0, 1))
        rank.hear(Accepted)
        assert phase() == ("publishing", False)


@pytest.mark.slow
def test_one_wait_is_logged_after_a_while_and_then_at_doubling_intervals(
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(batches, "NOT_YET_EVERY_S", 0.02)
    monkeypatch.setattr(client, "LOG_AFTER_S", 0.3)
    caplog.set_level(logging.INFO, client.__name__)
    with serving(config):
        rank = BrokerClient(address_of(config, "rank"))
        with pytest.raises(
            PeerLost, match="iteration 0 got no batch within 3 s; it waits for prefixes"
        ):
            rank.next_batch(GetBatch(0, 0, 1), 3.0)
        rank.close()
    said = [record.getMessage() for record in caplog.records if record.name == client.__name__]
    # After 0.3 s, and about 0.6, 1.2 and 2.4 s; before, each new text was a line.
    assert 1 <= len(said) <= 4
    assert all(text.startswith("iteration 0 has waited ") for text in said)
