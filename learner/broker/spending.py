"""Usage of the endpoint that serves the target, by all scorers of a run together.

Every scorer counts since it was started and reports the count in its heartbeats. Its newest count stands here under its
own name, which no other process ever has, so a restarted broker or a lost scorer changes no sum. Where preemption makes
more and more scorers, those that were heard of longest ago are added up under one name.
"""

from pathlib import Path

import msgspec

from prefixrl.common.config.openai_options import OpenAIConfig
from prefixrl.common.errors import is_full
from prefixrl.common.host.process import write_atomically
from prefixrl.common.run.status import USAGE_FILE, UsageTotal, total_usage
from prefixrl.common.wire.messages import Usage

SAVE_EVERY_S = 2.0
MOST_SCORERS = 256
"""Scorers with a count of their own; more only while they live."""
GONE_S = 24 * 3600.0
"""Silence after which a scorer is taken for gone: one that came back even later would be counted twice."""
GONE = "scorers that are gone"


class UsageFile:
    """Usage by scorer, kept in the run directory."""

    def __init__(self, directory: Path, section: OpenAIConfig) -> None:
        self._path, self._section = directory / USAGE_FILE, section
        self._by_scorer: dict[str, Usage] = {}
        if self._path.exists():
            self._by_scorer = msgspec.json.decode(self._path.read_bytes(), type=dict[str, Usage])
        self._heard_s: dict[str, float] = {}
        """Time of the newest sign of each, the oldest first."""
        self._is_saved, self._saved_s = True, 0.0

    def note(self, scorer: str, usage: Usage | None, now_s: float) -> None:
        """Take over the count of a scorer; None is no count."""
        if usage is None:
            return
        self._heard_s.pop(scorer, None)
        self._heard_s[scorer] = now_s
        if usage != self._by_scorer.get(scorer):
            self._by_scorer[scorer] = usage
            self._is_saved = False
            self._fold(now_s)

    def _fold(self, now_s: float) -> None:
        for scorer in self._by_scorer.keys() - self._heard_s.keys() - {GONE}:
            self._heard_s[scorer] = now_s  # an earlier broker's, which may live
        while len(self._heard_s) > MOST_SCORERS:
            oldest = next(iter(self._heard_s))
            if now_s - self._heard_s[oldest] <= GONE_S:
                return
            del self._heard_s[oldest]
            self._by_scorer[GONE] = _sum(self._by_scorer.get(GONE, Usage()), self._by_scorer.pop(oldest))

    def save(self, now_s: float, at_once: bool = False) -> None:
        """Write new counts to the file, at most every few seconds."""
        if self._is_saved or not (at_once or now_s - self._saved_s > SAVE_EVERY_S):
            return
        self._saved_s = now_s
        try:
            write_atomically(self._path, msgspec.json.encode(self._by_scorer).decode())
        except OSError as error:
            if not is_full(error):
                raise
            return  # the journal tells of it; counts are kept, and written later
        self._is_saved = True

    def total(self) -> UsageTotal | None:
        """Return the total; None where no scorer uses an endpoint."""
        return total_usage(self._by_scorer.values(), self._section) if self._by_scorer else None


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        requests=one.requests + other.requests,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        completion_tokens=one.completion_tokens + other.completion_tokens,
        retries=one.retries + other.retries,
        limited_s=one.limited_s + other.limited_s,
    )
