"""Writes `metrics.jsonl`, a line per iteration, and `advantages.jsonl`, one per group."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import asdict

from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.run import json_lines
from prefixrl.common.run.disk import when_there_is_room
from prefixrl.common.run.documents import ADVANTAGES_FILE, METRICS_FILE, AdvantageLine, MetricsLine
from prefixrl.common.run.status import StatusDocument
from prefixrl.common.wire.messages.groups import StageTimes
from prefixrl.common.wire.messages.learner import Batch
from prefixrl.learner.run.alarms import Alarms
from prefixrl.learner.run.fractions import batch_fractions, by_source, statuses
from prefixrl.learner.run.stop import NO_STOP, StopSignal
from prefixrl.learner.training.figures import IterationMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Times:
    """The learner's time during an iteration."""

    waited_s: float
    trained_s: float
    since_start_s: float
    """Time since this learner process started."""
    busy_fraction: float
    """Fraction of its time since the first batch in which the learner trained."""
    publish_s: float = 0.0
    """Time in which the main thread published the version before."""
    ranks: Mapping[str, float] = field(default_factory=dict)
    """Figures of `speed.rank_figures`."""


class MetricsLog:
    """Appends both files; after a resume it continues at the iteration of the learner."""

    def __init__(
        self,
        directory: Path,
        iteration: int,
        stop: StopSignal = NO_STOP,
        forecast: Mapping[str, float] = {},
        is_replay: bool = False,
    ) -> None:
        """Raise DataError where a line before the last one is damaged; `stop` may end a wait for room.

        `forecast` is added to the figures of the ranks. A replay draws no tokens, so it has no speed of doing it.
        """
        self._stop = stop
        self._forecast = forecast
        self._is_replay = is_replay
        self._metrics = directory / METRICS_FILE
        self._advantages = directory / ADVANTAGES_FILE
        _keep_before(self._metrics, MetricsLine, iteration)
        _keep_before(self._advantages, AdvantageLine, iteration)
        self._alarms = Alarms()
        self._before_s = 0.0
        for line in self.lines():
            self._alarms.new_sentences(line.iteration, line.figures)
            self._before_s = line.since_start_s
        self._written_s = self._before_s

    def lines(self) -> list[MetricsLine]:
        """Return the lines of all iterations so far, by this learner process or an earlier process."""
        return json_lines.read(self._metrics, MetricsLine)

    def since_run_began_s(self, since_start_s: float) -> float:
        """Translate a time of this process to a time of the run (`MetricsLine.since_start_s`)."""
        return self._before_s + since_start_s

    def write(
        self,
        batch: Batch,
        metrics: IterationMetrics,
        optimizer_steps: int,
        times: Times,
        status: StatusDocument,
    ) -> None:
        """Write the lines of one iteration, and log the alarms that begin with it."""
        now_s = self.since_run_began_s(times.since_start_s)
        interval_s = now_s - self._written_s
        self._written_s = now_s
        rollouts = [each for each in status.workers if each.role == "rollout"]
        slopes = [each.probe_slope for each in rollouts if each.probe_slope is not None]
        ages = [batch.iteration - group.version for group in batch.groups]
        figures = metrics.means | batch_fractions(batch.groups)
        # Before the line is made: it holds the alarms that are on.
        begun = self._alarms.new_sentences(batch.iteration, figures)
        line = MetricsLine(
            iteration=batch.iteration,
            version=batch.iteration + 1,
            optimizer_steps=optimizer_steps,
            figures=figures
            | by_source(batch.groups, status.passed_by_source, status.filtered_by_source),
            ages=Counter(map(str, ages)),
            mean_age=sum(ages) / max(1, len(ages)),
            admission=status.admission,
            statuses=statuses(batch.groups),
            histograms=_histograms(metrics),
            stages=_mean(batch),
            waited_for_s=batch.waited_s,
            tokens_per_s=self._tokens_per_s(batch, interval_s, times.trained_s),
            busy_fraction=status.busy_fraction | {"learner": times.busy_fraction},
            engine_mismatch=max((each.engine_mismatch for each in rollouts), default=0.0),
            proofs=Counter(each.proof for each in rollouts),
            probe_slope=max(slopes, key=lambda slope: abs(slope - 1.0), default=None),
            ended=status.causes,
            losses=status.losses,
            waited_s=times.waited_s,
            trained_s=times.trained_s,
            publish_s=times.publish_s,
            since_start_s=now_s,
            drift=metrics.ages,
            engines=_engines(status),
            waiting_rows=status.waiting_rows,
            alarms=dict(self._alarms.ringing),
            endpoint=status.endpoint,
            drafts=status.drafts,
            pools=asdict(status.pools) if status.pools else {},
            ranks={**times.ranks, **self._forecast},
        )
        self._append(self._metrics, [line])
        self._append(self._advantages, _advantage_lines(batch, metrics))
        for text in begun:
            log.warning("%s", text)
        crash_point("iteration.noted")

    def _tokens_per_s(self, batch: Batch, interval_s: float, trained_s: float) -> dict[str, float]:
        lengths = [length for group in batch.groups for length in group.lengths]
        learner = {"learner": sum(map(sum, lengths)) / max(trained_s, 1e-9)}
        if self._is_replay:
            return learner
        interval_s = max(interval_s, 1e-9)
        sampled = sum(tokens for _, tokens in lengths)
        completed = sum(group.completion_tokens for group in batch.groups)
        return {"rollout": sampled / interval_s, "scorer": completed / interval_s, **learner}

    def _append(self, path: Path, lines: Sequence[MetricsLine | AdvantageLine]) -> None:
        when_there_is_room(
            lambda: json_lines.append(path, lines), path.parent, path.name, self._stop.end_disk_wait
        )


def _advantage_lines(batch: Batch, metrics: IterationMetrics) -> list[AdvantageLine]:
    rows = iter(metrics.row_advantages)
    return [
        AdvantageLine(batch.iteration, group.seq, [next(rows) for _ in group.lengths])
        for group in batch.groups
    ]


def _engines(status: StatusDocument) -> dict[str, tuple[str, ...]]:
    """Return the engines of the workers by role; a loading worker has not named its engine."""
    return {
        role: tuple(sorted({each.engine for each in status.workers if each.role == role} - {""}))
        for role in ("rollout", "scorer")
    }


def _histograms(metrics: IterationMetrics) -> dict[str, dict[str, list[float]]]:
    return {
        name: {"edges": list(each.edges), "counts": list(map(float, each.counts))}
        for name, each in metrics.histograms.items()
    }


def _mean(batch: Batch) -> StageTimes:
    names = StageTimes.__struct_fields__
    sums = [sum(getattr(group.stages, name) for group in batch.groups) for name in names]
    return StageTimes(*(total / max(1, len(batch.groups)) for total in sums))


def _keep_before(
    path: Path, kind: "type[MetricsLine] | type[AdvantageLine]", iteration: int
) -> None:
    """Drop the lines of iterations that will be trained again, and an incomplete last one."""
    if path.exists():
        lines: Sequence[MetricsLine | AdvantageLine] = json_lines.read(path, kind)
        json_lines.write(path, (line for line in lines if line.iteration < iteration))
