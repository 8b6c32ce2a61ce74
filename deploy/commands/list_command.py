"""`prefixrl list`, `prefixrl compare`: runs side by side, from their files alone."""

from itertools import chain
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from prefixrl.common.errors import UserError
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import metrics_of
from prefixrl.common.worker.command import PATH
from prefixrl.deploy.runs.checkpoints import PLACE, config_of, flat_settings
from prefixrl.deploy.runs.tables import figure, table_of
from prefixrl.deploy.view.run_state import runs_below, state_of

ARM_NAMES = {"untrained_adapter": "adapter@0", "trained_adapter": "adapter, trained"}
LEARNER_FIGURES = (
    "policy_loss",
    "value_loss",
    "entropy",
    "approx_kl",
    "reference_kl",
    "clip_fraction",
    "bounded_fraction",
    "actor_grad_norm",
    "old_ess_fraction",
    "explained_variance",
)
"""Figures that another learner changes on the same samples."""


@click.command("list")
@click.argument("folder", default="runs", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per run.")
def list_runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER (default: runs) with state, reward and accuracy."""
    if as_json:
        for run in runs_below(folder):
            click.echo(msgspec.json.encode(state_of(run)).decode())
    else:
        Console().print(listing(folder))


@click.command()
@click.argument("runs", nargs=-1, required=True, type=PATH)
def compare(runs: tuple[Path, ...]) -> None:
    """Show RUNS side by side: their figures, and the settings in which they differ."""
    Console().print(comparison(list(runs)))


def listing(folder: Path) -> Table:
    """Return a table of the runs in a folder; a run that cannot be read is a row with its fault."""
    rows = []
    for run in runs_below(folder):
        rows.append([str(run.relative_to(folder))])
        try:
            state = state_of(run)
        except UserError as fault:
            rows[-1].append(f"unreadable: {fault}")
            continue
        total = f"/{state.total_iterations}" if state.total_iterations else ""
        figures = map(figure, (state.reward, state.accuracy.get("trained_adapter")))
        rows[-1] += [state.words, f"{state.iterations}{total}", *figures]
    table = table_of(("run", "state", "iterations", "reward", "adapter, trained"), rows)
    # A name that is cut names no run; a long fault is folded instead.
    table.columns[0].no_wrap = True
    return table


def _learner_rows(runs: list[Path]) -> list[list[str]]:
    """Return the figures of the learners in the newest iteration that all have: a replay has no others of its own."""
    lines = [metrics_of(run) for run in runs]
    common = min(len(each) for each in lines) - 1
    if common < 0:
        return []
    columns = [each[common].figures for each in lines]
    rows = [["the learner in iteration", *(str(common) for _ in runs)]]
    return rows + [
        [name, *(_short(column.get(name)) for column in columns)]
        for name in LEARNER_FIGURES
        if any(name in column for column in columns)
    ]


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def comparison(runs: list[Path]) -> Table:
    """Return a column per run: state, figures, and the settings that differ."""
    for run in runs:
        check_format(run)
    states = [state_of(run) for run in runs]
    settings = [flat_settings(config_of(run, ()).model_dump(mode="json")) for run in runs]
    has_replay = any(state.replay_of for state in states)
    rows = [
        ["state", *(state.state for state in states)],
        ["iterations", *(str(state.iterations) for state in states)],
        ["reward of the newest iteration", *(figure(state.reward) for state in states)],
    ]
    if has_replay:
        rows.insert(1, ["replay of", *(state.replay_of for state in states)])
        rows += _learner_rows(runs)
    for arm in dict.fromkeys(chain.from_iterable(state.accuracy for state in states)):
        name = ARM_NAMES.get(arm, arm)
        rows.append([f"accuracy, {name}", *(figure(state.accuracy.get(arm)) for state in states)])
    for key in dict.fromkeys(chain.from_iterable(settings)):
        values = [setting.get(key, "") for setting in settings]
        if key.split(".")[0] not in PLACE and len(set(values)) > 1:
            rows.append([key, *values])
    return table_of(("", *(state.directory for state in states)), rows)
