"""The verdict on a row of several continuations, and which results of that kind the broker accepts."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.wire.messages.groups import ScoredGroup, TextVerdict, Verdict, VerdictStatus
from prefixrl.common.wire.messages.worker import Scores, ScoreTask
from prefixrl.common.wire.verdicts import row_verdict
from prefixrl.learner.broker.batches import batch_group
from prefixrl.learner.run.fractions import batch_fractions, statuses
from support.broker.dispatch_desk import Desk
from support.broker.scoring_world import check_scores
from support.fakes import run_on_disk

M = 3


def verdict(status: VerdictStatus, reward: float = 0.0, **more: Any) -> TextVerdict:
    given = {"extracted": status, "finish": "eos", "completion_tokens": 5, "elapsed_ms": 7}
    if status == "error":
        given["fault"] = "process died"
    return TextVerdict(reward=reward, status=status, **(given | more))


VERDICTS = st.builds(
    verdict,
    st.sampled_from(["ok", "no_answer", "parse_fail", "timeout", "truncated", "error"]),
    st.sampled_from([0.0, 1.0, 0.1, 1 / 3]),
    finish=st.sampled_from(["eos", "length"]),
    completion_tokens=st.integers(0, 9),
    elapsed_ms=st.integers(0, 9),
    completion=st.sampled_from(["", "text"]),
    was_cached=st.booleans(),
)


def slowly(each: Sequence[TextVerdict]) -> Verdict:
    """Compute the row's verdict by the rules of docs/continuations.md."""
    rewards = [Fraction(one.reward) for one in each if one.status not in ("error", "truncated")]
    judged = [one for one in each if one.status not in ("error", "truncated")]
    speakers = [one for one in each if one.status == "ok"] or judged
    speakers = speakers or [one for one in each if one.status == "error"] or list(each)
    total = Fraction(0)
    for reward in rewards:
        total += reward
    return Verdict(
        reward=float(total / len(rewards)) if rewards else 0.0,
        status=speakers[0].status,
        extracted=speakers[0].extracted,
        finish=speakers[0].finish,
        completion_tokens=sum(one.completion_tokens for one in each),
        elapsed_ms=sorted(one.elapsed_ms for one in each)[-1],
        fault=speakers[0].fault,
        was_cached=False not in [one.was_cached for one in each],
        continuations=tuple(each),
    )


@given(st.lists(VERDICTS, min_size=2, max_size=8))
def test_a_row_is_worth_the_mean_of_what_was_judged(each: list[TextVerdict]) -> None:
    actual = row_verdict(each)
    expected = slowly(each)
    assert actual.reward == pytest.approx(expected.reward, abs=1e-15)
    assert actual == msgspec.structs.replace(expected, reward=actual.reward)
    assert 0.0 <= actual.reward <= 1.0
    assert actual.is_judged == any(one.is_judged for one in each)


@given(VERDICTS)
def test_one_continuation_stands_for_itself(one: TextVerdict) -> None:
    actual = row_verdict([one])
    assert msgspec.structs.asdict(actual) == msgspec.structs.asdict(one) | {"continuations": ()}
    assert actual.texts == (actual,)


RIGHT, WRONG = verdict("ok", 1.0), verdict("ok")
BROKEN, CUT = verdict("error"), verdict("truncated", finish="length")


@pytest.mark.parametrize(
    ("each", "reward", "status"),
    [
        ([RIGHT, WRONG, WRONG], 1 / 3, "ok"),
        ([BROKEN, RIGHT, WRONG], 1 / 2, "ok"),
        ([BROKEN, CUT, RIGHT], 1.0, "ok"),
        ([verdict("no_answer"), verdict("timeout"), CUT], 0.0, "no_answer"),
        ([CUT, BROKEN, CUT], 0.0, "error"),
        ([CUT, CUT, CUT], 0.0, "truncated"),
    ],
)
def test_what_was_not_judged_is_neither_right_nor_wrong(
    each: list[TextVerdict], reward: float, status: str
) -> None:
    actual = row_verdict(each)
    assert (actual.reward, actual.status) == (reward, status)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(run_on_disk(tmp_path, scorer={"continuations": M}))


