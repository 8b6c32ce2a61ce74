"""Documents of a learner that commands read: metrics, advantages, summary."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import dataclass_transform

import msgspec

from prefixrl.common.evaluation.accuracy import Figures, Interval, Point
from prefixrl.common.run import json_lines
from prefixrl.common.run.status import AdmissionStatus, Counts, DraftTotal, UsageTotal
from prefixrl.common.wire.messages.groups import StageTimes

METRICS_FILE = "metrics.jsonl"
ADVANTAGES_FILE = "advantages.jsonl"
SUMMARY_FILE = "summary.json"
UPLOADS_FILE = "uploads.jsonl"
END_FILE = "end.json"
"""`RunEnd` of the learner that worked last; absent while one works, and after one that was killed."""
ARMS = ("no_prefix", "fixed_prefix", "untrained_adapter", "trained_adapter")
"""Arms of a run in the order in which they are reported."""


@dataclass_transform(frozen_default=True)
class Document(msgspec.Struct, frozen=True):
    """A document, or a part of one; every such class is frozen, as this one is."""


class AgeDrift(Document, kw_only=True):
    """Distance of the learner's policy p from the engine's mu, in the samples of one age."""

    age: int
    """Versions between the one that sampled and the one that is trained."""
    tokens: int
    gap: float
    """Mean |log p/mu| per token, in nats."""
    ess_fraction: float
    """Effective sample size of p/mu of the tokens, over their number."""
    rows: int
    """Rows whose oldest token has this age."""
    row_ess_fraction: float
    """Effective sample size of the products over whole rows, over the number of rows."""


class MetricsLine(Document, kw_only=True):
    """One line of `metrics.jsonl`: one iteration."""

    iteration: int
    version: int
    """The version this iteration made."""
    optimizer_steps: int
    figures: Figures
    ages: Counts
    """Groups of the batch by age in versions, that of their oldest token."""
    mean_age: float
    """Mean age of these groups."""
    admission: AdmissionStatus
    """Lead and cap after this iteration, and the wait for groups."""
    statuses: Counts
    """Texts of the batch by verdict (docs/verification.md): one per row, or `scorer.continuations` of them."""
    histograms: dict[str, dict[str, list[float]]]
    stages: StageTimes
    """Means over the batch's groups."""
    waited_for_s: Figures
    """Time in which the broker had no batch to give, by cause: rollouts, scorers, or another rank's report."""
    tokens_per_s: Figures
    """rollout, scorer: tokens of the batch over the time since the batch before; learner: while it trained."""
    busy_fraction: Figures
    """Row-seconds in a seat over seats x time by role, since each worker's first lease; learner: its share of time."""
    engine_mismatch: float
    """Largest difference from the learner that nine of ten positions of a rollout's probe keep below."""
    proofs: Counts = {}
    """Rollouts by what their present version was admitted by: digest, change or checksum (docs/weights.md)."""
    probe_slope: float | None = None
    """Slope of the rollouts' newest probes that is farthest from 1; None where no change could be seen."""
    ended: Counts
    """Groups that ended untrained so far, by state and cause."""
    losses: Counts
    """Workers and tasks lost so far, by cause."""
    waited_s: float
    trained_s: float
    since_start_s: float
    """Running time of all learners of the run, without time that was lost to a kill."""
    publish_s: float = 0.0
    """Time in which the learner, before this iteration, published the version that it starts from."""
    drift: tuple[AgeDrift, ...] = ()
    """Distance of the policy from its samples, by their age; age 0 shows what engine and learner differ by."""
    engines: dict[str, tuple[str, ...]] = {}
    """Engines of the connected workers, by role."""
    waiting_rows: Counts = {}
    """Rows that waited in the engines of a role for a seat, when the line was written."""
    alarms: dict[str, str] = {}
    """Alarms that ring after this iteration, in words, by kind: the kinds are in docs/console.md."""
    endpoint: UsageTotal | None = None
    """Usage of the target's endpoint so far; None unless the target is served elsewhere."""
    drafts: DraftTotal | None = None
    """The target's drafts so far, a part of that usage; None unless the adapter reads them."""
    pools: Counts = {}
    """Training problems by their outcomes so far, as in `status.json`; empty unless these decide what is asked."""
    ranks: Figures = {}
    """Figures of each learner rank: tokens_per_s/0 and, on CUDA, tflop_per_s, peak_allocated_gib, peak_reserved_gib.
    forecast_gib: what a rank was expected to reserve, as by `--check` but without the device's own context."""


class AlarmSpan(Document):
    """An alarm, and the iterations through which it rang."""

    kind: str
    """As in docs/console.md."""
    first: int
    last: int
    text: str
    """The words with which it began."""


class UploadLine(Document):
    """One line of `uploads.jsonl`: a checkpoint that a command uploaded, or failed to."""

    time_s: float
    """Seconds since 1970, at the end of the command."""
    iteration: int
    digest: str
    """Digest of the checkpoint's manifest."""
    exit_code: int | None
    """0 where it was uploaded; None where the command was ended after `checkpoint.upload_s`."""
    took_s: float
    last_line: str
    """The last line that the command printed."""


class AdvantageLine(Document):
    """One line of `advantages.jsonl`: the mean whitened advantage of each row of a group."""

    iteration: int
    seq: int
    advantages: list[float]


class Staleness(Document, kw_only=True):
    """Ages in versions of what was trained."""

    window: int
    admission: str
    """`algorithm.admission`."""
    max_trained: int
    mean_trained: float
    """Mean over the groups."""
    histogram: Counts
    """Groups, by the age of their oldest token."""
    token_histogram: Counts
    crossed_fraction: float
    """Fraction of the rows with tokens of more than one version."""


