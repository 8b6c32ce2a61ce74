"""`summary.json`: what a finished run amounts to, for people and programs."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from prefixrl.common.accuracy import Interval, Point
from prefixrl.common.process import write_atomically
from prefixrl.common.status import Document, Spent
from prefixrl.learner.evaluate import Evaluator
from prefixrl.learner.evaluations import GREEDY, SAMPLED
from prefixrl.learner.metrics import MetricsLine


class Staleness(msgspec.Struct, frozen=True):
    """Ages in versions of what was trained."""

    window: int
    max_trained: int
    histogram: dict[str, int]
    """Groups, by the age of their oldest token."""
    token_histogram: dict[str, int]
    crossed_fraction: float
    """Share of the rows with tokens of more than one version."""


class Summary(msgspec.Struct, frozen=True):
    """The document. Accuracies are per arm, greedy; `*_sampled` at the run's temperatures.

    An arm of which nothing could be judged has none, and is named in `evaluations_incomplete`.
    """

    run_id: str
    accuracy: dict[str, float]
    accuracy_ci95: dict[str, tuple[float, float]]
    accuracy_interval: dict[str, Interval]
    """What `accuracy_ci95` is: Wilson's of a share where all rewards are 0 or 1, else a bootstrap over problems."""
    accuracy_sampled: dict[str, float]
    accuracy_by_family: dict[str, dict[str, float]]
    accuracy_by_version: list[Point]
    """Of the adapter, greedy: before training, every `evaluation.every` versions, after it."""
    truncated_fraction: float
    """Share of the trained rows that a length limit cut; `accuracy_truncated`: of the evaluated ones, greedy."""
    accuracy_truncated: dict[str, float]
    fixed_prefix: str
    evaluations_incomplete: list[str]
    eval_problems: int
    verifier_errors: int
    groups: dict[str, int]
    causes: dict[str, int]
    """Untrained groups by state and cause."""
    row_errors: dict[str, int]
    """Texts of training groups without a verdict, by the kind of failure."""
    cached_fraction: float
    """Share of all judged texts, evaluations' included, that were in a scorer's cache; since the broker started."""
    filter_pass_fraction: float | None
    """Of all groups that the prompt filter judged; None without one."""
    staleness: Staleness
    versions: int
    optimizer_steps: int
    busy_fraction: dict[str, float]
    """Per role, when the last iteration ended; since the learner that trained it had started."""
    engine: dict[str, str]
    """Engines that worked for the run, by role."""
    losses: dict[str, int]
    wall_s: float
    """That learners were up, those that were killed until the last iteration they left in the run."""
    endpoint: Spent | None
    """What the endpoint that serves the target was asked for, evaluations included; None where there is none."""


def summarise(
    status: Document,
    evaluator: Evaluator,
    lines: Sequence[MetricsLine],
    optimizer_steps: int,
    wall_s: float,
) -> Summary:
    """Put the broker's status, the evaluations and the lines of all iterations together.

    The lines outlive the processes: a learner that is started again on a finished run finds other workers and has done nothing.
    """
    arms = evaluator.arms()
    greedy = {arm: found[GREEDY] for arm, found in arms.items() if GREEDY in found}
    sampled = {arm: found[SAMPLED] for arm, found in arms.items() if SAMPLED in found}
    return Summary(
        run_id=status.run_id,
        accuracy={arm: each.accuracy for arm, each in greedy.items()},
        accuracy_ci95={arm: each.ci95 for arm, each in greedy.items()},
        accuracy_interval={arm: each.interval for arm, each in greedy.items()},
        accuracy_sampled={arm: each.accuracy for arm, each in sampled.items()},
        accuracy_by_family={arm: each.by_family for arm, each in greedy.items()},
        accuracy_by_version=evaluator.curve(),
        truncated_fraction=_truncated_fraction(lines),
        accuracy_truncated={arm: each.truncated_fraction for arm, each in greedy.items()},
        fixed_prefix=evaluator.fixed_prefix(),
        evaluations_incomplete=evaluator.asked.incomplete,
        eval_problems=min((each.problems for each in greedy.values()), default=0),
        verifier_errors=evaluator.errors(),
        groups=msgspec.structs.asdict(status.groups),
        causes=status.causes,
        row_errors=status.row_errors,
        cached_fraction=status.completions.get("cached", 0)
        / max(1, status.completions.get("judged", 0)),
        filter_pass_fraction=_pass_fraction(status),
        staleness=Staleness(
            status.window,
            max((int(age) for age in status.age_histogram), default=0),
            status.age_histogram,
            status.token_age_histogram,
            status.crossed_fraction,
        ),
        versions=status.iteration,
        optimizer_steps=optimizer_steps,
        busy_fraction=lines[-1].busy_fraction if lines else {},
        engine=_engines(lines),
        losses=_losses(lines, status),
        wall_s=wall_s,
        endpoint=status.endpoint,
    )


def _truncated_fraction(lines: Sequence[MetricsLine]) -> float:
    """Share of all trained rows that a length limit cut."""
    rows = sum(line.figures["rows"] for line in lines)
    cut = sum(line.figures["rows"] * line.figures.get("truncated_fraction", 0.0) for line in lines)
    return cut / max(1.0, rows)


def _engines(lines: Sequence[MetricsLine]) -> dict[str, str]:
    """All engines that ever worked for the run, by role."""
    found: dict[str, set[str]] = {}
    for line in lines:
        for role, engines in line.engines.items():
            found.setdefault(role, set()).update(engines)
    return {role: ", ".join(sorted(engines)) for role, engines in found.items() if engines}


def _losses(lines: Sequence[MetricsLine], status: Document) -> dict[str, int]:
    """The broker counts since it started: of every cause the largest count that any broker of the run reached."""
    found: dict[str, int] = {}
    for losses in (*(line.losses for line in lines), status.losses):
        for cause, count in losses.items():
            found[cause] = max(count, found.get(cause, 0))
    return found


def _pass_fraction(status: Document) -> float | None:
    """A finished run holds no group any more: what passed was trained."""
    if status.filter is None:
        return None
    trained, filtered = status.groups.trained, status.groups.filtered
    return trained / (trained + filtered)


def merged(summary: Summary, directory: Path) -> Summary:
    """With the time that the run took when it was finished before: this learner found nothing left to train."""
    path = directory / "summary.json"
    if not path.exists():
        return summary
    before = msgspec.json.decode(path.read_bytes(), type=Summary)
    is_same = (before.run_id, before.versions) == (summary.run_id, summary.versions)
    wall_s = max(before.wall_s, summary.wall_s) if is_same else summary.wall_s
    return msgspec.structs.replace(summary, wall_s=wall_s)


def write(summary: Summary, directory: Path) -> None:
    """Write `summary.json`."""
    write_atomically(
        directory / "summary.json",
        msgspec.json.format(msgspec.json.encode(summary), indent=2).decode(),
    )
