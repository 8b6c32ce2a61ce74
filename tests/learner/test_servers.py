"""The learner's children come back on their addresses when they are killed, and go when it goes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fakes import NOTE, run_on_disk, wait_until
from prefixrl.common.config import RunConfig
from prefixrl.common.messages import GetManifest, Gone
from prefixrl.common.transport import Client
from prefixrl.learner.client import BrokerClient
from prefixrl.learner.servers import Servers

LEARNER = """
import sys, time
from pathlib import Path
from prefixrl.common.config import from_json
from prefixrl.learner.servers import Servers
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
    """What the weight server says is its newest version."""
    client: Client[Gone, GetManifest] = Client(endpoint, Gone, b"asking")
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
    client = BrokerClient(servers.endpoint)
    client.published(NOTE)
    for name in ("_broker", "_weights"):
        child = getattr(servers, name)
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda n=name, c=child: getattr(servers, n) is not c, "the restart")
    assert client.status().iteration == 0, "the same connection finds the new broker"
    client.close()
    assert newest(servers.weights_endpoint) == -1
    assert servers.failure is None
    journal = Path(config.directory) / "journal.msgpack"
    assert journal.read_bytes().count(b"VersionPublished") == 1


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
    wait_until(
        lambda: all(
            not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in children
        ),
        "the end of both children",
    )
