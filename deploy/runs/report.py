"""The result of a run: a table and a page. Made again from files alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from prefixrl.common.errors import ConfigError, UserError, to_copy
from prefixrl.common.evaluation.accuracy import EvaluatedRow, means_by_problem
from prefixrl.common.evaluation.plans import GREEDY, SAMPLED
from prefixrl.common.host.process import printable, write_atomically
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import STARTS_FILE, StartLine, check_format
from prefixrl.common.run.documents import (
    ARMS,
    METRICS_FILE,
    SUMMARY_FILE,
    MetricsLine,
    Summary,
    alarm_spans,
    alarm_words,
)
from prefixrl.deploy.runs.eval_table import PAIR_COLUMNS, PAIR_NOTE, pair_figures
from prefixrl.deploy.runs.inspect import TrainedGroup, trained_groups
from prefixrl.deploy.runs.report_page import Cells, PageContent, file_text, page
from prefixrl.deploy.runs.samples import Common, SampleText, commonest, decoder, texts_of
from prefixrl.deploy.runs.tables import table_of

SAMPLES = 8


@click.command()
@click.argument("run_directory", type=click.Path(path_type=Path))
def report(run_directory: Path) -> None:
    """Write report.html into RUN_DIRECTORY and print its table."""
    write_report(run_directory)
    print_table(run_directory)


def read(directory: Path) -> tuple[Summary | None, list[MetricsLine]]:
    """Return the summary, if written, and all metrics lines; raise ConfigError or DataError."""
    check_format(directory)
    path, metrics = directory / SUMMARY_FILE, directory / METRICS_FILE
    if not metrics.exists():
        raise ConfigError(f"{directory} holds no run that trained anything (no file {metrics})")
    return json_lines.document(path, Summary), json_lines.read(metrics, MetricsLine)


def write_report(directory: Path) -> None:
    """Write report.html."""
    summary, lines = read(directory)
    write_atomically(directory / "report.html", page(_content(summary, lines, directory)))


def print_table(directory: Path) -> None:
    """Print the arms and the path of the run."""
    summary, lines = read(directory)
    console = Console()
    for alarm in alarm_spans(lines):
        console.print(printable(alarm_words(alarm)), highlight=False, markup=False, soft_wrap=True)
    if summary is None:
        console.print(f"{len(lines)} iterations trained, not finished; {directory}", highlight=False)
        return
    if not summary.accuracy and not summary.evaluations_incomplete:
        console.print("nothing was judged: the run has no held-out problems (data.eval)", highlight=False)
    for columns, rows in _tables(summary) if summary.accuracy else ():
        console.print(table_of(columns, rows, no_wrap=True))
    for name, value in _facts(summary):
        console.print(printable(f"{name}: {value}"), highlight=False, markup=False)
    told = f"everything is in {directory}; {to_copy('prefixrl samples', directory)} shows what the adapter wrote"
    console.print(told, highlight=False, markup=False, soft_wrap=True)


def _tables(summary: Summary) -> list[Cells]:
    """Return the table of arms and that of families, if any, with "" for what was not judged."""
    arms = []
    for arm in (arm for arm in ARMS if arm in summary.accuracy):
        low, high = summary.accuracy_ci95[arm]
        sampled = f"{summary.accuracy_sampled[arm]:.3f}" if arm in summary.accuracy_sampled else ""
        accuracy, interval = f"{summary.accuracy[arm]:.3f}", f"{low:.3f} to {high:.3f}"
        arms.append([arm_name(arm, summary.versions), accuracy, interval, sampled])
    found: list[Cells] = [(("arm", "greedy", "95% interval", "sampled"), arms)]
    shares = summary.accuracy_by_family
    if families := sorted({family for each in shares.values() for family in each}):
        cells = {arm: {name: f"{share:.2f}" for name, share in shares[arm].items()} for arm in ARMS if arm in shares}
        rows = [
            [arm_name(arm, summary.versions), *(each.get(name, "") for name in families)] for arm, each in cells.items()
        ]
        found.append((("arm, greedy", *families), rows))
    return found


def arm_name(arm: str, versions: int) -> str:
    """Return an arm's name in tables, as in those of `prefixrl eval`: with the version."""
    return {"untrained_adapter": "adapter@0", "trained_adapter": f"adapter@{versions}"}.get(arm, arm)


