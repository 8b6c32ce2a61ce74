"""Completions paid until a task is learned, with problems asked evenly, behind a filter, and by their outcomes.

    python -m benchmarks.by_outcome --json FILE        FILE.md beside it; where it was interrupted, it goes on

Of the training problems two fifths are hopeless and one fifth is solved by any answer; they stand among the learnable
problems without a mark. The learnable ones are those of the arithmetic and of the letters example, whole runs on this
machine with S = 2 and GRPO. How counts fade, and the number of groups in the probability, were changed after first
runs with seed 1. *Paid*: rows that the target had completed, filtered groups included, when the first evaluation
showed a greedy accuracy of 0.9 on held-out learnable problems. Rows of all kinds are about equally long, so
completions stand for tokens."""

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from benchmarks.kept import KeptRuns
from benchmarks.newcomer.mixture_reward import ALWAYS, NEVER
from benchmarks.results import ROOT, Figure, Report, commit, mean_figure, options
from prefixrl.common.journal import journal
from prefixrl.common.journal.records import BatchFormed, GroupEnded, GroupScored
from prefixrl.common.run.documents import Summary

RUNS = ROOT / "runs/by_outcome"
REWARDS = ROOT / "benchmarks/newcomer/mixture_reward.py"
PROGRAM = ("benchmarks/by_outcome.py", "learner/broker/groups/*.py", "learner/training/*.py")
ENOUGH, EVERY = 0.9, 5
TASKS: Mapping[str, tuple[int, int]] = {"arithmetic": (128, 60), "letters": (240, 240)}
"""Problems of a mixture, of which an iteration asks 32, and iterations of a run."""
UNIFORM = "asked evenly"
ARMS: Mapping[str, tuple[str, ...]] = {
    UNIFORM: (),
    "behind a filter": ("filter.accuracy=[0.01, 0.99]",),
    "by outcome": ("data.sampling=by_outcome",),
    "by outcome, behind a filter": (
        "data.sampling=by_outcome",
        "filter.accuracy=[0.01, 0.99]",
    ),
}
SEEDS, QUICK_SEEDS, QUICK_ITERATIONS = (1, 2, 3), (1,), 20


class MixtureRun(msgspec.Struct, frozen=True):
    """One run on a mixture."""

    task: str
    arm: str
    seed: int
    paid_by_iteration: list[int]
    """Rows completed when each batch was formed."""
    accuracy_by_version: list[tuple[int, float]]
    """Greedy accuracy on held-out learnable problems."""
    batch_shares: dict[str, float]
    """Share of the judged groups by kind of problem."""
    wall_s: float

    @property
    def paid(self) -> int | None:
        """Rows paid when the task was learned; None if it was not."""
        learned = [version for version, accuracy in self.accuracy_by_version if accuracy >= ENOUGH]
        return self.paid_by_iteration[max(0, min(learned) - 1)] if learned else None


