"""Records of the journal: the source from which the ledger is rebuilt after a crash."""

from typing import Literal

import msgspec

from prefixrl.common.wire.messages import ScoredGroup, WeightsNote


class RunHeader(msgspec.Struct, frozen=True, tag=True):
    """First record: the identity of the run."""

    run_id: str
    protocol: int
    task_key: bytes = b""
    """Secret key of `broker/task_names.py`: results of tasks that an earlier broker gave out are known by it."""


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


Record = GroupIssued | GroupScored | BatchFormed | GroupEnded
"""Records that the ledger itself writes and replays."""
JournalRecord = RunHeader | VersionPublished | Record
