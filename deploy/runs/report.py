"""The result of a run: a table and a page. Made again from files alone."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from prefixrl.common.errors import ConfigError, UserError, to_copy
from prefixrl.common.evaluation.accuracy import (
    Difference,
    EvaluatedRow,
    Point,
    accuracy,
    difference,
    means_by_problem,
)
from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.evaluation.plans import GREEDY, SAMPLED
from prefixrl.common.host.process import write_atomically
from prefixrl.common.run import documents, json_lines
from prefixrl.common.run.directory_format import STARTS_FILE, StartLine, check_format
from prefixrl.common.run.replay import plan_of
from prefixrl.deploy.runs.checkpoints import flat_settings, run_directory_argument
from prefixrl.deploy.runs.curves import Curves
from prefixrl.deploy.runs.eval_table import PAIR_COLUMNS, PAIRS_NOTE, pair_figures
from prefixrl.deploy.runs.inspect import TrainedGroup, trained_groups
from prefixrl.deploy.runs.report_page import page
from prefixrl.deploy.runs.samples import SAMPLES, ShownSamples, commonest, decoder, shown_samples
from prefixrl.deploy.runs.tables import cell, counted, figure, interval, table_of

CHANCE = 0.05
"""Most chance of so unequal numbers of problems at which a gain or a loss is shown."""
Cells = tuple[Sequence[str], Sequence[Sequence[str]]]


@click.command()
@run_directory_argument
def report(run_directory: Path) -> None:
    """Write report.html into RUN_DIRECTORY and print its table."""
    write_report(run_directory)
    print_table(run_directory)


def read(directory: Path) -> tuple[documents.Summary | None, list[documents.MetricsLine]]:
    """Return the summary, if written, and all metrics lines; raise ConfigError or DataError."""
    check_format(directory)
    metrics = directory / documents.METRICS_FILE
    if not metrics.exists():
        raise ConfigError(f"{directory} holds no run that trained anything (no file {metrics})")
    return documents.summary_of(directory), documents.metrics_of(directory)


def write_report(directory: Path) -> None:
    """Write report.html: the page of the dashboard with all that it shows of the run."""
    summary, lines = read(directory)
    curves = Curves(directory)
    curves.read()
    plan = plan_of(directory)
    replay = f", replay of {plan.source}" if plan else ""
    parts = {
        "state": {
            "state": "finished" if summary else "",
            "iterations": len(lines),
            "words": f"{len(lines)} iterations trained{replay}",
        },
        "page": page_part(directory),
        "alarms": curves.alarms.found,
        "curves": curves.document(),
        "samples": _samples(directory, lines[-1].iteration if lines else 0),
    }
    write_atomically(directory / "report.html", page({directory.resolve().name: parts}))


def print_table(directory: Path) -> None:
    """Print the arms and the path of the run."""
    summary, lines = read(directory)
    console = Console()
    for alarm in documents.alarm_spans(lines):
        console.print(cell(documents.alarm_words(alarm)), soft_wrap=True)
    if summary is None:
        console.print(cell(f"{len(lines)} iterations trained, not finished; {directory}"))
        return
    plan = plan_of(directory)
    if plan:
        judge = to_copy("prefixrl eval", directory)
        console.print(
            cell(
                f"replay of {plan.source}: nothing was sampled or judged; {judge} judges its adapter"
            ),
            soft_wrap=True,
        )
    elif not summary.accuracy and not summary.evaluations_incomplete:
        console.print("nothing was judged: the run has no held-out problems (data.eval)")
    for columns, rows in _tables(summary) if summary.accuracy else ():
        console.print(table_of(columns, rows, no_wrap=True))
    if gain := _gain(summary, directory):
        console.print(cell(gain), soft_wrap=True)
    for name, value in _facts(summary, directory):
        console.print(cell(f"{name}: {value}"))
    command = to_copy("prefixrl samples", plan.source if plan else directory)
    hint = f"everything is in {directory}, report.html is its page; {command} shows what the adapter wrote"
    console.print(cell(hint), soft_wrap=True)


def _tables(summary: documents.Summary) -> list[Cells]:
    """Return the table of arms and that of families, if any, with "" for what was not judged."""
    names = {
        arm: arm_name(arm, summary.versions) for arm in documents.ARMS if arm in summary.accuracy
    }
    arms = [
        [
            name,
            figure(summary.accuracy[arm]),
            interval(summary.accuracy_ci95[arm]),
            figure(summary.accuracy_sampled.get(arm)),
        ]
        for arm, name in names.items()
    ]
    tables: list[Cells] = [(("arm", "greedy", "95% interval", "sampled"), arms)]
    shares = summary.accuracy_by_family
    if families := sorted(set().union(*shares.values())):
        judged = {arm: name for arm, name in names.items() if arm in shares}
        rows = [
            [
                family,
                *(f"{shares[arm][family]:.2f}" if family in shares[arm] else "" for arm in judged),
            ]
            for family in families
        ]
        tables.append((("family, greedy", *judged.values()), rows))
    return tables


def arm_name(arm: str, versions: int) -> str:
    """Return an arm's name in tables, as in those of `prefixrl eval`: with the version."""
    return {"untrained_adapter": "adapter@0", "trained_adapter": f"adapter@{versions}"}.get(
        arm, arm
    )


