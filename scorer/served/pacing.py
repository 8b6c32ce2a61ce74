"""The turns of requests to an endpoint: the limits of the run, which its broker divides among scorers.

    row ── turn ──▶ waits in order for a permit ──▶ request

Where there is no broker (`prefixrl serve`), the limits hold for this process, and the same rule gives the permits here.
"""

import asyncio
import time
from collections.abc import Callable

from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.worker import Usage
from prefixrl.common.worker.allowance import Allowance, RateLimits
from prefixrl.common.worker.permits import LOOK_S, Permits

LOCAL_BEAT_S = 0.1
"""Time between two grants where there is no broker."""
STILL_WAITS_S = 5.0
"""Time after the last wait for a permit in which the limit is still named: it would come and go with each request."""


class Stopwatch:
    """The seconds in which a condition held so far."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._since_s: float | None = None

    def run(self, is_running: bool) -> None:
        """Note whether the condition holds from now on."""
        self._before_s = self.total_s
        self._since_s = time.monotonic() if is_running else None

    @property
    def total_s(self) -> float:
        """All of it."""
        return self._before_s + (0.0 if self._since_s is None else time.monotonic() - self._since_s)


class Pacing:
    """Gives requests their turns, on one asyncio loop; others only read."""

    def __init__(
        self, permits: Permits | None = None, limit_words: str = "", local: Allowance | None = None
    ) -> None:
        """Without arguments every request has its turn at once.

        Args:
            permits: what the broker grants; None: it grants none.
            limit_words: the limits in words, "" without.
            local: gives the permits where there is no broker.
        """
        self.permits = permits or Permits(LOCAL_BEAT_S)
        self.is_on = bool(limit_words)
        """True if there is a limit."""
        self._limit_words, self._local = limit_words, local
        self._gate = asyncio.Lock()
        self._under_way = 0
        self._paused = Stopwatch()
        self._waited_s = -STILL_WAITS_S
        """Newest time at which a request waited."""

    @property
    def paused_s(self) -> float:
        """Seconds so far in which requests waited for their turn and none was under way."""
        return self._paused.total_s

    @property
    def words(self) -> str:
        """The limits that requests wait for, and how many wait; "" if none waits."""
        waiting = self.permits.waiting
        if not waiting and time.monotonic() - self._waited_s > STILL_WAITS_S:
            return ""
        return f"{self._limit_words} ({waiting} rows)"

    async def turn(self, usage: Callable[[], Usage]) -> None:
        """Wait until a request may be made; `usage` returns what was used so far."""
        if not self.is_on:
            return
        self.permits.waiting += 1
        try:
            async with self._gate:
                while wait_s := self._wait_s(usage):
                    self._waited_s = time.monotonic()
                    self._watch_pause()
                    await asyncio.sleep(min(wait_s, LOOK_S))
        finally:
            self.permits.waiting -= 1
            self._watch_pause()

    def begin(self) -> None:
        """Count a request that is under way."""
        self._under_way += 1
        self._watch_pause()

    def end(self) -> None:
        """Count it as ended."""
        self._under_way -= 1
        self._watch_pause()

    def _wait_s(self, usage: Callable[[], Usage]) -> float:
        now_s = time.monotonic()
        if self._local is not None:
            demand = self.permits.demand(now_s)
            self.permits.add(self._local.grant("", demand, usage(), now_s), now_s)
        return self.permits.take_permit(now_s)

    def _watch_pause(self) -> None:
        self._paused.run(self.permits.waiting > 0 and not self._under_way)


def pacing_of(config: RunConfig, permits: Permits | None) -> Pacing:
    """Return the pacing of a scorer; `permits`: those of its broker, None where there is no broker."""
    limits = RateLimits.of_run(config)
    local = Allowance(limits, LOCAL_BEAT_S) if permits is None and limits.is_on else None
    return Pacing(permits, config.scorer.openai.limit_words, local)
