"""The publisher ends whatever its thread is about to meet."""

import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from benchmarks.simulated import PROBE
from prefixrl.common.errors import PeerLost
from prefixrl.common.wire.messages.weights import WeightsNote
from prefixrl.learner.run.stop import StopSignal
from prefixrl.learner.weights import publish
from prefixrl.learner.weights.publish import QUEUED, Publisher

NEVER_S = 60.0


class FailingClient:
    """A broker's client whose first announcement fails, once the test lets it go."""

    is_announcing = threading.Event()
    may_fail = threading.Event()

    def __init__(self, endpoint: str, stop: StopSignal) -> None:
        pass

    def published(self, note: WeightsNote) -> None:
        self.is_announcing.set()
        assert self.may_fail.wait(NEVER_S)
        raise PeerLost("no answer")


def test_a_publisher_whose_queue_is_full_when_it_fails_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BrokerClient", FailingClient)
    publisher = Publisher("tcp://127.0.0.1:1", tmp_path, PROBE, deltas=False)
    weights = {"w": torch.zeros(3)}
    publisher.publish(0, weights.items(), np.zeros(1, np.float32))
    assert FailingClient.is_announcing.wait(NEVER_S)
    for version in range(1, 1 + QUEUED):
        publisher.publish(version, weights.items(), np.zeros(1, np.float32))
    closing = threading.Thread(target=publisher.close, daemon=True)
    closing.start()
    # The end is being put into the full queue; were it not yet, closing would only be easier.
    closing.join(1.0)
    FailingClient.may_fail.set()
    closing.join(NEVER_S)
    assert not closing.is_alive()
    with pytest.raises(PeerLost, match="version 0 could not be published: no answer"):
        publisher.check()


class SlowClient:
    """A broker's client that takes announcements when the test lets it."""

    taken: ClassVar[list[int]] = []
    may_take = threading.Event()

    def __init__(self, endpoint: str, stop: StopSignal) -> None:
        pass

    def published(self, note: WeightsNote) -> None:
        assert self.may_take.wait(NEVER_S)
        self.taken.append(note.version)

    def close(self) -> None:
        pass


def test_what_was_handed_over_is_published_before_the_publisher_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "BrokerClient", SlowClient)
    publisher = Publisher("tcp://127.0.0.1:1", tmp_path, PROBE, deltas=False)
    for version in range(1 + QUEUED):
        publisher.publish(version, {"w": torch.zeros(3)}.items(), np.zeros(1, np.float32))
    closing = threading.Thread(target=publisher.close, daemon=True)
    closing.start()
    SlowClient.may_take.set()
    closing.join(NEVER_S)
    assert SlowClient.taken == list(range(1 + QUEUED))
    assert publisher.newest == QUEUED
