"""The form of log lines, and a bound on those that peers cause: none may fill the disk, or hide what others did."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar

LINE_CHARS = 1000
"""Most characters of a message; the trace of a fault comes on top of them."""
PER_KIND, PER_KIND_S = 100, 1.0
"""Lines of a kind that are written at once, and then per second."""
PER_PEER, PER_PEER_S = 20, 0.1
"""Lines that one peer causes."""
MOST_PEERS = 4096
CAUSE: ContextVar[bytes] = ContextVar("CAUSE", default=b"")
"""Identity of the peer whose message is handled."""


class LineBudget(logging.Filter):
    """Lets a line through while its kind, by the unformatted text, and its peer have lines left.

    The next line of a kind that is let through says how many were not.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._left: dict[object, tuple[float, float]] = {}
        """By kind or peer, the lines left at a time."""
        self._left_out = Counter[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True for a line that is written."""
        now_s = self._clock()
        kind = str(record.msg)[:LINE_CHARS]
        peer = CAUSE.get()
        has_room = not peer or self._spend_line(peer, PER_PEER, PER_PEER_S, now_s)
        if not has_room or not self._spend_line(kind, PER_KIND, PER_KIND_S, now_s):
            self._left_out[kind] += 1
            return False
        text = record.getMessage()
        if left_out := self._left_out.pop(kind, 0):
            text = f"{text[:LINE_CHARS]} ({left_out} more such lines before this were left out)"
        record.msg = text[: LINE_CHARS + 100]
        record.args = ()
        return True

    def _spend_line(self, key: object, most: float, per_s: float, now_s: float) -> bool:
        lines, then_s = self._left.pop(key, (most, now_s))
        lines = min(most, lines + per_s * (now_s - then_s))
        if len(self._left) >= MOST_PEERS:
            self._left.pop(next(iter(self._left)))  # the one that was asked for longest ago
        self._left[key] = lines - (lines >= 1), now_s
        return lines >= 1