class CostEnd(Document, kw_only=True):
    """The end of a run by its cost."""

    most_cost: float
    """`scorer.openai.most_cost`."""
    reason: str
    """The sentence of the console and the log."""


class Summary(Document, kw_only=True):
    """The content of `summary.json`: accuracies by judged arm, greedy but for `*_sampled`."""

    run_id: str
    accuracy: Figures
    accuracy_ci95: dict[str, tuple[float, float]]
    accuracy_interval: dict[str, Interval]
    """The kind of `accuracy_ci95`: Wilson's where all rewards are 0 or 1, else a bootstrap over problems."""
    accuracy_sampled: Figures
    accuracy_by_family: dict[str, dict[str, float]]
    accuracy_by_version: list[Point]
    """The adapter, greedy: before training, every `evaluation.every` versions, after training."""
    truncated_fraction: float
    """Fraction of the trained rows that a length limit cut."""
    accuracy_truncated: Figures
    """Fraction of the evaluated rows that a length limit cut, by arm, greedy."""
    fixed_prefix: str
    evaluations_incomplete: list[str]
    eval_problems: int
    verifier_errors: int
    groups: Counts
    causes: Counts
    """Untrained groups by state and cause."""
    row_errors: Counts
    """Texts of training groups without a verdict, by the kind of failure."""
    cached_fraction: float
    """Fraction of all judged texts, evaluations' included, that a scorer's cache held; since the broker started."""
    filter_pass_fraction: float | None
    """Fraction of the groups that the prompt filter judged; None without a filter."""
    staleness: Staleness
    versions: int
    optimizer_steps: int
    busy_fraction: Figures
    """Fraction by role when the last iteration ended, since the learner that trained it had started."""
    engine: dict[str, str]
    """Engines that worked for the run, by role."""
    losses: Counts
    wall_s: float
    """Running time of all learners; a killed learner counts until its last kept iteration."""
    publish_s: float = 0.0
    """Mean time in which a publication held the learner up."""
    uploads: Counts = {}
    """Uploads of checkpoints by outcome: done, failed."""
    alarms: list[AlarmSpan] = []
    """Alarms that rang, in the order in which they began."""
    endpoint: UsageTotal | None = None
    """Usage of the target's endpoint, evaluations included; None unless the target is served elsewhere."""
    ended_by_cost: CostEnd | None = None
    """None unless `scorer.openai.most_cost` ended the run before its last iteration."""
    drafts: DraftTotal | None = None
    """The target's drafts, a part of that usage; None unless the adapter reads them."""
    learner_memory: str = ""
    """Forecast and measured peak of a learner rank, in words; "" where CUDA was not measured."""


class RunEnd(Document, kw_only=True):
    """The content of `end.json`: how a learner ended, in its own words."""

    exit_code: int
    reason: str


class AlarmSpans:
    """Every alarm that rang, in the order in which they began."""

    def __init__(self) -> None:
        self.found: list[AlarmSpan] = []
        self._ringing: Counts = {}

    def add(self, iteration: int, alarms: Mapping[str, str]) -> None:
        """Take the alarms that ring after an iteration, the one after that of the call before."""
        still = {kind: place for kind, place in self._ringing.items() if kind in alarms}
        for kind, text in alarms.items():
            if kind not in still:
                still[kind] = len(self.found)
                self.found.append(AlarmSpan(kind, iteration, iteration, text))
            self.found[still[kind]] = msgspec.structs.replace(
                self.found[still[kind]], last=iteration
            )
        self._ringing = still


def alarm_spans(lines: Sequence[MetricsLine]) -> list[AlarmSpan]:
    """Return every alarm that rang, in the order in which they began; `lines` are in order."""
    spans = AlarmSpans()
    for line in lines:
        spans.add(line.iteration, line.alarms)
    return spans.found


def alarm_words(alarm: AlarmSpan) -> str:
    """Return an alarm in a line of text."""
    return f"ALARM, iterations {alarm.first} to {alarm.last}: {alarm.text}"


def memory_words(ranks: Mapping[str, float]) -> str:
    """Return forecast, measured peak and their ratio for `MetricsLine.ranks`; "" where CUDA was not measured."""
    measured = max(
        (gib for name, gib in ranks.items() if name.startswith("peak_reserved_gib/")), default=0.0
    )
    if not measured or not (forecast := ranks.get("forecast_gib")):
        return ""
    ratio = measured / forecast
    return f"forecast {forecast:.1f} GiB per rank, measured at most {measured:.1f}, a ratio of {ratio:.2f}"


def metrics_of(run: Path) -> list[MetricsLine]:
    """Return the lines of all iterations of a run; raise DataError for a damaged one."""
    return json_lines.read(run / METRICS_FILE, MetricsLine)


def newest_metrics(run: Path, count: int = 1) -> list[MetricsLine]:
    """Return the last whole lines of the metrics of a run, in order."""
    return json_lines.newest(run / METRICS_FILE, MetricsLine, count)


def summary_of(run: Path) -> Summary | None:
    """Return the summary of a run, None before its end; raise DataError for a damaged one."""
    return json_lines.document(run / SUMMARY_FILE, Summary)


LEFT_OUT = ("histograms", "engines")
"""Fields that are no number per iteration."""


def columns(line: MetricsLine) -> Figures:
    """Return the numbers of an iteration by name, such as `figures/reward`, `drift/0/rows`."""
    document = msgspec.to_builtins(line)
    return dict(_flat({name: each for name, each in document.items() if name not in LEFT_OUT}, ""))


def _flat(value: object, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        # Ages are named by what they are, not by where they stand.
        for index, part in enumerate(value):
            key = part["age"] if isinstance(part, dict) and "age" in part else index
            yield from _flat(part, f"{name}/{key}")
    elif isinstance(value, bool | int | float):
        yield name, float(value)
