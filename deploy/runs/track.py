"""`prefixrl track`: the metrics and samples of a run in TensorBoard and Weights & Biases.

    learner ── metrics.jsonl, journal ──▶ this process ──▶ RUN/tensorboard, wandb

The learner starts it where `[log]` asks for a tracker and ends it by closing its stdin: what a tracker waits for, and
what it fails at, never holds up training. After a resume the same run goes on.
"""

import contextlib
import logging
import os
import secrets
import select
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

import click
import msgspec
import xxhash

from prefixrl.common.config.foreign import read_json
from prefixrl.common.config.learner import LogConfig, WandbConfig
from prefixrl.common.errors import ConfigError, UserError
from prefixrl.common.host.process import stop_event, write_atomically
from prefixrl.common.run.directory_format import check_format
from prefixrl.common.run.documents import METRICS_FILE, MetricsLine, columns
from prefixrl.common.run.json_lines import AddedLines
from prefixrl.deploy.runs.inspect import newest_groups
from prefixrl.deploy.runs.samples import SampleText, decoder, texts_of

log = logging.getLogger(__name__)

POLL_S = 2.0
SAMPLES_S = 300.0
"""Time between two tables of samples: for each the journal is read."""
SAMPLES = 16
STATE_FILE = "wandb.json"
SAMPLE_COLUMNS = SampleText.__struct_fields__


class TensorBoard:
    """Event files in the run directory."""

    def __init__(self, directory: Path) -> None:
        """Remove what an earlier tracker wrote there; raise ConfigError without the package."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("log.tensorboard needs tensorboard: pip install 'prefixrl[trackers]'") from None
        self._folder = directory / "tensorboard"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._open: Callable[[int], Any] = lambda first: SummaryWriter(str(self._folder), purge_step=first)
        self._writer = self._open(0)
        self._next = 0

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Write scalars; lines that come again take the place of the first ones."""
        if lines[0].iteration < self._next:
            self._writer.close()
            self._writer = self._open(lines[0].iteration)
        for line in lines:
            for name, value in columns(line).items():
                self._writer.add_scalar(name, value, line.iteration)
        self._next = lines[-1].iteration + 1
        self._writer.flush()

    def samples(self, found: Sequence[SampleText]) -> None:
        """Write samples as text."""
        for place, each in enumerate(found):
            text = f"{each.question}\n\n**{each.prefix}**{each.completion}\n\nreward {each.reward:g}, gold {each.gold}"
            self._writer.add_text(f"samples/{place}", text, each.iteration)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class _State(msgspec.Struct):
    """The identity under which a later tracker goes on."""

    id: str


