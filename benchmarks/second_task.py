"""Cost of age under each correction on a task that nothing was tuned to, beside a plain loop.

    python -m benchmarks.second_task --json FILE

FILE.md and FILE.png are written beside it. Where it was interrupted, the same command goes on (`kept.py`).

The task and how it was fixed: `openings/__init__.py`; what counts as collapsed: `openings/arms.py`. In the product
every sample has exactly the age of its setting (`aged_run.py`), the worst that a window of S = age versions allows. The
plain loop (`plain_grpo.py`) is the yardstick: without staleness both must end at the same reward."""

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
from benchmarks.kept import TRAINING, KeptRuns
from benchmarks.openings.arms import RUN_FILE, Outcome, Setting, Size, config_of, run_arm
from benchmarks.results import Figure, Report, commit, mean_figure, options, t_interval
from benchmarks.staleness_arms import FORMS
from prefixrl.common.config.run import RunConfig
from prefixrl.learner.training.objectives import resolve

FRESH = "product, S = 0"
SETTINGS = {
    FRESH: Setting(0),
    "plain loop, no delay": Setting(0, is_plain=True),
    "plain loop, delay 2": Setting(2, is_plain=True),
    "product, S = 2, default": Setting(2),
    "product, S = 8, default": Setting(8),
    "product, S = 32, default": Setting(32),
    **{
        f"product, S = {age}, {form}": Setting(
            age, tuple(f"algorithm.{key}" for key in FORMS[form])
        )
        for form in (
            "none",
            "behaviour",
            "decoupled",
            "none, bounded",
            "decoupled, bounded",
        )
        for age in (2, 8)
    },
}
"""Everything that is compared, by name. Two names of one resolved loss share their runs."""
FULL = Size(tuple(range(1, 9)), iterations=300, heldout=128, evaluate_every=10)
QUICK = Size((1, 2), iterations=20, heldout=32, evaluate_every=10)


PROGRAM = (
    *TRAINING,
    "benchmarks/openings/*.py",
    "deploy/examples/letters/*.py",
    "benchmarks/plain_grpo.py",
)


def run_all(
    settings: dict[str, Setting], size: Size, run_file: Path, kept: KeptRuns[Outcome]
) -> list[Outcome]:
    """Every seed of every setting, seeds outermost, in one process and with one target."""
    target, outcomes = None, []
    for seed in size.seeds:
        for name, setting in settings.items():
            config = config_of(run_file, setting, seed, size)
            key = key_of(config, setting, size)
            run = kept.get(key)
            if run is None:
                target = target or Target(config)
                run = run_arm(name, setting, config, size, target)
                kept.add(key, run)
                print(_line(run), flush=True)
            outcomes.append(msgspec.structs.replace(run, setting=name))
    return outcomes


def key_of(config: RunConfig, setting: Setting, size: Size) -> tuple[object, ...]:
    """Return everything that a run follows from but the program: the resolved loss, not the names of its keys."""
    algorithm = config.algorithm
    shape = (
        algorithm.groups_per_iteration,
        algorithm.samples_per_prompt,
        algorithm.minibatches,
        algorithm.ppo_epochs,
    )
    loss = None if setting.is_plain else resolve(algorithm, config.max_sampled_tokens)
    once = (
        config.learner,
        config.rollout.temperature,
        size.iterations,
        size.heldout,
        size.evaluate_every,
    )
    return (setting.is_plain, algorithm.max_staleness, config.seed, *shape, loss, *once)


def _line(run: Outcome) -> str:
    collapsed = ", collapsed" if run.is_collapsed else ""
    return (
        f"{run.setting}, seed {run.seed}: reward {run.heldout[0][1]:.3f} -> {run.final:.3f}, least ESS "
        f"{run.least_ess:.3f} in iteration {run.least_ess_at}{collapsed}; {run.wall_s:.0f} s"
    )


def of(outcomes: Sequence[Outcome], setting: str) -> list[Outcome]:
    """The seeds of a setting, in order."""
    return sorted(
        (each for each in outcomes if each.setting == setting), key=lambda each: each.seed
    )


def less_fresh(outcomes: Sequence[Outcome], setting: str) -> list[float]:
    """Final reward less that of the product at S = 0 with the same seed."""
    fresh = {each.seed: each.final for each in of(outcomes, FRESH)}
    return [each.final - fresh[each.seed] for each in of(outcomes, setting) if each.seed in fresh]


