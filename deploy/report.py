"""The result of a run: a table, the reward curve, a page. Made anew from files alone."""

import base64
import html
import math
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Column, Table

from prefixrl.common.errors import ConfigError
from prefixrl.common.process import printable
from prefixrl.common.run import json_lines
from prefixrl.common.run.accuracy import Point
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import ARMS, METRICS_FILE, SUMMARY_FILE, MetricsLine, Summary

SMOOTHED_OVER = 8
STYLE = "body{font:16px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}img{max-width:100%}"
Cells = tuple[tuple[str, ...], list[list[str]]]
"""Columns and rows of a table."""


def read(directory: Path) -> tuple[Summary | None, list[MetricsLine]]:
    """Return the summary, if written, and all metrics lines; raise ConfigError or DataError."""
    check_format(directory)
    path, metrics = directory / SUMMARY_FILE, directory / METRICS_FILE
    if not metrics.exists():
        raise ConfigError(f"{directory} holds no run that trained anything (no file {metrics})")
    summary = msgspec.json.decode(path.read_bytes(), type=Summary) if path.exists() else None
    return summary, json_lines.read(metrics, MetricsLine)


def write_report(directory: Path) -> None:
    """Write reward.png and report.html."""
    summary, lines = read(directory)
    _draw(lines, summary.accuracy_by_version if summary else [], directory / "reward.png")
    (directory / "report.html").write_text(_page(summary, directory), encoding="utf-8")


def print_table(directory: Path) -> None:
    """Print the arms and the path of the run."""
    summary, lines = read(directory)
    console = Console()
    if summary is None:
        console.print(f"{len(lines)} iterations trained, not finished; {directory}", highlight=False)
        return
    for columns, rows in _tables(summary):
        table = Table(*(Column(name, no_wrap=True) for name in columns), box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for name, value in _facts(summary):
        console.print(printable(f"{name}: {value}"), highlight=False, markup=False)
    console.print(f"everything is in {directory}", highlight=False, markup=False)


def _tables(summary: Summary) -> list[Cells]:
    """Return the table of arms and that of families, if any, with "" for what was not judged."""
    arms = []
    for arm in (arm for arm in ARMS if arm in summary.accuracy):
        low, high = summary.accuracy_ci95[arm]
        sampled = f"{summary.accuracy_sampled[arm]:.3f}" if arm in summary.accuracy_sampled else ""
        arms.append([arm, f"{summary.accuracy[arm]:.3f}", f"{low:.3f} to {high:.3f}", sampled])
    found: list[Cells] = [(("arm", "greedy", "95% interval", "sampled"), arms)]
    shares = summary.accuracy_by_family
    if families := sorted({family for each in shares.values() for family in each}):
        cells = {arm: {name: f"{share:.2f}" for name, share in shares[arm].items()} for arm in ARMS if arm in shares}
        rows = [[arm, *(each.get(name, "") for name in families)] for arm, each in cells.items()]
        found.append((("arm, greedy", *families), rows))
    return found


def _facts(summary: Summary) -> list[tuple[str, str]]:
    groups = ", ".join(f"{count} {name}" for name, count in summary.groups.items())
    busy = ", ".join(f"{role} {share:.0%}" for role, share in summary.busy_fraction.items())
    ages = summary.staleness
    engines = ", ".join(f"{role} {engine}" for role, engine in summary.engine.items())
    fixed = [("best fixed prefix", repr(summary.fixed_prefix))]
    means = [arm for arm in ARMS if summary.accuracy_interval.get(arm) == "bootstrap"]
    missing = summary.evaluations_incomplete
    crossed = f"{ages.token_histogram}; {ages.crossed_fraction:.1%} of the rows crossed an update"
    return [
        *([("mean reward, with a bootstrap interval", ", ".join(means))] if means else []),
        *([("evaluations that are incomplete", ", ".join(missing))] if missing else []),
        ("held-out problems", str(summary.eval_problems)),
        *(fixed if "fixed_prefix" in summary.accuracy else []),
        ("trained rows cut by the length limit", f"{summary.truncated_fraction:.1%}"),
        ("groups", groups),
        (
            "trained groups by age in versions",
            f"{ages.histogram} (mean {ages.mean_trained:.2f}, window {ages.window}, admission {ages.admission})",
        ),
        *([("trained tokens by age in versions", crossed)] if ages.crossed_fraction else []),
        ("versions", f"{summary.versions}, {summary.optimizer_steps} optimiser steps"),
        ("busy", busy),
        ("engines", engines),
        *([("the target's endpoint", str(summary.endpoint))] if summary.endpoint else []),
        ("time", f"{summary.wall_s:.0f} s; a publication held the learner up for {summary.publish_s:.2g} s"),
    ]


def _draw(lines: list[MetricsLine], evaluated: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1, 1))
    iterations = [line.iteration for line in lines]
    rewards = [line.figures["reward"] for line in lines]
    recent = [rewards[max(0, end - SMOOTHED_OVER) : end] for end in range(1, len(rewards) + 1)]
    smooth = [sum(each) / len(each) for each in recent]
    top.plot(iterations, rewards, color="0.75", linewidth=1, label="mean reward of an iteration")
    top.plot(iterations, smooth, color="tab:blue", label=f"mean of the last {SMOOTHED_OVER}")
    if evaluated:
        versions, shares = [point.version for point in evaluated], [point.accuracy for point in evaluated]
        below = [point.accuracy - point.ci95[0] for point in evaluated]
        above = [max(0.0, point.ci95[1] - point.accuracy) for point in evaluated]
        label = "held out, greedy, 95%"
        top.errorbar(versions, shares, [below, above], fmt="o", color="tab:green", markersize=4, label=label)
    top.set_ylim(0, 1.02)
    top.set_ylabel("reward")
    top.legend(loc="lower right")
    middle.plot(iterations, [line.mean_age for line in lines], color="tab:orange")
    middle.set_ylabel("mean age, versions")
    worth = [line.figures.get("old_ess_fraction", math.nan) for line in lines]
    bottom.plot(iterations, worth, color="tab:green")
    bottom.set_ylim(0, 1.05)
    bottom.set_ylabel("ESS of old samples")
    bottom.set_xlabel("iteration")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _page(summary: Summary | None, directory: Path) -> str:
    image = base64.b64encode((directory / "reward.png").read_bytes()).decode()
    title = html.escape(directory.name)
    body = [f"<h1>{title}</h1>"]
    if summary is not None:
        body += [_html_table(*cells) for cells in _tables(summary)]
        facts = "".join(f"<li>{name}: {html.escape(value)}</li>" for name, value in _facts(summary))
        body.append(f"<ul>{facts}</ul>")
    body.append(f'<img alt="reward" src="data:image/png;base64,{image}">')
    return f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>{''.join(body)}"


def _html_table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
