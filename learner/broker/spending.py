"""What the endpoint that serves the target was asked for, by all scorers of a run together.

Every scorer counts since it was started and says so in its heartbeats; its newest count stands here under its own name, which
no other process ever has, so that neither a broker that was restarted nor a scorer that was given up is counted twice or lost.
"""

from pathlib import Path

import msgspec

from prefixrl.common.messages import Usage
from prefixrl.common.openai_options import OpenAIConfig
from prefixrl.common.process import write_atomically
from prefixrl.common.status import USAGE_FILE, Spent, spent

SAVE_EVERY_S = 2.0


class Spending:
    """The counts of a run, kept in its directory."""

    def __init__(self, directory: Path, section: OpenAIConfig) -> None:
        self._path = directory / USAGE_FILE
        self._section = section
        self._by_scorer: dict[str, Usage] = {}
        if self._path.exists():
            self._by_scorer = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Usage])
        self._is_saved = True
        self._saved_s = 0.0

    def note(self, scorer: str, usage: Usage | None) -> None:
        """Take over what a scorer says; None says nothing."""
        if usage is not None and usage != self._by_scorer.get(scorer):
            self._by_scorer[scorer] = usage
            self._is_saved = False

    def save(self, now_s: float, at_once: bool = False) -> None:
        """Write down what is new, at most every few seconds."""
        if self._is_saved or not (at_once or now_s - self._saved_s > SAVE_EVERY_S):
            return
        write_atomically(self._path, msgspec.json.encode(self._by_scorer).decode())
        self._is_saved, self._saved_s = True, now_s

    def total(self) -> Spent | None:
        """All of it; None where no scorer asked any endpoint."""
        if not self._by_scorer:
            return None
        return spent(self._by_scorer.values(), self._section)
