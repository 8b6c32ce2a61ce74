"""A worker's link against a broker played by the test: nothing is lost, and every end has a reason."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from prefixrl.common.errors import PeerLost, Refusal, RunIsOver
from prefixrl.common.host.exit_codes import exit_codes
from prefixrl.common.wire.address import ENDPOINT_FILE, address_in
from prefixrl.common.wire.messages import worker as worker_messages
from prefixrl.common.wire.messages.learner import FromBroker, ToBroker
from prefixrl.common.wire.messages.protocol import PROTOCOL
from prefixrl.common.wire.transport import Malformed, Server
from prefixrl.common.worker import link as links
from prefixrl.common.worker.link import Link
from support.fakes import offer, wait_until
from support.keys import address, give_keys, keys
from support.messages import score_task

WELCOME = worker_messages.Welcome(
    protocol=PROTOCOL,
    run_id="run",
    worker="scorer-0",
    config_json="{}",
    weights_endpoint="tcp://127.0.0.1:9",
)
READY = offer(2, worker_messages.ModelDigests("m", "t", "c"), "fake")
BEAT_S = 0.05


def result(number: int) -> worker_messages.Scores:
    return worker_messages.Scores(f"e-{number}", "train", ())


class FakeBroker:
    """The other end, one message at a time."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self.server: Server[ToBroker, FromBroker] = Server(endpoint, ToBroker, keys())
        self.peer = b""
        self.beats: list[worker_messages.Heartbeat] = []

    def next(self, timeout_s: float = 20.0) -> ToBroker:
        """The next message that is no heartbeat."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            received = self.server.receive(0.05)
            if received is None:
                continue
            self.peer, message = received.peer, received.message
            if not isinstance(message, worker_messages.Heartbeat):
                return message
            self.beats.append(message)
        raise AssertionError(f"the link sent nothing within {timeout_s:g} s")

    def next_result(self) -> ToBroker:
        """Leave out what a slow machine sends besides: a second Hello."""
        while not isinstance(message := self.next(), worker_messages.Scores):
            pass
        return message

    def hear_beat(self) -> worker_messages.Heartbeat:
        """The next heartbeat."""

        def heard() -> worker_messages.Heartbeat | None:
            received = self.server.receive(0.05)
            return (
                received.message
                if received and isinstance(received.message, worker_messages.Heartbeat)
                else None
            )

        beat = wait_until(heard, "a heartbeat")
        assert isinstance(beat, worker_messages.Heartbeat)
        return beat

    def until(self, wanted: type) -> list[ToBroker]:
        """Messages up to one of a type."""
        messages = [self.next()]
        while not isinstance(messages[-1], wanted):
            messages.append(self.next())
        return messages

    def say(self, message: FromBroker) -> None:
        self.server.send(self.peer, message)

    def welcome(self) -> None:
        assert isinstance(self.next(), worker_messages.Hello)
        self.say(WELCOME)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBroker]:
    monkeypatch.setattr(links, "RESEND_S", 0.2)
    playing = FakeBroker()
    yield playing
    playing.server.close()


@pytest.fixture
def link(broker: FakeBroker) -> Iterator[Link]:
    connected = Link(lambda: address(broker.server.endpoint), "scorer", BEAT_S)
    yield connected
    connected.close("test over", patience_s=0.5)


def acquainted(broker: FakeBroker, link: Link) -> None:
    broker.welcome()
    assert link.welcome() == WELCOME


def test_hello_is_said_until_somebody_answers(broker: FakeBroker, link: Link) -> None:
    hellos = [broker.next() for _ in range(3)]
    assert hellos[0] == hellos[1] == hellos[2]
    assert isinstance(hellos[0], worker_messages.Hello) and hellos[0].role == "scorer"
    broker.say(WELCOME)
    assert link.welcome() == WELCOME
    wait_until(lambda: broker.server.receive(0.05) and link.vitals, "a heartbeat")


def test_nothing_but_hello_is_said_before_the_welcome(broker: FakeBroker, link: Link) -> None:
    link.send(result(1))
    assert all(isinstance(broker.next(), worker_messages.Hello) for _ in range(3))
    broker.say(WELCOME)
    assert broker.until(worker_messages.Scores)[-1] == result(1)


def test_heartbeats_carry_what_the_work_loop_left(broker: FakeBroker, link: Link) -> None:
    acquainted(broker, link)
    link.vitals.progress, link.vitals.leases, link.vitals.state = 41, ("e-1",), "version 3"
    expected = worker_messages.Heartbeat(
        progress=41, busy_row_s=0.0, leases=("e-1",), state="version 3", activity="loading"
    )
    wait_until(
        lambda: msgspec.structs.replace(broker.hear_beat(), memory=None) == expected,
        "a heartbeat with the figures",
    )


def test_heartbeats_carry_the_memory_of_the_process_which_is_looked_at_seldom(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = itertools.count(1)
    monkeypatch.setattr(
        links,
        "memory_now",
        lambda: worker_messages.MemoryUse(resident_bytes=next(sizes), own_bytes=1, share_bytes=1),
    )

    def told_bytes() -> int:
        memory = broker.hear_beat().memory
        assert memory is not None
        return memory.resident_bytes

    monkeypatch.setattr(links, "MEMORY_EVERY_S", math.inf)
    link = Link(lambda: address(broker.server.endpoint), "scorer", BEAT_S)
    acquainted(broker, link)
    assert [told_bytes() for _ in range(3)] == [1, 1, 1]
    monkeypatch.setattr(links, "MEMORY_EVERY_S", 0.0)
    wait_until(lambda: told_bytes() > 1, "another look")
    link.close("test over", patience_s=0.5)


def test_a_task_counts_as_held_from_its_arrival_to_its_result(
    broker: FakeBroker, link: Link
) -> None:
    """The work loop may be in a step of its engine for long: a task taken back meanwhile would be worked twice."""

    def held() -> tuple[str, ...]:
        return broker.beats[-1].leases if broker.beats else ()

    def hears(condition: Callable[[], bool], what: str) -> None:
        def heard() -> bool:
            received = broker.server.receive(0.02)
            if received is not None and isinstance(received[1], worker_messages.Heartbeat):
                broker.beats.append(received[1])
            return condition()

        wait_until(heard, what)

    broker.welcome()
    for name in ("e-1", "e-2", "e-3"):
        broker.say(score_task(task=name))
    hears(lambda: set(held()) == {"e-1", "e-2", "e-3"}, "all three, unread")
    assert link.receive(5.0) is not None
    link.vitals.leases = ("e-1",)
    before = len(broker.beats)
    hears(lambda: len(broker.beats) > before + 1, "beats that know of the first")
    assert sorted(held()) == ["e-1", "e-2", "e-3"], "each once"
    link.vitals.leases = ()
    link.send(worker_messages.Refused("e-2", "no"))
    link.send(result(3))
    hears(lambda: held() == (), "none of them")


def test_what_passes_while_the_process_is_suspended_is_not_the_brokers_silence(
    broker: FakeBroker, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.welcome()
    monkeypatch.setattr(links, "ORPHAN_S", 5.0)
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0], sleep=time.sleep)
    monkeypatch.setattr(links, "time", clock)
    passed_s[0] = 60.0
    beats = len(broker.beats)
    deadline_s = time.monotonic() + 20.0
    while len(broker.beats) < beats + 10 and time.monotonic() < deadline_s:
        received = broker.server.receive(0.05)
        if received is not None and isinstance(received[1], worker_messages.Heartbeat):
            broker.beats.append(received[1])
    assert len(broker.beats) >= beats + 10
    assert link.receive(0.0) is None


def test_a_connection_on_which_nothing_comes_is_made_anew_and_nothing_is_lost(
    broker: FakeBroker, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.welcome()
    link.send(result(1))
    assert broker.until(worker_messages.Scores)[-1] == result(1)
    renewed: list[int] = []
    renew = link._client.renew

    def counted() -> None:
        renewed.append(1)
        renew()

    monkeypatch.setattr(link._client, "renew", counted)
    monkeypatch.setattr(links, "RENEW_S", 0.3)
    wait_until(lambda: len(renewed) >= 2, "two new connections")
    monkeypatch.setattr(links, "RENEW_S", 60.0)

    def is_acknowledged() -> bool:
        with suppress(Malformed):  # the rest of what came over the former connections
            received = broker.server.receive(0.05)
            if received is not None and received[1] == result(1):
                assert received[0] == broker.peer, "the same peer"
                broker.say(worker_messages.Ack("e-1"))
        return len(link._unacknowledged) == 0

    wait_until(is_acknowledged, "the acknowledgement of a result that was sent again")


def test_whatever_ends_the_connection_ends_the_worker(
    broker: FakeBroker, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.welcome()

    def fail(timeout_s: float) -> None:
        raise MemoryError("no room for a message")

    monkeypatch.setattr(link._client, "receive", fail)
    with pytest.raises(MemoryError, match="no room"):
        wait_until(lambda: link.receive(0.1), "the end")


def test_a_result_is_sent_again_until_it_is_acknowledged(broker: FakeBroker, link: Link) -> None:
    acquainted(broker, link)
    link.send(result(1))
    link.send(result(2))
    assert {broker.next_result() for _ in range(3)} == {result(1), result(2)}, (
        "one of them came again"
    )
    broker.say(worker_messages.Ack("e-1"))
    wait_until(lambda: len(link._unacknowledged) == 1, "the acknowledgement")
    # Some may have been sent again before the acknowledgement came.
    later = [broker.next_result() for _ in range(8)]
    assert later[-2:] == [result(2), result(2)]
    broker.say(worker_messages.Ack("e-2"))
    wait_until(lambda: len(link._unacknowledged) == 0, "the acknowledgement")


def test_an_acknowledgement_of_another_task_changes_nothing(broker: FakeBroker, link: Link) -> None:
    acquainted(broker, link)
    link.send(result(1))
    broker.until(worker_messages.Scores)
    broker.say(worker_messages.Ack("e-7"))
    assert broker.until(worker_messages.Scores)[-1] == result(1)
    assert len(link._unacknowledged) == 1


def test_a_broker_that_forgot_the_worker_gets_hello_ready_and_the_results_again(
    broker: FakeBroker, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "RESEND_S", 600.0)
    acquainted(broker, link)
    link.send(READY)
    link.send(result(1))
    broker.until(worker_messages.Scores)
    broker.say(worker_messages.Unknown())
    said = broker.until(worker_messages.Hello)
    assert not any(isinstance(message, worker_messages.Ready) for message in said)
    broker.say(WELCOME)
    welcome = wait_until(lambda: link.receive(0.1), "the second welcome")
    assert welcome == WELCOME
    link.send(READY)
    said = broker.until(worker_messages.Scores)
    while worker_messages.Hello in map(type, said) and READY not in said:
        said += broker.until(worker_messages.Scores)
    assert READY in said
    assert said[-1] == result(1)


def test_nothing_is_lost_when_the_broker_restarts_on_its_port(
    broker: FakeBroker, link: Link
) -> None:
    acquainted(broker, link)
    link.send(READY)
    link.send(result(1))
    broker.until(worker_messages.Scores)
    endpoint = broker.server.endpoint
    broker.server.close()
    link.send(result(2))
    link.send(result(3))
    broker.server = Server(endpoint, ToBroker, keys())
    missing = {result(1), result(2), result(3)}
    deadline_s = time.monotonic() + 30.0
    greeted = False
    while missing and time.monotonic() < deadline_s:
        message = broker.next()
        if isinstance(message, worker_messages.Hello):
            greeted = True
            broker.say(WELCOME)
        elif not greeted:
            broker.say(worker_messages.Unknown())
        elif isinstance(message, worker_messages.Scores):
            missing.discard(message)
            broker.say(worker_messages.Ack(message.task))
    assert not missing
    wait_until(lambda: len(link._unacknowledged) == 0, "the acknowledgements")


@pytest.mark.slow
def test_a_worker_follows_a_broker_that_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(links, "LOOK_S", 0.2)
    first, second = FakeBroker(), FakeBroker()
    give_keys(tmp_path)
    file = tmp_path / ENDPOINT_FILE
    file.write_text(first.server.endpoint)
    link = Link(partial(address_in, tmp_path, "worker"), "scorer", BEAT_S)
    acquainted(first, link)
    link.send(result(1))
    first.until(worker_messages.Scores)
    first.server.close()
    file.write_text(second.server.endpoint)
    second.until(worker_messages.Scores)
    assert link.endpoint == second.server.endpoint
    link.close("done", patience_s=0.1)
    second.server.close()


def test_a_worker_that_waits_for_a_broker_can_be_stopped() -> None:
    lonely = Link(lambda: address("tcp://127.0.0.1:1"), "scorer", BEAT_S)
    with pytest.raises(RunIsOver, match="asked to stop"):
        lonely.welcome(60.0, lambda: True)
    lonely.close("nobody there", patience_s=2.0)


def test_a_rejected_hello_ends_with_the_reason(broker: FakeBroker, link: Link) -> None:
    broker.next()
    broker.say(worker_messages.Reject("another target"))
    with pytest.raises(Refusal, match="another target"):
        link.welcome()


def test_who_comes_when_the_run_is_over_leaves_without_a_fault(
    broker: FakeBroker, link: Link, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.next()
    broker.say(worker_messages.Done("everything is judged"))
    with pytest.raises(SystemExit) as end, exit_codes():
        link.welcome()
    assert end.value.code == 0
    assert capsys.readouterr().err == "there is nothing to do: everything is judged\n"


def test_a_reject_in_the_middle_of_work_ends_with_the_reason(
    broker: FakeBroker, link: Link
) -> None:
    acquainted(broker, link)
    broker.say(worker_messages.Reject("the probe failed"))
    with pytest.raises(Refusal, match="the probe failed"):
        wait_until(lambda: link.receive(0.1), "the refusal")


def test_a_broker_of_another_protocol_is_refused(broker: FakeBroker, link: Link) -> None:
    broker.next()
    broker.say(
        worker_messages.Welcome(
            protocol=PROTOCOL + 1,
            run_id="run",
            worker="scorer-0",
            config_json="{}",
            weights_endpoint="",
        )
    )
    with pytest.raises(Refusal, match=f"protocol {PROTOCOL + 1}"):
        link.welcome()


def test_a_worker_whose_broker_stays_silent_ends(
    broker: FakeBroker, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquainted(broker, link)
    monkeypatch.setattr(links, "ORPHAN_S", 0.3)
    with pytest.raises(PeerLost, match=f"{broker.server.endpoint} has been silent"):
        wait_until(lambda: link.receive(0.1), "the end")


def test_a_broker_that_answers_heartbeats_is_not_silent(
    broker: FakeBroker, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquainted(broker, link)
    broker.say(worker_messages.Beat(None))
    monkeypatch.setattr(links, "ORPHAN_S", 2.0)
    until_s = time.monotonic() + 2.5
    while time.monotonic() < until_s:
        if broker.server.receive(0.05) is not None:
            broker.say(worker_messages.Beat(None))
    assert link.receive(0.0) is None


def test_no_broker_at_all_is_named() -> None:
    lonely = Link(lambda: address("tcp://127.0.0.1:1"), "scorer", BEAT_S)
    with pytest.raises(PeerLost, match=r"no broker answered at tcp://127.0.0.1:1 within 0.2 s"):
        lonely.welcome(0.2)
    lonely.close("nobody there", patience_s=2.0)


def test_bytes_that_are_no_message_do_not_end_the_link(broker: FakeBroker, link: Link) -> None:
    acquainted(broker, link)
    broker.server._socket.send_multipart([broker.peer, b"\xc1junk"])
    broker.say(worker_messages.Done("over"))
    assert wait_until(lambda: link.receive(0.1), "the message after") == worker_messages.Done(
        "over"
    )


def test_closing_says_goodbye_after_every_result_is_acknowledged(
    broker: FakeBroker, link: Link
) -> None:
    acquainted(broker, link)
    link.send(result(1))
    broker.until(worker_messages.Scores)
    broker.say(worker_messages.Ack("e-1"))
    wait_until(lambda: len(link._unacknowledged) == 0, "the acknowledgement")
    link.close("done", patience_s=5.0)
    assert broker.until(worker_messages.Goodbye)[-1] == worker_messages.Goodbye("done")