class WeightsAndBiases:
    """One run of Weights & Biases, also over resumes."""

    def __init__(self, directory: Path, wanted: WandbConfig) -> None:
        """Begin or go on; raise ConfigError without the package or an account."""
        try:
            import wandb
        except ImportError:
            raise ConfigError("log.wandb needs wandb: pip install 'prefixrl[trackers]'") from None
        self._wandb: Any = wandb
        path = directory / STATE_FILE
        if not path.exists():
            write_atomically(path, msgspec.json.encode(_State(secrets.token_hex(4))).decode())
        state = read_json(path, _State)
        config = read_json(directory / "config.json", dict[str, Any])
        try:
            self._run: Any = wandb.init(
                project=wanted.project, entity=wanted.entity, name=wanted.name or directory.resolve().name, id=state.id,
                resume="allow", mode=wanted.mode, dir=str(directory), config=config,
                settings=wandb.Settings(console="off"),
            )  # fmt: skip
        except wandb.Error as error:
            raise ConfigError(f"log.wandb: {error}") from None
        # Its own counter of steps only rises; iterations that are trained again have their own number again.
        self._run.define_metric("*", step_metric="iteration")

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Send the columns of each line."""
        for line in lines:
            self._run.log(columns(line))

    def samples(self, found: Sequence[SampleText]) -> None:
        """Send a table."""
        rows = [[getattr(each, name) for name in SAMPLE_COLUMNS] for each in found]
        table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)
        self._run.log({"samples": table, "iteration": found[0].iteration if found else 0})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


Tracker = TensorBoard | WeightsAndBiases


@click.command("track")
@click.argument("run_directory", type=click.Path(path_type=Path))
@click.option("--tensorboard", is_flag=True, help="Write event files into RUN_DIRECTORY/tensorboard.")
@click.option("--wandb", "project", metavar="PROJECT", help="Send to this project of Weights & Biases.")
@click.option("--offline", is_flag=True, help="With --wandb: write files for `wandb sync`.")
@click.option("--follow", "follows", is_flag=True, help="Go on as iterations are trained, until Ctrl-C.")
@click.option("--until-eof", "is_child", is_flag=True, hidden=True, help="As [log] says, until stdin ends.")
def track_command(
    run_directory: Path, tensorboard: bool, project: str | None, offline: bool, follows: bool, is_child: bool
) -> None:
    """Send metrics and samples of a run to TensorBoard or Weights & Biases.

    A run does so itself where its run file says so (log.tensorboard, log.wandb).
    """
    if is_child:
        document = read_json(run_directory / "config.json", dict[str, Any])
        track(run_directory, LogConfig.model_validate(document["log"]), stdin_ended)
        return
    wandb = WandbConfig(project=project, mode="offline" if offline else "online") if project else None
    ended = stop_event().is_set if follows else lambda: True
    track(run_directory, LogConfig(tensorboard=tensorboard, wandb=wandb), ended)


def stdin_ended() -> bool:
    """Return True once the starter of this process has closed its stdin, or is gone."""
    readable, _, _ = select.select([0], [], [], 0.0)
    return bool(readable) and os.read(0, 4096) == b""


def track(directory: Path, wanted: LogConfig, ended: Callable[[], bool]) -> None:
    """Send all metrics until `ended`; raises UserError for what cannot work."""
    check_format(directory)
    makers: dict[str, Callable[[], Tracker]] = {}
    if wanted.tensorboard:
        makers["log.tensorboard"] = lambda: TensorBoard(directory)
    if (given := wanted.wandb) is not None:
        makers["log.wandb"] = lambda: WeightsAndBiases(directory, given)
    if not makers:
        raise ConfigError("nothing to send to: give --tensorboard or --wandb, or [log] in the run file")
    trackers = Trackers(makers)
    metrics, sampled_s = MetricsFile(directory / METRICS_FILE), 0.0
    try:
        while True:
            is_last = ended()
            lines = metrics.changed()
            if lines:
                trackers.each(methodcaller("write", lines))
            if lines and (is_last or time.monotonic() - sampled_s > SAMPLES_S):
                sampled_s = time.monotonic()
                _send_samples(directory, trackers)
            if is_last:
                return
            time.sleep(POLL_S)
    finally:
        trackers.each(methodcaller("close"))


class Trackers:
    """The trackers that work; one that fails is left out and named, the failure of the last one is raised."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]]) -> None:
        """Begin each."""
        self._working: dict[str, Tracker] = {}
        faults: dict[str, Exception] = {}
        for name, make in makers.items():
            try:
                self._working[name] = make()
            except Exception as fault:  # noqa: BLE001  whatever a library raises is about this tracker alone
                faults[name] = fault
        for name, found in faults.items():
            self._lose(name, found)

    def each(self, call: Callable[[Tracker], None]) -> None:
        """Call a method of each."""
        for name, tracker in list(self._working.items()):
            try:
                call(tracker)
            except Exception as fault:  # noqa: BLE001  whatever a library raises is about this tracker alone
                del self._working[name]
                with contextlib.suppress(Exception):
                    tracker.close()
                self._lose(name, fault)

    def _lose(self, name: str, fault: Exception) -> None:
        if not self._working:
            raise fault
        log.error("%s failed, and is sent nothing until a tracker is started again: %s", name, fault)


def _send_samples(directory: Path, trackers: Trackers) -> None:
    try:
        decode, newest = decoder(directory), newest_groups(directory)
    except UserError as fault:
        log.warning("no samples are sent: %s", fault)
        return
    found = [text for group in newest for text in texts_of(group, decode)][:SAMPLES]
    trackers.each(methodcaller("samples", found))


class MetricsFile:
    """The lines of `metrics.jsonl` that are new, or other than before."""

    def __init__(self, path: Path) -> None:
        """Begin before the first line."""
        self._added = AddedLines(path)
        self._sent: dict[int, str] = {}

    def changed(self) -> list[MetricsLine]:
        """Return what was appended; after a resume replaced the file, the lines that differ."""
        found = []
        for text in (line for block in self._added.blocks() for line in block.splitlines()):
            line, digest = msgspec.json.decode(text, type=MetricsLine), xxhash.xxh3_64_hexdigest(text)
            if self._sent.get(line.iteration) != digest:
                self._sent[line.iteration] = digest
                found.append(line)
        return found
