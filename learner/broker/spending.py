"""Usage of the endpoint that serves the target, by all scorers of a run together.

Every scorer counts since it was started and reports the count in its heartbeats. Its newest count stands here under its
own name, which no other process ever has, so a restarted broker or a lost scorer changes no sum.
"""

from pathlib import Path

import msgspec

from prefixrl.common.config.openai_options import OpenAIConfig
from prefixrl.common.process import write_atomically
from prefixrl.common.run.status import USAGE_FILE, UsageTotal, total_usage
from prefixrl.common.wire.messages import Usage

SAVE_EVERY_S = 2.0


class UsageFile:
    """Usage by scorer, kept in the run directory."""

    def __init__(self, directory: Path, section: OpenAIConfig) -> None:
        self._path, self._section = directory / USAGE_FILE, section
        self._by_scorer: dict[str, Usage] = {}
        if self._path.exists():
            self._by_scorer = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Usage])
        self._is_saved, self._saved_s = True, 0.0

    def note(self, scorer: str, usage: Usage | None) -> None:
        """Take over the count of a scorer; None is no count."""
        if usage is not None and usage != self._by_scorer.get(scorer):
            self._by_scorer[scorer] = usage
            self._is_saved = False

    def save(self, now_s: float, at_once: bool = False) -> None:
        """Write new counts to the file, at most every few seconds."""
        if self._is_saved or not (at_once or now_s - self._saved_s > SAVE_EVERY_S):
            return
        write_atomically(self._path, msgspec.json.encode(self._by_scorer).decode())
        self._is_saved, self._saved_s = True, now_s

    def total(self) -> UsageTotal | None:
        """Return the total; None where no scorer uses an endpoint."""
        return total_usage(self._by_scorer.values(), self._section) if self._by_scorer else None
