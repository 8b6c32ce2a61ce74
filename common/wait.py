"""A wait that may be long: a person reads now and then what is waited for."""

import logging

log = logging.getLogger(__name__)

TELL_EVERY_S = 30.0


class Wait:
    """One wait. Its deadline is the waiter's own."""

    def __init__(self, awaited: str) -> None:
        """`awaited`: who, and to do what."""
        self._awaited = awaited
        self._told_s = 0.0

    def tell(self, waited_s: float) -> None:
        """To be called again and again: logs, every half minute, that it goes on."""
        if waited_s - self._told_s >= TELL_EVERY_S:
            self._told_s = waited_s
            log.info("waiting for %s, %.0f s so far", self._awaited, waited_s)
