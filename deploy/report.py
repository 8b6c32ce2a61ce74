"""What a run amounts to: a table, the reward curve, a page that holds both. Made from files alone, so it can be made again."""

import base64
import html
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Column, Table

from prefixrl.common import json_lines
from prefixrl.common.accuracy import Point
from prefixrl.common.errors import ConfigError
from prefixrl.common.status import Spent

ARMS = ("no_prefix", "fixed_prefix", "untrained_adapter", "trained_adapter")
SMOOTHED_OVER = 8


class Line(msgspec.Struct):
    """What a report needs of a line of metrics.jsonl."""

    iteration: int
    figures: dict[str, float]
    ages: dict[str, int]
    waited_s: float
    trained_s: float
    since_start_s: float


class Summary(msgspec.Struct):
    """What a report needs of summary.json."""

    run_id: str
    accuracy: dict[str, float]
    accuracy_ci95: dict[str, tuple[float, float]]
    accuracy_sampled: dict[str, float]
    accuracy_by_family: dict[str, dict[str, float]]
    fixed_prefix: str
    eval_problems: int
    groups: dict[str, int]
    staleness: dict[str, object]
    versions: int
    optimizer_steps: int
    busy_fraction: dict[str, float]
    engine: dict[str, str]
    wall_s: float
    truncated_fraction: float = 0.0
    accuracy_interval: dict[str, str] = {}
    """`bootstrap` where some reward of the arm was neither 0 nor 1; Wilson's else."""
    evaluations_incomplete: list[str] = []
    accuracy_by_version: list[Point] = []
    endpoint: Spent | None = None


def read(directory: Path) -> tuple[Summary | None, list[Line]]:
    """The summary, None while the run is not finished, and every whole metrics line.

    Raises:
        ConfigError: there is no run.
        DataError: a metrics line before the last one is damaged.
    """
    path, metrics = directory / "summary.json", directory / "metrics.jsonl"
    if not metrics.exists():
        raise ConfigError(f"{directory} holds no run that trained anything (no file {metrics})")
    summary = msgspec.json.decode(path.read_bytes(), type=Summary) if path.exists() else None
    return summary, json_lines.read(metrics, Line)


def write_report(directory: Path) -> None:
    """Write reward.png and report.html."""
    summary, lines = read(directory)
    _draw(lines, summary.accuracy_by_version if summary else [], directory / "reward.png")
    (directory / "report.html").write_text(_page(summary, directory), encoding="utf-8")


