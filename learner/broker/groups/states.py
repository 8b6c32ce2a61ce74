"""Plain values of a ledger: groups, work items, order of prompts."""

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from prefixrl.common.wire.messages.groups import GroupPrefixes, Prompt, ScoredGroup

State = Literal["queued", "sampling", "sampled", "scoring", "spare", "scored", "batched"]
UNVERIFIED: tuple[State, ...] = ("queued", "sampling", "sampled", "scoring")
ACCEPTED: tuple[State, ...] = ("scored", "batched")


class PromptSource(Protocol):
    """Order of prompts, by `prompt_index`."""

    @property
    def total(self) -> int | None:
        """Number of prompts to ask, None when the order repeats for ever."""

    def prompt(self, prompt_index: int, /) -> Prompt:
        """Return the prompt at this position."""

    def source(self, prompt_index: int, /) -> str:
        """Return the source of this prompt, as figures name it."""

    def problem(self, prompt_index: int, /) -> int:
        """Return the number of the problem at this position, in the order of the files."""

    def is_ready(self, prompt_index: int, /) -> bool:
        """Return True if a group of this prompt may begin: nothing has to be known of it first."""


@dataclass
class Group:
    """One live group; `prompt` is its prompt_index."""

    seq: int
    prompt: int
    requeues: int
    state: State = "queued"
    version: int | None = None
    deaths: int = 0
    result: ScoredGroup | None = None

    @property
    def is_accepted(self) -> bool:
        """True if it was judged and passed; in the states before it is *unverified*."""
        return self.state in ACCEPTED


class LiveGroups(dict[int, Group]):
    """Live groups by sequence number, counted by state and version as these change."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[State, int | None]]()
        """Number of groups by state and version; no entry is 0."""

    def add(self, group: Group) -> None:
        """Take a new group."""
        assert group.seq not in self
        self[group.seq] = group
        self._count(group, 1)

    def take_out(self, seq: int) -> Group:
        """Take a group out, and return it."""
        group = self.pop(seq)
        self._count(group, -1)
        return group

    def move(self, group: Group, state: State, version: int | None) -> None:
        """Change state and version of a group."""
        self._count(group, -1)
        group.state, group.version = state, version
        self._count(group, 1)

    def _count(self, group: Group, change: int) -> None:
        key = group.state, group.version
        self.counts[key] += change
        if not self.counts[key]:
            del self.counts[key]

    def states(self) -> dict[str, int]:
        """Return the number of groups by state."""
        totals: dict[str, int] = {}
        for (state, _), count in self.counts.items():
            totals[state] = totals.get(state, 0) + count
        return totals


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
        return tuple([group.seq for group in self.groups])

    def only(self, seqs: Container[int]) -> "ScoreItem":
        """Return the part with these groups."""
        groups = tuple([group for group in self.groups if group.seq in seqs])
        return self if len(groups) == len(self.groups) else replace(self, groups=groups)


@dataclass(frozen=True)
class LedgerLimits:
    """Size of work items and limits on retries and failures."""

    groups_per_item: int
    attempts: int
    requeues: int
    max_failure_share: float = 1.0
    """Share of failed rows, among the newest rows, above which the run ends."""
