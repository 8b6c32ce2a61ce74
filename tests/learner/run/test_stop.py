"""A stop is asked for turn by turn, and each kind of wait has an error that ends it."""

import socket
from pathlib import Path

import pytest

from prefixrl.common.errors import Halted, PeerLost, TrainingFault
from prefixrl.common.host.service import Service
from prefixrl.learner.run.stop import StopSignal


class DeadServers:
    def check(self) -> None:
        raise PeerLost("the broker died too often")


def test_without_a_stop_no_wait_ends() -> None:
    stop = StopSignal()
    stop.end_start()
    stop.end_disk_wait()
    stop.end_judging(3)
    stop.check_servers()
    assert not stop.is_requested()


def test_each_kind_of_wait_has_an_error_of_its_own() -> None:
    stop = StopSignal(lambda: True, servers=DeadServers())
    with pytest.raises(Halted, match="while the servers of the run began"):
        stop.end_start()
    with pytest.raises(TrainingFault, match="asked to stop while the disk is full"):
        stop.end_disk_wait()
    with pytest.raises(Halted, match="stopped as asked after 3 iterations, not finished"):
        stop.end_judging(3)


def test_lost_servers_end_the_wait_for_an_answer_and_for_the_last_evaluation() -> None:
    stop = StopSignal(servers=DeadServers())
    with pytest.raises(PeerLost, match="the broker died too often"):
        stop.check_servers()
    with pytest.raises(PeerLost):
        stop.end_judging(3)
    with pytest.raises(PeerLost):
        StopSignal().beside(DeadServers()).check_servers()


def test_a_stop_by_the_operator_ends_judging_alone() -> None:
    stop = StopSignal()
    stop.is_halting = True
    stop.end_start()
    stop.end_disk_wait()
    with pytest.raises(Halted, match="after 2 iterations"):
        stop.end_judging(2)


def test_each_question_is_a_sign_of_life_and_a_stop_is_told_once(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        service = Service({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"})
        answers = iter([False, True, True])
        stop = StopSignal(lambda: next(answers), service)
        assert [stop.is_requested() for _ in range(3)] == [False, True, True]
        manager.setblocking(False)
        told = [manager.recv(4096).decode() for _ in range(2)]
        with pytest.raises(BlockingIOError):
            manager.recv(4096)
    assert told == ["WATCHDOG=1", "STOPPING=1"]
