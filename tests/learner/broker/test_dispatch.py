"""Who gets which task, and what a result, a refusal or a loss means: the dispatcher with a real ledger and no socket."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fakes import ROWS, judged, run_on_disk, sampled, scored
from prefixrl.common.config import RunConfig
from prefixrl.common.messages import (
    Evaluate,
    FromBroker,
    Prefixes,
    PrefixTask,
    Prompt,
    Refused,
    Revoke,
    Sampling,
    Scores,
    ScoreTask,
)
from prefixrl.learner import problems
from prefixrl.learner.broker.dispatch import EVALUATION_SHARE, LOST_TASK_S, Dispatcher
from prefixrl.learner.broker.ledger import Ledger, Limits
from prefixrl.learner.broker.prompts import PromptOrder
from prefixrl.learner.broker.window import Window
from prefixrl.learner.broker.workers import Worker

SAMPLING = Sampling(0.0, 4)


@dataclass
class Desk:
    """A dispatcher, and what it sent to whom."""

    config: RunConfig
    now_s: float = 0.0
    inboxes: dict[str, list[FromBroker]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        prompts = [each.prompt() for each in problems.load(config.data.train, config.data)]
        order = PromptOrder(prompts, config.seed, None)
        algorithm = config.algorithm
        limits = Limits(config.rollout.groups_per_task, 3, 3, algorithm.iterations)
        window = Window(algorithm.groups_per_iteration, algorithm.max_staleness)
        self.ledger = Ledger(window, limits, order)
        self.dispatcher = Dispatcher(config, self.ledger, order, "e")

    def worker(
        self, role: Literal["rollout", "scorer"], slots: int = 1, version: int = 0
    ) -> Worker:
        registry = self.dispatcher.registry
        identity = f"{role}{len(registry.by_identity)}".encode()
        worker = registry.add(identity, role, "h", 1, self.now_s)
        worker.phase, worker.slots, worker.version = "ready", slots, version
        self.inboxes[worker.name] = []
        return worker

    def dispatch(self) -> None:
        self.now_s += 0.1
        self.dispatcher.dispatch(self.now_s)
        names = {each.identity: each.name for each in self.dispatcher.registry.by_identity.values()}
        for identity, message in self.dispatcher.outgoing:
            self.inboxes[names[identity]].append(message)
        self.dispatcher.outgoing.clear()

    def tasks(self, worker: Worker, kind: type[Any]) -> list[Any]:
        """What a worker got of a type since it was last asked."""
        got = [each for each in self.inboxes[worker.name] if isinstance(each, kind)]
        self.inboxes[worker.name] = [each for each in self.inboxes[worker.name] if each not in got]
        return got

    def sample_everything(self, rollout: Worker) -> int:
        """Let a rollout work until it gets nothing more; groups sampled."""
        groups = 0
        while True:
            self.dispatch()
            tasks = self.tasks(rollout, PrefixTask)
            if not tasks:
                return groups
            for task in tasks:
                self.dispatcher.take_prefixes(rollout, sampled(task))
                groups += len(task.groups)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_on_disk(tmp_path, algorithm={"groups_per_iteration": 8})


@pytest.fixture
def desk(config: RunConfig) -> Desk:
    return Desk(config)


def evaluate(desk: Desk, version: int, prompts: list[Prompt], name: str = "e") -> None:
    request = Evaluate(name, version, b"", tuple(prompts), SAMPLING, SAMPLING)
    desk.dispatcher.evaluations.add(request)


def held_out(count: int) -> list[Prompt]:
    return [Prompt(f"h{i}", "?", "1") for i in range(count)]


# --- giving work -----------------------------------------------------------------------------------------------------


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
        desk.dispatcher.take_prefixes(rollout, sampled(task))
    idle = desk.worker("scorer", 1)
    desk.dispatch()
    assert [len(desk.tasks(each, ScoreTask)) for each in (busy, idle)] == [1, 1]


def test_a_rollout_is_never_given_more_than_its_slots(desk: Desk) -> None:
    rollout = desk.worker("rollout", 2)
    for _ in range(3):
        desk.dispatch()
    assert len(desk.tasks(rollout, PrefixTask)) == 2


def test_an_idle_newcomer_gets_what_only_waits_behind_other_work(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    busy = desk.worker("scorer", 1)
    desk.config.algorithm.model_fields_set  # noqa: B018
    desk.sample_everything(rollout)
    # Leave exactly two tasks: one running, one ahead.
    while len(desk.ledger._unscored_items) > 2:
        desk.ledger._unscored_items.pop()
    desk.dispatch()
    running, ahead = desk.tasks(busy, ScoreTask)
    newcomer = desk.worker("scorer", 1)
    desk.dispatch()
    desk.dispatch()
    assert desk.tasks(busy, Revoke) == [Revoke(ahead.task, ahead.attempt)], "asked once"
    desk.dispatcher.take_refusal(busy, Refused(ahead.task, ahead.attempt, "revoked"))
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
    draining.phase, loading.phase, swapping.phase = "draining", "loading", "swapping"
    desk.dispatch()
    assert not any(desk.tasks(each, PrefixTask) for each in (draining, loading, swapping))


def test_a_draining_rollout_finishes_the_evaluation_of_its_version(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    rollout.phase = "draining"
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
            desk.dispatcher.take_scores(scorer, scored(task))
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
            desk.dispatcher.take_scores(scorer, scored(task))
    assert kinds == ["eval"] * 3


def test_nothing_is_given_while_paused(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    desk.dispatcher.paused = True
    desk.dispatch()
    assert not desk.tasks(rollout, PrefixTask)


# --- losing work -----------------------------------------------------------------------------------------------------


def test_the_task_of_a_lost_worker_goes_to_another_with_the_same_numbers(desk: Desk) -> None:
    first = desk.worker("rollout")
    desk.dispatch()
    (task,) = desk.tasks(first, PrefixTask)
    assert desk.dispatcher.lose(first, "gone", died=True) == [task.task]
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
    desk.dispatcher.lose(first, "gone", died=True)
    second = desk.worker("scorer")
    desk.dispatch()
    assert [each.groups for each in desk.tasks(second, ScoreTask)] == [
        each.groups for each in tasks
    ]


def test_the_late_result_of_a_lost_worker_counts_and_the_second_one_is_ignored(desk: Desk) -> None:
    first, second = desk.worker("rollout"), None
    desk.dispatch()
    (task,) = desk.tasks(first, PrefixTask)
    desk.dispatcher.lose(first, "slow", died=False)
    second = desk.worker("rollout")
    desk.dispatch()
    (again,) = desk.tasks(second, PrefixTask)
    desk.dispatcher.take_prefixes(first, sampled(task))
    assert desk.ledger.states() == {"sampled": 2}
    desk.dispatcher.take_prefixes(second, sampled(again))
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
        desk.dispatcher.take_refusal(rollout, Refused(task.task, 0, "wrong version"))
    assert desk.ledger.counts.expired == 0
    assert all(group.deaths == 0 for group in desk.ledger.live())


def test_a_group_that_ends_every_worker_is_requeued_as_a_new_group(desk: Desk) -> None:
    for _ in range(3):
        rollout = desk.worker("rollout")
        desk.dispatch()
        desk.dispatcher.lose(rollout, "died", died=True)
    assert desk.ledger.counts.expired == 2
    rollout = desk.worker("rollout")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    assert [group.seq for group in task.groups] == [2, 3]
    desk.ledger.check()


# --- results that are not what was asked for -------------------------------------------------------------------------


def test_prefixes_of_another_version_are_refused_and_the_task_comes_back(desk: Desk) -> None:
    rollout = desk.worker("rollout")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    wrong = sampled(task)
    wrong = Prefixes(task.task, 0, "train", 1, "d1", wrong.groups, 0.0)
    with pytest.raises(ValueError, match="version 1 for a task at version 0"):
        desk.dispatcher.take_prefixes(rollout, wrong)
    desk.dispatch()
    (again,) = desk.tasks(rollout, PrefixTask)
    assert again.groups == task.groups


def test_groups_left_out_of_a_result_come_back(desk: Desk) -> None:
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    whole = sampled(task)
    half = Prefixes(task.task, 0, "train", 0, "d0", whole.groups[:1], 0.0)
    desk.dispatcher.take_prefixes(rollout, half)
    desk.dispatch()
    (again,) = desk.tasks(rollout, PrefixTask)
    assert again.groups == task.groups[1:]
    desk.dispatcher.take_prefixes(rollout, sampled(again))
    desk.dispatch()
    score_tasks = desk.tasks(scorer, ScoreTask)
    assert sorted(group.seq for each in score_tasks for group in each.groups) == [0, 1]
    desk.dispatcher.take_scores(scorer, Scores(score_tasks[0].task, 0, "train", ()))
    desk.dispatch()
    assert desk.ledger.states()["scoring"] >= 2


def test_groups_left_out_of_an_evaluations_result_come_back(desk: Desk) -> None:
    evaluate(desk, -1, held_out(3))
    scorer = desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(scorer, ScoreTask)
    only = judged(task.groups[0], task)
    desk.dispatcher.take_scores(scorer, Scores(task.task, 0, "eval", (only,)))
    desk.dispatch()
    (again,) = desk.tasks(scorer, ScoreTask)
    assert again.groups == task.groups[1:]
    desk.dispatcher.take_scores(scorer, scored(again))
    run = desk.dispatcher.evaluations.get("e")
    assert run is not None and run.finished and len(run.results) == 3


def test_groups_nobody_asked_for_are_refused_and_the_task_comes_back(desk: Desk) -> None:
    evaluate(desk, -1, held_out(2))
    scorer = desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(scorer, ScoreTask)
    good = scored(task)
    strange = Scores(task.task, 0, "eval", (*good.groups, *good.groups))
    with pytest.raises(ValueError, match="the task holds \\[0, 1\\]"):
        desk.dispatcher.take_scores(scorer, strange)
    desk.dispatch()
    assert len(desk.tasks(scorer, ScoreTask)) == 1


def test_scores_without_a_version_never_count_as_training(desk: Desk) -> None:
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    desk.dispatcher.take_prefixes(rollout, sampled(task))
    desk.dispatch()
    (score,) = desk.tasks(scorer, ScoreTask)
    unversioned = ScoreTask(score.task, 0, "train", -1, "", score.groups, SAMPLING, 0.0)
    with pytest.raises(ValueError, match="has no version"):
        desk.dispatcher.take_scores(scorer, scored(unversioned))
    assert "scored" not in desk.ledger.states()


# --- evaluations and the ledger --------------------------------------------------------------------------------------


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
    desk.dispatcher.take_prefixes(evaluator, sampled(test))
    scorer = desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(scorer, ScoreTask)
    assert task.kind == "eval"
    desk.dispatcher.take_scores(scorer, scored(task))
    after = desk.ledger.states()
    assert after.get("sampled", 0) == after.get("scored", 0) == 0
    assert after["sampling"] >= before["sampling"]
    run = desk.dispatcher.evaluations.get("e")
    assert run is not None and len(run.results) == 2


def test_an_evaluations_result_that_calls_itself_training_is_refused(desk: Desk) -> None:
    _, evaluator, _, test = colliding(desk)
    rows = PrefixTask(test.task, 0, "train", 0, test.groups, ROWS, SAMPLING)
    with pytest.raises(ValueError, match="a train result Prefixes for the eval task"):
        desk.dispatcher.take_prefixes(evaluator, sampled(rows))
    assert "sampled" not in desk.ledger.states()


def test_a_training_result_that_calls_itself_an_evaluation_is_refused(desk: Desk) -> None:
    trainer, _, train, _ = colliding(desk)
    rows = PrefixTask(train.task, 0, "eval", 0, train.groups, 1, SAMPLING)
    with pytest.raises(ValueError, match="a eval result Prefixes for the train task"):
        desk.dispatcher.take_prefixes(trainer, sampled(rows))


def test_an_evaluations_late_result_is_dropped(desk: Desk) -> None:
    _, evaluator, _, test = colliding(desk)
    desk.dispatcher.lose(evaluator, "slow", died=True)
    before = desk.ledger.states()
    desk.dispatcher.take_prefixes(evaluator, sampled(test))
    assert desk.ledger.states() == before
    run = desk.dispatcher.evaluations.get("e")
    assert run is not None and not run.to_score
