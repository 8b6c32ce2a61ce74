"""Answers to ranks where the filter lets too little through; evaluations are never filtered."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.learner import Batch, CannotGoOn, GetBatch, NotYet
from prefixrl.common.wire.messages.worker import Ack, PrefixTask, ScoreTask
from support.broker.dispatch_desk import Desk, evaluate, held_out
from support.fakes import (
    Peer,
    endpoint_of,
    learner,
    peers,
    run_on_disk,
    sampled,
    scored,
    serving,
    status,
)

MIXED = [0.01, 0.99]


def filtered_run(folder: Path, **keys: Any) -> RunConfig:
    """A run of 4 groups per iteration; 8 judged groups decide."""
    return run_on_disk(folder, filter={"accuracy": MIXED, "limit_batches": 2} | keys)


def judge_one_item(rollout: Peer, scorer: Peer, reward: float) -> None:
    """One task, every row of it with this reward."""
    task = rollout.hear(PrefixTask)
    rollout.say(sampled(task))
    rollout.hear(Ack)
    scores = scored(scorer.hear(ScoreTask), reward)
    scorer.say(scores)
    scorer.hear(Ack)


def test_a_waiting_rank_receives_how_many_passed_and_at_the_limit_the_end(tmp_path: Path) -> None:
    config = filtered_run(tmp_path)
    with (
        serving(config, ranks=2),
        peers(endpoint_of(config), "rank", "other", "r", "s") as (rank, other, rollout, scorer),
    ):
        learner(rank)
        other.join("rank")
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(2):
            judge_one_item(rollout, scorer, 0.0)
        rank.say(GetBatch(0, 0, 2))
        waiting_for = rank.hear(NotYet).waiting_for
        assert waiting_for.endswith("; 0 of the last 4 judged groups passed the filter")
        for _ in range(2):
            judge_one_item(rollout, scorer, 1.0)
        rank.say(GetBatch(0, 0, 2))
        reason = rank.hear(CannotGoOn).reason
        assert reason.startswith(
            "iteration 0 gets no batch: 0 of the last 8 judged groups passed filter.accuracy = [0.01, 0.99], fewer "
            "than filter.min_pass_rate = 0.01 of them or none; widen"
        )
        assert reason.endswith("ended so far: 4 filtered: accuracy 0, 4 filtered: accuracy 1)")
        # Said once, said to every rank, even if groups pass after all.
        for _ in range(4):
            task = rollout.hear(PrefixTask)
            rollout.say(sampled(task))
            rollout.hear(Ack)
            scores = scored(scorer.hear(ScoreTask))
            scorer.say(half_right(scores))
            scorer.hear(Ack)
        other.say(GetBatch(0, 1, 2))
        assert other.hear(CannotGoOn).reason == reason
        document = status(rank)
        assert document["filter"] == {"passed": 8, "judged": 8}
        assert document["causes"] == {"filtered: accuracy 0": 4, "filtered: accuracy 1": 4}


def half_right(scores: Any) -> Any:
    """The same scores, the second row of every group wrong."""

    def mixed(group: Any) -> Any:
        right = group.verdicts[0]
        wrong = msgspec.structs.replace(right, reward=0.0)
        return msgspec.structs.replace(group, verdicts=(right, wrong))

    return msgspec.structs.replace(scores, groups=tuple(mixed(each) for each in scores.groups))


def test_a_run_that_was_ended_ends_again_when_it_is_resumed_unless_the_limit_is_moved(
    tmp_path: Path,
) -> None:
    config = filtered_run(tmp_path)
    names = ("rank", "r", "s")
    with serving(config), peers(endpoint_of(config), *names) as (rank, rollout, scorer):
        learner(rank)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        for _ in range(4):
            judge_one_item(rollout, scorer, 0.0)
    for limit_batches, answer in ((2, CannotGoOn), (3, NotYet)):
        again = config.model_copy(
            update={"filter": config.filter.model_copy(update={"limit_batches": limit_batches})}
        )
        with serving(again), peers(endpoint_of(config), "rank") as (rank,):
            learner(rank)
            rank.say(GetBatch(0, 0, 1))
            assert isinstance(rank.hear(answer), answer)


def test_a_group_of_one_is_trained_if_the_band_holds_its_reward(tmp_path: Path) -> None:
    config = run_on_disk(
        tmp_path,
        algorithm={"samples_per_prompt": 1, "groups_per_iteration": 2},
        filter={"accuracy": [1.0, 1.0]},
    )
    with serving(config), peers(endpoint_of(config), "rank", "r", "s") as (rank, rollout, scorer):
        learner(rank)
        rollout.ready(config, "rollout")
        scorer.ready(config, "scorer")
        judge_one_item(rollout, scorer, 0.0)
        judge_one_item(rollout, scorer, 1.0)
        rank.say(GetBatch(0, 0, 1))
        batch = rank.hear(Batch)
        assert [group.rewards for group in batch.groups] == [(1.0,), (1.0,)]


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_evaluations_are_never_filtered(reward: float, tmp_path: Path) -> None:
    desk = Desk(filtered_run(tmp_path))
    evaluate(desk, -1, held_out(3))
    scorer = desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(scorer, ScoreTask)
    desk.dispatcher.take_scores(scorer, scored(task, reward), now_s=1.0)
    run = desk.dispatcher.evaluations.runs.get("e")
    assert run is not None and run.finished and len(run.results) == 3
    assert desk.ledger.counts.filtered == 0
