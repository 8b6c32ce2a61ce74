"""Seeds that end in a local optimum: two tasks, two rates, with what `prefixrl init` writes against it and without.

    python -m benchmarks.exploration --json FILE        FILE.md beside it; where it was interrupted, it goes on

GRPO in one process, every sample exactly two versions old (`aged_run.py`), greedy targets. The rates are the one that
`prefixrl init --size tiny` writes and a quarter of it, the examples' own. *Documented*: entropy and KL terms as it
writes them, and the default schedule, which lets the rate fall to a tenth. The other arms hold the rate, with the same
terms and without any. *Ended well*: the mean held-out reward over the last quarter of the run is within 0.05 of the
best seed of the same arm, rate and task; a slower rate is no local optimum."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import click

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads are slower than one

from benchmarks.aged_run import Target
from benchmarks.kept import TRAINING, KeptRuns
from benchmarks.openings.arms import RUN_FILE, Outcome, Setting, Size, config_of, run_arm
from benchmarks.results import ROOT, Figure, Report, commit, mean_figure, options

COMMON = (
    "algorithm.name=grpo",
    "algorithm.minibatches=1",
    "learner.warmup_ratio=0.0",
    "learner.min_lr_ratio=1.0",
    "scorer.temperature=0.0",
)
TASKS = {
    "letters": (RUN_FILE, 300),
    "arithmetic": (ROOT / "deploy/examples/arithmetic/run.toml", 150),
}
"""Run file and iterations."""
RATES = (2.5e-4, 1e-3)
DOCUMENTED = ("algorithm.entropy=0.03", "algorithm.kl=0.01")
TERMS = {
    "documented": (*DOCUMENTED, "learner.warmup_ratio=0.03", "learner.min_lr_ratio=0.1"),
    "its terms at a constant rate": DOCUMENTED,
    "no terms at a constant rate": ("algorithm.entropy=0.0", "algorithm.kl=0.0"),
}
SEEDS, QUICK_SEEDS, QUICK_ITERATIONS = tuple(range(1, 11)), (1,), 10
AGE, WITHIN, FALL = 2, 0.05, 0.2


def run_all(
    seeds: Sequence[int], quick: bool, kept: KeptRuns[Outcome]
) -> dict[tuple[str, float, str], list[Outcome]]:
    """Every cell's seeds, seeds outermost; a target per task."""
    found: dict[tuple[str, float, str], list[Outcome]] = {}
    targets: dict[str, Target] = {}
    for seed in seeds:
        for task, (run_file, iterations) in TASKS.items():
            size = Size(
                (seed,), QUICK_ITERATIONS if quick else iterations, 32 if quick else 128, 10, COMMON
            )
            for rate in RATES:
                for terms, changes in TERMS.items():
                    setting = Setting(AGE, (f"learner.actor_lr={rate!r}", *changes))
                    key = (task, seed, rate, terms, size.iterations, size.heldout)
                    run = kept.get(key)
                    if run is None:
                        config = config_of(run_file, setting, seed, size)
                        targets.setdefault(task, Target(config))
                        run = run_arm(
                            f"{task}, {rate:g}, {terms}", setting, config, size, targets[task]
                        )
                        kept.add(key, run)
                        print(
                            f"{run.setting}, seed {seed}: {run.final:.3f}; {run.wall_s:.0f} s",
                            flush=True,
                        )
                    found.setdefault((task, rate, terms), []).append(run)
    return found


def well(runs: Sequence[Outcome]) -> list[float]:
    """1 for each seed of a cell that ended well, else 0."""
    best = max(run.final for run in runs)
    return [float(run.final >= best - WITHIN) for run in runs]


def has_fallen(run: Outcome) -> bool:
    """True if an evaluation was `FALL` below an earlier one."""
    best = 0.0
    for _, reward in run.heldout:
        best = max(best, reward)
        if reward <= best - FALL:
            return True
    return False


def markdown(found: dict[tuple[str, float, str], list[Outcome]], report: Report) -> str:
    """The table."""
    lines = [
        "| task | rate | arm | ended well | mean | worst seeds | fell on the way |",
        "|---|---|---|---|---|---|---|",
    ]
    for (task, rate, terms), runs in sorted(found.items()):
        finals = sorted(run.final for run in runs)
        worst = ", ".join(f"{final:.2f}" for final in finals[:3])
        fell = sum(has_fallen(run) for run in runs)
        cells = (
            f"{sum(well(runs)):.0f} of {len(runs)}",
            f"{statistics.fmean(finals):.3f}",
            worst,
            str(fell),
        )
        lines.append(f"| {task} | {rate:g} | {terms} | {' | '.join(cells)} |")
    body = "\n".join(lines)
    arms = "\n".join(f"- {name}: `{'`, `'.join(changes)}`" for name, changes in TERMS.items())
    return f"""# Exploration

`python -m benchmarks.exploration`: GRPO, every sample {AGE} versions old, 128 held-out problems, rewards over the last
quarter of a run. *Ended well*: within {WITHIN} of the best seed of the same row. *Fell on the way*: seeds with an
evaluation {FALL} below an earlier one.

{arms}

Commit `{report.commit}`, {report.wall_s:.0f} s of one core.

{body}
"""


@click.command()
@options
def main(path: Path, quick: bool) -> None:
    """Train what is missing, and write figures and page."""
    measured = commit()
    seeds = QUICK_SEEDS if quick else SEEDS
    kept = KeptRuns(path, Outcome, (*TRAINING, "benchmarks/openings/*.py"))
    found = run_all(seeds, quick, kept)
    figures: list[Figure] = []
    for (task, rate, terms), runs in sorted(found.items()):
        name = f"{task}, rate {rate:g}, {terms}"
        figures.append(mean_figure(f"final reward, {name}", "share", [run.final for run in runs]))
        figures.append(mean_figure(f"ended well, {name}", "share of seeds", well(runs)))
    settings = {"seeds": list(seeds), "rates": RATES, "terms": TERMS, "common": COMMON, "age": AGE}
    cells = {", ".join(map(str, cell)): runs for cell, runs in found.items()}
    report = Report("exploration", quick, settings, figures, cells, measured)
    report.wall_s = round(sum(run.wall_s for runs in found.values() for run in runs))
    report.write(path)
    kept.remove()
    path.with_suffix(".md").write_text(markdown(found, report), encoding="utf-8")


if __name__ == "__main__":
    main()
