"""The supervisor of ranks: what their ends together mean."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from prefixrl.common.errors import Halted, PeerLost
from prefixrl.learner.ranks import _for_rank, _watch
from support.fakes import end

HALTS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print(flush=True)
time.sleep(600)
"""
FINISHES = HALTS.replace("143", "0")
DEAF = "print(flush=True); import time; time.sleep(600)"


def ends(code: int, after_s: float = 0.0) -> str:
    return f"print(flush=True); import sys, time; time.sleep({after_s}); sys.exit({code})"


@contextlib.contextmanager
def ranks(*scripts: str) -> "Iterator[list[subprocess.Popen[bytes]]]":
    """Processes in place of ranks, each as far as its first line; none outlives the block."""
    started = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for script in scripts]
    try:
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline() == b"\n"
            each.stdout.close()
        yield started
    finally:
        for each in started:
            end(each)


def is_asked() -> bool:
    return True


def is_not_asked() -> bool:
    return False


def test_ranks_that_halt_one_after_another_are_not_lost() -> None:
    with ranks(ends(143), ends(143, after_s=1.0), ends(0)) as children, pytest.raises(Halted):
        _watch(children, is_not_asked)


@pytest.mark.parametrize("others", [HALTS, FINISHES, DEAF])
def test_ranks_that_are_asked_to_stop_halt(others: str) -> None:
    with ranks(HALTS, others) as children, pytest.raises(Halted):
        _watch(children, is_asked)


def test_ranks_that_had_finished_when_they_were_asked_are_finished() -> None:
    with ranks(FINISHES, FINISHES) as children:
        _watch(children, is_asked)
    with ranks(ends(0), ends(0)) as children:
        _watch(children, is_not_asked)


def test_a_rank_that_was_killed_is_lost() -> None:
    with ranks(DEAF, DEAF) as children:
        threading.Timer(0.5, children[1].send_signal, [signal.SIGTERM]).start()
        with pytest.raises(PeerLost, match=r"learner rank 1 .* was killed by signal 15"):
            _watch(children, is_not_asked)


def test_a_rank_that_failed_gives_its_exit_code() -> None:
    with ranks(ends(2), ends(2)) as children, pytest.raises(SystemExit) as failed:
        _watch(children, is_not_asked)
    assert failed.value.code == 2


def test_the_first_rank_alone_speaks_to_systemd_for_all() -> None:
    given = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "7", "HOME": "/root"}
    assert _for_rank(0, given) == {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "1", "HOME": "/root"}
    assert _for_rank(1, given) == {"HOME": "/root"}
