"""The requests of an operator to a broker: the ranks are to stop, a worker is to leave."""

from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages import learner as messages
from prefixrl.common.wire.messages.worker import (
    Beat,
    Heartbeat,
    Leave,
    Leaving,
    PrefixTask,
    Reject,
    ScoreTask,
)
from prefixrl.learner.broker.workers.workers import Phase
from support.fakes import (
    endpoint_of,
    learner,
    peers,
    run_on_disk,
    sampled,
    score_one_item,
    serving,
    status,
)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_on_disk(
        tmp_path,
        algorithm={
            "groups_per_iteration": 4,
            "samples_per_prompt": 2,
            "iterations": 3,
            "max_staleness": 1,
        },
        rollout={"groups_per_task": 2},
    )


BEAT = Heartbeat(progress=0, busy_row_s=0.0, leases=(), state="idle")


def test_an_operator_halts_the_ranks_at_an_iteration_of_which_none_holds_a_shard(
    config: RunConfig,
) -> None:
    names = "zero", "r", "s", "operator"
    with serving(config), peers(endpoint_of(config), *names) as (zero, rollout, scorer, operator):
        learner(zero)
        operator.join("operator")
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(2):
            score_one_item(rollout, scorer)
        zero.say(messages.GetBatch(0, 0, 1))
        zero.hear(messages.Batch)
        assert not status(operator)["is_halting"]
        for _ in range(2):
            operator.say(messages.HaltRun("by hand"))
            operator.hear(messages.Accepted)
        assert status(operator)["is_halting"]
        zero.say(messages.GetEvaluation("last"))
        assert zero.hear(messages.EvaluationProgress).is_halting, (
            "nobody waits for a last evaluation either"
        )
        zero.say(messages.GetBatch(0, 0, 1))
        assert zero.hear(messages.Batch).iteration == 0, "what has begun is ended"
        zero.say(messages.IterationDone(0, 1))
        zero.hear(messages.Accepted)
        zero.say(messages.GetBatch(1, 0, 1))
        assert zero.hear(messages.Halt).iteration == 1


def test_a_drained_worker_is_told_until_it_leaves_and_gets_no_task(config: RunConfig) -> None:
    names = "zero", "r", "s", "t", "operator"
    with (
        serving(config) as broker,
        peers(endpoint_of(config), *names) as (zero, rollout, one, two, operator),
    ):
        learner(zero)
        operator.join("operator")
        one.ready(config, "scorer")
        two.ready(config, "scorer")
        operator.say(messages.DrainWorker("scorer-0"))
        operator.hear(messages.Accepted)
        one.hear(Leave)
        for _ in range(2):
            one.say(BEAT)
            one.hear(Leave)
        rollout.ready(config, "rollout")
        rollout.say(sampled(rollout.hear(PrefixTask)))
        two.hear(ScoreTask)
        assert one.hears_nothing_of(ScoreTask)
        assert status(operator)["drained"] == [{"host": "host", "pid": 4711}]
        one.say(Leaving())
        one.say(BEAT)
        one.hear(Beat)
        assert one.hears_nothing_of(Leave)
        assert [
            each.name
            for each in broker.dispatcher.registry.by_identity.values()
            if each.phase is Phase.READY and not each.is_leaving
        ] == ["scorer-1", "rollout-0"]


def test_a_worker_that_is_not_there_cannot_be_drained(config: RunConfig) -> None:
    with serving(config), peers(endpoint_of(config), "s", "operator") as (scorer, operator):
        operator.join("operator")
        scorer.ready(config, "scorer")
        operator.say(messages.DrainWorker("scorer-7"))
        assert "no worker 'scorer-7'; it has scorer-0" in operator.hear(Reject).reason


def test_a_worker_halts_and_drains_nobody(config: RunConfig) -> None:
    with serving(config), peers(endpoint_of(config), "s") as (scorer,):
        scorer.ready(config, "scorer")
        scorer.say(messages.DrainWorker("scorer-0"))
        assert scorer.hears_nothing_of(messages.Accepted)
