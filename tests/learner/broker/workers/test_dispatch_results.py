"""Results that are not what was asked for, and what keeps evaluations out of the ledger."""

import msgspec
import pytest

from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.wire.messages.worker import Prefixes, PrefixTask, Scores, ScoreTask
from prefixrl.learner.broker.workers.workers import Worker
from support.broker.dispatch_desk import Desk, evaluate, held_out
from support.fakes import ROWS, sampled, scored
from support.messages import score_task

SAMPLING = Sampling(temperature=0.0, max_new_tokens=4)


def test_prefixes_of_another_version_are_refused_and_the_task_comes_back(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    wrong = sampled(task)
    wrong = Prefixes(
        task=task.task,
        kind="train",
        version=1,
        weights_digest="d1",
        groups=wrong.groups,
        elapsed_s=0.0,
    )
    with pytest.raises(ValueError, match="version 1 for a task at version 0"):
        desk.dispatcher.take_prefixes(rollout, wrong, now_s=1.0)
    other = desk.replaced(rollout)
    desk.dispatch()
    (again,) = desk.tasks(other, PrefixTask)
    assert again.groups == task.groups


def test_a_result_that_leaves_groups_out_is_refused_and_all_of_them_come_back(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    whole = sampled(task)
    half = msgspec.structs.replace(whole, groups=whole.groups[:1])
    with pytest.raises(ValueError, match=r"holds groups \[0\], the task holds \[0, 1\]"):
        desk.dispatcher.take_prefixes(rollout, half, now_s=1.0)
    other = desk.replaced(rollout)
    desk.dispatch()
    assert desk.tasks(other, PrefixTask)[0].groups == task.groups


def test_groups_nobody_asked_for_are_refused_and_the_task_comes_back(desk: Desk) -> None:
    evaluate(desk, -1, held_out(2))
    scorer = desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(scorer, ScoreTask)
    good = scored(task)
    strange = Scores(task.task, "eval", (*good.groups, *good.groups))
    with pytest.raises(ValueError, match="the task holds \\[0, 1\\]"):
        desk.dispatcher.take_scores(scorer, strange, now_s=1.0)
    other = desk.replaced(scorer)
    desk.dispatch()
    assert len(desk.tasks(other, ScoreTask)) == 1


def test_scores_without_a_version_never_count_as_training(desk: Desk) -> None:
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    desk.dispatcher.take_prefixes(rollout, sampled(task), now_s=1.0)
    desk.dispatch()
    (score,) = desk.tasks(scorer, ScoreTask)
    unversioned = score_task(*score.groups, task=score.task, version=-1, weights_digest="")
    with pytest.raises(
        ValueError, match=r"another prefixes, version or weights in groups \[0, 1\]"
    ):
        desk.dispatcher.take_scores(scorer, scored(unversioned), now_s=1.0)
    assert "scored" not in desk.ledger.states()


def colliding(desk: Desk) -> tuple[Worker, Worker, PrefixTask, PrefixTask]:
    """A training task and an evaluation task over the same numbers and the same prompts."""
    trainer = desk.worker("rollout")
    desk.dispatch()
    (train,) = desk.tasks(trainer, PrefixTask)
    evaluate(desk, 0, [group.prompt for group in train.groups])
    evaluator = desk.worker("rollout")
    desk.dispatch()
    (test,) = desk.tasks(evaluator, PrefixTask)
    assert test.kind == "eval"
    assert [(group.seq, group.prompt) for group in test.groups] == [
        (group.seq, group.prompt) for group in train.groups
    ]
    return trainer, evaluator, train, test


def test_an_evaluations_result_never_enters_the_ledger_though_number_and_prompt_collide(
    desk: Desk,
) -> None:
    _, evaluator, _, test = colliding(desk)
    before = desk.ledger.states()
    desk.dispatcher.take_prefixes(evaluator, sampled(test), now_s=1.0)
    scorer = desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(scorer, ScoreTask)
    assert task.kind == "eval"
    desk.dispatcher.take_scores(scorer, scored(task), now_s=1.0)
    after = desk.ledger.states()
    assert after.get("sampled", 0) == after.get("scored", 0) == 0
    assert after["sampling"] >= before["sampling"]
    run = desk.dispatcher.evaluations.runs.get("e")
    assert run is not None and len(run.results) == 2


def test_an_evaluations_result_that_calls_itself_training_is_refused(desk: Desk) -> None:
    _, evaluator, _, test = colliding(desk)
    rows = PrefixTask(
        task=test.task,
        kind="train",
        version=0,
        groups=test.groups,
        rows_per_group=ROWS,
        sampling=SAMPLING,
    )
    with pytest.raises(ValueError, match="a train result Prefixes for the eval task"):
        desk.dispatcher.take_prefixes(evaluator, sampled(rows), now_s=1.0)
    assert "sampled" not in desk.ledger.states()


def test_a_training_result_that_calls_itself_an_evaluation_is_refused(desk: Desk) -> None:
    trainer, _, train, _ = colliding(desk)
    rows = PrefixTask(
        task=train.task,
        kind="eval",
        version=0,
        groups=train.groups,
        rows_per_group=1,
        sampling=SAMPLING,
    )
    with pytest.raises(ValueError, match="a eval result Prefixes for the train task"):
        desk.dispatcher.take_prefixes(trainer, sampled(rows), now_s=1.0)


def test_an_evaluations_late_result_is_dropped(desk: Desk) -> None:
    _, evaluator, _, test = colliding(desk)
    desk.dispatcher.lose_worker(evaluator, "slow", died=True)
    before = desk.ledger.states()
    desk.dispatcher.take_prefixes(evaluator, sampled(test), now_s=1.0)
    assert desk.ledger.states() == before
    run = desk.dispatcher.evaluations.runs.get("e")
    assert run is not None and not run.to_score
