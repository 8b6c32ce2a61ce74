"""The status document: the state of a run, from the broker to commands, metrics, summary."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, NamedTuple, dataclass_transform, get_type_hints

import msgspec

from prefixrl.common.config.workers.served import OpenAIConfig
from prefixrl.common.wire.messages.weights import Proof
from prefixrl.common.wire.messages.worker import Activity, MemoryUse, Usage

USAGE_FILE = "usage.json"
"""In the run directory: `Usage` of the endpoint that serves the target, by scorer."""


Counts = dict[str, int]
"""Numbers of things by name."""


class Shown(NamedTuple):
    """Mark of a field that `prefixrl status` shows as it is: a number, a text or counts, if there are any."""

    name: str
    form: str = "{}"
    """Form of a number, for example "{:.1%}"."""


LearnerPhase = Literal["", "loading", "waiting", "training", "publishing", "ending"]
"""publishing: from the end of an iteration until it asks for the next batch, so it may save too. "": there is none."""


@dataclass_transform(frozen_default=True)
class StatusPart(msgspec.Struct, frozen=True):
    """A part of the status document, or all of it; every such class is frozen, as this one is."""


class WorkerStatus(StatusPart, kw_only=True):
    """One connected worker."""

    name: str
    role: str
    host: str
    pid: int
    phase: str
    engine: str
    version: int
    about: str
    """The engine's own choices, in words."""
    seats: int
    """Rows that the engine works on at once."""
    rows: int
    """Rows of its leases that have not ended."""
    waiting_rows: int
    """Rows that wait in the engine for a seat, as it last reported."""
    leases: int
    busy_fraction: float | None
    """Row-seconds in a seat over seats x time since the first lease."""
    busy_row_s: float
    """Row-seconds in a seat up to the newest report."""
    since_first_lease_s: float
    """Seconds from the first lease to that report; of two documents, the differences give the share in between."""
    tokens_per_s: float
    """Tokens that the engine wrote per second in the newest seconds."""
    tasks_done: int
    silent_s: float
    engine_mismatch: float
    """Difference from the learner's logprobs that nine of ten positions of the probe stay below."""
    proof: Proof
    """The proof that its present version was admitted by (docs/weights.md)."""
    probe_slope: float | None
    """Change of its logprobs in units of the learner's: 1 where it holds the version; None: too small to be seen."""
    first_lease_after_ready_s: float | None
    activity: Activity
    state: str


class GroupCounts(StatusPart, kw_only=True):
    """Groups by their end: issued is the sum of the others but duplicates_ignored."""

    issued: int
    trained: int
    filtered: int
    failed: int
    expired: int
    outstanding: int
    duplicates_ignored: int


class FilterStatus(StatusPart):
    """Counts of the prompt filter over the newest groups."""

    passed: int
    judged: int


class AdmissionStatus(StatusPart, kw_only=True):
    """The rule of admission and the groups it lets be begun (docs/staleness.md)."""

    rule: str
    """`algorithm.admission`."""
    lead_groups: float
    """Most groups under way or scored, besides the batch in training."""
    cap_groups: float
    """Most groups of them beyond one batch, by what old samples are worth."""
    waited_s: float
    """Time of the newest iteration that the learner waited because fewer groups were scored than it takes."""


class DrainedWorker(StatusPart, kw_only=True):
    """A process that the operator wants to leave, or that has left so."""

    host: str
    pid: int


class UsageTotal(StatusPart, kw_only=True):
    """Requests of all scorers to the endpoint that serves the target, since the run began."""

    requests: int
    """Answered requests, with the trial request of each scorer at its start."""
    prompt_tokens: int
    completion_tokens: int
    retries: int
    limited_s: float
    """Seconds in which some row waited for a rate limit, added up over scorers."""
    cost: float | None
    """Cost at the config's prices; None without prices."""

    def __str__(self) -> str:
        """Return the figures in words."""
        tokens = f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} completion tokens"
        retries = f", {self.retries:,} retries" if self.retries else ""
        limited = f", {self.limited_s:.0f} s held back by rate limits" if self.limited_s else ""
        cost = "" if self.cost is None else f", cost {self.cost:,.2f}"
        return f"{self.requests:,} requests, {tokens}{retries}{limited}{cost}"


class OutcomePools(StatusPart, kw_only=True):
    """The training problems by the outcomes of their groups so far, with `data.sampling = "by_outcome"`."""

    not_asked: int = 0
    """Problems without a judged group."""
    never_right: int = 0
    mixed: int = 0
    """Problems with right and wrong rows."""
    always_right: int = 0
    passed_over: int = 0
    """Turns of problems that were not asked, since their groups would most likely have no gradient."""

    def __str__(self) -> str:
        """Return the counts in words."""
        return (
            f"{self.mixed:,} mixed, {self.never_right:,} never right, {self.always_right:,} always right, "
            f"{self.not_asked:,} not asked yet; {self.passed_over:,} turns passed over"
        )


