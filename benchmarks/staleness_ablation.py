"""The cost of the age of samples under each form of the policy loss, at two learning rates.

Every trained sample has exactly the age asked for (`aged_run.py`), on the arithmetic example with its real adapter,
frozen target and verifier. Runs of one seed see the same prompts in the same order with the same draws; a run is what
its age, its form and its learning rate make of them.

    python -m benchmarks.staleness_ablation --json FILE

FILE.png and FILE.md are written beside it. Where it was interrupted, the same command goes on (`kept.py`).

Fixed before it was run: ages, forms, learning rates and seeds; the outcomes (accuracy on held-out problems, one sampled
prefix each: *final* is the mean over the last quarter of the run's versions, *throughout* over all of them)."""

import os
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
import msgspec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads are slower than one

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.aged_run import Target
from benchmarks.kept import TRAINING, KeptRuns
from benchmarks.results import Figure, Report, commit, mean_figure, options, t_interval
from benchmarks.staleness_arms import FIGURES, FORMS, SETTINGS, Arm, Run, Size, config_of, run_arm

LEARNING_RATES = (5e-4, 2.5e-4)
AGAINST = "decoupled"
"""The form that the others are compared with, paired by seed."""
FULL = Size(
    (8, 32, 0), tuple(range(1, 9)), iterations=96, groups=16, problems=128, evaluate_every=4
)
QUICK = Size((0, 4), (1, 2), iterations=12, groups=4, problems=32, evaluate_every=3)
OUTCOMES = ("final", "area")


def arms_of(size: Size, forms: Sequence[str]) -> Iterator[Arm]:
    """Every arm, seeds outermost: an interrupted ablation has whole seeds."""
    for seed in size.seeds:
        for lr in LEARNING_RATES:
            for age in size.ages:
                for form in forms:
                    yield Arm(age, form, seed, lr)


def run_all(arms: Sequence[Arm], size: Size, kept: KeptRuns[Run]) -> list[Run]:
    """One after the other, in one process and with one target."""
    target: Target | None = None
    runs = []
    missing = sum(kept.get((arm.made_as, size)) is None for arm in {arm.made_as for arm in arms})
    for arm in arms:
        run = kept.get((arm.made_as, size))
        if run is None:
            target = target or Target(config_of(arm, size))
            run = run_arm(arm.made_as, size, target)
            kept.add((arm.made_as, size), run)
            missing -= 1
            print(_line(run, missing), flush=True)
        runs.append(msgspec.structs.replace(run, arm=arm))
    return runs


def _line(run: Run, missing: int) -> str:
    arm = run.arm
    return (
        f"[{missing} to go] {arm.form}, age {arm.age}, seed {arm.seed}, learning rate {arm.actor_lr:g}: accuracy "
        f"{run.final:.3f} at the end, {run.area:.3f} throughout; {run.wall_s:.0f} s"
    )


def of(runs: Sequence[Run], lr: float, age: int, form: str) -> list[Run]:
    """The seeds of one cell of the table, in order."""
    found = [
        run for run in runs if (run.arm.actor_lr, run.arm.age, run.arm.form) == (lr, age, form)
    ]
    return sorted(found, key=lambda run: run.arm.seed)


def paired(cell: Sequence[Run], other: Sequence[Run], outcome: str) -> list[float]:
    """Differences of an outcome, seed by seed."""
    theirs = {run.arm.seed: getattr(run, outcome) for run in other}
    return [getattr(run, outcome) - theirs[run.arm.seed] for run in cell if run.arm.seed in theirs]


def kept_share(cell: Sequence[Run], fresh: Sequence[Run], outcome: str) -> float:
    """The cell's mean outcome as a share of age 0's."""
    return statistics.fmean(getattr(run, outcome) for run in cell) / statistics.fmean(
        getattr(run, outcome) for run in fresh
    )


