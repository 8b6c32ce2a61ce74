"""The learner's children come back on their addresses when they are killed, and go when it goes."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import Halted, PeerLost, UserError
from prefixrl.common.host import process
from prefixrl.common.wire.address import beside
from prefixrl.common.wire.messages.weights import GetManifest, Gone
from prefixrl.common.wire.transport import Client
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.processes import servers as module
from prefixrl.learner.processes.servers import Servers
from prefixrl.learner.run.stop import StopSignal
from prefixrl.rollout.weights import WeightsSource
from support import keys
from support.fakes import NOTE, free_pair, peers, run_on_disk, wait_until
from support.processes import is_alive
from support.tiers import mostly_nightly

LEARNER = """
import sys, time
from pathlib import Path
from prefixrl.common.config.load import from_json
from prefixrl.learner.processes.servers import Servers
directory = Path(sys.argv[1])
servers = Servers(from_json((directory / "config.json").read_text()), directory, 0)
(directory / "started").touch()
time.sleep(600)
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_on_disk(tmp_path)


@pytest.fixture
def servers(config: RunConfig) -> Iterator[Servers]:
    started = Servers(config, Path(config.directory), 0)
    yield started
    started.close()


def newest(endpoint: str) -> int:
    """Ask the weight server for its newest version."""
    client: Client[Gone, GetManifest] = Client(endpoint, Gone, b"asking", keys.key())
    try:
        client.send(GetManifest(5), timeout_s=30.0)
        received = client.receive(30.0)
        assert received is not None
        return received[0].latest
    finally:
        client.close()


def test_killed_children_come_back_on_their_addresses_with_their_books(
    config: RunConfig, servers: Servers
) -> None:
    assert newest(servers.weights_endpoint) == -1
    client = BrokerClient(servers.address)
    client.published(NOTE)
    for name in (module.BROKER, module.WEIGHT_SERVER):
        child = servers._processes[name]
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda n=name, c=child: servers._processes[n] is not c, "the restart")
    assert client.status().iteration == 0, "the same connection finds the new broker"
    client.close()
    assert newest(servers.weights_endpoint) == -1
    assert servers.failure is None
    journal = Path(config.directory) / "journal" / "000000.msgpack"
    assert journal.read_bytes().count(b"VersionPublished") == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(resource, "prlimit"), reason="no limits of another process on this system"
)
def test_a_broker_whose_disk_fails_ends_and_comes_back(config: RunConfig, servers: Servers) -> None:
    client = BrokerClient(servers.address)
    failing = servers._processes[module.BROKER]
    resource.prlimit(
        failing.pid, resource.RLIMIT_FSIZE, (1, 1)
    )  # its next write to the journal raises EFBIG
    client.published(NOTE)
    assert servers._processes[module.BROKER] is not failing
    assert failing.returncode == 1
    assert client.status().iteration == 0
    client.close()
    assert servers.failure is None


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["", "journal"])
def test_a_run_whose_directory_or_journal_is_removed_ends_with_a_sentence(
    config: RunConfig, servers: Servers, lost: str
) -> None:
    gone = Path(config.directory) / lost
    gone.rename(gone.with_name("elsewhere"))
    wait_until(lambda: servers.failure, "the end of the broker")
    why = "it said why" if lost else f"{gone} was removed"
    with pytest.raises(UserError, match=f"ended with exit code 2: {why}"):
        servers.check()
    gone.with_name("elsewhere").rename(gone)


@pytest.mark.slow
@pytest.mark.parametrize("host", mostly_nightly(["lo", "localhost", "0.0.0.0"], 1))
@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_run_on_any_interface_is_found_again_at_its_address(
    host: str, is_fixed: bool, tmp_path: Path
) -> None:
    port = free_pair() if is_fixed else 0
    config = run_on_disk(tmp_path, broker={"listen": f"tcp://{host}:{port}"})
    servers = Servers(config, Path(config.directory), 0)
    try:
        name, _, told = servers.address.endpoint.removeprefix("tcp://").rpartition(":")
        assert name == (socket.gethostname() if host == "0.0.0.0" else "127.0.0.1")
        weights = beside(servers.weights_endpoint, servers.address.endpoint)
        assert not is_fixed or (told, weights) == (str(port), f"tcp://{name}:{port + 1}")
        client = BrokerClient(servers.address)
        for module_name in (module.BROKER, module.WEIGHT_SERVER):
            kill(servers, module_name)
        assert client.status().iteration == 0, "the same connection finds the new broker"
        assert newest(weights) == -1
        client.close()
    finally:
        servers.close()