def figures_of(outcomes: Sequence[Outcome], names: Sequence[str]) -> list[Figure]:
    """Per setting: final reward, the same less that of S = 0, least ESS, share of collapsed runs."""
    found = []
    for name in names:
        cell, gaps = of(outcomes, name), less_fresh(outcomes, name)
        found.append(
            mean_figure(f"final reward, {name}", "share of letters", [each.final for each in cell])
        )
        if gaps and name != FRESH:
            found.append(
                mean_figure(f"final reward less that of S = 0, {name}", "share of letters", gaps)
            )
        found.append(
            mean_figure(
                f"least ESS of an iteration, {name}", "share", [each.least_ess for each in cell]
            )
        )
        found.append(
            mean_figure(
                f"collapsed, {name}", "share of runs", [float(each.is_collapsed) for each in cell]
            )
        )
    return found


def markdown(outcomes: Sequence[Outcome], names: Sequence[str], size: Size, report: Report) -> str:
    """The page beside the figures: what was run, and the table."""
    changes = f" with {', '.join(size.changes)}" if size.changes else ""
    lines = [
        "| setting | final reward | less that of S = 0 | worst seed | least ESS: mean, worst seed | collapsed |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        cell, gaps = of(outcomes, name), less_fresh(outcomes, name)
        finals, least = [each.final for each in cell], [each.least_ess for each in cell]
        paired = _interval(gaps) if gaps and name != FRESH else "-"
        collapsed = f"{sum(each.is_collapsed for each in cell)} of {len(cell)}"
        ess = f"{statistics.fmean(least):.3f}, {min(least):.3f}"
        lines.append(
            f"| {name} | {_interval(finals)} | {paired} | {min(finals):.3f} | {ess} | {collapsed} |"
        )
    body = "\n".join(lines)
    return f"""# A second task{changes}

`python -m benchmarks.second_task`: the letters example (`benchmarks/openings`), {size.iterations} iterations,
{len(size.seeds)} seeds, every sample at exactly the age S of its setting. Rewards are on {size.heldout} held-out
questions, one sampled prefix each; *final* is the mean over the last quarter of the versions. In brackets 95 %
intervals of the mean over seeds (Student's t); "less that of S = 0" is paired by seed. ESS: of the ratios of the
trained policy to the one that sampled, as a share of their number, the least of any iteration.

Commit `{report.commit}`, {report.machine["cores"]} cores of {report.machine["cpu"]}, {report.wall_s:.0f} s.

{body}
"""


def _interval(values: Sequence[float]) -> str:
    mean, (low, high) = t_interval(values)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def draw(outcomes: Sequence[Outcome], names: Sequence[str], path: Path) -> None:
    """Held-out reward by version, a panel per setting, a line per seed; collapsed runs red."""
    columns = 4
    rows = -(-len(names) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.4 * columns, 2.6 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        for run in of(outcomes, name):
            axis.plot(
                *zip(*run.heldout, strict=True),
                color="C3" if run.is_collapsed else "C0",
                linewidth=1,
            )
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1.05)
    figure.supxlabel("version")
    figure.supylabel("reward on held-out questions")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


@click.command()
@options
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only settings whose name contains this; may be repeated.",
)
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    type=int,
    help="Instead of the benchmark's seeds; may be repeated.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the run file, for all that is compared; may be repeated.",
)
def main(
    path: Path, quick: bool, only: tuple[str, ...], seeds: tuple[int, ...], changes: tuple[str, ...]
) -> None:
    """Compare the product with a plain loop, and ages and corrections with none."""
    warnings.filterwarnings("ignore")
    size = QUICK if quick else FULL
    size = replace(size, seeds=seeds or size.seeds, changes=changes)
    settings = {
        name: each
        for name, each in SETTINGS.items()
        if not only or any(part in name for part in only)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    measured, kept = commit(), KeptRuns(path, Outcome, PROGRAM)
    outcomes = run_all(settings, size, RUN_FILE, kept)
    figures = figures_of(outcomes, list(settings))
    report = Report(
        "second_task", quick, {"size": size, "settings": settings}, figures, outcomes, measured
    )
    report.wall_s = round(sum(run.wall_s for run in outcomes), 1)
    report.write(path)
    kept.remove()
    draw(outcomes, list(settings), path.with_suffix(".png"))
    text = markdown(outcomes, list(settings), size, report)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
