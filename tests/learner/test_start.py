"""The way of a learner to its broker, also past leftovers of an earlier start, and the loss of a broker."""

import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.simulated import PROBE
from prefixrl.common.errors import ConfigError, PeerLost, PrefixRLError, TrainingFault
from prefixrl.common.wire import requester
from prefixrl.learner import start
from prefixrl.learner.broker.client import BrokerClient
from prefixrl.learner.run.stop import StopSignal
from prefixrl.learner.start import _memory_fault_explained, join
from prefixrl.learner.weights.publish import Publisher
from support.fakes import endpoint_of, run_on_disk, serving, wait_until
from support.keys import address
from support.models.recipes import recipe
from support.paths import EXAMPLE


def joining(directory: Path) -> "queue.SimpleQueue[BrokerClient | PrefixRLError]":
    """Joins in a thread; what comes of it."""
    result: queue.SimpleQueue[BrokerClient | PrefixRLError] = queue.SimpleQueue()

    def run() -> None:
        try:
            result.put(join(directory, StopSignal()))
        except PrefixRLError as error:
            result.put(error)

    threading.Thread(target=run, daemon=True).start()
    return result


@pytest.mark.parametrize("left_behind", [None, "tcp://127.0.0.1:1"])
def test_a_rank_waits_for_the_broker_of_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_behind: str | None
) -> None:
    monkeypatch.setattr(requester, "ASK_AGAIN_S", 0.1)
    config = run_on_disk(tmp_path)
    if left_behind:
        (Path(config.directory) / "endpoint").write_text(left_behind)
    actual = joining(Path(config.directory))
    with pytest.raises(queue.Empty):
        actual.get(timeout=1.0)
    with serving(config):
        client = actual.get(timeout=60.0)
        assert isinstance(client, BrokerClient), client
        assert endpoint_of(config) != left_behind
        assert client.status().iteration == 0
        client.close()


def test_a_rank_that_finds_no_broker_names_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "ANSWER_S", 0.2)
    with pytest.raises(
        PeerLost, match=f"rank 0 wrote no broker endpoint to {tmp_path} within 0.2 s"
    ):
        join(tmp_path, StopSignal())


def test_a_rank_whose_endpoint_file_goes_bad_ends_with_a_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requester, "ASK_AGAIN_S", 0.1)
    config = run_on_disk(tmp_path)
    endpoint = Path(config.directory) / "endpoint"
    endpoint.write_text("tcp://127.0.0.1:1")
    actual = joining(Path(config.directory))
    with pytest.raises(queue.Empty):
        actual.get(timeout=1.0)
    endpoint.unlink()
    endpoint.mkdir()  # reading it fails
    failure = actual.get(timeout=20.0)
    assert isinstance(failure, ConfigError)
    assert str(failure).startswith(f"{endpoint} cannot be read ([Errno 21] Is a directory")


def test_a_publisher_whose_broker_is_beyond_help_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a lost peer: a learner that is started again goes on, one that failed would fail again."""
    monkeypatch.setattr(requester, "ASK_AGAIN_S", 0.1)

    class DeadServers:
        def check(self) -> None:
            raise PeerLost("the broker died too often")

    publisher = Publisher(
        address("tcp://127.0.0.1:1", "rank"),
        tmp_path,
        PROBE,
        stop=StopSignal(servers=DeadServers()),
    )

    def failed() -> str:
        try:
            publisher.check()
        except PeerLost as error:
            return str(error)
        return ""

    said = wait_until(failed, "the failure")
    assert said == "version 0 could not be published: the broker died too often"


def test_a_device_without_room_ends_training_with_forecast_peak_and_what_would_help(
    tmp_path: Path,
) -> None:
    config = recipe("math_qwen2.5", tmp_path)
    with pytest.raises(TrainingFault) as ended, _memory_fault_explained(config):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free."
        )
    said = str(ended.value)
    assert "at most 0.0 GiB were held of 79.0, the forecast is 63." in said and said.endswith(
        "(CUDA out of memory)"
    )
    assert (
        "less is needed with learner.deepspeed.zero_optimization.stage = 2 and launch.learner_ranks = 2 ("
        in said
    )
    with pytest.raises(RuntimeError, match="another fault"), _memory_fault_explained(config):
        raise RuntimeError("another fault")


# A build for CUDA reads it as it is imported, and aborts over a name that it does not know.
GIVEN = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}


@pytest.mark.parametrize(("given", "expected"), [({}, "expandable"), (GIVEN, "None")])
def test_blocks_of_the_learners_device_grow_unless_its_owner_says_otherwise(
    given: dict[str, str], expected: str
) -> None:
    program = (
        "import os; from prefixrl.learner import start; from prefixrl.learner.__main__ import main\n"
        "start.start = lambda *_: print(os.environ.get('PYTORCH_ALLOC_CONF'))\nmain()"
    )
    command = [sys.executable, "-c", program, str(EXAMPLE / "run.toml")]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True)
    assert done.stdout.startswith(expected), done.stderr
