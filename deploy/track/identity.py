"""Helpers of the built-in trackers: the id of a run at a tracker, its config, and imports of packages."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.learner import missing
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import write_atomically


def identity_at(directory: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return the id of the run at a tracker. The first call makes the id; later calls return the same one."""
    path = directory / f"{tracker}.json"
    if not path.exists():
        write_atomically(path, msgspec.json.encode({"id": make()}))
    return read_json(path, dict[str, str])["id"]


def imported_package(name: str) -> Any:
    """Import a tracker's package; raise ConfigError without it."""
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise ConfigError(f"{missing(name)}: {fault}") from None


def settings_of(directory: Path) -> dict[str, Any]:
    """Return the config of a run."""
    return read_json(directory / "config.json", dict[str, Any])
