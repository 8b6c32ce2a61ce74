"""Drafts between a ledger, evaluations and scorers: the dispatcher, and no socket."""

import dataclasses
from pathlib import Path

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.groups import Prompt
from prefixrl.common.wire.messages.worker import PrefixTask, Scores, ScoreTask
from prefixrl.learner.broker.batches import awaited_groups, groups_in_words
from prefixrl.learner.broker.groups.drafts import MOST_DRAFT_CHARS
from prefixrl.learner.broker.groups.window import NotYetChosen
from support import messages
from support.broker.dispatch_desk import Desk, evaluate, held_out
from support.fakes import run_on_disk, sampled, scored

BATCH = 4


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    advised = {"placement": "advice", "model": str(tmp_path / "target")}
    adapter = {"sees": "draft", "model": str(tmp_path / "adapter")}
    return run_on_disk(tmp_path, target=advised, adapter=adapter)


@pytest.fixture
def desk(config: RunConfig) -> Desk:
    return Desk(config)


def drafted(task: ScoreTask, **fields: object) -> Scores:
    """A scorer's draft of one problem."""
    (prefixes,) = task.groups
    usual = {"completion": f"draft of {prefixes.prompt.question}", "status": "no_gold"}
    verdict = messages.verdict(0.0, **usual | fields)
    group = messages.scored_group(
        prefixes, verdict, version=task.version, weights_digest=task.weights_digest
    )
    return Scores(task.task, task.kind, (group,), prompt_tokens=7)


def test_a_batch_of_problems_is_drafted_before_a_group_begins(desk: Desk) -> None:
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer", 8)
    desk.dispatch()
    tasks = desk.tasks(scorer, ScoreTask)
    assert [task.kind for task in tasks] == ["draft"] * BATCH
    assert all(task.groups[0].prompt.gold == "" for task in tasks)
    assert {task.sampling.temperature for task in tasks} == {0.0}
    assert desk.tasks(rollout, PrefixTask) == []
    assert desk.ledger.lacks_draft and desk.ledger.counts.issued == 0
    for task in tasks:
        desk.dispatcher.take_scores(scorer, drafted(task), desk.now_s)
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    assert [group.prompt.draft for group in task.groups] == [
        f"draft of {group.prompt.question}" for group in task.groups
    ]
    result = sampled(task)
    desk.dispatcher.take_prefixes(rollout, result, desk.now_s)
    assert desk.ledger.counts.duplicates_ignored == 0, "the ledger knows the prompt by its draft"


def test_an_item_waits_for_all_of_its_drafts(desk: Desk) -> None:
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer", 8)
    desk.dispatch()
    first, second, *_ = desk.tasks(scorer, ScoreTask)
    desk.dispatcher.take_scores(scorer, drafted(second), desk.now_s)
    desk.dispatch()
    assert desk.tasks(rollout, PrefixTask) == []
    desk.dispatcher.take_scores(scorer, drafted(first), desk.now_s)
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    assert len(task.groups) == 2


def test_the_wait_names_the_scorer_that_has_the_draft(desk: Desk) -> None:
    desk.worker("rollout")
    desk.dispatch()
    words = groups_in_words(desk.dispatcher, NotYetChosen(()), 1.0)
    assert words == "drafts of the target for 4 problems (queued, for any scorer)"
    scorer = desk.worker("scorer", 8)
    desk.dispatch()
    words = groups_in_words(desk.dispatcher, NotYetChosen(()), desk.now_s + 3.0)
    assert words.startswith(f"drafts of the target for 4 problems ({scorer.name} on h for 3 s")
    assert awaited_groups(desk.ledger, words).cause == "scorers"


def test_a_draft_that_the_target_did_not_give_is_empty_and_holds_nothing_up(desk: Desk) -> None:
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer", 8)
    desk.dispatch()
    failed = {"completion": "", "status": "error", "finish": "error", "fault": "no completion"}
    for task in desk.tasks(scorer, ScoreTask):
        desk.dispatcher.take_scores(scorer, drafted(task, **failed), desk.now_s)
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    assert {group.prompt.draft for group in task.groups} == {""}
    assert desk.dispatcher.drafts is not None
    assert desk.dispatcher.drafts.total.failed == BATCH


def test_an_endless_draft_is_cut_and_the_task_stays_small(desk: Desk) -> None:
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer", 8)
    desk.dispatch()
    for task in desk.tasks(scorer, ScoreTask):
        endless = drafted(task, completion="ab" * MOST_DRAFT_CHARS)
        desk.dispatcher.take_scores(scorer, endless, desk.now_s)
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    assert {len(group.prompt.draft) for group in task.groups} == {MOST_DRAFT_CHARS}
    desk.dispatcher.take_prefixes(rollout, sampled(task), desk.now_s)
    assert desk.ledger.counts.duplicates_ignored == 0


