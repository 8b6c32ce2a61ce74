"""`prefixrl track`: the metrics and samples of a run in TensorBoard, Weights & Biases, trackio and MLflow.

    learner ── metrics.jsonl, journal ──▶ this process ──▶ RUN/tensorboard, wandb, trackio, mlflow

The learner starts it where `[log]` asks for a tracker and ends it by closing its stdin: what a tracker waits for, and
what it fails at, never holds up training. After a resume the same run goes on.
"""

import contextlib
import importlib
import logging
import os
import re
import secrets
import select
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import click
import msgspec
import xxhash

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.learner import LogConfig, WandbConfig, missing
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


class TensorBoard:
    """Event files in the run directory."""

    def __init__(self, directory: Path, _: bool) -> None:
        """Remove what an earlier tracker wrote there; raise ConfigError without the package."""
        _package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._folder = directory / "tensorboard"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._open: Callable[[int], Any] = lambda first: SummaryWriter(
            str(self._folder), purge_step=first
        )
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


def _identity(directory: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return the id that the run has at a tracker, made at the first time: later trackers go on under it."""
    path = directory / f"{tracker}.json"
    if not path.exists():
        write_atomically(path, msgspec.json.encode({"id": make()}).decode())
    return read_json(path, dict[str, str])["id"]


def _package(name: str) -> Any:
    """Import a tracker's package; raise ConfigError without it."""
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise ConfigError(f"{missing(name)}: {fault}") from None


class Logged:
    """One run of Weights & Biases, or of trackio, which has the same calls; also over resumes."""

    def __init__(self, module: Any, run: Any, takes_steps: bool) -> None:
        self._module, self._run, self._takes_steps = module, run, takes_steps

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Send the columns of each line."""
        for line in lines:
            self._run.log(columns(line), step=line.iteration if self._takes_steps else None)

    def samples(self, found: Sequence[SampleText]) -> None:
        """Send a table."""
        rows, at = (
            [[*msgspec.structs.astuple(each)] for each in found],
            found[0].iteration if found else 0,
        )
        table = self._module.Table(columns=list(SampleText.__struct_fields__), data=rows)
        self._run.log({"samples": table, "iteration": at}, step=at if self._takes_steps else None)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def weights_and_biases(directory: Path, wanted: WandbConfig) -> Logged:
    """Begin or go on; raise ConfigError without the package or an account."""
    wandb, number = _package("wandb"), _identity(directory, "wandb", lambda: secrets.token_hex(4))
    try:
        run: Any = wandb.init(
            project=wanted.project,
            entity=wanted.entity,
            name=wanted.name or directory.resolve().name,
            id=number,
            resume="allow",
            mode=wanted.mode,
            dir=str(directory),
            config=_settings(directory),
            settings=wandb.Settings(console="off"),
        )
    except wandb.Error as error:
        raise ConfigError(f"log.wandb: {error}") from None
    # Its own counter of steps only rises; iterations that are trained again have their own number again.
    run.define_metric("*", step_metric="iteration")
    return Logged(wandb, run, takes_steps=False)


def trackio(directory: Path, project: str) -> Logged:
    """Begin or go on; raise ConfigError without the package."""
    package = _package("trackio")
    name = _identity(
        directory, "trackio", lambda: f"{directory.resolve().name}-{secrets.token_hex(2)}"
    )
    quiet = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
    run = package.init(project, name, config=_settings(directory), **quiet)
    return Logged(package, run, takes_steps=True)


class MLflow:
    """One run of MLflow, also over resumes, on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, directory: Path, experiment: str) -> None:
        """Begin or go on; raise ConfigError without the package."""
        self._mlflow = mlflow = _package("mlflow")
        try:
            place, client = mlflow.set_experiment(experiment).experiment_id, mlflow.MlflowClient()
        except mlflow.MlflowException as fault:
            raise ConfigError(
                f"log.mlflow: {fault}; MLFLOW_TRACKING_URI names the server"
            ) from None
        name = directory.resolve().name
        mlflow.start_run(
            _identity(
                directory, "mlflow", lambda: client.create_run(place, run_name=name).info.run_id
            )
        )
        mlflow.log_dict(_settings(directory), "config.json")

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Send the columns of each line, in names that MLflow allows; no name is a folder of another one."""
        for line in lines:
            found = ((name.replace("/", "."), value) for name, value in columns(line).items())
            values = {re.sub(r"[^\w\-. :]", "_", name): value for name, value in found}
            self._mlflow.log_metrics(values, line.iteration)

    def samples(self, found: Sequence[SampleText]) -> None:
        """Send a file."""
        for each in found[:1]:
            self._mlflow.log_text(
                msgspec.json.encode(found).decode(), f"samples/{each.iteration}.json"
            )

    def close(self) -> None:
        """Name the run as ended."""
        self._mlflow.end_run()


Tracker = TensorBoard | Logged | MLflow
MAKERS: dict[str, Callable[[Path, Any], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": weights_and_biases,
    "trackio": trackio,
    "mlflow": MLflow,
}
"""By key of `[log]`; each is given the run directory and the key's value."""


def _settings(directory: Path) -> dict[str, Any]:
    return read_json(directory / "config.json", dict[str, Any])


@click.command("track")
@click.argument("run_directory", type=click.Path(path_type=Path))
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
    **others: Any,
) -> None:
    """Send metrics and samples of a run to TensorBoard, Weights & Biases, trackio or MLflow.

    A run does so itself where its run file says so (log.tensorboard, log.wandb, log.trackio, log.mlflow).
    """
    if is_child:
        track(run_directory, LogConfig.model_validate(_settings(run_directory)["log"]), stdin_ended)
        return
    wandb = (
        WandbConfig(project=project, mode="offline" if offline else "online") if project else None
    )
    track(
        run_directory,
        LogConfig(wandb=wandb, **others),
        stop_event().is_set if follows else lambda: True,
    )


def stdin_ended() -> bool:
    """Return True once the starter of this process has closed its stdin, or is gone."""
    return bool(select.select([0], [], [], 0.0)[0]) and os.read(0, 4096) == b""


def track(directory: Path, wanted: LogConfig, ended: Callable[[], bool]) -> None:
    """Send all metrics until `ended`; raises UserError for what cannot work."""
    check_format(directory)
    if not wanted.trackers:
        raise ConfigError(
            f"nothing to send to: give one of --{', --'.join(MAKERS)}, or [log] in the run file"
        )
    trackers = Trackers(
        {
            f"log.{name}": partial(MAKERS[name], directory, given)
            for name, given in wanted.trackers.items()
        }
    )
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
            raise (
                fault if isinstance(fault, UserError) else ConfigError(f"{name}: {fault}")
            ) from fault
        log.error(
            "%s failed, and is sent nothing until a tracker is started again: %s", name, fault
        )


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
            line, digest = (
                msgspec.json.decode(text, type=MetricsLine),
                xxhash.xxh3_64_hexdigest(text),
            )
            if self._sent.get(line.iteration) != digest:
                self._sent[line.iteration] = digest
                found.append(line)
        return found
