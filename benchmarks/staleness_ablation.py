"""The cost of the age of samples under each correction: ages 0, 2, 8, 32 x none, behaviour, decoupled.

Every trained sample has exactly the age asked for (`aged_run.py`), on the arithmetic example with its real adapter,
frozen target and verifier. Runs of one seed see the same prompts in the same order with the same draws; a run is what
its age and its correction make of them.

    python -m benchmarks.staleness_ablation --sweep --json FILE   which learning rate: age 0 against age 8, uncorrected
    python -m benchmarks.staleness_ablation --json FILE           the ablation; FILE.png and FILE.md beside it; where it
    was
                                                                  interrupted, the same command at the same commit goes
                                                                  on (from a tree without changes only)

Fixed before the ablation was run: the learning rate (the smallest of the sweep at which age 0 ends above 0.9 and age 8
without correction ends at least 0.1 below it), the outcomes (accuracy on held-out problems, one sampled prefix each:
the mean over the last quarter of the run's versions, and over all of them) and what *holds* means (the last quarter's
mean is at least 95 % of that of age 0 with the same correction)."""

import os
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import msgspec

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads are slower than one

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.aged_run import Target
from benchmarks.results import Figure, Report, commit, is_committed, mean_figure, options, t_interval
from benchmarks.staleness_arms import FIGURES, SETTINGS, Arm, Run, Size, config_of, run_arm

CORRECTIONS = ("none", "behaviour", "decoupled")
HOLDS = 0.95
LEARNING_RATE = 5e-4
SWEEP_RATES = (2.5e-4, 5e-4, 1e-3)
SWEEP_SEED = 101
FULL = Size((0, 2, 8, 32), (1, 2, 3), iterations=96, groups=16, problems=128, evaluate_every=4)
QUICK = Size((0, 4), (1,), iterations=12, groups=4, problems=32, evaluate_every=3)


class Kept(msgspec.Struct, frozen=True):
    """A line of what an interrupted benchmark leaves: a run, and the size it was made at."""

    size: Size
    run: Run


def run_all(arms: Sequence[Arm], size: Size, kept: Path) -> list[Run]:
    """One after the other, in one process and with one target.

    Runs of the same arm and size that stand in `kept` are not made again.
    """
    target = Target(config_of(arms[0], size))
    known = kept_runs(kept, size)
    runs = []
    for number, arm in enumerate(arms, start=1):
        if arm in known:
            runs.append(known[arm])
            continue
        run = run_arm(arm, size, target)
        runs.append(run)
        with kept.open("ab") as file:
            file.write(msgspec.json.encode(Kept(size, run)) + b"\n")
        ages = ", ".join(f"{samples} of age {age}" for age, samples in run.ages.items())
        print(
            f"[{number}/{len(arms)}] age {arm.age} {arm.correction} seed {arm.seed} lr {arm.actor_lr:g}: "
            f"trained {ages}; accuracy {run.final:.3f} at the end, {run.area:.3f} throughout; {run.wall_s:.0f} s",
            flush=True,
        )
    return runs


def kept_runs(kept: Path, size: Size) -> dict[Arm, Run]:
    """The runs of this size an interrupted benchmark left, by arm."""
    lines = kept.read_bytes().splitlines() if kept.exists() else []
    found = [msgspec.json.decode(line, type=Kept) for line in lines]
    return {each.run.arm: each.run for each in found if each.size == size}


def of(runs: Sequence[Run], age: int, correction: str) -> list[Run]:
    """The seeds of one cell of the table."""
    return [run for run in runs if (run.arm.age, run.arm.correction) == (age, correction)]