def test_a_draft_that_kills_its_scorers_fails(desk: Desk, config: RunConfig) -> None:
    rollout = desk.worker("rollout")
    for _ in range(config.broker.attempts):
        scorer = desk.worker("scorer", 8)
        desk.dispatch()
        assert {task.kind for task in desk.tasks(scorer, ScoreTask)} == {"draft"}
        desk.dispatcher.lose_worker(scorer, "killed", died=True)
    desk.dispatch()
    assert desk.tasks(rollout, PrefixTask)
    assert desk.dispatcher.drafts is not None and desk.dispatcher.drafts.total.failed == BATCH


def test_an_evaluation_of_the_adapter_waits_for_its_drafts_and_one_of_the_target_is_them(
    desk: Desk,
) -> None:
    desk.dispatcher.evaluations.published(0, "")
    sampling = desk.config.scorer_sampling(0.0)
    for name, version in (("no_prefix", -1), ("adapter", 0)):
        request = messages.evaluate(name, version, held_out(2), completion_sampling=sampling)
        desk.dispatcher.evaluations.add(request)
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer", 8)
    kinds = []
    for _ in range(3):
        desk.dispatch()
        for task in desk.tasks(scorer, ScoreTask):
            kinds.append(task.kind)
            if task.kind == "draft":
                desk.dispatcher.take_scores(scorer, drafted(task), desk.now_s)
            else:
                texts = [answer and answer.text for answer in task.answers]
                assert texts == [f"draft of {group.prompt.question}" for group in task.groups]
    # Both held-out problems have one question, and so one draft.
    assert kinds.count("draft") == BATCH + 1
    assert kinds.count("eval") == 1
    prefix_tasks = desk.tasks(rollout, PrefixTask)
    assert any(task.kind == "eval" for task in prefix_tasks)


def test_training_is_drafted_before_held_out_problems(desk: Desk) -> None:
    evaluate(desk, 0, held_out(2))
    scorer = desk.worker("scorer", 1)
    desk.dispatch()
    task, *_ = desk.tasks(scorer, ScoreTask)
    assert task.kind == "draft" and "+ 1 =" in task.groups[0].prompt.question


def test_a_refused_evaluation_has_no_draft_asked_but_those_that_others_need(desk: Desk) -> None:
    drafts, evaluations = desk.dispatcher.drafts, desk.dispatcher.evaluations
    assert drafts is not None
    shared, alone = Prompt("s", "shared?", "1"), Prompt("a", "alone?", "1")
    evaluate(desk, 0, [shared], "first")
    evaluate(desk, 0, [shared, alone], "second")
    assert drafts.total.waiting == 2
    assert evaluations.texts_of(messages.evaluate("third", 0, [alone])) == 2, "an answer, a draft"
    evaluations.refuse_evaluation("second", "too much")
    assert drafts.total.waiting == 1
    item = drafts.start_scoring(for_training=False)
    assert item is not None and item.groups[0].prompt.question == "shared?"
    assert drafts.start_scoring(for_training=False) is None


def test_after_the_end_of_training_only_needed_drafts_are_asked(desk: Desk) -> None:
    drafts = desk.dispatcher.drafts
    assert drafts is not None
    desk.dispatch()
    assert drafts.total.waiting == BATCH
    upcoming = desk.ledger.upcoming
    evaluate(desk, 0, [desk.dispatcher._prompts.prompt(upcoming.start)], "the same question")
    desk.ledger.is_closed = True
    desk.dispatcher.end_drafting()
    desk.dispatch()
    assert drafts.total.waiting == 1
    scorer = desk.worker("scorer", 8)
    desk.dispatch()
    (task,) = desk.tasks(scorer, ScoreTask)
    assert task.kind == "draft"


def test_a_late_draft_of_an_earlier_broker_is_kept(desk: Desk, config: RunConfig) -> None:
    scorer = desk.worker("scorer", 8)
    desk.dispatch()
    (task, *_) = desk.tasks(scorer, ScoreTask)
    successor = dataclasses.replace(desk, inboxes={}, now_s=0.0)
    same = successor.worker("scorer", 8)
    same.identity = scorer.identity
    successor.dispatcher.take_scores(same, drafted(task), 1.0)
    assert successor.dispatcher.drafts is not None
    assert successor.dispatcher.drafts.total.requests == 1


def test_without_drafts_nothing_waits(tmp_path: Path) -> None:
    desk = Desk(run_on_disk(tmp_path))
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer")
    desk.dispatch()
    (task,) = desk.tasks(rollout, PrefixTask)
    desk.dispatcher.take_prefixes(rollout, sampled(task), 1.0)
    desk.dispatch()
    (scoring,) = desk.tasks(scorer, ScoreTask)
    assert scoring.kind == "train" and scoring.answers == ()
    assert desk.dispatcher.take_scores(scorer, scored(scoring), 2.0)
    assert desk.dispatcher.drafts is None and desk.dispatcher.answers.records == []
