"""Records of the journal: the source from which the ledger is rebuilt after a crash."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeVar, dataclass_transform

import msgspec

from prefixrl.common.wire.messages.groups import Finish, ScoredGroup
from prefixrl.common.wire.messages.weights import WeightsNote

Key = TypeVar("Key", str, int)
MOST_CAUSES, OTHERS = 64, "other causes"
"""Number of causes counted one by one; later causes, which workers word, are counted together."""


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Tagged(msgspec.Struct, frozen=True, tag=True):
    """A record; its tag is its class name. All of them are frozen, as this class is."""


class RunHeader(Tagged):
    """First record: the identity of the run."""

    run_id: str
    protocol: int
    task_key: bytes
    """Secret key of `broker/workers/task_names.py`: it signs tasks, also those of an earlier broker."""


class VersionPublished(Tagged):
    """A version and its digest, which may be another one after a resume."""

    note: WeightsNote


class GroupIssued(Tagged):
    """A group was created; `prompt` is its prompt_index, of a requeued group its first one."""

    seq: int
    prompt: int
    requeues: int


class GroupScored(Tagged):
    """A complete result was accepted."""

    group: ScoredGroup


class BatchFormed(Tagged):
    """An iteration's groups, in training order."""

    iteration: int
    seqs: tuple[int, ...]


class GroupEnded(Tagged, kw_only=True):
    """A group ended untrained. `requeued`: its prompt will be issued again as a new group."""

    seq: int
    state: Literal["filtered", "failed", "expired"]
    cause: str
    requeued: bool = False
    faults: dict[str, int] = {}
    """Texts of its rows without a verdict, by the kind of failure."""
    right: float = 0.0
    """Sum of the outcomes of its judged rows, where a filter ended it."""
    judged: int = 0
    """Number of its judged rows, where a filter ended it."""


class AnswerKept(Tagged, kw_only=True):
    """A greedy answer of the target, in a journal of its own (`broker/groups/answers.py`)."""

    key: bytes
    """Digest of the request."""
    text: str
    """The whole answer, up to a stop; with a prefix that is continued, the prefix too."""
    finish: Finish
    """`error`: the target gave no draft."""
    is_draft: bool
    prompt_tokens: int
    """Tokens of the prompt of a draft, as the endpoint counts them if there is one; 0 for other answers."""
    completion_tokens: int


class LiveGroup(msgspec.Struct, frozen=True):
    """One live group at the start of a segment; what was under way is `queued` again."""

    seq: int
    prompt: int
    requeues: int
    state: Literal["queued", "spare", "scored", "batched"] = "queued"
    result: ScoredGroup | None = None


class GroupTotals(msgspec.Struct):
    """Counts of issued and ended groups; live ones are counted by the ledger itself."""

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    expired: int = 0
    duplicates_ignored: int = 0
    causes: dict[str, int] = {}
    passed_by_source: dict[str, int] = {}
    """Groups that a filter let pass, by the source of their prompt."""
    filtered_by_source: dict[str, int] = {}
    row_errors: dict[str, int] = {}
    """Texts without a verdict by the kind of failure, of trained and untrained groups."""
    rows_left_out: dict[str, int] = {}
    """Rows of accepted groups that are never trained, by the status of their verdict."""
    age_histogram: dict[int, int] = {}
    """Trained groups by the age of their oldest token."""
    token_age_histogram: dict[int, int] = {}
    rows: int = 0
    """Trained rows."""
    rows_crossed: int = 0
    """Trained rows with tokens of more than one version."""

    @property
    def mean_age(self) -> float:
        """Mean age of the trained groups, 0 before the first."""
        total = sum(age * count for age, count in self.age_histogram.items())
        return total / max(1, sum(self.age_histogram.values()))

    def note_scored(self, group: ScoredGroup, faults: Mapping[str, int]) -> None:
        """Count the rows of an accepted group that could not be judged."""
        for verdict in group.verdicts:
            if not verdict.is_judged:
                tally(self.rows_left_out, verdict.status)
        for fault, count in faults.items():
            _tally_words(self.row_errors, fault, count)

    def note_ended(self, state: str, cause: str, faults: Mapping[str, int]) -> None:
        """Count a group that ended untrained."""
        setattr(self, state, getattr(self, state) + 1)
        _tally_words(self.causes, f"{state}: {cause}")
        for fault, count in faults.items():
            _tally_words(self.row_errors, fault, count)

    def note_trained(self, group: ScoredGroup, age: int, iteration: int) -> None:
        """Count a trained group and the versions that wrote its rows."""
        self.trained += 1
        tally(self.age_histogram, age)
        for row, verdict in group.judged_rows:
            if verdict.is_judged:
                self.rows += 1
                self.rows_crossed += len(row.spans) > 1
                for span in row.spans:
                    tally(self.token_age_histogram, iteration - span.version, span.tokens)


def tally(counts: dict[Key, int], key: Key, count: int = 1) -> None:
    """Count a key once more, or so many times."""
    counts[key] = counts.get(key, 0) + count


def _tally_words(counts: dict[str, int], words: str, count: int = 1) -> None:
    tally(counts, words if words in counts or len(counts) < MOST_CAUSES else OTHERS, count)


class OutcomeCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of judged rows of a problem or a source; each count is what it is worth at `iteration`."""

    iteration: int
    right: float = 0.0
    """Sum of the outcomes of the rows."""
    rows: float = 0.0
    right_pairs: float = 0.0
    """Ordered pairs of right rows of one group."""
    pairs: float = 0.0
    """Ordered pairs of rows of one group."""


class GroupOutcome(NamedTuple):
    """The outcome of one judged group."""

    seq: int
    problem: int
    """Number of the problem in the order of the files."""
    source: str
    right: float
    """Sum of the outcomes of its judged rows, each in [0, 1]."""
    rows: int
    """Number of its judged rows."""


class OutcomeState(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of the problems so far, with `data.sampling = "by_outcome"`."""

    iteration: int
    """The iteration after the newest batch."""
    by_problem: dict[int, OutcomeCounts]
    by_source: dict[str, OutcomeCounts]
    ended: tuple[GroupOutcome, ...]
    """Groups that a filter ended since the newest batch."""
    passed_over: int
    """Positions of the order of prompts that were not asked."""


class LedgerState(msgspec.Struct, frozen=True):
    """The state that earlier records lead to; a ledger is rebuilt from it alone."""

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
    outcomes: OutcomeState | None = None
    """None unless problems are asked by their outcomes."""


class SegmentStart(Tagged):
    """First record of every segment but the first. A resume here needs no earlier record."""

    before_bytes: int
    """Length of all earlier segments, uncompressed; it shows if a segment was cut short."""
    run: RunHeader
    ledger: LedgerState
    digests: dict[int, tuple[str, ...]]
    """Digests of the versions that live groups may name."""
    newest: WeightsNote | None


Record = GroupIssued | GroupScored | BatchFormed | GroupEnded
JournalRecord = RunHeader | VersionPublished | SegmentStart | AnswerKept | Record