def groups_of(desk: Desk, *rows: Verdict) -> tuple[ScoreTask, list[ScoredGroup]]:
    """A leased task of two groups, both rows of which got these verdicts."""
    rollout, scorer = desk.worker("rollout"), desk.worker("scorer")
    desk.sample_everything(rollout)
    desk.dispatch()
    task: ScoreTask = desk.tasks(scorer, ScoreTask)[0]
    return task, [
        ScoredGroup(
            prefixes=group,
            version=task.version,
            weights_digest=task.weights_digest,
            verdicts=rows,
            scorer="scorer-1",
        )
        for group in task.groups
    ]


def take(desk: Desk, *rows: Verdict) -> list[ScoredGroup]:
    task, groups = groups_of(desk, *rows)
    scorer = next(iter(desk.dispatcher.registry.workers_of("scorer")))
    result = Scores(task.task, task.kind, tuple(groups))
    desk.dispatcher.take_scores(scorer, result, 1.0)
    return groups


def test_texts_without_a_verdict_are_counted_one_by_one_and_the_rest_is_trained(desk: Desk) -> None:
    cached = msgspec.structs.replace(RIGHT, was_cached=True, completion_tokens=0)
    groups = take(desk, row_verdict([RIGHT, BROKEN, cached]), row_verdict([BROKEN] * 3))
    ledger = desk.ledger
    assert ledger.counts.row_errors == {"process died": 2 * 4}
    assert ledger.counts.rows_left_out == {"error": 2 * 1}
    assert ledger.failures.failed_fraction == pytest.approx(4 / 6)
    assert ledger.newest_error == BROKEN.extracted
    assert desk.dispatcher.completions == {"judged": 2 * 6, "cached": 2}
    batch = [batch_group(group) for group in groups]
    assert [group.rewards for group in batch] == [(1.0,)] * 2
    assert batch[0].completion_tokens == 10
    assert statuses(batch) == {"ok": 4, "error": 8}
    assert batch_fractions(batch)["cached_fraction"] == 1 / 2


def test_a_fault_in_one_continuation_is_told_although_its_row_is_trained(desk: Desk) -> None:
    take(desk, row_verdict([RIGHT, BROKEN, WRONG]), row_verdict([WRONG] * 3))
    assert desk.ledger.newest_error == BROKEN.extracted
    assert desk.ledger.counts.row_errors == {"process died": 2}
    assert desk.ledger.counts.rows_left_out == {}
    assert desk.ledger.failures.failed_fraction == pytest.approx(1 / 6)


def test_cut_texts_are_counted_among_texts(desk: Desk) -> None:
    long = verdict("ok", 1.0, finish="length")
    groups = take(desk, row_verdict([RIGHT, long, CUT]), row_verdict([CUT, WRONG, WRONG]))
    batch = [batch_group(group) for group in groups]
    assert [group.rewards for group in batch] == [(1.0, 0.0)] * 2
    assert batch_fractions(batch)["truncated_fraction"] == 1 / 4
    assert batch_fractions(batch)["truncated_masked_fraction"] == 2 / 6


def test_a_group_of_cut_rows_alone_fails_for_that(desk: Desk) -> None:
    take(desk, *[row_verdict([CUT] * 3)] * 2)
    assert desk.ledger.counts.causes == {"failed: every row cut by the length limit": 2}


MEAN = row_verdict([RIGHT, WRONG, WRONG])


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (row_verdict([RIGHT]), "verdicts on 1 continuations, asked for were 3"),
        (row_verdict([RIGHT, WRONG]), "verdicts on 2 continuations"),
        (
            msgspec.structs.replace(MEAN, reward=0.5),
            "does not follow from those of its continuations",
        ),
        (row_verdict([verdict("error", 2.0), RIGHT, WRONG]), r"reward 2.0 is outside \[0, 1\]"),
    ],
)
def test_a_verdict_that_is_not_of_its_continuations_is_refused(
    row: Verdict, complaint: str, desk: Desk
) -> None:
    _, groups = groups_of(desk, MEAN, row)
    with pytest.raises(ValueError, match=complaint):
        check_scores(groups[0], 2, M)


def test_verdicts_on_continuations_survive_the_wire(desk: Desk) -> None:
    _, (group, _) = groups_of(desk, MEAN, MEAN)
    check_scores(group, 2, M)
    packed = msgspec.msgpack.encode(group)
    assert msgspec.msgpack.decode(packed, type=ScoredGroup) == group
    with pytest.raises(ValueError, match="asked for were 1"):
        check_scores(group, 2)
