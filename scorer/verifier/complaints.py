"""Failures by kind, for logs that name each once, and for the state of a scorer."""

import logging
import time
from collections import Counter

from prefixrl.common.wire.messages.groups import Fault

MAX_COMPLAINTS = 20
"""Number of kinds of failures that a log distinguishes."""
SLOW_S = 2.0
"""A call of a user's function that takes longer is named at once: it may never end."""
RECENT_S = 60.0
"""Time for which the status names a failure of a user's function."""


class Complaints:
    """Failures so far, by kind."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[tuple[str, object]] = Counter()

    def is_first(self, kind: tuple[str, object], reason: str) -> bool:
        """Count a failure; return True for the first of its kind, log the 10th, 100th and so on."""
        if kind not in self._counts and len(self._counts) >= MAX_COMPLAINTS:
            kind = ("other", 0)
        self._counts[kind] += 1
        count = self._counts[kind]
        if count > 1 and str(count).strip("0") == "1":
            self._log.warning("%d times so far: %s", count, reason)
        return count == 1


class Troubles:
    """Failures of the children of a pool; the status names failures of a user's function."""

    def __init__(self, log: logging.Logger, function_ref: str, timeout_s: int) -> None:
        """`function_ref` is empty without a function."""
        self._log = log
        self._ref = function_ref
        self._timeout_s = timeout_s
        self._complaints = Complaints(log)
        self._counts: Counter[Fault] = Counter()
        self._newest_s = -RECENT_S
        self._is_slow_logged = False

    def count_failure(self, fault: Fault) -> None:
        """Count an attempt at a verdict that failed."""
        self._counts[fault] += 1
        self._newest_s = time.monotonic()

    def log_failure(self, reason: str, fault: Fault) -> None:
        """Log a failure that no child can log itself, the first of its kind and the 10th, 100th."""
        if self._complaints.is_first((fault, 0), reason):
            self._log.warning("%s", reason)

    def log_slow_call(self, slowest_s: float) -> None:
        """Log the first call of a function that takes long: whether it ends is not known yet."""
        if self._ref and slowest_s >= SLOW_S and not self._is_slow_logged:
            self._is_slow_logged = True
            limit = f"no answer for {slowest_s:.1f} s, the limit is {self._timeout_s} s"
            self._log.warning(
                "reward.function %s: %s; `prefixrl status` shows later ones", self._ref, limit
            )

    def in_words(self, slowest_s: float) -> str:
        """Describe a function that hangs or failed in the last minute; "" without one."""
        if not self._ref:
            return ""
        waiting = f"waiting for reward.function {self._ref}: {slowest_s:.0f} s on one answer"
        troubles = [waiting] if slowest_s >= SLOW_S else []
        if time.monotonic() - self._newest_s < RECENT_S:
            counts = ", ".join(f"{fault} {count} times" for fault, count in self._counts.items())
            troubles.append(f"reward.function {self._ref}: {counts}")
        return "; ".join(troubles)
