"""The bound on what connections send and nobody has read, over real sockets."""

import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest
import zmq

from prefixrl.common.wire import flood
from prefixrl.common.wire.messages.learner import FromBroker, GetStatus, Stop, ToBroker
from prefixrl.common.wire.transport import Client, Server
from support.fakes import wait_until
from support.keys import key, keys
from support.runs.no_descriptor import no_descriptor

MOST = 2**20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server[ToBroker, FromBroker]]:
    monkeypatch.setattr(flood, "MOST_UNREAD_BYTES", MOST)
    monkeypatch.setattr(flood, "CHECK_EVERY_S", 0.0)
    with closing(Server[ToBroker, FromBroker]("tcp://127.0.0.1:0", ToBroker, keys())) as opened:
        yield opened


def connect(endpoint: str, name: bytes) -> Client[FromBroker, ToBroker]:
    return Client(endpoint, FromBroker, name, key())


@contextmanager
def stopping_after(endpoint: str, most: int) -> Iterator[str]:
    """An endpoint whose connection reaches the server until it has sent so much; then it is silent, and stays."""

    def forward(source: socket.socket, sink: socket.socket, left: int) -> None:
        with suppress(OSError):
            while left > 0 and (data := source.recv(min(left, 2**16))):
                sink.sendall(data)
                left -= len(data)

    host, port = endpoint.removeprefix("tcp://").split(":")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection((host, int(port))) as onward,
    ):

        def serve() -> None:
            with listener.accept()[0] as caller:
                back = threading.Thread(target=forward, args=(onward, caller, sys.maxsize))
                back.start()
                forward(caller, onward, most)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with suppress(OSError):  # the server cut it
                onward.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_many_messages_that_are_read_are_never_too_much(
    server: Server[ToBroker, FromBroker], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(connect(server.endpoint, b"busy")) as busy:
        for _ in range(400):
            busy.send(Stop("x" * 4000))
            assert server.receive(20.0) is not None
    assert not caplog.records


def nobody(peer: bytes) -> bool:
    """Every peer is a stranger."""
    return False


def is_large(peer: bytes) -> bool:
    """The peer of that name is a member."""
    return peer == b"large"


def wait_for_cut(
    server: Server[ToBroker, FromBroker],
    caplog: pytest.LogCaptureFixture,
    words: str,
    members: Callable[[bytes], bool],
) -> None:
    def is_cut() -> bool:
        assert server.receive(0.01, members) is None
        return words in caplog.text

    wait_until(is_cut, "the cut")


def send_endlessly(client: Client[FromBroker, ToBroker]) -> None:
    """Send 4 MiB of one message."""
    for _ in range(64):
        client._socket.send(bytes(2**16), zmq.SNDMORE)
    client._socket.send(b"")


def test_a_large_message_of_a_member_is_not_cut_for_what_strangers_hold(
    server: Server[ToBroker, FromBroker], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        stopping_after(server.endpoint, 3 * MOST) as slowly,
        stopping_after(server.endpoint, 2 * MOST) as endpoint,
        closing(connect(slowly, b"large")) as large,
        closing(connect(endpoint, b"endless")) as endless,
    ):
        for client in (large, endless):
            client.send(GetStatus())
            assert server.receive(20.0, is_large) is not None
        for client in (large, endless):
            send_endlessly(client)
        wait_for_cut(server, caplog, "cut the connection of 127.0.0.1", is_large)
        for _ in range(50):
            assert server.receive(0.01, is_large) is None
    assert len(caplog.messages) == 1 and "of all strangers" in caplog.text


@pytest.mark.parametrize("limit", ["MEMBER_BYTES", "MEMBERS_BYTES"])
def test_a_member_that_holds_more_than_members_may_is_cut(
    limit: str,
    server: Server[ToBroker, FromBroker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(flood, limit, MOST)
    with (
        stopping_after(server.endpoint, 2 * MOST) as endpoint,
        closing(connect(endpoint, b"large")) as large,
    ):
        large.send(GetStatus())
        assert server.receive(20.0, is_large) is not None
        send_endlessly(large)
        wait_for_cut(server, caplog, "of all members", is_large)


def test_a_kernel_that_does_not_count_bytes_is_named_once_and_cuts_nothing(
    server: Server[ToBroker, FromBroker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(flood, "_RECEIVED", struct.Struct("900xQ"))
    with closing(connect(server.endpoint, b"one")) as one:
        for _ in range(3):
            one.send(GetStatus())
            assert server.receive(20.0) is not None
    assert caplog.messages == ["this kernel does not count what connections send: nothing is cut"]


def test_the_connection_that_holds_most_is_cut_and_the_others_stay(
    server: Server[ToBroker, FromBroker], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        stopping_after(server.endpoint, 2 * MOST) as endpoint,
        closing(connect(endpoint, b"endless")) as endless,
        closing(connect(server.endpoint, b"honest")) as honest,
    ):
        for client in (endless, honest):
            client.send(GetStatus())
            assert server.receive(20.0, nobody) is not None
        send_endlessly(endless)
        wait_for_cut(server, caplog, "cut the connection of 127.0.0.1", nobody)
        honest.send(Stop("still here"))
        actual = wait_until(lambda: server.receive(1.0), "the honest peer's message")
        assert actual.peer == b"honest"


DESCRIPTOR = 900
"""High, so that nothing else of this process has it."""


@contextmanager
def accepted(listener: socket.socket) -> Iterator[int]:
    """A new connection to a server under the same descriptor as the one before; its peer sends nothing."""
    with socket.create_connection(listener.getsockname()[:2]):
        with listener.accept()[0] as connection:
            os.dup2(connection.fileno(), DESCRIPTOR)
        try:
            yield DESCRIPTOR
        finally:
            os.close(DESCRIPTOR)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


@pytest.fixture
def guard(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> flood.FloodGuard:
    monkeypatch.setattr(flood, "CHECK_EVERY_S", 0.0)
    return flood.FloodGuard(f"tcp://127.0.0.1:{listener.getsockname()[1]}")


def is_member(guard: flood.FloodGuard, descriptor: int) -> bool:
    """Check, and return whether a connection counts as a member's."""
    guard._next_s = 0.0
    guard.check()
    return guard._known[descriptor].is_member


def test_a_connection_does_not_inherit_the_membership_of_one_that_came_and_went_between_two_checks(
    listener: socket.socket, guard: flood.FloodGuard
) -> None:
    with accepted(listener) as descriptor:
        guard.took(descriptor, 10, 1, "key", True)
    with accepted(listener):
        assert not is_member(guard, descriptor)
        assert guard._known[descriptor].key is None
        guard.took(descriptor, 10, 1, "key", True)
        assert is_member(guard, descriptor), "by a message of its own"


def test_a_late_message_of_a_closed_connection_makes_no_member_of_the_one_that_has_its_descriptor(
    listener: socket.socket, guard: flood.FloodGuard
) -> None:
    with accepted(listener) as descriptor:
        guard.took(descriptor, 10, 1, "key", True)
        assert is_member(guard, descriptor)
    with accepted(listener):
        guard.took(descriptor, 10, 1, "key", True)
        assert not is_member(guard, descriptor), "the message may be of either"
        guard.took(descriptor, 10, 1, "key", True)
        assert is_member(guard, descriptor), "by its next message"


def test_the_newest_and_the_silent_are_cut_where_no_descriptor_is_free(
    listener: socket.socket, guard: flood.FloodGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = [socket.create_connection(listener.getsockname()[:2]) for _ in range(12)]
    connections = [listener.accept()[0] for _ in peers]
    for number, each in enumerate(connections[:9]):
        guard.took(each.fileno(), 10, 1, "many" if number < 7 else "few", number == 6)
    monkeypatch.setattr(flood, "_most_connections", lambda: 8)
    with no_descriptor():
        guard.check()
    cut = [number for number, each in enumerate(connections) if guard._known[each.fileno()].is_cut]
    assert cut == [4, 5, 9, 10, 11], (
        "strangers, then the newest of the key that has most, no member"
    )
    with socket.socket() as late:
        late.settimeout(0.2)
        with pytest.raises(TimeoutError):
            late.connect(listener.getsockname()[:2])
        for each in (*peers, *connections):
            each.close()
        monkeypatch.setattr(flood, "SHUT_S", 0.0)
        guard._next_s = 0.0
        guard.check()
    with socket.create_connection(listener.getsockname()[:2], timeout=5.0):
        pass


def test_a_message_of_a_connection_that_is_gone_is_no_fault(
    listener: socket.socket, guard: flood.FloodGuard
) -> None:
    with accepted(listener) as descriptor:
        pass
    guard.took(descriptor, 10, 1, "key", True)
    guard.check()
    assert descriptor not in guard._known
