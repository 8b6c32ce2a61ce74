"""Malformed messages, counted; of many the log holds a line per interval.

So no peer can fill the disk.
"""

import logging
import math

log = logging.getLogger(__name__)

TELL_EVERY_S = 10.0


class MalformedMessages:
    """The count of a broker's malformed messages; time is passed in."""

    def __init__(self) -> None:
        self.refused = 0
        """Messages that could be read and ended their senders; each has a line of its own."""
        self._ignored = self._told = 0
        self._told_s = -math.inf
        self._newest = ""

    @property
    def total(self) -> int:
        """Number of messages that the broker did not take."""
        return self._ignored + self.refused

    def ignored(self, error: Exception, now_s: float) -> None:
        """Count a message that is not answered; the first is logged at once."""
        self._ignored += 1
        self._newest = str(error)
        self.tell(now_s)

    def tell(self, now_s: float) -> None:
        """Log what came since the last line, if that was long enough ago."""
        if self._newest and now_s - self._told_s >= TELL_EVERY_S:
            since, self._told, self._told_s = self._ignored - self._told, self._ignored, now_s
            log.warning("ignored %d malformed messages, %d in all: %.500s", since, self._ignored, self._newest)
            self._newest = ""
