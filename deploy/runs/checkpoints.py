"""Runs and their checkpoints as commands name them: config, weights, published digests."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from prefixrl.common.config.load import changed, from_json
from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.evaluation.grouping import grouped
from prefixrl.common.journal import journal
from prefixrl.common.journal.records import VersionPublished
from prefixrl.common.run.directory_format import check_holds_run, checkpoints
from prefixrl.common.worker.command import PATH

PLACE = ("directory", "launch", "slurm", "broker", "log")
"""Sections with the place of a run. They do not change what it does."""
LATEST, BEST = "latest", "best"
CHECKPOINT = "Iterations trained, 0 for none, best, or latest (default)."
SERVED = (
    "Iterations trained, 0 for none, latest, or best (default, where a run judged any in training)."
)
run_directory_argument = click.argument("run_directory", type=PATH)
ema_option = click.option(
    "--ema", "is_averaged", is_flag=True, help="Take the moving average of the weights."
)


@dataclass(frozen=True)
class Weights:
    """An adapter that answers."""

    version: int
    """Number of iterations that trained it. 0 also if no run trained it."""
    model: str
    published: tuple[str, ...] = ()
    """Digests under which the run published this version. Empty if no digest of whole weights is known."""


def newest_checkpoint(run: Path) -> int:
    """Return the iterations of the newest checkpoint, from which a start resumes; 0 without a checkpoint."""
    return max(checkpoints(run / "checkpoints"), default=0)


def config_of(run: Path, settings: tuple[str, ...]) -> RunConfig:
    """Return the config of a run with settings over it; raise ConfigError."""
    check_holds_run(run)
    path = run / "config.json"
    return changed(from_json(path.read_bytes(), str(path)), settings, "--set")


def served_checkpoint(run: Path) -> str:
    """Return the checkpoint that a run is used by: its best one, or its latest where none is known to be the best."""
    return BEST if (run / "checkpoints" / BEST).is_dir() else LATEST


def weights_of(run: Path, config: RunConfig, checkpoint: str, is_averaged: bool) -> Weights:
    """Return the weights of a checkpoint: iterations, `latest`, `best`; raise ConfigError."""
    if checkpoint == "0":
        version = 0
        model = config.adapter.start
    else:
        folders = checkpoints(run / "checkpoints")
        if not folders:
            raise ConfigError(
                f"{run} has no checkpoint yet; --checkpoint 0 is the adapter it began with"
            )
        versions = {LATEST: max(folders)} | {str(version): version for version in folders}
        if (best := run / "checkpoints" / BEST).is_dir():
            versions[BEST] = int(best.resolve().name[5:])
        if checkpoint not in versions:
            choices = ", ".join(["0", *(name for name in versions if name != LATEST)])
            raise ConfigError(
                f"--checkpoint {checkpoint}: {run} keeps {choices} and {LATEST} (checkpoint.keep)"
            )
        version = versions[checkpoint]
        folder = folders[version] / ("hf_ema" if is_averaged else "hf")
        if not folder.is_dir():
            raise ConfigError(
                f"--ema: {folders[version]} holds no averaged weights (learner.ema_decay)"
            )
        model = str(folder.resolve())
    lora = config.learner.lora
    # Version 0 goes out whole; a checkpoint holds later ones merged, which have another digest than the matrices.
    if is_averaged or (version > 0 and lora is not None and lora.publish == "matrices"):
        return Weights(version, model)
    return Weights(version, model, _published(run).get(version, ()))


@functools.cache
def _published(run: Path) -> dict[int, tuple[str, ...]]:
    """Return the digests of each version; a long journal is read once for all checkpoints."""
    records = journal.read(run / journal.FOLDER)
    notes = (record.note for record in records if isinstance(record, VersionPublished))
    digests = grouped((note.version, note.digest) for note in notes)
    return {version: tuple(names) for version, names in digests.items()}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a tree of settings, with dots, and their values."""
    if isinstance(value, dict) and (value or not name):
        for key, part in value.items():
            yield from flat(part, f"{name}.{key}" if name else key)
    else:
        yield name, value


def flat_settings(config: dict[str, Any]) -> dict[str, str]:
    """Return the values of a config as JSON, by their keys with dots."""
    return {name: msgspec.json.encode(value).decode() for name, value in flat(config)}
