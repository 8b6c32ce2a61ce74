"""Asking a broker that is slow, restarted, forgetful or hostile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from prefixrl.common.errors import PeerLost, Refusal
from prefixrl.common.wire import requester
from prefixrl.common.wire.messages import learner as messages
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.messages.worker import Hello, Reject, Unknown, Welcome
from prefixrl.common.wire.requester import Requester
from prefixrl.common.wire.transport import Server
from prefixrl.learner.broker.client import REPLAY_S, BrokerClient
from prefixrl.learner.run.stop import StopSignal
from support.fakes import SteppedClock
from support.keys import address, keys

WELCOME = Welcome(
    protocol=PROTOCOL,
    run_id="run",
    worker="rank",
    config_json="{}",
    weights_endpoint="tcp://127.0.0.1:9",
)
Answering = Callable[[messages.ToBroker], list[messages.FromBroker]]


@contextmanager
def broker(answer: Answering, endpoint: str = "tcp://127.0.0.1:0") -> Iterator[str]:
    """Run a server that answers every message by `answer`; yields its endpoint."""
    stop, bound = threading.Event(), threading.Event()
    endpoints: list[str] = []

    def serve() -> None:
        server: Server[messages.ToBroker, messages.FromBroker] = Server(
            endpoint, messages.ToBroker, keys()
        )
        endpoints.append(server.endpoint)
        bound.set()
        while not stop.is_set():
            received = server.receive(0.02)
            if received is not None:
                for message in answer(received[1]):
                    server.send(received[0], message)
        server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert bound.wait(20.0)
    try:
        yield endpoints[0]
    finally:
        stop.set()
        thread.join()


def polite(message: messages.ToBroker) -> list[messages.FromBroker]:
    return [WELCOME] if isinstance(message, Hello) else [messages.Accepted()]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requester, "ASK_AGAIN_S", 0.1)


def test_an_answer_of_the_wanted_type_is_returned_and_others_are_passed_over() -> None:
    def answer(message: messages.ToBroker) -> list[messages.FromBroker]:
        return (
            polite(message)
            if isinstance(message, Hello)
            else [messages.NotYet(0, "x"), messages.Status(b"{}")]
        )

    with broker(answer) as endpoint:
        asking = Requester(address(endpoint, "operator"), "operator")
        assert asking.welcome == WELCOME
        assert asking.ask_broker(messages.GetStatus(), messages.Status) == (
            messages.Status(b"{}"),
            [],
        )
        asking.close()


def test_a_request_is_repeated_until_it_is_answered(quick: None) -> None:
    heard: list[messages.ToBroker] = []

    def answer(message: messages.ToBroker) -> list[messages.FromBroker]:
        heard.append(message)
        return [] if heard.count(messages.Stop("x")) in (1, 2) else polite(message)

    with broker(answer) as endpoint:
        asking = Requester(address(endpoint, "rank"), "rank")
        asking.ask_broker(messages.Stop("x"), messages.Accepted)
        asking.close()
    assert heard.count(messages.Stop("x")) == 3


def test_a_broker_that_does_not_know_the_peer_gets_hello_and_the_request_again(quick: None) -> None:
    heard: list[messages.ToBroker] = []
    known = False

    def answer(message: messages.ToBroker) -> list[messages.FromBroker]:
        nonlocal known
        heard.append(message)
        if isinstance(message, Hello):
            known = len(heard) > 1
            return [WELCOME]
        return [messages.Accepted()] if known else [Unknown()]

    with broker(answer) as endpoint:
        asking = Requester(address(endpoint, "rank"), "rank")
        asking.ask_broker(messages.Stop("x"), messages.Accepted)
        asking.close()
    assert [type(message) for message in heard] == [Hello, messages.Stop, Hello, messages.Stop]
    assert heard[0] == heard[2]


def test_a_rejected_peer_ends_with_the_reason() -> None:
    with (
        broker(lambda message: [Reject("use one release")]) as endpoint,
        pytest.raises(Refusal, match="use one release"),
    ):
        Requester(address(endpoint, "operator"), "operator")


def test_silence_ends_with_what_was_asked_and_whom(quick: None) -> None:
    def answer(message: messages.ToBroker) -> list[messages.FromBroker]:
        return polite(message) if isinstance(message, Hello) else []

    with broker(answer) as endpoint:
        asking = Requester(address(endpoint, "operator"), "operator", answer_s=0.5)
        with pytest.raises(PeerLost, match=f"{endpoint} did not answer GetStatus within 0.5 s"):
            asking.ask_broker(messages.GetStatus(), messages.Status)
        asking.close()


def test_a_question_outlives_a_restart_of_the_broker(quick: None) -> None:
    with broker(polite) as endpoint:
        asking = Requester(address(endpoint, "rank"), "rank")
    answered: list[object] = []
    waiting = threading.Thread(
        target=lambda: answered.append(asking.ask_broker(messages.Stop("x"), messages.Accepted)[0])
    )
    waiting.start()
    with broker(polite, endpoint):
        waiting.join(30.0)
    assert answered == [messages.Accepted()]
    asking.close()


def test_a_wait_that_became_useless_ends_with_the_reason(quick: None) -> None:
    """A request waits for its answer up to the limit that its sender chose, unless waiting is hopeless."""
    tries = 0

    def watch() -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            raise PeerLost("the broker died too often")

    def answer(message: messages.ToBroker) -> list[messages.FromBroker]:
        return polite(message) if isinstance(message, Hello) else []

    with broker(answer) as endpoint:
        asking = Requester(address(endpoint, "rank"), "rank", 3600.0, watch)
        assert tries == 0, "an answer that is there is taken"
        with pytest.raises(PeerLost, match="the broker died too often"):
            asking.ask_broker(messages.GetStatus(), messages.Status)
        asking.close()


def test_a_long_wait_says_what_is_waited_for(
    quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(requester, "LOG_EVERY_S", 0.2)
    caplog.set_level("INFO")
    with pytest.raises(PeerLost):
        Requester(address("tcp://127.0.0.1:1", "rank"), "rank", answer_s=0.9)
    told = [
        each for each in caplog.messages if "waiting for the broker at tcp://127.0.0.1:1 to" in each
    ]
    assert 1 <= len(told) <= 4, "now and then, not at every try"
    assert "to answer Hello, 0 s so far" in told[0]


@pytest.mark.slow
def test_a_rank_waits_for_as_long_as_a_broker_may_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, receive = SteppedClock(), requester.Client.receive
    monkeypatch.setattr(requester, "time", clock)
    # The clock may be stepped before a try begins: its wait would then be a real one.
    monkeypatch.setattr(
        requester.Client, "receive", lambda self, timeout_s: receive(self, min(timeout_s, 0.05))
    )

    def answer(message: messages.ToBroker) -> list[messages.FromBroker]:
        if isinstance(message, Hello):
            return [WELCOME]
        clock.sleep(requester.ASK_AGAIN_S)
        return [messages.Accepted()] if clock.monotonic() >= REPLAY_S else [messages.NotYet(0, "x")]

    with broker(answer) as endpoint:
        rank = BrokerClient(address(endpoint, "rank"))
        rank.forget("x")
        rank.close()
    assert clock.monotonic() >= REPLAY_S


def test_a_rank_that_is_asked_to_stop_does_not_wait_for_a_broker_that_is_silent(
    quick: None,
) -> None:
    def answer(message: messages.ToBroker) -> list[messages.FromBroker]:
        return polite(message) if isinstance(message, Hello) else []

    with broker(answer) as endpoint:
        rank = BrokerClient(address(endpoint, "rank"), StopSignal(lambda: True))
        assert rank.next_batch(messages.GetBatch(7, 0, 1), 3600.0) == messages.Halt(7)
        rank.close()


def test_no_broker_at_all_ends_with_its_address(quick: None) -> None:
    with pytest.raises(PeerLost, match=r"127.0.0.1:1 did not answer Hello"):
        Requester(address("tcp://127.0.0.1:1", "operator"), "operator", answer_s=0.3)


def test_a_process_that_was_suspended_gives_up_in_the_end(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Suspended(monkeypatch)
    with broker(answer) as endpoint:
        asking = Requester(address(endpoint, "operator"), "operator", answer_s=0.3)
        with pytest.raises(PeerLost, match=r"did not answer GetStatus within 0\.3 s"):
            asking.ask_broker(messages.GetStatus(), messages.Status)
        asking.close()
    assert 3 <= answer.tries <= 5


def test_a_process_that_was_suspended_asks_again_before_it_gives_up(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Suspended(monkeypatch)
    answer.answers_from = 2
    with broker(answer) as endpoint:
        # Nothing is left of its patience after the first try, however little that counts.
        asking = Requester(address(endpoint, "operator"), "operator", answer_s=0.1)
        assert asking.ask_broker(messages.GetStatus(), messages.Status) == (
            messages.Status(b"{}"),
            [],
        )
        asking.close()


class Suspended:
    """A broker whose asker is suspended for an hour in the first try; it answers later tries, or never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock = SteppedClock()
        monkeypatch.setattr(requester, "time", self._clock)
        self.tries = 0
        self.answers_from = 0

    def __call__(self, message: messages.ToBroker) -> list[messages.FromBroker]:
        if isinstance(message, Hello):
            return [WELCOME]
        self.tries += 1
        self._clock.sleep(3600.0 if self.tries == 1 else requester.ASK_AGAIN_S)
        return [messages.Status(b"{}")] if self.tries == self.answers_from else []
