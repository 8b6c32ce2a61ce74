"""The choice of a worker for each task, and the return of a lost worker's tasks.

The dispatcher with a real ledger and no socket.
"""

import pytest

from prefixrl.common.wire.messages.groups import Sampling
from prefixrl.common.wire.messages.worker import PrefixTask, Refused, Revoke, ScoreTask
from prefixrl.learner.broker.workers.dispatch import EVALUATION_SHARE, LOST_TASK_S
from prefixrl.learner.broker.workers.workers import Phase
from support.broker.dispatch_desk import Desk, evaluate, held_out
from support.fakes import ROWS, sampled, scored

SAMPLING = Sampling(temperature=0.0, max_new_tokens=4)


def test_scoring_goes_to_the_scorer_with_most_free_slots(desk: Desk) -> None:
    desk.sample_everything(desk.worker("rollout"))
    small, large = desk.worker("scorer", 1), desk.worker("scorer", 3)
    desk.dispatch()
    # Twelve tasks wait. Slots are filled first, then each scorer gets one ahead.
    assert len(desk.tasks(small, ScoreTask)) == 2
    assert len(desk.tasks(large, ScoreTask)) == 4


def test_a_task_is_prefetched_only_when_no_slot_is_free_anywhere(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    busy = desk.worker("scorer", 1)
    for _ in range(2):
        desk.dispatch()
        (task,) = desk.tasks(rollout, PrefixTask)
        desk.dispatcher.take_prefixes(rollout, sampled(task), now_s=1.0)
    idle = desk.worker("scorer", 1)
    desk.dispatch()
    assert [len(desk.tasks(each, ScoreTask)) for each in (busy, idle)] == [1, 1]


def test_a_rollout_is_never_given_more_than_its_slots(desk: Desk) -> None:
    rollout = desk.worker("rollout", 2)
    for _ in range(3):
        desk.dispatch()
    assert len(desk.tasks(rollout, PrefixTask)) == 2


def test_an_idle_new_worker_gets_a_task_that_waits_behind_another(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    for _ in range(2):
        desk.dispatch()
        (task,) = desk.tasks(rollout, PrefixTask)
        desk.dispatcher.take_prefixes(rollout, sampled(task), now_s=1.0)
    rollout.phase = Phase.SWAPPING
    busy = desk.worker("scorer", 1)
    desk.dispatch()
    running, ahead = desk.tasks(busy, ScoreTask)
    newcomer = desk.worker("scorer", 1)
    desk.dispatch()
    desk.dispatch()
    assert desk.tasks(busy, Revoke) == [Revoke(ahead.task)], "asked once"
    desk.dispatcher.take_refusal(busy, Refused(ahead.task, "revoked"))
    desk.dispatch()
    (task,) = desk.tasks(newcomer, ScoreTask)
    assert task.groups == ahead.groups
    assert running.task in busy.leases


def test_a_task_names_its_version_its_rows_and_a_seed_per_group(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    assert (task.version, task.kind, task.rows_per_group) == (0, "train", ROWS)
    assert len({group.seed for group in task.groups}) == len(task.groups) == 2


def test_a_draining_or_loading_rollout_gets_no_training_work(desk: Desk) -> None:
    draining, loading, swapping = (desk.worker("rollout") for _ in range(3))
    draining.phase = Phase.DRAINING
    loading.phase = Phase.LOADING
    swapping.phase = Phase.SWAPPING
    desk.dispatch()
    assert not any(desk.tasks(each, PrefixTask) for each in (draining, loading, swapping))


def test_a_draining_rollout_finishes_the_evaluation_of_its_version(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    rollout.phase = Phase.DRAINING
    evaluate(desk, 0, held_out(3))
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    assert (task.kind, task.rows_per_group, task.sampling) == ("eval", 1, SAMPLING)


def test_an_evaluation_goes_before_training_on_rollouts_that_have_its_version(desk: Desk) -> None:
    rollout = desk.worker("rollout", 2)
    evaluate(desk, 0, held_out(3))
    desk.dispatch()
    assert [task.kind for task in desk.tasks(rollout, PrefixTask)] == ["eval", "train"]


def test_one_score_task_in_four_is_an_evaluations_while_both_wait(desk: Desk) -> None:
    desk.sample_everything(desk.worker("rollout"))
    evaluate(desk, -1, held_out(64 * 3))
    scorer, kinds = desk.worker("scorer", 1), []
    for _ in range(12):
        desk.dispatch()
        for task in desk.tasks(scorer, ScoreTask):
            kinds.append(task.kind)
            desk.dispatcher.take_scores(scorer, scored(task), now_s=1.0)
    assert len(kinds) >= 12
    assert all(
        (kind == "eval") == (number % EVALUATION_SHARE == 0)
        for number, kind in enumerate(kinds[:12], start=1)
    )


def test_an_evaluation_takes_every_scorer_when_there_is_nothing_else(desk: Desk) -> None:
    evaluate(desk, -1, held_out(64 * 3))
    scorer, kinds = desk.worker("scorer", 1), []
    for _ in range(5):
        desk.dispatch()
        for task in desk.tasks(scorer, ScoreTask):
            kinds.append(task.kind)
            desk.dispatcher.take_scores(scorer, scored(task), now_s=1.0)
    assert kinds == ["eval"] * 3


@pytest.mark.parametrize("is_over", [False, True])
def test_evaluations_hold_a_quarter_of_the_seats_while_a_run_trains(
    desk: Desk, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_over:  # a run that was shortened, with groups left
        monkeypatch.setattr(desk.ledger, "_is_past_the_end", lambda iteration: True)
    desk.sample_everything(desk.worker("rollout"))
    scorer = desk.worker("scorer")
    scorer.takes_runs, scorer.seats, scorer.room = False, 1024, 1024
    evaluate(desk, -1, held_out(64 * 20))
    desk.dispatch()
    kinds = [task.kind for task in desk.tasks(scorer, ScoreTask)]
    held, quarter = kinds.count("eval"), 1024 / EVALUATION_SHARE
    assert held > quarter if is_over else (held == quarter and kinds.count("train") > 8)


def test_the_task_of_a_lost_worker_goes_to_another_with_the_same_numbers(desk: Desk) -> None:
    first = desk.worker("rollout")
    desk.dispatch()
    (task,) = desk.tasks(first, PrefixTask)
    assert desk.dispatcher.lose_worker(first, "gone", died=True) == [task.task]
    second = desk.worker("rollout")
    desk.dispatch()
    (again,) = desk.tasks(second, PrefixTask)
    assert again.task != task.task
    assert again.groups == task.groups, "the same prompts and seeds, so the same text"
    assert desk.dispatcher.losses == {"rollout: lost": 1}


def test_the_prefixes_of_a_lost_scorer_go_to_another(desk: Desk) -> None:
    desk.sample_everything(desk.worker("rollout"))
    first = desk.worker("scorer")
    desk.dispatch()
    tasks = desk.tasks(first, ScoreTask)
    desk.dispatcher.lose_worker(first, "gone", died=True)
    second = desk.worker("scorer")
    desk.dispatch()
    assert [each.groups for each in desk.tasks(second, ScoreTask)] == [
        each.groups for each in tasks
    ]


def test_the_late_result_of_a_lost_worker_counts_and_the_second_one_is_ignored(desk: Desk) -> None:
    first, second = desk.worker("rollout"), None
    desk.dispatch()
    (task,) = desk.tasks(first, PrefixTask)
    desk.dispatcher.lose_worker(first, "slow", died=False)
    second = desk.worker("rollout")
    desk.dispatch()
    (again,) = desk.tasks(second, PrefixTask)
    desk.dispatcher.take_prefixes(first, sampled(task), now_s=1.0)
    assert desk.ledger.states() == {"sampled": 2}
    desk.dispatcher.take_prefixes(second, sampled(again), now_s=1.0)
    assert desk.ledger.states() == {"sampled": 2}
    assert desk.ledger.counts.duplicates_ignored == 2


def test_a_task_its_worker_never_got_comes_back_after_a_while(desk: Desk) -> None:
    rollout = desk.worker("rollout", 2)
    desk.dispatch()
    held, lost = desk.tasks(rollout, PrefixTask)
    for now_s in (1.0, LOST_TASK_S, LOST_TASK_S + 1.0):
        desk.dispatcher.reconcile(rollout, (held.task,), now_s)
    assert list(rollout.leases) == [held.task]
    assert desk.dispatcher.losses == {"rollout: task lost on the way": 1}
    desk.dispatch()
    (again,) = desk.tasks(rollout, PrefixTask)
    assert again.groups == lost.groups


def test_a_task_that_is_finished_but_not_yet_delivered_is_not_taken_back_at_once(
    desk: Desk,
) -> None:
    rollout = desk.worker("rollout")
    desk.dispatch()
    desk.dispatcher.reconcile(rollout, tuple(rollout.leases), 100.0)
    desk.dispatcher.reconcile(rollout, (), 100.0 + LOST_TASK_S)
    assert len(rollout.leases) == 1


def test_a_refused_task_costs_no_attempt(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    for _ in range(10):
        desk.dispatch()
        (task,) = desk.tasks(rollout, PrefixTask)
        desk.dispatcher.take_refusal(rollout, Refused(task.task, "wrong version"))
    assert desk.ledger.counts.expired == 0
    assert all(group.deaths == 0 for group in desk.ledger.live())


def test_a_group_that_ends_every_worker_is_requeued_as_a_new_group(desk: Desk) -> None:
    for _ in range(3):
        rollout = desk.worker("rollout")
        desk.dispatch()
        desk.dispatcher.lose_worker(rollout, "died", died=True)
    assert desk.ledger.counts.expired == 2
    rollout = desk.worker("rollout")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    assert [group.seq for group in task.groups] == [2, 3]
    desk.ledger.check()


def test_a_worker_that_keeps_a_training_task_for_ever_is_refused_however_it_reports(
    desk: Desk,
) -> None:
    rollout, patience_s = desk.worker("rollout"), desk.config.learner.batch_timeout_s / 2
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    desk.dispatcher.reconcile(rollout, (task.task,), patience_s)
    with pytest.raises(
        ValueError, match=f"no result of the train task {task.task} within {patience_s:g} s"
    ):
        desk.dispatcher.reconcile(rollout, (task.task,), patience_s + 1.0)


def test_a_prefetched_task_is_timed_from_when_it_came_to_the_front(desk: Desk) -> None:
    desk.sample_everything(desk.worker("rollout"))
    scorer, patience_s = desk.worker("scorer"), desk.config.learner.batch_timeout_s / 2
    desk.dispatch()
    first, second = desk.tasks(scorer, ScoreTask)
    desk.dispatcher.reconcile(scorer, (first.task, second.task), patience_s)
    desk.dispatcher.take_scores(scorer, scored(first), patience_s)
    desk.dispatcher.reconcile(scorer, (second.task,), patience_s + 10.0)
    desk.dispatcher.reconcile(scorer, (second.task,), 2 * patience_s + 10.0)
    with pytest.raises(ValueError, match=f"no result of the train task {second.task}"):
        desk.dispatcher.reconcile(scorer, (second.task,), 2 * patience_s + 11.0)


def test_an_evaluations_task_has_as_much_more_time_as_it_is_larger(desk: Desk) -> None:
    evaluate(desk, 0, held_out(40))
    rollout, patience_s = desk.worker("rollout"), desk.config.learner.batch_timeout_s / 2
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    config = desk.config
    usual = config.rollout.groups_per_task * ROWS * config.rollout_sampling().max_new_tokens
    most_s = patience_s * 40 * SAMPLING.max_new_tokens / usual
    assert most_s > patience_s
    desk.dispatcher.reconcile(rollout, (task.task,), most_s)
    with pytest.raises(ValueError, match=f"no result of the eval task {task.task}"):
        desk.dispatcher.reconcile(rollout, (task.task,), most_s + 1.0)
