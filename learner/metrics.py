"""`metrics.jsonl`: one line per iteration, and `advantages.jsonl` beside it: what every trained row was worth."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prefixrl.common import json_lines
from prefixrl.common.messages import Batch, StageTimes
from prefixrl.common.process import write_atomically
from prefixrl.common.status import Document, Spent
from prefixrl.learner.report import IterationMetrics
from prefixrl.learner.shares import (
    as_text_fraction,
    cached_fraction,
    masked_fraction,
    statuses,
    truncated_fraction,
)


@dataclass(frozen=True)
class Times:
    """Where the learner's time went."""

    waited_s: float
    trained_s: float
    since_start_s: float
    """Of this learner process."""
    busy_fraction: float
    """Share of its time since the first batch that the learner trained."""


class MetricsLine(msgspec.Struct, frozen=True):
    """One line of `metrics.jsonl`."""

    iteration: int
    version: int
    """The version this iteration made."""
    optimizer_steps: int
    figures: dict[str, float]
    ages: dict[str, int]
    """Groups of the batch by age in versions, that of their oldest token."""
    statuses: dict[str, int]
    """Judged texts of the batch by their verdict (docs/verification.md): one per row, or `scorer.continuations` of them."""
    histograms: dict[str, dict[str, list[float]]]
    stages: StageTimes
    """Means over the batch's groups."""
    waited_for_s: dict[str, float]
    """How long the broker had no batch to give, by what held it up: rollouts, scorers, or another rank's report."""
    tokens_per_s: dict[str, float]
    """rollout, scorer: tokens of the batch over the time since the batch before; learner: while it trained."""
    busy_fraction: dict[str, float]
    """Per role, since each worker's first lease."""
    engine_mismatch: float
    """Largest difference in a probe logprob among the rollouts, at the versions they installed last."""
    ended: dict[str, int]
    """Groups that ended untrained so far, by state and cause."""
    losses: dict[str, int]
    """Workers and tasks lost so far, by cause."""
    waited_s: float
    trained_s: float
    since_start_s: float
    """That learners were up since the run began, without what was lost when one was killed."""
    engines: dict[str, tuple[str, ...]] = {}
    """Of the workers connected then, by role."""
    endpoint: Spent | None = None
    """So far; None unless the target is served elsewhere."""


class AdvantageLine(msgspec.Struct, frozen=True):
    """One line of `advantages.jsonl`: the mean whitened advantage of every trained row of a group."""

    iteration: int
    seq: int
    advantages: list[float]


class MetricsLog:
    """Appends both files; after a resume it goes on from the iteration the learner stands at."""

    def __init__(self, directory: Path, iteration: int) -> None:
        """Raise DataError where a line before the last one is damaged."""
        self._metrics = directory / "metrics.jsonl"
        self._advantages = directory / "advantages.jsonl"
        for path, kind in ((self._metrics, MetricsLine), (self._advantages, AdvantageLine)):
            _keep_before(path, kind, iteration)
        lines = self.lines()
        self._before_s = self._written_s = lines[-1].since_start_s if lines else 0.0

    def lines(self) -> list[MetricsLine]:
        """Every iteration trained so far, whichever learner process trained it."""
        return json_lines.read(self._metrics, MetricsLine)

    def since_run_began_s(self, since_start_s: float) -> float:
        """Time of the run at a time of this learner process; see `MetricsLine.since_start_s`."""
        return self._before_s + since_start_s

    def write(
        self,
        batch: Batch,
        metrics: IterationMetrics,
        optimizer_steps: int,
        times: Times,
        status: Document,
    ) -> None:
        """Write one iteration's lines."""
        now_s = self.since_run_began_s(times.since_start_s)
        interval_s, self._written_s = now_s - self._written_s, now_s
        ages: dict[str, int] = {}
        for group in batch.groups:
            age = str(batch.iteration - group.version)
            ages[age] = ages.get(age, 0) + 1
        line = MetricsLine(
            iteration=batch.iteration,
            version=batch.iteration + 1,
            optimizer_steps=optimizer_steps,
            figures=metrics.means
            | {
                "truncated_fraction": truncated_fraction(batch.groups),
                "truncated_masked_fraction": masked_fraction(batch.groups),
                "prefix_as_text_fraction": as_text_fraction(batch.groups),
                "cached_fraction": cached_fraction(batch.groups),
            },
            ages=ages,
            statuses=statuses(batch.groups),
            histograms={
                name: {"edges": list(each.edges), "counts": [float(count) for count in each.counts]}
                for name, each in metrics.histograms.items()
            },
            stages=_mean(batch),
            waited_for_s=batch.waited_s,
            tokens_per_s=_tokens_per_s(batch, interval_s, times.trained_s),
            busy_fraction=status.busy_fraction | {"learner": times.busy_fraction},
            engine_mismatch=max(
                (each.engine_mismatch for each in status.workers if each.role == "rollout"),
                default=0.0,
            ),
            ended=status.causes,
            losses=status.losses,
            waited_s=times.waited_s,
            trained_s=times.trained_s,
            since_start_s=now_s,
            engines=_engines(status),
            endpoint=status.endpoint,
        )
        _append(self._metrics, [line])
        rows, lines = iter(metrics.row_advantages), []
        for group in batch.groups:
            lines.append(
                AdvantageLine(batch.iteration, group.seq, [next(rows) for _ in group.lengths])
            )
        _append(self._advantages, lines)


def _engines(status: Document) -> dict[str, tuple[str, ...]]:
    """Engines of the workers by role; one that is still loading has not named its own."""
    return {
        role: tuple(sorted({each.engine for each in status.workers if each.role == role} - {""}))
        for role in ("rollout", "scorer")
    }


def _mean(batch: Batch) -> StageTimes:
    names = StageTimes.__struct_fields__
    sums = [sum(getattr(group.stages, name) for group in batch.groups) for name in names]
    return StageTimes(*(total / max(1, len(batch.groups)) for total in sums))


def _tokens_per_s(batch: Batch, interval_s: float, trained_s: float) -> dict[str, float]:
    lengths = [length for group in batch.groups for length in group.lengths]
    sampled = sum(tokens for _, tokens in lengths)
    completed = sum(group.completion_tokens for group in batch.groups)
    return {
        "rollout": sampled / max(interval_s, 1e-9),
        "scorer": completed / max(interval_s, 1e-9),
        "learner": (sampled + sum(prompt for prompt, _ in lengths)) / max(trained_s, 1e-9),
    }


def _append(path: Path, lines: "list[MetricsLine] | list[AdvantageLine]") -> None:
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _keep_before(
    path: Path, kind: "type[MetricsLine] | type[AdvantageLine]", iteration: int
) -> None:
    """Drop the lines of iterations that will be trained again, and a last one that is not whole."""
    if not path.exists():
        return
    lines: Sequence[MetricsLine | AdvantageLine] = json_lines.read(path, kind)
    kept = [line for line in lines if line.iteration < iteration]
    write_atomically(path, "".join(msgspec.json.encode(line).decode() + "\n" for line in kept))