def mixture(task: str) -> Path:
    """Write the training problems of a task, and return their file."""
    count, _ = TASKS[task]
    source = ROOT / f"deploy/examples/{task}/train.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()][:count]
    random.Random(task).shuffle(rows)
    for place, row in enumerate(rows):
        if place < 2 * count // 5:
            row["answer"] = NEVER
        elif place < 3 * count // 5:
            row["answer"] = ALWAYS
        del row["family"]
    random.Random(count).shuffle(rows)
    path = RUNS / f"{task}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def trained(task: str, arm: str, seed: int, iterations: int) -> MixtureRun:
    """Train one run, and read what it paid and learned."""
    started_s = time.monotonic()
    directory = RUNS / f"{task}-{list(ARMS).index(arm)}-{seed}"
    settings = (
        f"directory={directory}",
        f"seed={seed}",
        f"data.train={mixture(task)}",
        "data.family_column=null",
        f"reward.function={REWARDS}:of_{task}",
        "algorithm.name=grpo",
        "algorithm.max_staleness=2",
        f"algorithm.iterations={iterations}",
        f"evaluation.every={EVERY}",
        "evaluation.problems=128",
        "evaluation.selection_problems=8",
        "evaluation.sampled_candidates=1",
        *ARMS[arm],
    )
    flags = [word for setting in settings for word in ("--set", setting)]
    run_file = ROOT / f"deploy/examples/{task}/run.toml"
    command = [sys.executable, "-m", "prefixrl.deploy", "launch", "--fresh", str(run_file), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = msgspec.json.decode((directory / "summary.json").read_bytes(), type=Summary)
    return MixtureRun(
        task,
        arm,
        seed,
        list(paid_rows(directory)),
        [(point.version, point.accuracy) for point in summary.accuracy_by_version],
        shares(directory),
        time.monotonic() - started_s,
    )


def paid_rows(directory: Path) -> Iterator[int]:
    """Yield the rows that were judged before each batch was formed."""
    judged = 0
    for record in journal.read(directory / journal.FOLDER):
        match record:
            case GroupScored(group):
                judged += len(group.outcomes)
            case GroupEnded():
                judged += record.judged
            case BatchFormed():
                yield judged


def shares(directory: Path) -> dict[str, float]:
    """Return the share of the trained groups by kind of problem."""
    kinds = {NEVER: "hopeless", ALWAYS: "solved"}
    names = [
        kinds.get(record.group.prefixes.prompt.gold, "learnable")
        for record in journal.read(directory / journal.FOLDER)
        if isinstance(record, GroupScored)
    ]
    return {name: names.count(name) / len(names) for name in sorted(set(names))}


def markdown(runs: Mapping[tuple[str, str], Sequence[MixtureRun]], report: Report) -> str:
    """Return the page."""
    lines = [
        f"| task | problems | paid until {ENOUGH} | times fewer than evenly | learnable groups trained |",
        "|---|---|---|---|---|",
    ]
    for (task, arm), seeds in runs.items():
        paid = [run.paid for run in seeds]
        words = ", ".join("never" if rows is None else f"{rows:,}" for rows in paid)
        ratios = savings(runs, task, arm)
        mean = f"{statistics.fmean(ratios):.2f}" if ratios else ""
        learnable = statistics.fmean(run.batch_shares.get("learnable", 0.0) for run in seeds)
        lines.append(f"| {task} | {arm} | {words} | {mean} | {learnable:.2f} |")
    table = "\n".join(lines)
    return f"""# Problems by their outcomes

`python -m benchmarks.by_outcome`: two fifths of the training problems are hopeless, one fifth is solved by any answer.
Rows that the target completed until the greedy accuracy on held-out learnable problems was {ENOUGH}, by seed, looked at
every {EVERY} iterations; and how many times fewer than with problems asked evenly, the mean of seeds.

Commit `{report.commit}`, {report.wall_s:.0f} s.

{table}
"""


def savings(
    runs: Mapping[tuple[str, str], Sequence[MixtureRun]], task: str, arm: str
) -> list[float]:
    """Return how many times fewer rows an arm paid than its seed with problems asked evenly.

    A seed that did not learn the task is left out of an arm; evenly it has paid the rows of its whole run at least.
    """
    return [
        (base.paid or base.paid_by_iteration[-1]) / run.paid
        for run, base in zip(runs[task, arm], runs[task, UNIFORM], strict=False)
        if run.paid is not None
    ]


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Train what is missing, and write figures and page."""
    measured = commit()
    kept = KeptRuns(path, MixtureRun, PROGRAM)
    runs: dict[tuple[str, str], list[MixtureRun]] = {
        (task, arm): [] for task in TASKS for arm in ARMS
    }
    for seed in QUICK_SEEDS if quick else SEEDS:
        for (task, arm), seeds in runs.items():
            iterations = QUICK_ITERATIONS if quick else TASKS[task][1]
            key = (task, arm, seed, iterations)
            run = kept.get(key)
            if run is None:
                run = trained(task, arm, seed, iterations)
                kept.add(key, run)
                print(
                    f"{task}, {arm}, seed {seed}: {run.paid} paid, {run.wall_s:.0f} s", flush=True
                )
            seeds.append(run)
    figures: list[Figure] = []
    for task, arm in runs:
        ratios = savings(runs, task, arm)
        if ratios and arm != UNIFORM:
            name = f"{task}: completions evenly over those {arm}, until learned"
            figures.append(mean_figure(name, "times", ratios))
    settings = {"seeds": list(QUICK_SEEDS if quick else SEEDS), "arms": ARMS, "tasks": TASKS}
    details = {", ".join(cell): seeds for cell, seeds in runs.items()}
    report = Report("by_outcome", quick, settings, figures, details, measured)
    report.wall_s = round(sum(run.wall_s for seeds in runs.values() for run in seeds))
    report.write(path)
    kept.remove()
    path.with_suffix(".md").write_text(markdown(runs, report), encoding="utf-8")


if __name__ == "__main__":
    main()
