"""`summary.json`: what a finished run amounts to, for people and programs."""

from pathlib import Path

import msgspec

from prefixrl.common.process import write_atomically
from prefixrl.learner.evaluate import GREEDY, SAMPLED, Evaluator


class Staleness(msgspec.Struct, frozen=True):
    """Ages of trained groups in versions."""

    window: int
    max_trained: int
    histogram: dict[str, int]


class Summary(msgspec.Struct, frozen=True):
    """The document. Accuracies are per arm, greedy; `*_sampled` at the run's temperatures."""

    run_id: str
    accuracy: dict[str, float]
    accuracy_ci95: dict[str, tuple[float, float]]
    accuracy_sampled: dict[str, float]
    accuracy_by_family: dict[str, dict[str, float]]
    fixed_prefix: str
    evaluations_incomplete: list[str]
    eval_problems: int
    verifier_errors: int
    groups: dict[str, int]
    causes: dict[str, int]
    staleness: Staleness
    versions: int
    optimizer_steps: int
    busy_fraction: dict[str, float]
    engine: dict[str, str]
    losses: dict[str, int]
    wall_s: float


class _StatusWorker(msgspec.Struct):
    role: str
    engine: str


class _Status(msgspec.Struct):
    """The part of the status document a summary needs."""

    run_id: str
    groups: dict[str, int]
    causes: dict[str, int]
    window: int
    age_histogram: dict[str, int]
    busy_fraction: dict[str, float]
    losses: dict[str, int]
    iteration: int
    workers: list[_StatusWorker]


def summarise(
    status_json: bytes,
    evaluator: Evaluator,
    optimizer_steps: int,
    learner_busy: float,
    wall_s: float,
) -> Summary:
    """Put the broker's status and the evaluations together."""
    status = msgspec.json.decode(status_json, type=_Status)
    arms = evaluator.arms()
    greedy = {arm: found[GREEDY] for arm, found in arms.items() if GREEDY in found}
    sampled = {arm: found[SAMPLED] for arm, found in arms.items() if SAMPLED in found}
    return Summary(
        run_id=status.run_id,
        accuracy={arm: each.accuracy for arm, each in greedy.items()},
        accuracy_ci95={arm: each.ci95 for arm, each in greedy.items()},
        accuracy_sampled={arm: each.accuracy for arm, each in sampled.items()},
        accuracy_by_family={arm: each.by_family for arm, each in greedy.items()},
        fixed_prefix=evaluator.fixed_prefix(),
        evaluations_incomplete=evaluator.incomplete,
        eval_problems=min((each.problems for each in greedy.values()), default=0),
        verifier_errors=sum(each.errors for each in (*greedy.values(), *sampled.values())),
        groups=status.groups,
        causes=status.causes,
        staleness=Staleness(
            status.window,
            max((int(age) for age in status.age_histogram), default=0),
            status.age_histogram,
        ),
        versions=status.iteration,
        optimizer_steps=optimizer_steps,
        busy_fraction=status.busy_fraction | {"learner": learner_busy},
        engine={worker.role: worker.engine for worker in status.workers},
        losses=status.losses,
        wall_s=wall_s,
    )


def write(summary: Summary, directory: Path) -> None:
    """Write `summary.json`."""
    write_atomically(
        directory / "summary.json",
        msgspec.json.format(msgspec.json.encode(summary), indent=2).decode(),
    )
