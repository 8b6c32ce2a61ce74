"""Builds `summary.json`, the result of a finished run for people and programs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from prefixrl.common.errors import DataError
from prefixrl.common.evaluation.accuracy import Accuracy, Point
from prefixrl.common.evaluation.plans import GREEDY, SAMPLED
from prefixrl.common.host.process import write_atomically
from prefixrl.common.run.documents import (
    SUMMARY_FILE,
    MetricsLine,
    Staleness,
    Summary,
    alarm_spans,
    memory_words,
    summary_of,
)
from prefixrl.common.run.status import StatusDocument


@dataclass(frozen=True)
class EvaluationOutcome:
    """Results of all evaluations of a run."""

    arms: Mapping[str, Mapping[str, Accuracy]] = field(default_factory=dict)
    """Accuracy by arm and decoding, of the arms of which something could be judged."""
    curve: Sequence[Point] = ()
    """Accuracy of the adapter by version, greedy."""
    fixed_prefix: str = ""
    """Text of the fixed prefix that was chosen, "" without one."""
    incomplete: Sequence[str] = ()
    """Names of the evaluations that are incomplete."""
    errors: int = 0
    """Rows of all arms whose verifier failed."""


def summarise(
    status: StatusDocument,
    evaluated: EvaluationOutcome,
    lines: Sequence[MetricsLine],
    steps: int,
    wall_s: float,
) -> Summary:
    """Combine the broker's status, the evaluations and the lines, which outlive the processes."""
    greedy = {arm: found[GREEDY] for arm, found in evaluated.arms.items() if GREEDY in found}
    sampled = {arm: found[SAMPLED] for arm, found in evaluated.arms.items() if SAMPLED in found}
    rows = sum(line.figures["rows"] for line in lines)
    cut = sum(line.figures["rows"] * line.figures.get("truncated_fraction", 0.0) for line in lines)
    groups = status.groups  # at its end a run holds trained and filtered ones alone
    return Summary(
        run_id=status.run_id,
        accuracy={arm: each.accuracy for arm, each in greedy.items()},
        accuracy_ci95={arm: each.ci95 for arm, each in greedy.items()},
        accuracy_interval={arm: each.interval for arm, each in greedy.items()},
        accuracy_sampled={arm: each.accuracy for arm, each in sampled.items()},
        accuracy_by_family={arm: each.by_family for arm, each in greedy.items()},
        accuracy_by_version=list(evaluated.curve),
        truncated_fraction=cut / max(1.0, rows),
        accuracy_truncated={arm: each.truncated_fraction for arm, each in greedy.items()},
        fixed_prefix=evaluated.fixed_prefix,
        evaluations_incomplete=list(evaluated.incomplete),
        eval_problems=min((each.problems for each in greedy.values()), default=0),
        verifier_errors=evaluated.errors,
        groups=msgspec.structs.asdict(groups),
        causes=status.causes,
        row_errors=status.row_errors,
        cached_fraction=status.completions.get("cached", 0)
        / max(1, status.completions.get("judged", 0)),
        filter_pass_fraction=None
        if status.filter is None
        else groups.trained / (groups.trained + groups.filtered),
        staleness=Staleness(
            window=status.window,
            admission=status.admission.rule,
            mean_trained=status.mean_age,
            max_trained=max((int(age) for age in status.age_histogram), default=0),
            histogram=status.age_histogram,
            token_histogram=status.token_age_histogram,
            crossed_fraction=status.crossed_fraction,
        ),
        versions=status.iteration,
        optimizer_steps=steps,
        busy_fraction=lines[-1].busy_fraction if lines else {},
        engine=_engines(lines),
        losses=_losses(lines, status),
        wall_s=wall_s,
        publish_s=sum(line.publish_s for line in lines) / max(1, len(lines)),
        alarms=alarm_spans(lines),
        endpoint=status.endpoint,
        drafts=status.drafts,
        learner_memory=memory_words(lines[-1].ranks) if lines else "",
    )


def _engines(lines: Sequence[MetricsLine]) -> dict[str, str]:
    names = defaultdict[str, set[str]](set)
    for line in lines:
        for role, engines in line.engines.items():
            names[role].update(engines)
    return {role: ", ".join(sorted(engines)) for role, engines in names.items() if engines}


def _losses(lines: Sequence[MetricsLine], status: StatusDocument) -> dict[str, int]:
    """Return the largest count of every cause; each broker counts since its own start."""
    largest = defaultdict[str, int](int)
    for losses in (*(line.losses for line in lines), status.losses):
        for cause, count in losses.items():
            largest[cause] = max(count, largest[cause])
    return largest


def merged(summary: Summary, directory: Path) -> Summary:
    """Return the summary with the longer time where an earlier learner finished the run."""
    try:
        before = summary_of(directory)
    except DataError:
        before = None  # this one takes its place
    if before is None:
        return summary
    is_same = (before.run_id, before.versions) == (summary.run_id, summary.versions)
    wall_s = max(before.wall_s, summary.wall_s) if is_same else summary.wall_s
    return msgspec.structs.replace(summary, wall_s=wall_s)


def write(summary: Summary, directory: Path) -> None:
    """Write `summary.json`."""
    document = msgspec.json.format(msgspec.json.encode(summary))
    write_atomically(directory / SUMMARY_FILE, document)