def kill(servers: Servers, name: str = module.BROKER) -> None:
    """Kill a child and wait for what is done about it."""
    child = servers._processes[name]
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: servers.failure or servers._processes[name] is not child, "the restart")


@pytest.mark.slow
def test_a_restarted_weight_server_waits_for_its_port(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = servers.weights_endpoint.removeprefix("tcp://").rpartition(":")
    start, taken = servers._start, socket.socket()

    def start_while_taken(name: str, is_restart: bool) -> None:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, int(port)))
        taken.listen()
        start(name, is_restart)

    monkeypatch.setattr(servers, "_start", start_while_taken)
    kill(servers, module.WEIGHT_SERVER)
    first = servers._processes[module.WEIGHT_SERVER]
    time.sleep(3.0)
    taken.close()
    assert newest(servers.weights_endpoint) == -1
    assert servers._processes[module.WEIGHT_SERVER] is first, (
        "it waited, and was not started again and again"
    )


class LateClock:
    """The `time` of a module, after whose first sleep ten minutes have passed; later ones wake stopped children.

    For the thread of the test alone: those that watch the servers of earlier tests sleep in the same module.
    """

    def __init__(self) -> None:
        self._late_s = 0.0
        self._thread = threading.get_ident()

    def monotonic(self) -> float:
        return time.monotonic() + (self._late_s if threading.get_ident() == self._thread else 0.0)

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() == self._thread:
            for child in psutil.Process().children() if self._late_s else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.status() == psutil.STATUS_STOPPED:
                        child.resume()
            self._late_s = 600.0
        time.sleep(seconds)


