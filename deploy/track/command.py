"""`prefixrl track`: the process that sends metrics and samples of a run to its trackers.

    learner ── metrics.jsonl, journal ──▶ this process ──▶ TensorBoard, W&B, trackio, MLflow, ...

The learner starts this process if `[log]` names a tracker, and ends it by closing its stdin. So a tracker that waits or
fails never delays training. After a resume the same run of the tracker continues.
"""

import contextlib
import logging
import os
import pkgutil
import select
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, cast

import click
import msgspec
import xxhash

from prefixrl.common.config.foreign.plugins import check_names, load_plugin, plugins
from prefixrl.common.config.learner import TRACKERS, LogConfig, WandbConfig
from prefixrl.common.errors import ConfigError, UserError
from prefixrl.common.host.process import stop_event
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import METRICS_FILE, MetricsLine
from prefixrl.common.run.json_lines import AddedLines
from prefixrl.common.run.tracker import OpenTracker, Tracker
from prefixrl.deploy.runs.checkpoints import run_directory_argument
from prefixrl.deploy.runs.inspect import newest_groups
from prefixrl.deploy.runs.samples import decoder, texts_of
from prefixrl.deploy.track.identity import settings_of

log = logging.getLogger(__name__)

POLL_S = 2.0
SAMPLES_S = 300.0
"""Time between two tables of samples; for each table the journal is read."""
SAMPLES = 16


@click.command("track")
@run_directory_argument
@click.option(
    "--tensorboard", is_flag=True, help="Write event files into RUN_DIRECTORY/tensorboard."
)
@click.option(
    "--wandb", "project", metavar="PROJECT", help="Send to this project of Weights & Biases."
)
@click.option("--offline", is_flag=True, help="With --wandb: write files for `wandb sync`.")
@click.option("--trackio", metavar="PROJECT", help="Send to this project of trackio.")
@click.option("--mlflow", metavar="EXPERIMENT", help="Send to this experiment of MLflow.")
@click.option(
    "--follow", "follows", is_flag=True, help="Go on as iterations are trained, until Ctrl-C."
)
@click.option(
    "--until-eof", "is_child", is_flag=True, hidden=True, help="As [log] says, until stdin ends."
)
def track_command(
    run_directory: Path,
    project: str | None,
    offline: bool,
    follows: bool,
    is_child: bool,
    **options: Any,
) -> None:
    """Send metrics and samples of a run to TensorBoard, Weights & Biases, trackio or MLflow.

    A run does so itself where its run file says so (log.tensorboard, log.wandb, log.trackio, log.mlflow).
    """
    if is_child:
        track(
            run_directory, LogConfig.model_validate(settings_of(run_directory)["log"]), stdin_ended
        )
        return
    if project:
        options["wandb"] = WandbConfig(project=project, mode="offline" if offline else "online")
    ended = stop_event().is_set if follows else lambda: True
    track(run_directory, LogConfig(**options), ended)


def stdin_ended() -> bool:
    """Return True after the process that started this one has closed its stdin, or has ended."""
    return bool(select.select([0], [], [], 0.0)[0]) and os.read(0, 4096) == b""


def track(directory: Path, config: LogConfig, ended: Callable[[], bool]) -> None:
    """Send all metrics until `ended` returns True; raise UserError if no tracker works."""
    check_format(directory)
    if not config.chosen_trackers:
        options = [option for each in track_command.params for option in each.opts]
        names = [option for option in options if option.removeprefix("--") in TRACKERS]
        raise ConfigError(
            f"nothing to send to: give one of {', '.join(names)}, or [log] in the run file"
        )
    makers = {
        f"log.{name}": partial(tracker_of(name).open, directory, options)
        for name, options in config.chosen_trackers.items()
    }
    trackers = WorkingTrackers(makers)
    metrics = MetricsFile(directory / METRICS_FILE)
    sampled_s = 0.0
    try:
        while True:
            # Asked before the file is read, so that the last lines are sent as well.
            is_last = ended()
            lines = metrics.changed()
            if lines:
                trackers.call_all(methodcaller("write", lines))
            if lines and (is_last or time.monotonic() - sampled_s > SAMPLES_S):
                sampled_s = time.monotonic()
                _send_samples(directory, trackers)
            if is_last:
                return
            time.sleep(POLL_S)
    finally:
        trackers.call_all(methodcaller("close"))


def tracker_of(name: str) -> Tracker:
    """Return a tracker that the config accepted; ConfigError where its package is broken."""
    check_names("trackers", TRACKERS)
    if name in TRACKERS:
        return cast(Tracker, pkgutil.resolve_name(TRACKERS[name].record))
    return load_plugin(plugins("trackers")[name], Tracker, "a Tracker")


class WorkingTrackers:
    """The trackers that work. A tracker that fails is logged and left out; the failure of the last one is raised."""

    def __init__(self, makers: Mapping[str, Callable[[], OpenTracker]]) -> None:
        """Open all of them."""
        self._working: dict[str, OpenTracker] = {}
        faults: dict[str, Exception] = {}
        for name, make in makers.items():
            try:
                self._working[name] = make()
            except Exception as fault:  # noqa: BLE001  whatever a library raises is about this tracker alone
                faults[name] = fault
        for name, first_fault in faults.items():
            self._drop(name, first_fault)

    def call_all(self, call: Callable[[OpenTracker], None]) -> None:
        """Call a method of every tracker that works."""
        for name, tracker in list(self._working.items()):
            try:
                call(tracker)
            except Exception as fault:  # noqa: BLE001  whatever a library raises is about this tracker alone
                del self._working[name]
                with contextlib.suppress(Exception):
                    tracker.close()
                self._drop(name, fault)

    def _drop(self, name: str, fault: Exception) -> None:
        if not self._working:
            raise (
                fault if isinstance(fault, UserError) else ConfigError(f"{name}: {fault}")
            ) from fault
        log.error(
            "%s failed, and is sent nothing until a tracker is started again: %s", name, fault
        )


def _send_samples(directory: Path, trackers: WorkingTrackers) -> None:
    try:
        decode = decoder(directory)
        newest = newest_groups(directory)
    except UserError as fault:
        log.warning("no samples are sent: %s", fault)
        return
    samples = [text for group in newest for text in texts_of(group, decode)][:SAMPLES]
    trackers.call_all(methodcaller("samples", samples))


class MetricsFile:
    """The lines of `metrics.jsonl` that are new or have changed."""

    def __init__(self, path: Path) -> None:
        """Begin before the first line."""
        self._added = AddedLines(path)
        self._sent: dict[int, str] = {}

    def changed(self) -> list[MetricsLine]:
        """Return the appended lines; after a resume has replaced the file, the lines that differ."""
        changed = []
        for text in (line for block in self._added.blocks() for line in block.splitlines()):
            line = msgspec.json.decode(text, type=MetricsLine)
            digest = xxhash.xxh3_64_hexdigest(text)
            if self._sent.get(line.iteration) != digest:
                self._sent[line.iteration] = digest
                changed.append(line)
        return changed
