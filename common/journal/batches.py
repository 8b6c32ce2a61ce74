"""The groups of every iteration, in the order in which they are trained, from the records of a journal. Pure."""

from collections.abc import Iterable, Iterator

from prefixrl.common.errors import DataError
from prefixrl.common.journal.records import (
    BatchFormed,
    GroupEnded,
    GroupScored,
    JournalRecord,
    SegmentStart,
)
from prefixrl.common.wire.messages.groups import ScoredGroup


def recorded_batches(records: Iterable[JournalRecord]) -> Iterator[tuple[int, list[ScoredGroup]]]:
    """Yield each iteration with its groups; hold no more than the groups that wait for theirs.

    Raises:
        DataError: a batch names a group of which the records have no result.
    """
    waiting: dict[int, ScoredGroup] = {}
    for number, record in enumerate(records):
        batches: dict[int, tuple[int, ...]] = {}
        if isinstance(record, GroupScored):
            waiting[record.group.prefixes.seq] = record.group
        elif isinstance(record, GroupEnded):
            waiting.pop(record.seq, None)
        # Only where reading begins: later segments repeat what the records before them led to.
        elif isinstance(record, SegmentStart) and number == 0:
            waiting = {group.seq: group.result for group in record.ledger.live if group.result}
            batches = record.ledger.batches
        elif isinstance(record, BatchFormed):
            batches = {record.iteration: record.seqs}
        for iteration, seqs in batches.items():
            if missing := [seq for seq in seqs if seq not in waiting]:
                raise DataError(
                    f"the journal names group {missing[0]} in the batch of iteration {iteration}, but has no result "
                    f"of it before; restore the journal"
                )
            yield iteration, [waiting.pop(seq) for seq in seqs]
