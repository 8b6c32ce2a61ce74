"""What a ledger keeps and hands out: live groups, work items, the order of prompts, where the others went. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prefixrl.common.messages import GroupPrefixes, ScoredGroup

State = Literal["queued", "sampling", "sampled", "scoring", "scored", "batched"]
ACCEPTED: tuple[State, ...] = ("scored", "batched")
"""Judged and found worth training; the states before are *unverified*."""


class PromptSource(Protocol):
    """Order of prompts: `identity(place)` names the problem at a place of the order."""

    @property
    def places(self) -> int | None:
        """Number of places, None when the order repeats for ever."""

    def identity(self, place: int) -> str:
        """Prompt id at this place."""


@dataclass
class Group:
    """One live group."""

    seq: int
    prompt: int
    requeues: int
    state: State = "queued"
    version: int | None = None
    deaths: int = 0
    result: ScoredGroup | None = None


@dataclass(frozen=True)
class SampleItem:
    """Groups to sample in one forward at `version`."""

    seqs: tuple[int, ...]
    version: int


@dataclass(frozen=True)
class ScoreItem:
    """Prefixes to complete and judge in one forward."""

    groups: tuple[GroupPrefixes, ...]
    version: int
    weights_digest: str
    sampled_s: float

    @property
    def seqs(self) -> tuple[int, ...]:
        """Sequence numbers of the item's groups."""
        return tuple(group.seq for group in self.groups)


@dataclass
class Counts:
    """Where issued groups went. Live ones are counted from the ledger itself."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    expired: int = 0
    duplicates_ignored: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    row_errors: Counter[str] = field(default_factory=Counter)
    """Texts without a verdict by the kind of failure, of whatever became of their groups."""
    rows_left_out: Counter[str] = field(default_factory=Counter)
    """Rows of accepted groups that are never trained, by the status of their verdict."""
    age_histogram: Counter[int] = field(default_factory=Counter)
    """Trained groups by the age of their oldest token."""
    token_age_histogram: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    """Trained ones."""
    rows_crossed: int = 0
    """Those of them with tokens of more than one version."""

    def note_rows(self, group: ScoredGroup | None, iteration: int) -> None:
        """Count what the trained rows of a group were written by."""
        assert group is not None, "what is trained was scored"
        for row, verdict in zip(group.prefixes.rows, group.verdicts, strict=True):
            if not verdict.is_judged:
                continue
            self.rows += 1
            self.rows_crossed += len(row.spans) > 1
            for span in row.spans:
                self.token_age_histogram[iteration - span.version] += span.tokens
