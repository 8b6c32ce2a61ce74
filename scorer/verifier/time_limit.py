"""A limit on the wall time of Python code that no `except` can lift, for the main thread."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

REPEAT_S = 0.1


class _Strike(BaseException):
    """The alarm; not an Exception, so that `except Exception` lets it through."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Interrupt the body at the limit, and again until it ends; raises TimeoutError.

    A strike may be swallowed by a bare `except` or a destructor, or arrive while C code ignores it:
    so the clock decides, whatever the body found. Code that never returns to Python must be killed
    from outside.
    """
    deadline = time.monotonic() + limit_s
    before = signal.signal(signal.SIGALRM, _strike)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, max(limit_s, 1e-6), REPEAT_S)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Strike:
        pass
    finally:
        # Once more: a strike on the way out leaves the inner one undone.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not done within {limit_s:g} s")


def _strike(_number: int, _frame: object) -> None:
    raise _Strike
