"""The status document: what an operator sees of a run, and what its summary and metrics take from the broker.

Built by the broker, sent as JSON; the live view, `prefixrl status`, `metrics.jsonl` and `summary.json` read the same.
"""

from collections.abc import Iterable

import msgspec

from prefixrl.common.messages import Usage
from prefixrl.common.openai_options import OpenAIConfig

USAGE_FILE = "usage.json"
"""In the run directory: what the endpoint that serves the target was asked for, `Usage` by scorer."""
MILLION = 1e6


class WorkerStatus(msgspec.Struct, frozen=True):
    """One connected worker."""

    name: str
    role: str
    host: str
    pid: int
    phase: str
    engine: str
    version: int
    slots: int
    leases: int
    busy_fraction: float | None
    tasks_done: int
    silent_s: float
    engine_mismatch: float
    first_lease_after_ready_s: float | None
    state: str


class GroupCounts(msgspec.Struct, frozen=True):
    """Where every group went: issued is the sum of the others but duplicates_ignored."""

    issued: int
    trained: int
    filtered: int
    failed: int
    expired: int
    outstanding: int
    duplicates_ignored: int


class FilterStatus(msgspec.Struct, frozen=True):
    """How the prompt filter judged the newest groups."""

    passed: int
    judged: int


class Spent(msgspec.Struct, frozen=True):
    """What the endpoint that serves the target was asked for since the run began, by all scorers."""

    requests: int
    """Answered ones, each scorer's trial at its start included."""
    prompt_tokens: int
    completion_tokens: int
    retries: int
    limited_s: float
    """Seconds in which some row waited for a rate limit, added up over scorers."""
    cost: float | None
    """At the config's prices; None without any."""

    def __str__(self) -> str:
        """In words."""
        tokens = f"{self.prompt_tokens:,} prompt and {self.completion_tokens:,} completion tokens"
        retries = f", {self.retries:,} retries" if self.retries else ""
        limited = f", {self.limited_s:.0f} s held back by rate limits" if self.limited_s else ""
        cost = "" if self.cost is None else f", cost {self.cost:,.2f}"
        return f"{self.requests:,} requests, {tokens}{retries}{limited}{cost}"


def spent(counts: Iterable[Usage], section: OpenAIConfig) -> Spent:
    """What scorers asked for together, at the prices of a config."""
    each = list(counts)
    prompt = sum(usage.prompt_tokens for usage in each)
    completion = sum(usage.completion_tokens for usage in each)
    prices = section.prompt_price, section.completion_price
    cost = (prompt * prices[0] + completion * prices[1]) / MILLION
    return Spent(
        requests=sum(usage.requests for usage in each),
        prompt_tokens=prompt,
        completion_tokens=completion,
        retries=sum(usage.retries for usage in each),
        limited_s=sum(usage.limited_s for usage in each),
        cost=cost if any(prices) else None,
    )


class Document(msgspec.Struct, frozen=True):
    """State of a run."""

    run_id: str
    directory: str
    broker_pid: int
    iteration: int
    """Completed iterations, which is also the newest version."""
    total_iterations: int
    """0 where nothing is trained: an evaluation, or answers for somebody."""
    groups: GroupCounts
    causes: dict[str, int]
    """Untrained groups by state and cause."""
    row_errors: dict[str, int]
    """Texts without a verdict, by the kind of failure, in trained groups or others: a row is one, or `scorer.continuations`."""
    filter: FilterStatus | None
    """None where no group was judged by a filter."""
    queues: dict[str, int]
    """Live groups by state."""
    window: int
    age_histogram: dict[str, int]
    """Trained groups by age in versions, that of their oldest token."""
    token_age_histogram: dict[str, int]
    """Trained tokens by age in versions."""
    crossed_fraction: float
    """Share of the trained rows that were begun with one version and ended with another."""
    workers: list[WorkerStatus]
    busy_fraction: dict[str, float]
    """Mean over the workers of a role."""
    losses: dict[str, int]
    truncated_fraction: float
    """Share of the newest batch's rows that a length limit cut."""
    waiting_for: str
    malformed_messages: int
    journal_bytes: int
    up_s: float
    evaluations: dict[str, int] = {}
    """Problems asked for, judged and failed, over all evaluations since the broker started."""
    completions: dict[str, int] = {}
    """Texts judged, for training and evaluations, since the broker started, and how many of them were in a scorer's cache."""
    rows_left_out: dict[str, int] = msgspec.field(default_factory=dict)
    """Rows of accepted groups that are never trained, by cause: truncated, error."""
    endpoint: Spent | None = None
    """None unless the target is served elsewhere."""
