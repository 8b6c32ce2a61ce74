"""Records of the journal: the source from which the ledger is rebuilt after a crash."""

from typing import Literal

import msgspec

from prefixrl.common.wire.messages.groups import ScoredGroup
from prefixrl.common.wire.messages.weights import WeightsNote


class RunHeader(msgspec.Struct, frozen=True, tag=True):
    """First record: the identity of the run."""

    run_id: str
    protocol: int
    task_key: bytes
    """Secret key of `broker/workers/task_names.py`: it signs tasks, also those of an earlier broker."""


class VersionPublished(msgspec.Struct, frozen=True, tag=True):
    """A version and its digest, which may be another one after a resume."""

    note: WeightsNote


class GroupIssued(msgspec.Struct, frozen=True, tag=True):
    """A group was created; `prompt` is its prompt_index, of a requeued group its first one."""

    seq: int
    prompt: int
    requeues: int


class GroupScored(msgspec.Struct, frozen=True, tag=True):
    """A complete result was accepted."""

    group: ScoredGroup


class BatchFormed(msgspec.Struct, frozen=True, tag=True):
    """An iteration's groups, in training order."""

    iteration: int
    seqs: tuple[int, ...]


class GroupEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A group ended untrained. `requeued`: its prompt will be issued again as a new group."""

    seq: int
    state: Literal["filtered", "failed", "expired"]
    cause: str
    requeued: bool = False
    faults: dict[str, int] = {}
    """Texts of its rows without a verdict, by the kind of failure."""


class LiveGroup(msgspec.Struct, frozen=True):
    """One live group at the start of a segment; what was under way is `queued` again."""

    seq: int
    prompt: int
    requeues: int
    state: Literal["queued", "spare", "scored", "batched"] = "queued"
    result: ScoredGroup | None = None


class GroupTotals(msgspec.Struct, frozen=True):
    """Counts of issued and ended groups, as `learner/broker/groups/states.py` has them."""

    issued: int
    trained: int
    filtered: int
    failed: int
    expired: int
    duplicates_ignored: int
    causes: dict[str, int]
    passed_by_source: dict[str, int]
    filtered_by_source: dict[str, int]
    row_errors: dict[str, int]
    rows_left_out: dict[str, int]
    age_histogram: dict[int, int]
    token_age_histogram: dict[int, int]
    rows: int
    rows_crossed: int


class LedgerState(msgspec.Struct, frozen=True):
    """All that earlier records say: a ledger is rebuilt from it as from them."""

    completed: int
    next_seq: int
    next_prompt: int
    requeued: tuple[tuple[int, int], ...]
    """Prompts to issue again, with their requeues, in their order."""
    batches: dict[int, tuple[int, ...]]
    live: tuple[LiveGroup, ...]
    totals: GroupTotals
    failures: tuple[float, ...]
    """Share of failed rows of the newest groups."""
    passed: tuple[bool, ...]
    """The newest verdicts of the filter."""


class SegmentStart(msgspec.Struct, frozen=True, tag=True):
    """First record of every segment but the first: who resumes here needs no earlier one."""

    before_bytes: int
    """Length of all earlier segments, uncompressed: where one of them is cut short, it shows."""
    run: RunHeader
    ledger: LedgerState
    digests: dict[int, tuple[str, ...]]
    """Digests of the versions that live groups may name."""
    newest: WeightsNote | None


Record = GroupIssued | GroupScored | BatchFormed | GroupEnded
"""Records that the ledger itself writes and replays."""
JournalRecord = RunHeader | VersionPublished | SegmentStart | Record
