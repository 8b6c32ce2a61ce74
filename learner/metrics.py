"""`metrics.jsonl`: one line per iteration, and `advantages.jsonl` beside it: what every trained row was worth."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from prefixrl.common.messages import Batch, ScoredGroup
from prefixrl.learner.report import IterationMetrics


@dataclass(frozen=True)
class Times:
    """Where an iteration's time went."""

    waited_s: float
    trained_s: float
    since_start_s: float


class MetricsLine(msgspec.Struct, frozen=True):
    """One line of `metrics.jsonl`."""

    iteration: int
    version: int
    """The version this iteration made."""
    optimizer_steps: int
    figures: dict[str, float]
    ages: dict[str, int]
    """Groups of the batch by age in versions."""
    histograms: dict[str, dict[str, list[float]]]
    waited_s: float
    trained_s: float
    sampled_s: float
    """Mean seconds the groups of rank 0's shard spent in sampling."""
    scoring_s: float
    since_start_s: float


class AdvantageLine(msgspec.Struct, frozen=True):
    """One line of `advantages.jsonl`: the mean whitened advantage of every trained row of a group."""

    iteration: int
    seq: int
    advantages: list[float]


class MetricsLog:
    """Appends both files; after a resume it goes on from the iteration the learner stands at."""

    def __init__(self, directory: Path, iteration: int) -> None:
        self._metrics = directory / "metrics.jsonl"
        self._advantages = directory / "advantages.jsonl"
        for path, kind in ((self._metrics, MetricsLine), (self._advantages, AdvantageLine)):
            _keep_before(path, kind, iteration)

    def write(
        self,
        batch: Batch,
        shard: list[ScoredGroup],
        metrics: IterationMetrics,
        optimizer_steps: int,
        times: Times,
    ) -> None:
        """Write one iteration's lines."""
        ages: dict[str, int] = {}
        for group in batch.groups:
            age = str(batch.iteration - group.version)
            ages[age] = ages.get(age, 0) + 1
        line = MetricsLine(
            iteration=batch.iteration,
            version=batch.iteration + 1,
            optimizer_steps=optimizer_steps,
            figures=metrics.means,
            ages=ages,
            histograms={
                name: {"edges": list(each.edges), "counts": [float(count) for count in each.counts]}
                for name, each in metrics.histograms.items()
            },
            waited_s=times.waited_s,
            trained_s=times.trained_s,
            sampled_s=sum(group.sampled_s for group in shard) / max(1, len(shard)),
            scoring_s=sum(group.scoring_s for group in shard) / max(1, len(shard)),
            since_start_s=times.since_start_s,
        )
        _append(self._metrics, [line])
        rows, lines = iter(metrics.row_advantages), []
        for group in batch.groups:
            lines.append(
                AdvantageLine(batch.iteration, group.seq, [next(rows) for _ in group.lengths])
            )
        _append(self._advantages, lines)


def _append(path: Path, lines: "list[MetricsLine] | list[AdvantageLine]") -> None:
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _keep_before(
    path: Path, kind: "type[MetricsLine] | type[AdvantageLine]", iteration: int
) -> None:
    """Drop the lines of iterations that will be trained again."""
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    lines = [line for line in path.read_bytes().splitlines() if line]
    kept = [line for line in lines if decoder.decode(line).iteration < iteration]
    path.write_bytes(b"".join(line + b"\n" for line in kept))
