"""`prefixrl status`: shows a running run by its broker, any other run by its files."""

import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from prefixrl.common.errors import ConfigError, PeerLost
from prefixrl.common.host.exit_codes import printable
from prefixrl.common.host.process import stop_event
from prefixrl.common.run.replay import plan_of
from prefixrl.deploy.runs.checkpoints import run_directory_argument
from prefixrl.deploy.view.live_view import View, render
from prefixrl.deploy.view.run_state import (
    fetch,
    is_going_on,
    is_locked,
    is_over,
    rung_alarms,
    state_of,
)

TICK_S = 0.2
RESTART_S = 6.0
"""Longest time that `launch` needs to start a killed learner again."""


@click.command()
@run_directory_argument
@click.option("--json", "as_json", is_flag=True, help="The whole document, for programs.")
@click.option("--watch", "watches", is_flag=True, help="Show the run until it ends.")
def status(run_directory: Path, as_json: bool, watches: bool) -> None:
    """Show the state of the run in RUN_DIRECTORY and its bottleneck, or how it ended."""
    if watches and as_json:
        raise ConfigError("give --watch or --json, not both")
    if watches and is_going_on(run_directory):
        watch(run_directory, stop_event().is_set)
    else:
        show_state(run_directory, as_json)


def show_state(directory: Path, as_json: bool) -> None:
    """Print the state of a run: the broker's document, or what its files say of its end."""
    document = b""
    if not is_over(directory) and plan_of(directory) is None:
        try:
            document = fetch(directory)
        except PeerLost:
            if is_locked(directory):
                raise
    if as_json:
        click.echo(printable((document or msgspec.json.encode(state_of(directory))).decode()))
    elif document:
        render(document, directory)
    else:
        _tell_end(directory)


def watch(directory: Path, stopped: Callable[[], bool]) -> None:
    """Show a run until it ends; then print how it ended."""
    silent_from_s = None
    with View(directory) as view:
        while not stopped() and not is_over(directory):
            view.refresh()
            silent_from_s = None if is_going_on(directory) else silent_from_s or time.monotonic()
            # A killed learner may be started again.
            if silent_from_s and time.monotonic() - silent_from_s > RESTART_S:
                break
            time.sleep(TICK_S)
    if not stopped():
        _tell_end(directory)


def _tell_end(directory: Path) -> None:
    for text in (str(state_of(directory)), *rung_alarms(directory)):
        click.echo(printable(text))