class BornStopped(subprocess.Popen[bytes]):
    """A child that does nothing until somebody wakes it: it cannot be ready before it is waited for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.send_signal(signal.SIGSTOP)


def test_a_child_that_takes_its_time_is_waited_for_by_name(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "time", LateClock())
    monkeypatch.setattr(subprocess, "Popen", BornStopped)
    servers = Servers(config, Path(config.directory), 0)
    servers.close()
    pid = servers._processes[module.WEIGHT_SERVER].pid
    assert any(
        each.startswith(f"waiting for the weight server (pid {pid}) to open its")
        for each in caplog.messages
    )


def test_a_child_that_never_opens_its_socket_is_named(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPLAY_S", 0.0)
    with pytest.raises(PeerLost, match=r"the weight server \(pid \d+\) did not open its socket"):
        Servers(config, Path(config.directory), 0)


def test_deaths_of_a_long_run_do_not_add_up(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers._budgets["broker"].most = 1
    monkeypatch.setattr(process, "WELL_S", 0.0)
    for _ in range(3):
        kill(servers)
    assert servers.failure is None
    servers.check()


@pytest.mark.slow
def test_who_asks_servers_beyond_help_ends_with_what_became_of_them(servers: Servers) -> None:
    for budget in servers._budgets.values():
        budget.most = 1
    client = BrokerClient(servers.address, StopSignal(servers=servers))
    kill(servers, module.WEIGHT_SERVER)
    kill(servers)
    assert servers.failure is None, "each has restarts of its own"
    kill(servers)
    with pytest.raises(PeerLost, match=r"the broker \(pid \d+\) ended with exit code -9, after 1"):
        client.status()
    client.close()


def test_a_child_that_cannot_be_started_again_is_a_failure_that_leaves_the_other_alone(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(servers, module.WEIGHT_SERVER)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    kill(servers)
    assert servers.failure
    assert "cannot be started again: Resource temporarily unavailable" in servers.failure
    assert any(each.name == "servers" for each in threading.enumerate()), "its end would kill it"
    assert newest(servers.weights_endpoint) == -1


@pytest.mark.slow
def test_a_broker_that_dies_while_it_is_asked_to_end_is_not_waited_for(servers: Servers) -> None:
    client = BrokerClient(servers.address, StopSignal(servers=servers))
    servers.expect_end()
    os.kill(servers._processes[module.BROKER].pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match="the broker ended with exit code -9 before it answered"):
        client.status()
    client.close()


@pytest.mark.slow
def test_a_broker_that_waits_for_a_worker_without_goodbye_ends_in_order(
    config: RunConfig, servers: Servers
) -> None:
    client = BrokerClient(servers.address)
    with peers(servers.endpoint, "worker") as (worker,):
        worker.ready(config, "scorer")
        servers.expect_end()
        client.stop("the run is finished")
        client.close()
        servers.close()
    assert servers._processes[module.BROKER].returncode == 0


def test_servers_are_deaf_to_what_a_batch_system_sends_to_every_process_and_end_when_the_learner_does(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def everybody_is_told_to_stop() -> None:
        for child in started:
            for number in process.STOP_SIGNALS:
                child.send_signal(number)

    def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(command, **options))
        everybody_is_told_to_stop()
        return started[-1]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    servers = Servers(config, Path(config.directory), 0)
    everybody_is_told_to_stop()
    assert newest(servers.weights_endpoint) == -1
    client = BrokerClient(servers.address, StopSignal(servers=servers))
    assert client.status().iteration == 0
    client.close()
    servers.close()
    assert [child.returncode for child in started] == [0, 0], "neither was started twice"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(), "the learner itself hears them"


@pytest.mark.slow
def test_a_clock_that_went_backwards_does_not_hold_a_start_up(config: RunConfig) -> None:
    endpoint = Path(config.directory) / "endpoint"
    Servers(config, Path(config.directory), 0).close()
    later_s = time.time() + 7200.0
    os.utime(endpoint, (later_s, later_s))
    Servers(config, Path(config.directory), 0).close()
    assert endpoint.stat().st_mtime < later_s, "it did not wait for a file of the future"


def test_a_stop_ends_the_wait_for_the_servers_start_and_the_servers(config: RunConfig) -> None:
    children_before = set(psutil.Process().children())
    with pytest.raises(Halted, match="stopped as asked while the servers of the run began"):
        Servers(config, Path(config.directory), 0, stop=StopSignal(lambda: True))
    assert set(psutil.Process().children()) <= children_before


def test_children_do_not_outlive_a_killed_learner(config: RunConfig) -> None:
    directory = Path(config.directory)
    learner = subprocess.Popen(
        [sys.executable, "-c", LEARNER, str(directory)], stderr=subprocess.DEVNULL
    )
    wait_until((directory / "started").exists, "the start")
    children = psutil.Process(learner.pid).children(recursive=True)
    assert len(children) == 2
    learner.kill()
    learner.wait()
    wait_until(lambda: not any(is_alive(each) for each in children), "the end of both children")


@pytest.mark.slow
def test_the_local_endpoint_is_in_one_folder_of_this_user_at_every_start(
    config: RunConfig, tmp_path: Path
) -> None:
    folders = []
    for _ in range(2):
        servers = Servers(config, Path(config.directory), 0)
        assert servers._folder
        folders.append(servers._folder)
        assert folders[-1].stat().st_mode & 0o777 == 0o700
        assert (folders[-1] / "weights").is_socket()
        servers.close()
        assert not folders[-1].exists()
    assert folders[0] == folders[1]
    folders[0].symlink_to(tmp_path)  # as another user might
    try:
        servers = Servers(config, Path(config.directory), 0)
        assert servers._folder != folders[0]
        servers.close()
    finally:
        folders[0].unlink()


@pytest.mark.parametrize("case", ["too long a path", "no folder"])
def test_without_a_local_endpoint_weights_come_over_tcp(
    case: str,
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / ("long" * 30) if case == "too long a path" else tmp_path / "a file"
    folder.touch() if case == "no folder" else folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    servers = Servers(config, Path(config.directory), 0)
    try:
        assert newest(servers.weights_endpoint) == -1
        with peers(servers.endpoint, "worker") as (worker,):
            welcome = worker.join("rollout")
        source = WeightsSource.from_welcome(welcome, servers.address)
        assert source.endpoint == servers.weights_endpoint and source.key
    finally:
        servers.close()
    assert sum("over TCP" in each for each in caplog.messages) == 1


def test_a_service_keeps_its_local_endpoint_outside_its_private_tmp(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}:/run/another")
    servers = Servers(config, Path(config.directory), 0)
    assert servers._folder and servers._folder.parent == tmp_path
    servers.close()