def figures_of(runs: Sequence[Run], size: Size) -> list[Figure]:
    """Per cell.

    Both outcomes against age 0 with the same correction, the paired differences, and what the learner saw.
    """
    found = []
    for correction in CORRECTIONS:
        fresh = of(runs, 0, correction)
        for age in size.ages:
            cell, where = of(runs, age, correction), f"{correction}, age {age}"
            for name in ("final", "area"):
                mine = [getattr(run, name) for run in cell]
                theirs = [getattr(run, name) for run in fresh]
                label = f"age 0, {correction}"
                found.append(mean_figure(f"{name} accuracy, {where}", "share of problems", mine, theirs, label))
                gaps = [a - b for a, b in zip(mine, theirs, strict=True)]
                found.append(mean_figure(f"{name} accuracy less that of age 0, {where}", "share of problems", gaps))
            for name in FIGURES:
                seen = [run.figures[name] for run in cell if name in run.figures]
                if seen:
                    found.append(mean_figure(f"{name}, {where}", "", seen))
            dropped = [float(run.actor_steps_dropped) for run in cell]
            found.append(mean_figure(f"actor steps dropped, {where}", "steps of a run", dropped))
    return found


def holds_to(runs: Sequence[Run], size: Size, correction: str) -> int:
    """The largest age up to which every age of the ablation keeps `HOLDS` of age 0's final accuracy."""
    fresh = statistics.fmean(run.final for run in of(runs, 0, correction))
    held = 0
    for age in size.ages:
        if statistics.fmean(run.final for run in of(runs, age, correction)) < HOLDS * fresh:
            break
        held = age
    return held


def markdown(report: Report, runs: Sequence[Run], size: Size) -> str:
    """The page beside the figures: what was run on what, and the tables."""
    changes = f" with {', '.join(size.changes)}" if size.changes else ""
    steps = runs[0].actor_steps // size.iterations
    return f"""# Staleness ablation{changes}

`python -m benchmarks.staleness_ablation`: the arithmetic example, every sample at exactly the age named, learning
rate {LEARNING_RATE:g}, {size.iterations} iterations of {size.groups} groups in {steps} optimiser steps,
{len(size.seeds)} seeds. Accuracy is on {size.problems} held-out problems, one sampled prefix each: *final* is the mean
over the last quarter of the versions, *throughout* over all. In brackets 95 % intervals of the mean over seeds
(Student's t, which knows no bounds); "less age 0's" is paired by seed.
The second table has means over the iterations after the warm-up.

Commit `{report.commit}`, {report.machine["cores"]} cores of {report.machine["cpu"]}, {report.wall_s:.0f} s.

{table(runs, size)}"""