def _facts(summary: documents.Summary, directory: Path) -> list[tuple[str, str]]:
    busy = ", ".join(f"{role} {share:.0%}" for role, share in summary.busy_fraction.items())
    ages = summary.staleness
    rule = f"mean {ages.mean_trained:.2f}, window {ages.window}, admission {ages.admission}"
    engines = ", ".join(f"{role} {engine}" for role, engine in summary.engine.items())
    fixed = repr(summary.fixed_prefix) if "fixed_prefix" in summary.accuracy else ""
    means = [
        arm_name(arm, summary.versions)
        for arm in documents.ARMS
        if summary.accuracy_interval.get(arm) == "bootstrap"
    ]
    crossed = f"{counted(ages.token_histogram)}; {ages.crossed_fraction:.1%} of the rows crossed an update"
    plan = plan_of(directory)
    publication = f"; a publication held the learner up for {summary.publish_s:.2g} s"
    publication = "" if plan else publication
    facts = {
        "replay of": plan.source if plan else "",
        "ended by cost": summary.ended_by_cost.reason if summary.ended_by_cost else "",
        "means of rewards, with bootstrap intervals": ", ".join(means),
        "evaluations that are incomplete": ", ".join(summary.evaluations_incomplete),
        "families that are answered worse than before training": _fallen_families(
            summary, directory
        ),
        "held-out problems": "" if plan else str(summary.eval_problems),
        "best fixed prefix": fixed,
        "trained rows cut by the length limit": f"{summary.truncated_fraction:.1%}",
        "groups": ", ".join(f"{count} {name}" for name, count in summary.groups.items()),
        "trained groups by age in versions": f"{counted(ages.histogram)} ({rule})",
        "trained tokens by age in versions": crossed if ages.crossed_fraction else "",
        "versions": f"{summary.versions}, {summary.optimizer_steps} optimiser steps",
        "uploads": counted(summary.uploads),
        "busy": busy,
        "engines": engines,
        "the target's endpoint": str(summary.endpoint or ""),
        "drafts of the target": str(summary.drafts or ""),
        "the learner's memory": summary.learner_memory,
        "time": f"{summary.wall_s:.0f} s{publication}",
    }
    return [(name, text) for name, text in facts.items() if text]


def page_part(directory: Path) -> dict[str, object]:
    """Return the part of a run's page that seldom changes; raise DataError for a damaged file."""
    summary = documents.summary_of(directory)
    tables: list[tuple[str, str, Cells]] = []
    if summary and summary.accuracy:
        names = ("Held-out problems", "Held-out problems by family")
        tables = [(name, "", cells) for name, cells in zip(names, _tables(summary), strict=False)]
        tables += _differences(summary, directory)
    path = directory / "config.json"
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    models = [(role, config[role]["model"]) for role in ("adapter", "target") if config.get(role)]
    if start := config.get("adapter", {}).get("init_from"):
        models.insert(1, ("the adapter begins with", start))
    return {
        "directory": str(directory.resolve()),
        "tables": [(name, note, *cells) for name, note, cells in tables],
        "gain": _gain(summary, directory) if summary else "",
        "facts": [*models, *(_facts(summary, directory) if summary else [])],
        "judged": judged_points(directory),
        "starts": json_lines.read(directory / STARTS_FILE, StartLine),
        "settings": list(flat_settings(config).items()),
    }


def judged_points(directory: Path) -> list[Point]:
    """Return the adapter's accuracy by version, as far as it is judged."""
    names = ("untrained_adapter", "adapter@*", "trained_adapter")
    points: dict[int, Point] = {}
    for name in names:
        for path in (directory / "evaluations").glob(f"{name}.{GREEDY}.jsonl"):
            if point := _point(path, path.stat().st_mtime_ns):
                points[point.version] = point
    return [points[version] for version in sorted(points)]


