"""Evaluations: the same text whoever works, one version, an end whatever happens."""

import msgspec
import pytest

from prefixrl.common.wire.messages.fields import VERSIONS_KEPT
from prefixrl.common.wire.messages.groups import (
    GroupPrefixes,
    Prompt,
    Row,
    Sampling,
    ScoredGroup,
    Verdict,
    VersionSpan,
)
from prefixrl.common.wire.messages.learner import Evaluate
from prefixrl.common.wire.packing import pack_logprobs, pack_tokens, token_ids
from prefixrl.learner.broker.groups.evaluations import (
    ROWS_PER_ITEM,
    STRANDED_S,
    EvaluationQueue,
    EvaluationRun,
)
from prefixrl.learner.broker.groups.states import SampleItem, ScoreItem
from support.messages import evaluate

SAMPLING = Sampling(temperature=0.0, max_new_tokens=4)


def request(name: str = "v3", version: int = 3, count: int = 70, prefix: bytes = b"") -> Evaluate:
    prompts = tuple(Prompt(f"h{i}", f"{i}?", str(i)) for i in range(count))
    return evaluate(name, version, prompts, prefix_tokens=prefix)


def with_request(*requests: Evaluate) -> EvaluationQueue:
    evaluations = EvaluationQueue(1, attempts=2)
    evaluations.published(3, "d3")
    for each in requests:
        evaluations.add(each)
    return evaluations


def run_named(evaluations: EvaluationQueue, name: str) -> EvaluationRun:
    run = evaluations.runs.get(name)
    assert run is not None
    return run


def sampled(evaluations: EvaluationQueue, item: SampleItem, bad: int = -1) -> list[GroupPrefixes]:
    row = Row(
        tokens=pack_tokens([1]),
        logprobs=pack_logprobs([-1.0]),
        finish="length",
        spans=(VersionSpan(3, "d3", 1),),
    )
    groups = []
    for seq in item.seqs:
        task = evaluations.group_task(seq)
        error = "too long" if seq == bad else ""
        rows = () if error else (row,)
        groups.append(
            GroupPrefixes(
                seq=seq,
                prompt=task.prompt,
                seed=task.seed,
                prompt_tokens=pack_tokens([1]),
                rows=rows,
                error=error,
            )
        )
    return groups


def judged(item: ScoreItem, extracted: str = "1") -> list[ScoredGroup]:
    verdict = Verdict(
        reward=1.0,
        status="ok",
        extracted=extracted,
        finish="eos",
        completion_tokens=1,
        elapsed_ms=1,
    )
    return [
        ScoredGroup(
            prefixes=group,
            version=item.version,
            weights_digest=item.weights_digest,
            verdicts=(verdict,),
            scorer="s",
        )
        for group in item.groups
    ]


def finish(evaluations: EvaluationQueue, version: int, bad: int = -1) -> None:
    while (sample := evaluations.start_sampling(version, "d3")) is not None:
        evaluations.take_prefixes(sample, sampled(evaluations, sample, bad), "d", 0.1)
    while (score := evaluations.start_scoring()) is not None:
        evaluations.take_scores(judged(score))


def test_problems_are_cut_into_items_of_a_fixed_size_in_their_order() -> None:
    evaluations = with_request(request(count=2 * ROWS_PER_ITEM + 3))
    items = []
    while (item := evaluations.start_sampling(3, "d3")) is not None:
        items.append(item.seqs)
    assert [len(seqs) for seqs in items] == [ROWS_PER_ITEM, ROWS_PER_ITEM, 3]
    assert [seq for seqs in items for seq in seqs] == list(range(2 * ROWS_PER_ITEM + 3))


def test_seeds_are_a_function_of_run_name_and_index_alone() -> None:
    alone = with_request(request("b"))
    second = with_request(request("a"), request("b"))
    first_of_b = run_named(second, "b").first
    assert first_of_b == 70
    for index in (0, 69):
        ours, theirs = alone.group_task(index), second.group_task(first_of_b + index)
        assert (ours.prompt, ours.seed) == (theirs.prompt, theirs.seed)
    assert alone.group_task(0).seed != second.group_task(0).seed, "another name, another seed"


def test_only_a_worker_with_the_pinned_version_gets_prefix_tasks() -> None:
    evaluations = with_request(request(version=3))
    assert evaluations.start_sampling(2, "d3") is None
    assert evaluations.start_sampling(4, "d3") is None
    assert evaluations.needs_version(3, "d3")
    assert not evaluations.needs_version(4, "d3")
    while evaluations.start_sampling(3, "d3") is not None:
        pass
    assert not evaluations.needs_version(3, "d3"), "what is leased needs nobody else"


def test_of_a_version_that_was_trained_anew_only_the_newest_weights_are_sampled() -> None:
    evaluations = with_request(request(version=3))
    assert evaluations.start_sampling(3, "of the course before") is None
    assert not evaluations.needs_version(3, "of the course before"), "it would be held for ever"
    assert evaluations.start_sampling(3, "d3") is not None


def test_nobody_samples_a_version_before_it_is_published_but_the_initial_one() -> None:
    evaluations = EvaluationQueue(7, 2)
    evaluations.add(request("later", 5))
    evaluations.add(request("initial", 0))
    assert evaluations.start_sampling(5, "of the course before") is None
    assert evaluations.start_sampling(0, "as loaded") is not None