def figures_of(runs: Sequence[Run], size: Size, forms: Sequence[str]) -> list[Figure]:
    """Return, per cell: outcomes against age 0 of the form, paired differences, and what the learner saw."""
    found = []
    for lr in LEARNING_RATES:
        for form in forms:
            for age in sorted(size.ages):
                found += _cell_figures(runs, lr, age, form)
    return found


def _cell_figures(runs: Sequence[Run], lr: float, age: int, form: str) -> list[Figure]:
    cell, fresh, against = (
        of(runs, lr, *each) for each in ((age, form), (0, form), (age, AGAINST))
    )
    where, found = f"{form}, age {age}, learning rate {lr:g}", []
    for outcome in OUTCOMES:
        mine, theirs = ([getattr(run, outcome) for run in each] for each in (cell, fresh))
        found.append(
            mean_figure(f"{outcome} accuracy, {where}", "share of problems", mine, theirs, "age 0")
        )
        if form != AGAINST and against:
            gaps = paired(cell, against, outcome)
            found.append(
                mean_figure(
                    f"{outcome} accuracy less that of {AGAINST}, {where}", "share of problems", gaps
                )
            )
    for name in FIGURES:
        seen = [run.figures[name] for run in cell if name in run.figures]
        if seen:
            found.append(mean_figure(f"{name}, {where}", "", seen))
    return found


def markdown(report: Report, runs: Sequence[Run], size: Size, forms: Sequence[str]) -> str:
    """The page beside the figures: what was run on what, and the tables."""
    changes = f" with {', '.join(size.changes)}" if size.changes else ""
    steps = runs[0].actor_steps // size.iterations
    keys = "\n".join(f"| {form} | `{'`, `'.join(FORMS[form])}` |" for form in forms)
    tables = "\n\n".join(
        f"## Learning rate {lr:g}\n\n{table(runs, size, forms, lr)}" for lr in LEARNING_RATES
    )
    return f"""# Staleness ablation{changes}

`python -m benchmarks.staleness_ablation`: the arithmetic example, every sample at exactly the age named, constant
learning rate, {size.iterations} iterations of {size.groups} groups in {steps} optimiser steps, {len(size.seeds)} seeds.
Accuracy is on {size.problems} held-out problems, one sampled prefix each: *final* is the mean over the last quarter of
the versions, *throughout* over all. In brackets 95 % intervals of the mean over seeds (Student's t, which knows no
bounds); differences are paired by seed; "kept" is the share of age 0's under the same form and learning rate.
Drift and effective sample size (ESS) are means over the iterations after the warm-up.

| form | keys of `[algorithm]` |
|---|---|
{keys}

Commit `{report.commit}`, {report.machine["cores"]} cores of {report.machine["cpu"]}, {report.wall_s:.0f} s of runs.

{tables}
"""