@lru_cache(maxsize=1024)
def _point(path: Path, _mark: int) -> Point | None:
    rows = json_lines.read(path, EvaluatedRow)
    judged = accuracy(rows)
    return Point(rows[0].version, judged.accuracy, judged.ci95) if judged else None


def _means(
    summary: documents.Summary, directory: Path, decoding: str
) -> dict[str, dict[str, float]]:
    """Return the mean reward of each problem by judged arm."""
    means = {}
    for arm in documents.ARMS:
        if arm in summary.accuracy:
            path = directory / "evaluations" / f"{arm}.{decoding}.jsonl"
            means[arm] = means_by_problem(json_lines.read(path, EvaluatedRow))
    return means


def _differences(summary: documents.Summary, directory: Path) -> list[tuple[str, str, Cells]]:
    """Return the table of the arms' paired differences, from the judged answers."""
    rows = []
    for decoding in (GREEDY, SAMPLED):
        means = _means(summary, directory, decoding)
        for baseline, other in combinations(means, 2):
            if figures := pair_figures(means[other], means[baseline]):
                names = (arm_name(arm, summary.versions) for arm in (other, baseline))
                rows.append([decoding, *names, *figures])
    return [("Paired differences", PAIRS_NOTE, (PAIR_COLUMNS[1:], rows))] if rows else []


def _fallen_families(summary: documents.Summary, directory: Path) -> str:
    """Return the families whose greedy accuracy training has lowered beyond chance, in words; "" without any."""
    arms = [arm for arm in ("untrained_adapter", "trained_adapter") if arm in summary.accuracy]
    files = [directory / "evaluations" / f"{arm}.{GREEDY}.jsonl" for arm in arms]
    if len(files) < 2:
        return ""
    before, after = (
        grouped((row.family, row) for row in json_lines.read(path, EvaluatedRow)) for path in files
    )
    return ", ".join(
        f"{family} {fall.mean:+.2f} ({fall.ci95[0]:+.2f} to {fall.ci95[1]:+.2f})"
        for family in sorted(before.keys() & after.keys() - {""})
        if (fall := difference(means_by_problem(after[family]), means_by_problem(before[family])))
        and fall.ci95[1] < 0.0
    )


def _gain(summary: documents.Summary, directory: Path) -> str:
    """Return what the training brought over the untrained adapter, in words; "" where both were not judged."""
    means = _means(summary, directory, GREEDY)
    gain = difference(means.get("trained_adapter", {}), means.get("untrained_adapter", {}))
    return gain_in_words(gain, summary.versions) if gain else ""


def gain_in_words(gain: Difference, versions: int) -> str:
    """Return in a sentence whether training has changed the accuracy on held-out problems. Pure."""
    low, high = gain.ci95
    figures = (
        f"adapter@{versions} less adapter@0 is {gain.mean:+.3f} (95% interval {low:+.3f} to {high:+.3f}; "
        f"by chance {gain.chance:.2g}; {gain.problems} problems, greedy)"
    )
    if gain.chance > CHANCE or low <= 0.0 <= high:
        return (
            f"no gain shown: {figures}. `prefixrl docs your_own_task`, section 9, says what to try"
        )
    return f"{'a gain' if gain.mean > 0 else 'a loss'}: {figures}"


def _samples(directory: Path, last: int) -> ShownSamples:
    """Read the journal once, and hold little of it: it may be larger than the memory."""
    early: list[TrainedGroup] = []
    late: list[TrainedGroup] = []
    try:
        decode = decoder(directory)
        common = commonest(_watched(trained_groups(directory), last, early, late), last, decode)
    except (UserError, OSError) as fault:
        return ShownSamples(fault=f"no samples: {fault}")
    return shown_samples(late or early, decode, common, early if late else ())


def _watched(
    groups: Iterable[TrainedGroup], last: int, early: list[TrainedGroup], late: list[TrainedGroup]
) -> Iterator[TrainedGroup]:
    """Yield all groups; keep some of the first iteration, and all of the last."""
    first = None
    for group in groups:
        first = group.version_trained if first is None else first
        if group.version_trained == first and len(early) < SAMPLES:
            early.append(group)
        elif group.version_trained == last > first:
            late.append(group)
        yield group
