"""A worker process that is asked to stop: no lease is left to expire, no group is lost or trained twice."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from e2e.simulated_run import beside, config_of, next_batch, note, workers
from prefixrl.common.config.run import RunConfig
from prefixrl.common.wire.messages.learner import Accepted, Batch, IterationDone, Published, Stop
from prefixrl.common.wire.messages.worker import Goodbye, ScoreTask, Welcome
from prefixrl.learner.broker.server import Broker
from prefixrl.learner.broker.workers.workers import Phase
from support.fakes import Peer, endpoint_of, groups_of, peers, ready, serving, wait_until

GRACE_S = 120.0
ENDS_S = 60.0
"""Longest end of an interpreter on a busy machine, after its Goodbye."""
Process = subprocess.Popen[str]


@contextmanager
def worker(role: str, config: RunConfig, grace_s: float = GRACE_S) -> Iterator[Process]:
    """A real `prefixrl-rollout` or `prefixrl-scorer` process of this run."""
    command = [
        sys.executable,
        "-m",
        f"prefixrl.{role}",
        "--run",
        config.directory,
        "--grace-s",
        str(grace_s),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def are_ready(broker: Broker, rollouts: int, scorers: int) -> None:
    def there() -> bool:
        working = [
            worker.role
            for worker in list(broker.dispatcher.registry.by_identity.values())
            if worker.phase is Phase.READY and not worker.is_leaving
        ]
        return working.count("rollout") == rollouts and working.count("scorer") == scorers

    wait_until(there, "all workers", timeout_s=90.0)


def is_scoring(broker: Broker) -> bool:
    return any(scorer.leases for scorer in list(broker.dispatcher.registry.workers_of("scorer")))


def end_of(process: Process, within_s: float) -> tuple[int, float, str]:
    """Exit code, seconds until the end, and the log of a process that was sent a signal just now."""
    began_s = time.monotonic()
    _, log = process.communicate(timeout=within_s)
    return process.returncode, time.monotonic() - began_s, log


@contextmanager
def learning(config: RunConfig, trained: list[int]) -> Iterator[None]:
    """A learner that trains every batch to the end of the run, and notes the groups."""

    def learn(_: threading.Event) -> None:
        for iteration in range(1000):
            rank.say(Published(note(0)))
            rank.hear(Accepted)
            answer = next_batch(rank, iteration)
            if not isinstance(answer, Batch):
                return
            trained.extend(group.prefixes.seq for group in groups_of(rank, answer))
            rank.say(IterationDone(iteration, iteration + 1, None))
            rank.hear(Accepted)

    with peers(endpoint_of(config), "rank") as (rank,):
        rank.join("rank")
        with beside(learn, end_s=120.0):
            yield
        rank.say(Stop("the run is finished"))
        rank.hear(Accepted)
        rank.say(Goodbye("the run is finished"))


SLOW_SIGNALS = [
    pytest.param(number, marks=pytest.mark.nightly) for number in (signal.SIGUSR1, signal.SIGUSR2)
]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, *SLOW_SIGNALS])
def test_a_drained_scorer_loses_nothing_and_every_group_is_trained_once(
    number: signal.Signals, tmp_path: Path
) -> None:
    # One version for all: this learner publishes none, and the window is wide enough to go on.
    config = config_of(
        tmp_path,
        staleness=8,
        iterations=8,
        simulated={"completion_s": 0.2, "completion_sigma": 0.5},
    )
    trained: list[int] = []
    with (
        serving(config) as broker,
        workers(endpoint_of(config), config, ("rollout", "scorer")),
        worker("scorer", config) as leaving,
    ):
        are_ready(broker, 1, 2)
        with learning(config, trained):
            wait_until(lambda: len(trained) >= 20, "the first iteration", timeout_s=60.0)
            leaving.send_signal(number)
            code, took_s, log = end_of(leaving, GRACE_S + 2.0)
            assert code == 0 and took_s < GRACE_S, log
            assert "leaving: asked to stop" in log
        assert len(trained) == len(set(trained)) == 8 * 20
        assert set(broker.dispatcher.losses) <= {"scorer: left", "rollout: left"}


@pytest.mark.slow
def test_a_drained_rollout_finishes_its_tasks_and_gets_no_more(tmp_path: Path) -> None:
    config = config_of(tmp_path, staleness=2, iterations=8, simulated={"prefix_s": 1.0})
    with serving(config) as broker, worker("rollout", config) as leaving:
        are_ready(broker, 1, 0)
        (registered,) = broker.dispatcher.registry.workers_of("rollout")
        rank = Peer(endpoint_of(config), b"rank")
        rank.join("rank")
        rank.say(Published(note(0)))
        rank.hear(Accepted)
        wait_until(lambda: registered.leases, "a task at the rollout")
        leaving.send_signal(signal.SIGTERM)
        code, took_s, log = end_of(leaving, GRACE_S + 2.0)
        rank.close()
        assert code == 0 and took_s < 1.0 + ENDS_S, log
        assert registered.tasks_done > 0, "what had begun was delivered"
        assert not registered.leases and broker.dispatcher.losses == {"rollout: left": 1}
        assert not broker.ledger.counts.failed


@pytest.mark.slow
def test_what_outlasts_the_grace_time_is_handed_back(tmp_path: Path) -> None:
    code, took_s, log = ended_while_scoring(tmp_path, [signal.SIGTERM], grace_s=2.0)
    assert code == 0 and 1.0 < took_s < 2.0 + ENDS_S, log


@pytest.mark.slow
def test_a_second_signal_means_now(tmp_path: Path) -> None:
    code, took_s, log = ended_while_scoring(tmp_path, [signal.SIGTERM, signal.SIGTERM])
    assert code == 0 and took_s < ENDS_S, log


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([signal.SIGINT] * 2, marks=pytest.mark.nightly),
        [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2],
    ],
)
def test_a_third_signal_and_a_second_ctrl_c_end_the_process_as_it_stands(
    numbers: list[signal.Signals], tmp_path: Path
) -> None:
    # Alike signals that arrive together are one to the kernel; after a pause the second may have ended it in order.
    pause_s = 0.1 if len(set(numbers)) < len(numbers) else 0.0
    code, took_s, log = ended_while_scoring(tmp_path, numbers, pause_s=pause_s, returns=False)
    assert code in {128 + number for number in numbers} and took_s < 1.0, log


def ended_while_scoring(
    tmp_path: Path,
    numbers: list[signal.Signals],
    grace_s: float = GRACE_S,
    pause_s: float = 0.4,
    returns: bool = True,
) -> tuple[int, float, str]:
    """Signal a scorer whose tasks take a minute; afterwards their groups are at another one at once."""
    config = config_of(
        tmp_path,
        staleness=2,
        iterations=8,
        simulated={"completion_s": 60.0, "completion_sigma": 0.0},
    )
    with (
        serving(config) as broker,
        workers(endpoint := endpoint_of(config), config, ("rollout",)),
        worker("scorer", config, grace_s) as leaving,
    ):
        are_ready(broker, 1, 1)
        rank, other = Peer(endpoint, b"rank"), Peer(endpoint, b"other")
        rank.join("rank")
        rank.say(Published(note(0)))
        rank.hear(Accepted)
        wait_until(lambda: is_scoring(broker), "a task at the scorer")
        (registered,) = broker.dispatcher.registry.workers_of("scorer")
        wait_until(registered.behind, "a task behind those that have begun")
        for number in numbers:
            leaving.send_signal(number)
            time.sleep(pause_s)
        if returns and len(numbers) == 1:
            wait_until(lambda: registered.is_leaving, "word of its end")
            wait_until(lambda: not registered.behind(), "the task that had not begun")
        if returns and len(numbers) == 2:
            wait_until(
                lambda: registered.identity not in broker.dispatcher.registry.by_identity,
                "its Goodbye",
                2.0,
            )
        ended = end_of(leaving, GRACE_S + 4.0)
        if returns:
            welcome = other.join("scorer")
            assert isinstance(welcome, Welcome)
            other.say(msgspec.structs.replace(ready(config, "scorer"), engine="simulated"))
            other.hear(ScoreTask, timeout_s=5.0)
            assert broker.dispatcher.losses == {"scorer: left": 1}
        rank.close()
        other.close()
    return ended


def test_a_worker_that_is_still_loading_ends_at_once(tmp_path: Path) -> None:
    config = config_of(tmp_path, staleness=2, iterations=8)
    with serving(config) as broker, worker("scorer", config) as loading:
        wait_until(lambda: broker.dispatcher.registry.by_identity, "its Hello", timeout_s=60.0)
        loading.send_signal(signal.SIGTERM)
        code, took_s, log = end_of(loading, ENDS_S)
        assert code == 0 and took_s < ENDS_S, log
        wait_until(lambda: not broker.dispatcher.registry.by_identity, "its Goodbye")
