"""What a tracker is: a record that opens one run of a program that shows metrics.

A package adds a tracker by an entry point (`common/config/foreign/plugins.py`), and a run file names it with options of
its own:

    [project.entry-points."prefixrl.trackers"]          [log.trackers]
    my_board = "my_package.board:TRACKER"               my_board = { url = "http://board:8000" }

    class Board:
        def write(self, lines): ...                     # iterations that were trained again come again
        def samples(self, samples): ...
        def close(self): ...

    TRACKER = Tracker(open=lambda directory, options: Board(options["url"]))
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from prefixrl.common.config.foreign.files import read_json
from prefixrl.common.config.learner import missing
from prefixrl.common.errors import ConfigError
from prefixrl.common.host.process import write_atomically
from prefixrl.common.run.documents import MetricsLine
from prefixrl.deploy.runs.samples import SampleText


class OpenTracker(Protocol):
    """One run at a tracker. Any method may raise: the tracker is then left out and named."""

    def write(self, lines: Sequence[MetricsLine]) -> None:
        """Send iterations. After a resume, iterations that were trained again come again."""

    def samples(self, samples: Sequence[SampleText]) -> None:
        """Send samples of the newest iteration."""

    def close(self) -> None:
        """Send what is left."""


@dataclass(frozen=True)
class Tracker:
    """One program that shows metrics."""

    open: Callable[[Path, Any], OpenTracker]
    """Begins a run, or goes on with it after a resume, from the run directory and the options of the run file. Raises
    ConfigError without the package or an account."""


def identity_at(directory: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return the id that the run has at a tracker, made at the first time: later trackers go on under it."""
    path = directory / f"{tracker}.json"
    if not path.exists():
        write_atomically(path, msgspec.json.encode({"id": make()}).decode())
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
