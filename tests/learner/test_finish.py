"""The end of a run at rank 0.

It can be stopped while its last version is judged, and needs no broker to have ended well.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from prefixrl.common.config.run import RunConfig
from prefixrl.common.errors import Halted, NothingToTrain, PeerLost
from prefixrl.common.host.service import Service
from prefixrl.learner.broker import client as clients
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.evaluation.arms import Arms
from prefixrl.learner.loop import WRITE_S, Learner, RankZeroParts
from prefixrl.learner.models.model import Models
from prefixrl.learner.processes.servers import Servers
from prefixrl.learner.run.collapse_answers import CollapseAnswers
from prefixrl.learner.run.metrics import MetricsLog
from prefixrl.learner.run.stop import StopSignal
from prefixrl.learner.run.uploads import Uploads
from prefixrl.learner.weights.publish import Publisher
from support.fakes import run_on_disk, wait_until


class NoModels:
    """Models of one rank; nothing is trained here."""

    rank, world_size, optimizer_steps = 0, 1, 0


class NoPublisher:
    """Has published everything."""

    digests: dict[int, str] = {}  # noqa: RUF012

    def flush(self, version: int) -> None:
        pass


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The parts of a run without workers: nobody answers its evaluations."""
    train = str(tmp_path / "train.jsonl")
    return run_on_disk(
        tmp_path,
        rollout={"engine": "simulated"},
        data={"train": train, "eval": train},
        evaluation={"problems": 4},
    )


@pytest.fixture
def servers(config: RunConfig) -> Iterator[Servers]:
    started = Servers(config, Path(config.directory), 0)
    yield started
    started.close()


@contextmanager
def learner_of(
    config: RunConfig, servers: Servers, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Learner]:
    """Rank 0 of a run that has trained everything there is and saved it."""
    directory = Path(config.directory)
    stop = StopSignal(stopped, servers=servers)
    client = BrokerClient(servers.address)
    arms = Arms(config, client, directory, 0, stop)
    publisher = cast(Publisher, NoPublisher())
    uploads = Uploads(directory, config.checkpoint)
    zero = RankZeroParts(
        servers, publisher, arms, MetricsLog(directory, 0, stop), Service({}), uploads
    )
    models = cast(Models, NoModels())
    answers = CollapseAnswers(config, directory, models, None)
    learner = Learner(config, directory, client, models, zero, 0, stop, (), answers)
    learner.saved = 0
    try:
        yield learner
    finally:
        client.close()


def test_a_stop_while_the_last_version_is_judged_ends_the_learner_and_not_the_broker(
    config: RunConfig, servers: Servers
) -> None:
    asked: list[bool] = []

    def stopped() -> bool:
        asked.append(True)
        return len(asked) > 2

    with learner_of(config, servers, stopped) as learner:
        with pytest.raises(Halted, match="stopped as asked after 0 iterations"):
            learner.finish()
        assert not (learner.directory / "summary.json").exists()
        assert learner.client.status().evaluations["asked"] > 0, "the broker serves on"


def test_the_watchdog_waits_for_the_last_publication(
    config: RunConfig, servers: Servers, tmp_path: Path
) -> None:
    stops = iter([False, True])
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        learner_of(config, servers, stops.__next__) as learner,
    ):
        manager.bind(str(tmp_path / "notify"))
        assert learner.rank_zero
        learner.rank_zero.service = Service(
            {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        )
        with pytest.raises(Halted):
            learner.finish()
        said = [manager.recv(4096).decode() for _ in range(2)]
    assert said == [f"WATCHDOG_USEC={int(WRITE_S * 1e6)}", "WATCHDOG_USEC=1000000\nWATCHDOG=1"]


def test_servers_that_are_beyond_help_end_the_wait_for_the_last_evaluation(
    config: RunConfig, servers: Servers
) -> None:
    servers.failure = "the broker died 6 times, last with exit code 1"
    with (
        learner_of(config, servers) as learner,
        pytest.raises(PeerLost, match="the broker died 6 times"),
    ):
        learner.finish()


def test_a_broker_that_dies_before_it_answers_the_stop_makes_a_finished_run_no_error(
    config: RunConfig,
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(clients, "STOP_S", 1.0)
    expect_end = servers.expect_end

    def expect_end_and_die() -> None:
        expect_end()
        servers._processes["broker"].kill()
        servers._processes["broker"].wait()

    monkeypatch.setattr(servers, "expect_end", expect_end_and_die)
    monkeypatch.setattr(Arms, "finish", lambda *_: None)
    with learner_of(config, servers) as learner:
        learner.finish()
        assert (learner.directory / "summary.json").exists()
        assert "did not answer" in caplog.text
        learner.give_up_run(NothingToTrain("too little passes"))


def test_a_broker_that_is_told_to_stop_goes(config: RunConfig, servers: Servers) -> None:
    client = BrokerClient(servers.address)
    servers.expect_end()
    client.stop("the run is finished")
    wait_until(lambda: servers._processes["broker"].poll() is not None, "the broker's end")
    assert servers._processes["broker"].returncode == 0
    client.close()
