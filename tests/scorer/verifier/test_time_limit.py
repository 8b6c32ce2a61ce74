"""The limit on a piece of Python: what swallows the alarm, and what comes back too late."""

import signal
import time

import pytest

from prefixrl.scorer.verifier.time_limit import time_limit


def test_work_that_is_done_in_time_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(60):
        actual = sum(range(1000))
    assert actual == 499500
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_loop_is_interrupted() -> None:
    with pytest.raises(TimeoutError, match="not done within"), time_limit(0.05):
        while True:
            pass


def test_code_that_swallows_the_alarm_is_interrupted_again() -> None:
    swallowed = 0
    with pytest.raises(TimeoutError), time_limit(0.05):
        while True:
            try:
                while True:
                    pass
            except BaseException:
                swallowed += 1
                if swallowed == 3:
                    raise
    assert swallowed == 3


def test_a_result_that_comes_after_the_limit_does_not_count() -> None:
    with pytest.raises(TimeoutError), time_limit(0.05):
        try:
            while True:
                pass
        except BaseException:  # noqa: BLE001
            pass  # as if sympy had found an answer in the end


def test_an_error_that_comes_after_the_limit_is_a_timeout() -> None:
    with pytest.raises(TimeoutError), time_limit(0.05):
        try:
            time.sleep(60)
        except BaseException:  # noqa: BLE001
            raise ValueError("what sympy makes of an interruption") from None


def test_an_error_within_the_limit_is_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError), time_limit(60):
        raise ZeroDivisionError