def _facts(summary: Summary) -> list[tuple[str, str]]:
    groups = ", ".join(f"{count} {name}" for name, count in summary.groups.items())
    busy = ", ".join(f"{role} {share:.0%}" for role, share in summary.busy_fraction.items())
    ages = summary.staleness
    engines = ", ".join(f"{role} {engine}" for role, engine in summary.engine.items())
    fixed = [("best fixed prefix", repr(summary.fixed_prefix))]
    means = [arm_name(arm, summary.versions) for arm in ARMS if summary.accuracy_interval.get(arm) == "bootstrap"]
    missing = summary.evaluations_incomplete
    crossed = f"{_counted(ages.token_histogram)}; {ages.crossed_fraction:.1%} of the rows crossed an update"
    return [
        *([("means of rewards, with bootstrap intervals", ", ".join(means))] if means else []),
        *([("evaluations that are incomplete", ", ".join(missing))] if missing else []),
        ("held-out problems", str(summary.eval_problems)),
        *(fixed if "fixed_prefix" in summary.accuracy else []),
        ("trained rows cut by the length limit", f"{summary.truncated_fraction:.1%}"),
        ("groups", groups),
        (
            "trained groups by age in versions",
            f"{_counted(ages.histogram)} (mean {ages.mean_trained:.2f}, window {ages.window}, "
            f"admission {ages.admission})",
        ),
        *([("trained tokens by age in versions", crossed)] if ages.crossed_fraction else []),
        ("versions", f"{summary.versions}, {summary.optimizer_steps} optimiser steps"),
        *([("uploads", _counted(summary.uploads))] if summary.uploads else []),
        ("busy", busy),
        ("engines", engines),
        *([("the target's endpoint", str(summary.endpoint))] if summary.endpoint else []),
        ("time", f"{summary.wall_s:.0f} s; a publication held the learner up for {summary.publish_s:.2g} s"),
    ]


def _counted(histogram: dict[str, int]) -> str:
    return ", ".join(f"{age}: {count}" for age, count in histogram.items())


def _content(summary: Summary | None, lines: Sequence[MetricsLine], directory: Path) -> PageContent:
    """Gather what the page shows."""
    config = file_text(directory / "config.json")
    state = f"{len(lines)} iterations trained, {'finished' if summary else 'not finished'}; {directory.resolve()}"
    tables = []
    if summary:
        names = (("Held-out problems", ""), ("Held-out problems by family", ""))
        tables = [(*name, cells) for name, cells in zip(names, _tables(summary), strict=False)]
        tables += _differences(summary, directory)
    texts = _texts(directory, lines[-1].iteration if lines else 0)
    return PageContent(
        title=directory.resolve().name, state=state, lines=lines,
        judged=summary.accuracy_by_version if summary else [], tables=tables,
        facts=[*_models(config), *(_facts(summary) if summary else [])], alarms=alarm_spans(lines),
        early=texts.early, late=texts.late, common=texts.common, no_samples=texts.fault,
        starts=json_lines.read(directory / STARTS_FILE, StartLine), config=config,
    )  # fmt: skip


def _models(config: str) -> list[tuple[str, str]]:
    if not config:
        return []
    document: dict[str, Any] = msgspec.json.decode(config)
    named = {role: (document.get(role) or {}).get("model") for role in ("adapter", "target")}
    return [(role, str(model)) for role, model in named.items() if model]


def _differences(summary: Summary, directory: Path) -> list[tuple[str, str, Cells]]:
    """Return the table of the arms' paired differences, from the judged answers."""
    rows = []
    for decoding in (GREEDY, SAMPLED):
        files = {arm: directory / "evaluations" / f"{arm}.{decoding}.jsonl" for arm in ARMS if arm in summary.accuracy}
        means = {arm: means_by_problem(json_lines.read(path, EvaluatedRow)) for arm, path in files.items()}
        for one, other in combinations(means, 2):
            if figures := pair_figures(means[other], means[one]):
                rows.append([decoding, arm_name(other, summary.versions), arm_name(one, summary.versions), *figures])
    return [("Paired differences", PAIR_NOTE, (PAIR_COLUMNS[1:], rows))] if rows else []


class _Texts(msgspec.Struct):
    """Samples of a run, or why there are none."""

    early: list[SampleText] = []
    late: list[SampleText] = []
    common: list[Common] = []
    fault: str = ""


def _texts(directory: Path, last: int) -> _Texts:
    """Read the journal once, and hold little of it: it may be larger than the memory."""
    found = _Texts()
    try:
        decode = decoder(directory)
        found.common = commonest(_watched(trained_groups(directory), last, decode, found), last, decode)
    except (UserError, OSError) as fault:
        return _Texts(fault=f"no samples: {fault}")
    return found if found.common else _Texts(fault="no samples: nothing is trained yet")


def _watched(
    groups: Iterable[TrainedGroup], last: int, decode: Callable[[list[int]], str], found: _Texts
) -> Iterator[TrainedGroup]:
    """Yield all groups; keep samples of the first and of the last iteration."""
    first = None
    for group in groups:
        first = group.version_trained if first is None else first
        for iteration, kept in ((first, found.early), (last, found.late)):
            is_other = kept is found.early or last > first
            if group.version_trained == iteration and is_other and group.rows and len(kept) < SAMPLES:
                kept.append(texts_of(group, decode)[0])
        yield group
