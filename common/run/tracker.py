"""The record of a tracker, which opens one run of a program that shows metrics.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from prefixrl.common.run.documents import MetricsLine


class SampleText(msgspec.Struct, frozen=True, kw_only=True):
    """One trained row as text."""

    iteration: int
    group: int
    prompt_id: str
    question: str
    gold: str
    draft: str = ""
    """The target's answer that the adapter read, with `adapter.sees = "draft"`."""
    prefix: str
    """The adapter's text; in direct mode the answer."""
    completion: str
    """The target's text; "" unless the run keeps completions (`scorer.keep_completions`)."""
    extracted: str
    status: str
    reward: float
    parts: str = ""
    """Other numbers that a reward function gave, as `name value`."""
    rule: str = ""
    """Rule that decided the verdict (`docs/verification.md`)."""
    advantage: float | None


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
