"""The groups of every iteration from the records of a journal, in the order in which they are trained."""

import pytest

from prefixrl.common.errors import DataError
from prefixrl.common.journal.batches import recorded_batches
from prefixrl.common.journal.records import (
    BatchFormed,
    GroupScored,
    GroupTotals,
    LedgerState,
    LiveGroup,
    RunHeader,
    SegmentStart,
)
from support.runs.recorded_run import groups_of, records_of


def start_of(completed: int, batches: dict[int, tuple[int, ...]]) -> SegmentStart:
    """A segment that begins when the batches are formed and not trained."""
    live = tuple(
        LiveGroup(group.prefixes.seq, group.prefixes.seq, 0, "batched", group)
        for iteration in batches
        for group in groups_of(iteration)
    )
    ledger = LedgerState(completed, 0, 0, (), batches, live, GroupTotals(), (), ())
    return SegmentStart(0, RunHeader("id", 1, b""), ledger, {}, None)


def seqs_of(iteration: int) -> tuple[int, ...]:
    return tuple(group.prefixes.seq for group in groups_of(iteration))


def test_every_iteration_has_the_groups_of_its_batch_in_their_order() -> None:
    batches = list(recorded_batches(records_of(3)))
    assert [iteration for iteration, _ in batches] == [0, 1, 2]
    for iteration, groups in batches:
        assert groups == groups_of(iteration)
        assert seqs_of(iteration) == tuple(sorted(seqs_of(iteration), reverse=True))


def test_the_start_of_a_segment_counts_where_reading_begins_and_nowhere_else() -> None:
    batches = {3: seqs_of(3)}
    assert list(recorded_batches([start_of(3, batches)])) == [(3, groups_of(3))]
    assert len(list(recorded_batches([*records_of(4), start_of(3, batches)]))) == 4


def test_a_batch_whose_group_has_no_result_is_damage() -> None:
    records = [
        record
        for record in records_of(2)
        if not (isinstance(record, GroupScored) and record.group.prefixes.seq == 101)
    ]
    assert BatchFormed(1, seqs_of(1)) in records
    with pytest.raises(DataError, match="names group 101 in the batch of iteration 1"):
        list(recorded_batches(records))