def table(runs: Sequence[Run], size: Size, forms: Sequence[str], lr: float) -> str:
    """One row per cell of a learning rate."""
    lines = [
        f"| age | form | final | kept | worst | throughout | kept | throughout less {AGAINST} | drift abs log p/μ | "
        "ESS per token | ESS per prefix | entropy |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for age in sorted(size.ages):
        for form in forms:
            cell, fresh, against = (
                of(runs, lr, *each) for each in ((age, form), (0, form), (age, AGAINST))
            )
            gaps = paired(cell, against, "area") if form != AGAINST else []
            columns = [
                _interval([run.final for run in cell]),
                f"{kept_share(cell, fresh, 'final'):.3f}",
                f"{min(run.final for run in cell):.3f}",
                _interval([run.area for run in cell]),
                f"{kept_share(cell, fresh, 'area'):.3f}",
                _interval(gaps) if gaps else "-",
                *(
                    _mean(cell, name)
                    for name in ("behaviour_gap", "importance_ess_fraction", "row_ess_fraction")
                ),
                _mean(cell, "entropy"),
            ]
            lines.append(f"| {age} | {form} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _interval(values: Sequence[float]) -> str:
    mean, (low, high) = t_interval(values)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _mean(cell: Sequence[Run], name: str) -> str:
    found = [run.figures[name] for run in cell if name in run.figures]
    return f"{statistics.fmean(found):.3g}" if found else "not finite"


def draw(runs: Sequence[Run], size: Size, forms: Sequence[str], path: Path) -> None:
    """Accuracy throughout by age at each learning rate, then every run by the drift that it had."""
    figure, axes = pyplot.subplots(
        1, len(LEARNING_RATES) + 1, figsize=(4.8 * (len(LEARNING_RATES) + 1), 4.2)
    )
    ages, places = sorted(size.ages), range(len(size.ages))
    for index, form in enumerate(forms):
        colour, shift = f"C{index}", 0.08 * (index - len(forms) / 2)
        for axis, lr in zip(axes[:-1], LEARNING_RATES, strict=True):
            cells = [t_interval([run.area for run in of(runs, lr, age, form)]) for age in ages]
            reach = [
                [mean - low for mean, (low, _) in cells],
                [high - mean for mean, (_, high) in cells],
            ]
            where = [place + shift for place in places]
            axis.errorbar(
                where,
                [mean for mean, _ in cells],
                reach,
                color=colour,
                marker="o",
                capsize=2,
                label=form,
            )
        aged = [
            run
            for run in runs
            if run.arm.form == form and run.arm.age and "behaviour_gap" in run.figures
        ]
        gaps = [run.figures["behaviour_gap"] for run in aged]
        axes[-1].scatter(gaps, [run.area for run in aged], s=9, color=colour)
    for axis, lr in zip(axes[:-1], LEARNING_RATES, strict=True):
        axis.set_xticks(places, [str(age) for age in ages])
        axis.set_xlabel("age of every sample, in versions")
        axis.set_title(f"learning rate {lr:g}, 95 % interval")
        axis.set_ylim(0, 1.05)
    axes[0].set_ylabel("accuracy throughout the run")
    axes[0].legend(loc="lower left", fontsize=8)
    axes[-1].set_xscale("log")
    axes[-1].set_xlabel("drift: mean |log p/μ| per token, nats")
    axes[-1].set_title("each run with old samples")
    axes[-1].set_ylim(0, 1.05)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@click.command()
@options
@click.option(
    "--only",
    "forms",
    multiple=True,
    type=click.Choice(list(FORMS)),
    help="These forms; may be repeated.",
)
@click.option(
    "--age",
    "ages",
    multiple=True,
    type=int,
    help="Instead of the ablation's ages; age 0 is always there.",
)
@click.option("--seed", "seeds", multiple=True, type=int, help="Instead of the ablation's seeds.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting for all runs; may be repeated.",
)
def main(
    path: Path,
    quick: bool,
    forms: tuple[str, ...],
    ages: tuple[int, ...],
    seeds: tuple[int, ...],
    changes: tuple[str, ...],
) -> None:
    """Measure the cost of the age of samples under each form of the loss."""
    warnings.filterwarnings("ignore")
    size = QUICK if quick else FULL
    size = replace(
        size,
        seeds=seeds or size.seeds,
        ages=tuple({0, *ages}) if ages else size.ages,
        changes=changes,
    )
    forms = forms or tuple(FORMS)
    path.parent.mkdir(parents=True, exist_ok=True)
    measured, kept = commit(), KeptRuns(path, Run, (*TRAINING, "benchmarks/staleness_arms.py"))
    # The size of one run, whatever else is compared with it.
    one = replace(size, ages=(), seeds=())
    runs = run_all(list(arms_of(size, forms)), one, kept)
    settings = {"size": size, "settings": SETTINGS, "forms": FORMS}
    report = Report(
        "staleness_ablation", quick, settings, figures_of(runs, size, forms), runs, measured
    )
    report.wall_s = round(sum(run.wall_s for run in runs), 1)
    report.write(path)
    kept.remove()
    draw(runs, size, forms, path.with_suffix(".png"))
    text = markdown(report, runs, size, forms)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
