"""Messages of a daemon to systemd, on a real datagram socket."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixrl.common.host.service import Service

WATCHDOG_S = 2.0


@pytest.fixture(params=["a path", "an abstract name"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """The manager's socket, and its address as NOTIFY_SOCKET names it."""
    is_abstract = request.param == "an abstract name"
    name = f"@prefixrl-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"\0{name[1:]}" if is_abstract else name)
        bound.settimeout(5.0)
        yield bound, name


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def heard(manager: socket.socket) -> list[str]:
    """Every line sent so far."""
    lines = []
    manager.setblocking(False)
    try:
        while True:
            lines += manager.recv(4096).decode().splitlines()
    except BlockingIOError:
        return lines


def watched(address: str, clock: Clock) -> Service:
    usec = str(int(WATCHDOG_S * 1e6))
    environment = {
        "NOTIFY_SOCKET": address,
        "WATCHDOG_USEC": usec,
        "WATCHDOG_PID": str(os.getpid()),
    }
    service = Service(environment, clock)
    assert environment == {}, "no child may speak for this process"
    return service


def test_readiness_comes_with_a_status_and_the_end_is_announced_once(
    manager: tuple[socket.socket, str],
) -> None:
    service = watched(manager[1], Clock())
    service.ready("serving")
    service.stopping()
    service.stopping()
    assert heard(manager[0]) == ["READY=1", "STATUS=serving", "STOPPING=1"]


def test_the_watchdog_is_fed_by_progress_at_half_its_interval(
    manager: tuple[socket.socket, str],
) -> None:
    clock = Clock()
    service = watched(manager[1], clock)
    service.ready("")
    heard(manager[0])
    fed = []
    for turn in range(100):
        clock.now_s += 0.1
        service.alive(turn)
        fed += [clock.now_s] * len(heard(manager[0]))
    assert len(fed) in (9, 10)
    assert (
        max(later - earlier for earlier, later in itertools.pairwise(fed)) <= WATCHDOG_S / 2 + 0.11
    )


def test_a_loop_that_turns_without_progress_starves_the_watchdog(
    manager: tuple[socket.socket, str],
) -> None:
    clock = Clock()
    service = watched(manager[1], clock)
    service.ready("")
    clock.now_s += WATCHDOG_S
    service.alive(7)
    heard(manager[0])
    for _ in range(100):
        clock.now_s += 0.1
        service.alive(7)
    assert heard(manager[0]) == []
    service.alive(8)
    assert heard(manager[0]) == ["WATCHDOG=1"]


def test_loading_is_given_time_until_the_first_progress(manager: tuple[socket.socket, str]) -> None:
    service = watched(manager[1], Clock())
    service.ready("loading")
    service.be_patient(3600.0)
    service.alive(1)
    service.alive(2)
    expected = [
        "READY=1",
        "STATUS=loading",
        "WATCHDOG_USEC=3600000000",
        "WATCHDOG_USEC=2000000",
        "WATCHDOG=1",
    ]
    assert heard(manager[0]) == expected


def test_a_status_is_sent_when_it_changes_and_once_a_second_at_most(
    manager: tuple[socket.socket, str],
) -> None:
    clock = Clock()
    service = watched(manager[1], clock)
    for state in ("version 1", "version 1", "version 2", "version 3"):
        service.status(state)
    clock.now_s += 1.0
    service.status("version 3")
    service.status("version 3")
    assert heard(manager[0]) == ["STATUS=version 1", "STATUS=version 3"]


def test_without_a_manager_or_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "1000000"}):
        service = Service(environment)
        service.ready("")
        service.be_patient(1.0)
        service.alive(None)
        service.stopping()
        with service.patience(1.0):
            service.progressed()


def wait_for_line(manager: socket.socket, wanted: str) -> list[str]:
    """Every line up to a wanted one."""
    lines: list[str] = []
    deadline_s = time.monotonic() + 10.0
    while not any(line.startswith(wanted) for line in lines):
        assert time.monotonic() < deadline_s, lines
        lines += heard(manager)
        time.sleep(0.01)
    return lines


def test_a_save_may_take_long_and_a_stop_that_comes_meanwhile_waits_for_it(
    manager: tuple[socket.socket, str],
) -> None:
    clock, asked = Clock(), threading.Event()
    environment = {"NOTIFY_SOCKET": manager[1], "WATCHDOG_USEC": "2000000"}
    service = Service(environment, clock, asked.is_set)
    service.ready("")
    with service.patience(60.0):
        assert "WATCHDOG_USEC=60000000" in wait_for_line(manager[0], "WATCHDOG_USEC")
        clock.now_s += 20.0
        asked.set()
        assert wait_for_line(manager[0], "EXTEND") == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=40000000"]
    assert heard(manager[0]) == ["WATCHDOG_USEC=2000000", "WATCHDOG=1"]


def test_each_step_of_the_work_moves_the_limit_of_a_stop_and_a_wait_does_not(
    manager: tuple[socket.socket, str],
) -> None:
    clock, asked = Clock(), threading.Event()
    service = Service({"NOTIFY_SOCKET": manager[1]}, clock, asked.is_set)
    service.progressed()
    assert heard(manager[0]) == []
    asked.set()
    service.alive(None)
    assert heard(manager[0]) == []
    said = []
    for _ in range(30):
        service.progressed()
        clock.now_s += 0.1
        said += heard(manager[0])
    assert said == ["STOPPING=1", *["EXTEND_TIMEOUT_USEC=600000000"] * 3]


HUNG = """
import time
from prefixrl.common.host.process import start_logging
start_logging("test-daemon")
def hangs_here():
    time.sleep(60)
hangs_here()
"""


def test_a_daemon_that_its_watchdog_kills_leaves_its_stack_in_the_log() -> None:
    process = subprocess.Popen([sys.executable, "-c", HUNG], stderr=subprocess.PIPE, text=True)
    title = Path(f"/proc/{process.pid}/cmdline")
    deadline_s = time.monotonic() + 20
    while not title.read_bytes().startswith(b"test-daemon") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGABRT)
    _, log = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGABRT
    assert "hangs_here" in log or "<string>" in log, log


def test_a_worker_without_work_is_alive(manager: tuple[socket.socket, str]) -> None:
    clock = Clock()
    service = watched(manager[1], clock)
    service.ready("")
    heard(manager[0])
    for _ in range(20):
        clock.now_s += WATCHDOG_S / 2
        service.alive(None)
        assert heard(manager[0]) == ["WATCHDOG=1"]


def test_a_watchdog_of_another_process_is_not_fed(manager: tuple[socket.socket, str]) -> None:
    clock = Clock()
    service = Service(
        {"NOTIFY_SOCKET": manager[1], "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, clock
    )
    clock.now_s += 10.0
    service.alive(None)
    service.be_patient(60.0)
    assert heard(manager[0]) == []


def test_what_a_busy_manager_did_not_take_is_sent_again(manager: tuple[socket.socket, str]) -> None:
    clock = Clock()
    service = watched(manager[1], clock)
    service.ready("")
    while service._send("STATUS=filling its queue", 0.01):
        pass
    clock.now_s += WATCHDOG_S / 2
    service.alive(None)
    heard(manager[0])
    service.alive(None)
    assert heard(manager[0]) == ["WATCHDOG=1"]
