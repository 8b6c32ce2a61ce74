"""`prefixrl list`, `prefixrl compare`: runs side by side, from their files alone."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich import box
from rich.table import Column, Table
from rich.text import Text

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError, Halted, UserError
from prefixrl.common.host.process import printable
from prefixrl.common.run import json_lines
from prefixrl.common.run.directory_format import FORMAT_FILE, check_format
from prefixrl.common.run.documents import END_FILE, SUMMARY_FILE, RunEnd, Summary
from prefixrl.deploy.runs.checkpoints import config_of
from prefixrl.deploy.view.live_view import newest_line

PLACE = ("directory", "launch", "slurm", "broker", "log")
"""Sections that say where a run is, not what it does."""


State = Literal["running", "finished", "stopped", "failed", "killed"]


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """One run, as its files show it."""

    directory: str
    state: State
    """stopped: its learner was asked to, and saved; failed: it ended by an error; killed: it left no word."""
    iterations: int
    """Trained so far."""
    total_iterations: int | None
    """None where the data's epochs end the run, and it has not read its data yet."""
    reward: float | None
    """Mean reward of the newest iteration's samples."""
    accuracy: dict[str, float]
    """By arm, of a finished run."""
    exit_code: int | None = None
    """The exit code that the learner ended with; None while it runs, and where it was killed."""
    reason: str = ""
    """The learner's last words."""


def state_of(run: Path) -> RunFiles:
    """Return the state of one run; raises ConfigError if there is none, or of another release."""
    config = config_of(run, ())
    newest = newest_line(run)
    summary = json_lines.document(run / SUMMARY_FILE, Summary)
    is_running = is_locked(run)
    end = None if is_running else json_lines.document(run / END_FILE, RunEnd)
    total = config.algorithm.iterations or _iterations_by_epochs(run, config)
    # A run that was extended has the summary of its first end until it reaches its second.
    is_complete = summary is not None and summary.versions >= (total or 0)
    state: State = "failed"
    if is_running:
        state = "running"
    elif summary and (is_complete if end is None else end.exit_code == 0):
        state = "finished"
    elif end is None:
        state = "killed"
    elif end.exit_code == Halted.exit_code:
        state = "stopped"
    return RunFiles(
        directory=str(run),
        state=state,
        iterations=newest.iteration + 1 if newest else 0,
        total_iterations=total,
        reward=newest.figures.get("reward") if newest else None,
        accuracy=summary.accuracy if summary and state == "finished" else {},
        exit_code=end.exit_code if end else None,
        reason=end.reason if end else "",
    )


def _iterations_by_epochs(run: Path, config: RunConfig) -> int | None:
    """Return the iterations that the epochs make; None before the run has read its data."""
    path = run / "data" / "train.jsonl"
    problems = path.read_bytes().count(b"\n") if path.exists() else 0
    return config.iterations_in_all(problems) if problems else None


def is_locked(run: Path) -> bool:
    """Return True if a learner of this host works in the directory; its lock is not taken."""
    try:
        descriptor = os.open(run / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def runs_below(folder: Path) -> list[Path]:
    """Return the run directories in a folder, at any depth; raises ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder")
    found = []
    for path, folders, files in os.walk(folder):
        if FORMAT_FILE in files:
            found.append(Path(path))
            folders.clear()  # a run directory holds no other run
    if not found:
        raise ConfigError(f"{folder} holds no run at any depth (no file {FORMAT_FILE})")
    return sorted(found)


def listing(folder: Path) -> Table:
    """Return a table of the runs in a folder; a run that cannot be read is a row with its fault."""
    # A name that is cut names no run; a long fault is folded instead.
    table = Table(Column("run", no_wrap=True), "state", "iterations", "reward", "adapter, trained", box=box.SIMPLE_HEAD)
    for run in runs_below(folder):
        name = Text(printable(str(run.relative_to(folder))))
        try:
            state = state_of(run)
        except UserError as fault:
            table.add_row(name, Text(printable(f"unreadable: {fault}")), "", "", "")
            continue
        total = f"/{state.total_iterations}" if state.total_iterations else ""
        reward = "" if state.reward is None else f"{state.reward:.3f}"
        accuracy = f"{state.accuracy['trained_adapter']:.3f}" if "trained_adapter" in state.accuracy else ""
        table.add_row(name, state.state, f"{state.iterations}{total}", reward, accuracy)
    return table


def comparison(runs: list[Path]) -> Table:
    """Return a column per run: state, figures, and the settings that differ."""
    for run in runs:
        check_format(run)
    states = [state_of(run) for run in runs]
    settings = [dict(flat_settings(config_of(run, ()).model_dump(mode="json"))) for run in runs]
    # Rich would read markup in settings and names; a run of somebody else's may hold control characters.
    table = Table("", *(Column(Text(printable(state.directory))) for state in states), box=box.SIMPLE_HEAD)
    table.add_row("state", *(state.state for state in states))
    table.add_row("iterations", *(str(state.iterations) for state in states))
    table.add_row("reward of the newest iteration", *(_shown(state.reward) for state in states))
    for arm in dict.fromkeys(arm for state in states for arm in state.accuracy):
        name = {"untrained_adapter": "adapter@0", "trained_adapter": "adapter, trained"}.get(arm, arm)
        table.add_row(f"accuracy, {name}", *(_shown(state.accuracy.get(arm)) for state in states))
    differing = [
        key
        for key in dict.fromkeys(key for each in settings for key in each)
        if key.split(".")[0] not in PLACE and len({each.get(key) for each in settings}) > 1
    ]
    for key in differing:
        table.add_row(Text(printable(key)), *(Text(printable(each.get(key, ""))) for each in settings))
    return table


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def flat_settings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a config with dots, and their values as JSON."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from flat_settings(each, f"{name}.{key}" if name else key)
    else:
        yield name, msgspec.json.encode(value).decode()