def print_table(directory: Path) -> None:
    """Print the arms and where everything lies."""
    summary, lines = read(directory)
    console = Console()
    if summary is None:
        console.print(
            f"{len(lines)} iterations trained, not finished; {directory}", highlight=False
        )
        return
    console.print(_table(("arm", "greedy", "95% interval", "sampled"), _arm_rows(summary)))
    families = _families(summary)
    if families:
        console.print(_table(("arm, greedy", *families), _family_rows(summary)))
    for name, value in _facts(summary):
        console.print(f"{name}: {value}", highlight=False, markup=False)
    console.print(f"everything is in {directory}", highlight=False, markup=False)


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(*(Column(name, no_wrap=True) for name in columns), box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    return table


def _arm_rows(summary: Summary) -> list[list[str]]:
    rows = []
    for arm in (arm for arm in ARMS if arm in summary.accuracy):
        low, high = summary.accuracy_ci95[arm]
        sampled = f"{summary.accuracy_sampled[arm]:.3f}" if arm in summary.accuracy_sampled else ""
        rows.append([arm, f"{summary.accuracy[arm]:.3f}", f"{low:.3f} to {high:.3f}", sampled])
    return rows


def _families(summary: Summary) -> list[str]:
    return sorted({family for each in summary.accuracy_by_family.values() for family in each})


def _family_rows(summary: Summary) -> list[list[str]]:
    """A cell is empty where no problem of the family could be judged."""
    shares = summary.accuracy_by_family
    return [
        [arm, *(f"{shares[arm][name]:.2f}" if name in shares[arm] else "" for name in _families(summary))]
        for arm in ARMS
        if arm in shares
    ]  # fmt: skip


def _facts(summary: Summary) -> list[tuple[str, str]]:
    groups = ", ".join(f"{count} {name}" for name, count in summary.groups.items())
    busy = ", ".join(f"{role} {share:.0%}" for role, share in summary.busy_fraction.items())
    ages = summary.staleness
    engines = ", ".join(f"{role} {engine}" for role, engine in summary.engine.items())
    fixed = [("best fixed prefix", repr(summary.fixed_prefix))]
    means = [arm for arm in ARMS if summary.accuracy_interval.get(arm) == "bootstrap"]
    missing = summary.evaluations_incomplete
    crossed = f"{ages.get('token_histogram')}; {ages.get('crossed_fraction'):.1%} of the rows crossed an update"
    return [
        *([("mean reward, with a bootstrap interval", ", ".join(means))] if means else []),
        *([("evaluations that are incomplete", ", ".join(missing))] if missing else []),
        ("held-out problems", str(summary.eval_problems)),
        *(fixed if "fixed_prefix" in summary.accuracy else []),
        ("trained rows cut by the length limit", f"{summary.truncated_fraction:.1%}"),
        ("groups", groups),
        ("trained groups by age in versions", f"{ages.get('histogram')} (window {ages.get('window')})"),
        *([("trained tokens by age in versions", crossed)] if ages.get("crossed_fraction") else []),
        ("versions", f"{summary.versions}, {summary.optimizer_steps} optimiser steps"),
        ("busy", busy),
        ("engines", engines),
        *([("the target's endpoint", str(summary.endpoint))] if summary.endpoint else []),
        ("time", f"{summary.wall_s:.0f} s"),
    ]  # fmt: skip


def _draw(lines: list[Line], evaluated: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1))
    iterations = [line.iteration for line in lines]
    rewards = [line.figures["reward"] for line in lines]
    smooth = [
        sum(rewards[max(0, end - SMOOTHED_OVER) : end]) / (end - max(0, end - SMOOTHED_OVER))
        for end in range(1, len(rewards) + 1)
    ]
    top.plot(iterations, rewards, color="0.75", linewidth=1, label="mean reward of an iteration")
    top.plot(iterations, smooth, color="tab:blue", label=f"mean of the last {SMOOTHED_OVER}")
    if evaluated:
        shares = [point.accuracy for point in evaluated]
        spread = [[share - point.ci95[0] for share, point in zip(shares, evaluated, strict=True)],
                  [max(0.0, point.ci95[1] - share) for share, point in zip(shares, evaluated, strict=True)]]  # fmt: skip
        versions = [point.version for point in evaluated]
        top.errorbar(
            versions,
            shares,
            spread,
            fmt="o",
            color="tab:green",
            markersize=4,
            label="held out, greedy, 95%",
        )
    top.set_ylim(0, 1.02)
    top.set_ylabel("reward")
    top.legend(loc="lower right")
    ages = [
        sum(int(age) * count for age, count in line.ages.items()) / sum(line.ages.values())
        for line in lines
    ]
    bottom.plot(iterations, ages, color="tab:orange")
    bottom.set_ylabel("mean age, versions")
    bottom.set_xlabel("iteration")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _page(summary: Summary | None, directory: Path) -> str:
    image = base64.b64encode((directory / "reward.png").read_bytes()).decode()
    body = [f"<h1>{html.escape(directory.name)}</h1>"]
    if summary is not None:
        body.append(_html_table(("arm", "greedy", "95% interval", "sampled"), _arm_rows(summary)))
        families = _families(summary)
        body.append(_html_table(("arm, greedy", *families), _family_rows(summary)))
        body.append(
            "<ul>"
            + "".join(f"<li>{name}: {html.escape(value)}</li>" for name, value in _facts(summary))
            + "</ul>"
        )
    body.append(f'<img alt="reward" src="data:image/png;base64,{image}">')
    title = html.escape(directory.name)
    style = "body{font:16px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left}img{max-width:100%}"
    head = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{style}</style>"
    return head + "".join(body)


def _html_table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
