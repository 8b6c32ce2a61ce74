"""The permits of one scorer: requests that it may make, evenly over a heartbeat. Pure: time is passed in.

    network thread ── add: a grant ──▶ Permits ◀── take_permit, before each request ── asyncio thread of the engine
          ▲ demand: permits that it lacks ──┘

It lacks what waits for a permit and what it usually uses in a heartbeat, less what it has. Permits that nobody takes
for `KEPT_BEATS` are dropped: used later they would come on top of what others are granted then.
"""

import math
import threading

from prefixrl.common.wire.messages.worker import MOST_REST_S, RequestDemand, RequestGrant

LOOK_S = 0.02
"""Time between two looks for a permit that may come at any time."""
KEPT_BEATS = 2
CATCH_UP = 0.1
"""Lateness that is made up for, in heartbeats: a waiting request is never woken exactly in time."""


class Permits:
    """Granted permits that are not used; for two threads."""

    def __init__(self, beat_s: float) -> None:
        """`beat_s`: time between two grants."""
        self.beat_s = beat_s
        self.own_rest_until_s = 0.0
        """Time until which the endpoint wants no request of this scorer."""
        self.rest_until_s = 0.0
        """Time until which no scorer of the run makes a request."""
        self.rest_since_s = 0.0
        self.waiting = 0
        """Number of requests that wait for a permit."""
        self._received, self._unused = 0, 0
        self._next_s, self._interval_s = 0.0, 0.0
        """Earliest time of the next request, and the time between two."""
        self._added_s = 0.0
        self._usual, self._usual_s = 0.0, 0.0
        """Requests of the newest heartbeat, older ones fading, at a time."""
        self._lock = threading.Lock()

    def add(self, grant: RequestGrant, now_s: float) -> None:
        """Take a grant over."""
        with self._lock:
            self._drop_old(now_s)
            if grant.rest_s and self.rest_until_s < now_s:
                self.rest_since_s = now_s
            self.rest_until_s = now_s + grant.rest_s
            more = grant.permits - self._received
            if more <= 0:
                return
            self._received = grant.permits
            self._unused += more
            self._interval_s = self.beat_s / self._unused
            self._next_s = min(self._next_s, now_s + self._interval_s)
            self._added_s = now_s

    def take_permit(self, now_s: float) -> float:
        """Take a permit; return 0, or the time after which to try again."""
        with self._lock:
            self._drop_old(now_s)
            until_s = max(self.own_rest_until_s, self.rest_until_s)
            if until_s > now_s:
                return until_s - now_s
            if not self._unused:
                return LOOK_S
            if self._next_s > now_s:
                return self._next_s - now_s
            self._unused -= 1
            self._next_s = max(self._next_s, now_s - CATCH_UP * self.beat_s) + self._interval_s
            self._usual = self._faded(now_s) + 1
            self._usual_s = now_s
            return 0.0

    def demand(self, now_s: float) -> RequestDemand:
        """Return what the broker is told."""
        with self._lock:
            self._drop_old(now_s)
            lacking = self.waiting + math.ceil(self._faded(now_s) - 0.5) - self._unused
            return RequestDemand(
                received=self._received,
                lacking=max(0, lacking),
                rest_s=min(max(0.0, self.own_rest_until_s - now_s), MOST_REST_S),
            )

    def _faded(self, now_s: float) -> float:
        return self._usual * math.exp((self._usual_s - now_s) / self.beat_s)

    def _drop_old(self, now_s: float) -> None:
        if now_s - self._added_s > KEPT_BEATS * self.beat_s:
            self._unused = 0
