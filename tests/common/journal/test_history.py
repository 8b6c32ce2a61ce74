"""The checker of a run's history finds what is planted, and nothing else."""

from collections.abc import Callable

import pytest

from prefixrl.common.journal.history import History, history
from prefixrl.common.journal.records import (
    BatchFormed,
    GroupEnded,
    GroupIssued,
    GroupScored,
    JournalRecord,
)
from support.messages import group, row, scored_group, verdict

Records = list[JournalRecord]


def scored(seq: int, version: int = 0) -> GroupScored:
    """A result of one row."""
    return GroupScored(
        scored_group(group(seq, row([1], "eos", version)), verdict(), version=version)
    )


def right() -> Records:
    """Two iterations of two groups; one group expires and is issued again as another."""
    return [
        *(GroupIssued(seq, seq, 0) for seq in range(4)),
        *(scored(seq) for seq in (1, 0)),
        BatchFormed(0, (0, 1)),
        scored(3, version=1),
        GroupEnded(seq=2, state="expired", cause="lost", requeued=True),
        GroupIssued(4, 2, 1),
        scored(4, version=1),
        BatchFormed(1, (3, 4)),
    ]


def faults(records: Records, staleness: int = 1) -> list[str]:
    return history(records, staleness).finished_faults()


def test_a_history_that_is_right_has_no_fault_and_is_counted() -> None:
    actual = history(right(), 1)
    assert actual.finished_faults() == []
    assert actual.counts == {"trained": 4, "expired": 1}
    assert actual.batches == [(0, 1), (3, 4)]
    assert actual.rows == 4
    assert actual.ages == {0: 4}


def without(records: Records, kind: type, seq: int) -> Records:
    return [each for each in records if not (isinstance(each, kind) and _seq(each) == seq)]


def _seq(record: JournalRecord) -> int:
    if isinstance(record, GroupScored):
        return record.group.prefixes.seq
    return getattr(record, "seq", -1)


PLANTED: dict[str, tuple[Callable[[], Records], str]] = {
    "a lost group": (
        lambda: without(right(), GroupEnded, 2),
        "1 groups neither trained nor ended: 2",
    ),
    "a doubled group": (
        lambda: [*right(), BatchFormed(2, (3,))],
        "group 3 is trained in iteration 2, but it is trained",
    ),
    "a result taken twice": (lambda: [*right(), scored(3)], "group 3 is scored, but it is trained"),
    "a batch of a group without a result": (
        lambda: without(right(), GroupScored, 4),
        "group 4 is trained in iteration 1, but it is issued",
    ),
    "an iteration left out": (
        lambda: [
            each for each in right() if not (isinstance(each, BatchFormed) and each.iteration == 0)
        ],
        "the batch of iteration 1 follows 0 others",
    ),
    "an ended group that is trained": (
        lambda: [*right(), BatchFormed(2, (2,))],
        "group 2 is trained in iteration 2, but it is expired",
    ),
    "a group from nowhere": (
        lambda: [*right(), scored(9)],
        "group 9 is scored, but it is not issued",
    ),
    "a number given twice": (
        lambda: [*right(), GroupIssued(0, 9, 0)],
        "group 0 is issued, but it is trained",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    records, told = PLANTED[name]
    assert any(told in each for each in faults(records())), faults(records())


def test_an_old_sample_is_found() -> None:
    old = [*right(), GroupIssued(5, 5, 0), scored(5, version=0), BatchFormed(2, (5,))]
    assert faults(old) == ["group 5 has age 2 in iteration 2, the window is 1"]
    assert faults(old, staleness=2) == []


def test_a_sample_of_a_version_that_comes_later_is_a_fault() -> None:
    assert faults([GroupIssued(0, 0, 0), scored(0, version=1), BatchFormed(0, (0,))]) == [
        "group 0 has age -1 in iteration 0, the window is 1"
    ]


def test_a_broken_history_does_not_word_faults_without_end() -> None:
    actual = History(1)
    for seq in range(1000):
        actual.follow_record(scored(seq))
    assert len(actual.faults) == 100