def table(runs: Sequence[Run], size: Size) -> str:
    """The outcomes, then what the learner saw, one row per cell."""
    outcome = [
        "| age | correction | final accuracy | less age 0's | of age 0's | accuracy throughout | of age 0's |",
        "|---|---|---|---|---|---|---|",
    ]
    seen = [
        "| age | correction | mean p/μ | ESS of p/μ | p/μ over the cap | ratios clipped | KL(p‖θ) | mean abs log p/μ "
        "| entropy | KL to the initial adapter | steps dropped |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for age in size.ages:
        for correction in CORRECTIONS:
            cell, fresh = of(runs, age, correction), of(runs, 0, correction)
            finals, areas = [run.final for run in cell], [run.area for run in cell]
            gaps = [a - b.final for a, b in zip(finals, fresh, strict=True)]
            shares = f"{_share(finals)} | {_share(gaps)} | {_ratio(finals, fresh, 'final')}"
            throughout = f"{_share(areas)} | {_ratio(areas, fresh, 'area')}"
            outcome.append(f"| {age} | {correction} | {shares} | {throughout} |")
            figures = " | ".join(_mean(cell, name) for name in FIGURES[1:])
            dropped = sum(run.actor_steps_dropped for run in cell)
            steps = sum(run.actor_steps for run in cell)
            seen.append(f"| {age} | {correction} | {figures} | {dropped} of {steps} |")
    held = [
        f"- `{correction}` holds {HOLDS:.0%} of its age 0's final accuracy up to age {holds_to(runs, size, correction)}"
        for correction in CORRECTIONS
    ]
    return "\n".join([*outcome, "", *held, "", *seen, ""])


def _share(values: Sequence[float]) -> str:
    mean, (low, high) = t_interval(values)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _ratio(values: Sequence[float], fresh: Sequence[Run], name: str) -> str:
    return f"{statistics.fmean(values) / statistics.fmean(getattr(run, name) for run in fresh):.3f}"


def _mean(cell: Sequence[Run], name: str) -> str:
    found = [run.figures[name] for run in cell if name in run.figures]
    return f"{statistics.fmean(found):.3g}" if found else "not finite"


def draw(runs: Sequence[Run], size: Size, path: Path) -> None:
    """Final accuracy by age with its intervals, and how the oldest ages got there."""
    oldest = [age for age in size.ages if age][-2:]
    figure, axes = pyplot.subplots(1, 1 + len(oldest), figsize=(4.6 * (1 + len(oldest)), 3.9), sharey=True)
    places = range(len(size.ages))
    for index, correction in enumerate(CORRECTIONS):
        colour, shift = f"C{index}", 0.13 * (index - 1)
        cells = [t_interval([run.final for run in of(runs, age, correction)]) for age in size.ages]
        means = [mean for mean, _ in cells]
        reach = [[mean - low for mean, (low, _) in cells], [high - mean for mean, (_, high) in cells]]
        axes[0].errorbar(
            [place + shift for place in places], means, reach, color=colour, marker="o", capsize=3, label=correction
        )
        for axis, age in zip(axes[1:], oldest, strict=True):
            for run in of(runs, age, correction):
                axis.plot(*zip(*run.accuracy, strict=True), color=colour, linewidth=1)
    axes[0].set_xticks(places, [str(age) for age in size.ages])
    axes[0].set_xlabel("age of every sample, in versions")
    axes[0].set_ylabel("accuracy on held-out problems")
    axes[0].set_title("last quarter of the run, 95 % interval")
    axes[0].set_ylim(0, 1.05)
    axes[0].legend(loc="lower left")
    for axis, age in zip(axes[1:], oldest, strict=True):
        for run in of(runs, 0, "none"):
            axis.plot(*zip(*run.accuracy, strict=True), color="0.6", linewidth=1, linestyle=":")
        axis.axvline(age, color="0.8", linewidth=1)
        axis.set_xlabel("version")
        axis.set_title(f"age {age}, each seed (dotted: age 0)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@click.command()
@options
@click.option("--sweep", is_flag=True, help="Only the sweep that fixes the learning rate.")
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the run file over the ablation's own; may be repeated.",
)
@click.option("--seed", "seeds", multiple=True, type=int, help="Instead of the ablation's seeds.")
def main(path: Path, quick: bool, sweep: bool, changes: tuple[str, ...], seeds: tuple[int, ...]) -> None:
    """Measure the cost of the age of samples under each correction."""
    warnings.filterwarnings("ignore")
    size = QUICK if quick else FULL
    size = replace(size, seeds=seeds or size.seeds, changes=changes)
    if sweep:
        arms = [Arm(age, "none", SWEEP_SEED, lr) for lr in SWEEP_RATES for age in (0, 8)]
    else:
        arms = [
            Arm(age, correction, seed, LEARNING_RATE)
            for seed in size.seeds
            for age in size.ages
            for correction in CORRECTIONS
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = commit()
    kept = path.with_suffix(f".{measured}.jsonl")
    if not is_committed(measured):
        kept.unlink(missing_ok=True)
    runs = run_all(arms, size, kept)
    figures = sweep_figures(runs) if sweep else figures_of(runs, size)
    settings = {"size": size, "settings": SETTINGS, "holds_at": HOLDS}
    name = "staleness_sweep" if sweep else "staleness_ablation"
    report = Report(name, quick, settings, figures, runs, measured)
    report.wall_s = round(sum(run.wall_s for run in runs), 1)
    report.write(path)
    kept.unlink()
    if not sweep:
        draw(runs, size, path.with_suffix(".png"))
        text = markdown(report, runs, size)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        print(text)


def sweep_figures(runs: Sequence[Run]) -> list[Figure]:
    """Final accuracy of age 8 against age 0 at each learning rate; one seed, which the ablation does not use."""
    found = []
    for lr in SWEEP_RATES:
        at = {run.arm.age: run.final for run in runs if run.arm.actor_lr == lr}
        label = f"age 0, none, learning rate {lr:g}"
        found.append(
            mean_figure(
                f"final accuracy, none, age 8, learning rate {lr:g}", "share of problems", [at[8]], [at[0]], label
            )
        )
    return found


if __name__ == "__main__":
    main()