def test_groups_of_a_version_that_every_rollout_is_past_fail_with_their_cause() -> None:
    evaluations = with_request(request(version=3, count=3))
    evaluations.give_up_stranded([4, 3], 0.0)
    evaluations.give_up_stranded([4, 5], 1.0)
    evaluations.give_up_stranded([], 30.0)
    evaluations.give_up_stranded([4, 5], 40.0)
    evaluations.give_up_stranded([4, 5], 40.0 + STRANDED_S)
    run = run_named(evaluations, "v3")
    assert not run.failed, "a rollout that was away may come back"
    evaluations.give_up_stranded([4, 5], 41.0 + STRANDED_S)
    assert run.finished and set(run.failed.values()) == {"every rollout has passed version 3"}
    assert evaluations.unsampled_versions() == set()


def test_several_answers_per_problem_make_smaller_items_not_larger_ones() -> None:
    evaluations = EvaluationQueue(7, 2)
    evaluations.published(3, "d3")
    asked = msgspec.structs.replace(request(version=3, count=9), samples=16)
    evaluations.add(asked)
    item = evaluations.start_sampling(3, "d3")
    assert item is not None and len(item.seqs) * 16 == ROWS_PER_ITEM
    assert evaluations.run_of(item.seqs[0]).request.samples == 16


def test_a_given_prefix_is_scored_without_a_rollout() -> None:
    evaluations = with_request(request("fixed", -1, 3, pack_tokens([5, 6])))
    assert evaluations.start_sampling(-1, "d3") is None
    item = evaluations.start_scoring()
    assert item is not None and item.version == -1
    assert [list(token_ids(group.rows[0].tokens)) for group in item.groups] == [[5, 6]] * 3
    evaluations.take_scores(judged(item))
    assert run_named(evaluations, "fixed").finished


def test_asking_twice_for_the_same_name_changes_nothing() -> None:
    evaluations = with_request(request(count=5), request(count=5))
    finish(evaluations, 3)
    run = run_named(evaluations, "v3")
    assert run.finished and len(run.results) == 5


def test_an_item_given_back_comes_first_again_and_as_it_was() -> None:
    evaluations = with_request(request())
    item = evaluations.start_sampling(3, "d3")
    assert item is not None
    evaluations.give_back(item, died=True)
    assert evaluations.start_sampling(3, "d3") == item


def test_an_item_that_ends_too_many_workers_fails_by_name_and_the_rest_finishes() -> None:
    evaluations = with_request(request())
    for _ in range(2):
        item = evaluations.start_sampling(3, "d3")
        assert item is not None
        evaluations.give_back(item, died=True)
    finish(evaluations, 3)
    run = run_named(evaluations, "v3")
    assert run.finished
    assert set(run.failed) == set(range(ROWS_PER_ITEM))
    assert set(run.failed.values()) == {"lost with its worker 2 times"}


def test_an_item_handed_back_alive_is_never_given_up() -> None:
    evaluations = with_request(request(count=3))
    for _ in range(10):
        item = evaluations.start_sampling(3, "d3")
        assert item is not None
        evaluations.give_back(item, died=False)
    finish(evaluations, 3)
    assert not run_named(evaluations, "v3").failed


def test_a_group_that_cannot_be_sampled_fails_with_its_error() -> None:
    evaluations = with_request(request(count=3))
    finish(evaluations, 3, bad=1)
    run = run_named(evaluations, "v3")
    assert run.finished and run.failed == {1: "too long"}


def test_the_first_verdict_stands() -> None:
    evaluations = with_request(request("fixed", -1, 1))
    item = evaluations.start_scoring()
    assert item is not None
    evaluations.take_scores(judged(item, "first"))
    evaluations.take_scores(judged(item, "second"))
    assert run_named(evaluations, "fixed").results[0].verdicts[0].extracted == "first"


def test_an_evaluation_of_nothing_is_finished() -> None:
    assert run_named(with_request(request(count=0)), "v3").finished


def test_what_is_forgotten_stays_counted_and_its_numbers_are_not_given_again() -> None:
    evaluations = with_request(request("first", count=3), request("second", count=2))
    with pytest.raises(ValueError, match="evaluation first is not finished"):
        evaluations.forget("first")
    finish(evaluations, 3)
    evaluations.forget("first")
    evaluations.forget("first")
    assert evaluations.runs.get("first") is None and run_named(evaluations, "second").finished
    assert evaluations.counts() == {"asked": 5, "judged": 5, "failed": 0}
    evaluations.add(request("third", count=1))
    assert run_named(evaluations, "third").first == 5


def test_an_unknown_evaluation_is_none() -> None:
    assert with_request().runs.get("v9") is None


def test_a_version_that_is_to_be_judged_is_known_however_many_came_after_it() -> None:
    evaluations = with_request(request(version=3))
    for version in range(4, VERSIONS_KEPT + 50):
        evaluations.published(version, f"d{version}")
    assert evaluations.needs_version(3, "d3")
    evaluations.add(request("forgotten", 5))
    assert not evaluations.needs_version(5, "d5")