class DraftTotal(StatusPart, kw_only=True):
    """Drafts of the target that an adapter reads, since the run began; a part of all that the target was asked."""

    requests: int = 0
    """Problems that the target was asked for a draft, once each."""
    failed: int = 0
    """Those of which it gave none; the adapter reads an empty one."""
    empty: int = 0
    """Drafts without a text."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    """Cost at the config's prices; None without prices."""
    waiting: int = 0
    """Problems whose draft is to come, at a scorer or in a queue."""

    def __str__(self) -> str:
        """Return the figures in words."""
        tokens = f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} completion tokens"
        cost = "" if self.cost is None else f", cost {self.cost:,.2f}"
        missing = f", {self.failed:,} failed" if self.failed else ""
        missing += f", {self.empty:,} empty" if self.empty else ""
        waiting = f"; {self.waiting:,} problems wait for one" if self.waiting else ""
        return f"{self.requests:,} problems, {tokens}{cost}{missing}{waiting}"


def total_usage(counts: Iterable[Usage], section: OpenAIConfig) -> UsageTotal:
    """Add up the usage of all scorers, at the prices of a config."""
    rows = [msgspec.structs.asdict(usage) for usage in counts]
    sums = {name: sum(row[name] for row in rows) for name in Usage.__struct_fields__}
    cost = section.cost(sums["prompt_tokens"], sums["completion_tokens"])
    return UsageTotal(**sums, cost=cost if section.has_price else None)


class StatusDocument(StatusPart, kw_only=True):
    """State of a run."""

    run_id: str
    directory: str
    broker_pid: int
    iteration: int
    """Completed iterations, which is also the newest version."""
    total_iterations: int
    """0 where nothing is trained: for `prefixrl eval` and `generate`."""
    groups: GroupCounts
    causes: Counts
    """Untrained groups by state and cause."""
    passed_by_source: Counts = {}
    """Groups that a filter let pass so far, by source."""
    filtered_by_source: Counts = {}
    """Groups that a filter left out so far, by source."""
    row_errors: Counts
    """Texts without a verdict, by the kind of failure. A row is one text, or `scorer.continuations` of them."""
    filter: FilterStatus | None
    """None where no group was judged by a filter."""
    queues: Annotated[Counts, Shown("groups")]
    """Live groups by state."""
    window: int
    mean_age: float
    """Mean age of the trained groups in versions."""
    admission: AdmissionStatus
    age_histogram: Counts
    """Trained groups by age in versions; the age of their oldest token."""
    token_age_histogram: Counts
    """Trained tokens by age in versions."""
    crossed_fraction: float
    """Fraction of the trained rows that were begun with one version and ended with another."""
    workers: list[WorkerStatus]
    busy_fraction: dict[str, float]
    """Mean over the workers of a role."""
    waiting_rows: Counts
    """Rows that wait in the engines of a role for a seat."""
    losses: Counts
    truncated_fraction: float
    """Fraction of the newest batch's rows that a length limit cut."""
    waiting_for: str
    learner_phase: LearnerPhase = ""
    """The present work of the learner's rank 0."""
    learner_waits_s: float = 0.0
    """Time that it has waited for its batch; 0 where it does not wait."""
    last_event: str = ""
    """The newest result, trained iteration or published version; "" before the first since the broker started."""
    idle_s: float = 0.0
    """Time since that event."""
    malformed_messages: Annotated[int, Shown("malformed messages")]
    journal_bytes: int
    up_s: float
    evaluations: Counts = {}
    """Problems asked for, judged and failed, over all evaluations since the broker started."""
    completions: Counts = {}
    """Texts judged since the broker started, evaluations included; and those that a scorer's cache held."""
    rows_left_out: Counts = {}
    """Rows of accepted groups that are never trained, by cause: truncated, error."""
    endpoint: UsageTotal | None = None
    """None unless the target is served elsewhere."""
    drafts: DraftTotal | None = None
    """None unless the adapter reads drafts of the target."""
    pools: OutcomePools | None = None
    """Training problems by their outcomes; None unless problems are asked by their outcomes."""
    is_halting: bool = False
    """The ranks were asked to save and end."""
    ending: str = ""
    """The reason why no new group is begun and the run ends in order, before its end; "" else."""
    memory: dict[str, MemoryUse] = {}
    """Memory by process: `broker`, `rank-0` and further ranks of the learner as they were when they last asked for a
    batch, workers by name as of the last 10 s. Without those that have not reported yet."""
    drained: list[DrainedWorker] = []
    """Workers that the operator drained since the broker started."""


def shown_fields(document: StatusDocument) -> Iterator[tuple[str, object]]:
    """Yield name and value of every marked field: counts, or a text; empty fields and zeros are left out."""
    for field, hint in get_type_hints(StatusDocument, include_extras=True).items():
        value = getattr(document, field)
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Shown) and value:
                yield mark.name, value if isinstance(value, dict) else mark.form.format(value)
