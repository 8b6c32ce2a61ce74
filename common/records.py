"""What the journal holds: enough to rebuild the ledger after a crash, and to say later what was trained on."""

from typing import Literal

import msgspec

from prefixrl.common.messages import ScoredGroup, WeightsNote


class RunHeader(msgspec.Struct, frozen=True, tag=True):
    """First record: which run this is."""

    run_id: str
    protocol: int


class VersionPublished(msgspec.Struct, frozen=True, tag=True):
    """A version and a digest it had; after a restart from a checkpoint it may have another one too."""

    note: WeightsNote


class Issued(msgspec.Struct, frozen=True, tag=True):
    """A group was created; `prompt` is its place in the order of prompts, or the place it was requeued from."""

    seq: int
    prompt: int
    requeues: int


class GroupScored(msgspec.Struct, frozen=True, tag=True):
    """A complete result was accepted."""

    group: ScoredGroup


class Batched(msgspec.Struct, frozen=True, tag=True):
    """An iteration's groups, in training order."""

    iteration: int
    seqs: tuple[int, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A group ended untrained. `requeued`: its prompt will come back as a new group."""

    seq: int
    state: Literal["filtered", "failed", "expired"]
    cause: str
    requeued: bool = False
    faults: dict[str, int] = {}
    """Its rows without a verdict, by the kind of failure."""


Record = Issued | GroupScored | Batched | Ended
"""What the ledger itself writes and replays."""
JournalRecord = RunHeader | VersionPublished | Record
