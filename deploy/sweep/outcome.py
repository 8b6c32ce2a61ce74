"""The table of a sweep: every run with its state and accuracy, and means over seeds.

Accuracy is greedy, on the held-out problems. The best evaluation of a run was chosen by those problems and is too high
for it; means are over the last versions, which nothing chose.
"""

from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from rich.table import Table

from prefixrl.common.config.load import CONFIG_FILE
from prefixrl.common.config.section import toml
from prefixrl.common.errors import UserError
from prefixrl.common.evaluation.accuracy import EvaluatedRow, accuracy, over_runs
from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.run import json_lines
from prefixrl.common.run.documents import summary_of
from prefixrl.deploy.runs.tables import console, figure, interval, table_of
from prefixrl.deploy.sweep.grid import Sweep, SweptRun, Values
from prefixrl.deploy.view.run_state import state_of

TRAINED, SEED = "trained_adapter", "seed"


@dataclass(frozen=True)
class RunResult:
    """State and accuracy of a run, as far as they are known."""

    run: SweptRun
    state: str = "not begun"
    iterations: str = ""
    best: tuple[float, int] | None = None
    """Highest accuracy of a version that was trained, and the version."""
    last: float | None = None
    """Accuracy of a finished run's last version."""


def run_result(run: SweptRun) -> RunResult:
    """Read a run; the state of an unreadable run is its fault."""
    if not (run.directory / CONFIG_FILE).exists():
        return RunResult(run)
    try:
        state = state_of(run.directory)
        judged = _judged(run.directory)
    except UserError as fault:
        return RunResult(run, f"unreadable: {fault}")
    total = f"/{state.total_iterations}" if state.total_iterations else ""
    pairs = [(score, version) for version, score in sorted(judged.items())]
    best = max(pairs, key=itemgetter(0), default=None)
    iterations = f"{state.iterations}{total}"
    return RunResult(run, state.state, iterations, best, state.accuracy.get(TRAINED))


def _judged(directory: Path) -> dict[int, float]:
    """Return the accuracy by version of the trained adapter, as far as it is judged."""
    judged: dict[int, float] = {}
    for path in (directory / "evaluations").glob("adapter@*.greedy.jsonl"):
        if score := accuracy(json_lines.read(path, EvaluatedRow)):
            judged[int(path.name.removeprefix("adapter@").partition(".")[0])] = score.accuracy
    if summary := summary_of(directory):
        judged |= {
            point.version: point.accuracy for point in summary.accuracy_by_version if point.version
        }
    return judged


def tables(sweep: Sweep) -> list[Table]:
    """Return the table of the runs by the keys in which they differ. Add means over seeds if seeds differ."""
    results = [run_result(run) for run in sweep.runs]
    keys = dict.fromkeys(key for run in sweep.runs for key in run.values)
    # Keys with one value in all runs tell no run from another.
    axes = [key for key in keys if len({toml(run.values.get(key)) for run in sweep.runs}) > 1]
    judged = [result.best for result in results if result.best]
    winner = max(judged, key=itemgetter(0), default=None)
    rows = [
        [
            str(result.run.index),
            *_cells(result.run.values, axes),
            result.state,
            result.iterations,
            _best_cell(result, winner),
            figure(result.last),
        ]
        for result in results
    ]
    runs = table_of(["run", *axes, "state", "iterations", "best (version)", "last"], rows)
    seeds = _over_seeds(results, [axis for axis in axes if axis != SEED])
    return [runs, seeds] if seeds.row_count else [runs]


def _best_cell(result: RunResult, winner: tuple[float, int] | None) -> str:
    if result.best is None:
        return ""
    accuracy, version = result.best
    return f"{accuracy:.3f} ({version}){' *' if result.best == winner else ''}"


def print_tables(sweep: Sweep) -> None:
    """Print both tables."""
    for table in tables(sweep):
        console().print(table)


def _over_seeds(results: list[RunResult], axes: list[str]) -> Table:
    """Return a line per setting that several finished runs share, the best mean first."""
    groups = grouped(
        (
            frozenset((key, toml(value)) for key, value in each.run.values.items() if key != SEED),
            each,
        )
        for each in results
        if each.last is not None
    )
    rows = []
    several = [
        (over_runs([each.last or 0.0 for each in group]), group)
        for group in groups.values()
        if len(group) > 1
    ]
    for (mean, ends), group in sorted(several, key=lambda pair: -pair[0][0]):
        numbers = ", ".join(str(each.run.index) for each in group)
        settings = _cells(group[0].run.values, axes)
        rows.append([numbers, *settings, figure(mean), interval(ends)])
    return table_of(["runs", *axes, "mean of last", "95% t-interval"], rows)


def _cells(values: Values, axes: list[str]) -> list[str]:
    return [toml(values[axis]) if axis in values else "" for axis in axes]
