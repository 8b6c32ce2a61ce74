"""Runs and their checkpoints, as commands name them: which config, which weights, published as what."""

import functools
from pathlib import Path

from prefixrl.common import journal
from prefixrl.common.config import RunConfig, changed, from_json
from prefixrl.common.errors import ConfigError
from prefixrl.common.records import VersionPublished

LATEST = "latest"


def config_of(run: Path, settings: tuple[str, ...]) -> RunConfig:
    """The config of a run with settings over it; raises ConfigError where there is no run or a setting is wrong."""
    known = run / "config.json"
    if not known.exists():
        raise ConfigError(f"{run} holds no run (no file {known})")
    return changed(from_json(known.read_text(encoding="utf-8"), str(known)), settings, "--set")


def weights_of(run: Path, config: RunConfig, checkpoint: str, is_averaged: bool) -> tuple[int, str]:
    """Iterations and model folder of a checkpoint, given as iterations or `latest`; 0 is the adapter the run began with.

    Raises:
        ConfigError: naming the checkpoints there are.
    """
    if checkpoint == "0":
        return 0, config.adapter.model
    there = {int(path.name[5:]): path for path in (run / "checkpoints").glob("step_????????")}
    if not there:
        raise ConfigError(
            f"{run} has no checkpoint yet; --checkpoint 0 is the adapter it began with"
        )
    wanted = (
        max(there) if checkpoint == LATEST else int(checkpoint) if checkpoint.isdecimal() else -1
    )
    if wanted not in there:
        kept = ", ".join(map(str, sorted(there)))
        raise ConfigError(
            f"--checkpoint {checkpoint}: {run} keeps 0, {kept} and {LATEST} (checkpoint.keep)"
        )
    folder = there[wanted] / ("hf_ema" if is_averaged else "hf")
    if not folder.is_dir():
        raise ConfigError(f"--ema: {there[wanted]} holds no averaged weights (learner.ema_decay)")
    return wanted, str(folder.resolve())


@functools.cache
def published(run: Path) -> dict[int, tuple[str, ...]]:
    """Digests under which a run published each version; a journal is long, so it is read once for all checkpoints."""
    found: dict[int, tuple[str, ...]] = {}
    path = run / "journal.msgpack"
    for each in journal.read(path) if path.exists() else ():
        if isinstance(each, VersionPublished):
            found[each.note.version] = (*found.get(each.note.version, ()), each.note.digest)
    return found
