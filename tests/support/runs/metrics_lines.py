"""Lines of `metrics.jsonl` with a value in every field."""

from collections.abc import Sequence
from pathlib import Path

from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import METRICS_FILE, AgeDrift, MetricsLine
from prefixrl.common.run.status import AdmissionStatus
from prefixrl.common.wire.messages.groups import StageTimes


def metrics_line(iteration: int, reward: float = 0.25) -> MetricsLine:
    """One iteration; `figures/kl` is there from the second one on."""
    figures = {"reward": reward + iteration / 100, **({"kl": 0.5} if iteration else {})}
    return MetricsLine(
        iteration=iteration,
        version=iteration + 1,
        optimizer_steps=4 * (iteration + 1),
        figures=figures,
        ages={"0": 3, "1": 1},
        mean_age=0.25,
        admission=AdmissionStatus(
            rule="just_in_time", lead_groups=4.0, cap_groups=8.0, waited_s=0.5
        ),
        statuses={"ok": 30, "no_answer": 2},
        histograms={"advantage": {"edges": [0.0, 1.0], "counts": [2.0]}},
        stages=StageTimes(0.1, 0.2, 0.3, 0.4),
        waited_for_s={"rollouts": 1.5},
        tokens_per_s={"rollout": 100.0},
        busy_fraction={"rollout": 0.5, "scorer": 0.9},
        engine_mismatch=0.001,
        proofs={"digest": 1},
        ended={"filtered: accuracy 1": 2},
        losses={"worker died": 1},
        waited_s=0.5,
        trained_s=1.5,
        since_start_s=2.0 * (iteration + 1),
        drift=tuple(
            AgeDrift(
                age=age,
                tokens=96,
                gap=0.01 * age,
                ess_fraction=1.0,
                rows=rows,
                row_ess_fraction=0.9,
            )
            for age, rows in ((0, 24), (1, 8))
        ),
        engines={"rollout": ("transformers",)},
    )


def write_metrics(directory: Path, lines: Sequence[MetricsLine]) -> None:
    """Replace the file of a run."""
    json_lines.write(directory / METRICS_FILE, lines)
