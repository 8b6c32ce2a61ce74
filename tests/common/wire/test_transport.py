"""Sockets as the daemons use them: what arrives, what is refused, and what a gone peer looks like."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from prefixrl.common.errors import ConfigError, PeerLost
from prefixrl.common.wire import transport
from prefixrl.common.wire.messages.learner import (
    Accepted,
    FromBroker,
    GetStatus,
    Published,
    Stop,
    ToBroker,
)
from prefixrl.common.wire.messages.weights import (
    Chunk,
    FromWeights,
    GetChunk,
    ToWeights,
    WeightsNote,
)
from prefixrl.common.wire.messages.worker import Reject
from prefixrl.common.wire.transport import Client, Malformed, Server, Undeliverable, check_endpoint
from support.fakes import wait_until
from support.keys import key, keys

Work = Server[ToBroker, FromBroker]
Worker = Client[FromBroker, ToBroker]


def bind(endpoint: str = "tcp://127.0.0.1:0") -> Work:
    return Server(endpoint, ToBroker, keys())


def connect(server: Work, identity: bytes = b"one") -> Worker:
    return Client(server.endpoint, FromBroker, identity, key())


def receive(server: Work) -> tuple[bytes, ToBroker]:
    received = server.receive(20.0)
    assert received is not None
    return received[0], received[1]


FAULT = """
import sys
from pathlib import Path
from prefixrl.common.wire.keys import make_keys, server_keys
from prefixrl.common.wire.messages.learner import ToBroker
from prefixrl.common.wire.transport import Server
make_keys(Path(sys.argv[1]))
server = Server("tcp://127.0.0.1:0", ToBroker, server_keys(Path(sys.argv[1])))
server.receive(0.1)
raise AssertionError("a fault")
"""


def test_a_process_with_a_server_ends_by_an_exception(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAULT, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert ended.returncode == 1 and ended.stderr.endswith("AssertionError: a fault\n")


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_message_and_its_answer_arrive_with_their_payload(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("s")
    endpoint = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{folder}/b"
    server: Server[ToWeights, FromWeights] = Server(endpoint, ToWeights, keys())
    client: Client[FromWeights, ToWeights] = Client(server.endpoint, FromWeights, b"one", key())
    client.send(GetChunk(3, 1))
    received = server.receive(20.0)
    assert received is not None and received[:3] == (b"one", GetChunk(3, 1), b"")
    bytes_of_chunk = bytes(range(256)) * 1024
    server.send(b"one", Chunk(3, 1), [memoryview(bytes_of_chunk)])
    assert client.receive(20.0) == (Chunk(3, 1), [bytes_of_chunk])
    client.close()
    server.close()


def test_a_message_for_a_peer_that_is_not_there_is_undeliverable() -> None:
    server = bind()
    with pytest.raises(Undeliverable, match=f"peer {b'nobody'.hex()}"):
        server.send(b"nobody", Accepted())
    server.close()


def test_a_peer_that_does_not_read_makes_messages_undeliverable_and_none_is_dropped() -> None:
    server = bind()
    client = connect(server)
    client.send(GetStatus())
    receive(server)
    sent, stalled = 0, bytes(65536)
    with pytest.raises(Undeliverable):
        while sent < 50_000:
            server.send(b"one", Accepted(), [stalled])
            sent += 1
    assert sent >= 1
    received = 0
    while client.receive(2.0 if received < sent else 0.0) is not None:
        received += 1
    assert received == sent
    client.close()
    server.close()


def test_a_newcomer_takes_over_the_identity_of_a_peer_that_is_still_connected() -> None:
    server = bind()
    first, second = connect(server), None
    first.send(Stop("first"))
    assert receive(server) == (b"one", Stop("first"))
    second = connect(server)
    second.send(Stop("second"))
    assert receive(server) == (b"one", Stop("second"))
    server.send(b"one", Accepted())
    received = second.receive(20.0)
    assert received is not None and received[0] == Accepted()
    assert first.receive(0.1) is None
    first.close()
    second.close()
    server.close()


def test_what_a_connection_left_unread_when_it_was_taken_over_comes_from_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = bind()
    with monkeypatch.context() as patched:
        # As a ROUTER names the former connection: whether anything is left on it cannot be arranged.
        left = [b"\0\1\2\3\4", msgspec.msgpack.encode(Stop("x"))]
        frames = iter([left[0], zmq.Frame(left[1])])
        former = SimpleNamespace(recv=lambda *_, **__: next(frames))
        patched.setattr(server, "_socket", former)
        with pytest.raises(Malformed, match="taken over"):
            server.receive(0.0)
    server.close()


def test_a_client_finds_a_server_that_is_restarted_on_its_port() -> None:
    server = bind()
    client = connect(server)
    client.send(Stop("before"))
    receive(server)
    endpoint = server.endpoint
    server.close()
    server = bind(endpoint)

    def arrives() -> bool:
        # What goes into the connection before its end is noticed is lost with it.
        client.send(Stop("after"), timeout_s=20.0)
        received = server.receive(0.5)
        return received is not None and received[:2] == (b"one", Stop("after"))

    wait_until(arrives, "the message at the new server")
    client.close()
    server.close()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [msgspec.msgpack.encode({"type": "Nonsense"})],
        [b"\x91" * 100_000],
        [b"\xd9\x02\xff\xfe"],
        [b"\xdd\xff\xff\xff\xff"],
    ],
)
def test_bytes_that_are_no_message_are_malformed_and_the_next_message_arrives(
    frames: list[bytes],
) -> None:
    server = bind()
    client = connect(server)
    client.send(GetStatus())
    client._socket.send_multipart(frames)
    client.send(Stop("well formed"))
    receive(server)
    with pytest.raises(Malformed, match=f"peer {b'one'.hex()}"):
        receive(server)
    assert receive(server) == (b"one", Stop("well formed"))
    client.close()
    server.close()


def test_a_frame_above_the_limit_ends_the_connection_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(transport._SERVER_OPTIONS, zmq.MAXMSGSIZE, 4096)  # type: ignore[misc]
    server = bind()
    bomber, client = connect(server, b"bomb"), connect(server)
    bomber.send(GetStatus())
    receive(server)
    bomber._socket.send(bytes(8192))
    client.send(Stop("still here"))
    assert receive(server) == (b"one", Stop("still here"))
    assert server.receive(0.1) is None
    bomber.close()
    client.close()
    server.close()


def test_a_message_above_the_limit_is_refused_where_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 2**20)
    server = bind()
    client = connect(server)
    try:
        client.send(Published(WeightsNote(0, "d", b"x" * 2**19, b"")))
        peer, _ = receive(server)
        with pytest.raises(ConfigError, match=r"Published holds 2 MiB, a message at most 1: lower"):
            client.send(Published(WeightsNote(0, "d", b"x" * 2**21, b"")))
        with pytest.raises(ConfigError, match="Reject holds 2 MiB"):
            server.send(peer, Reject("x" * 2**21))
    finally:
        client.close()
        server.close()


def test_wake_ends_a_receive_that_waits() -> None:
    server = bind()
    client = connect(server)
    client.wake()
    assert client.receive(60.0) is None
    assert client.receive(0.0) is None
    client.close()
    server.close()


def test_a_taken_port_is_a_config_error_that_names_it() -> None:
    server = bind()
    with pytest.raises(ConfigError, match=f"cannot listen on {server.endpoint}"):
        bind(server.endpoint)
    server.close()


@pytest.mark.parametrize(
    ("endpoint", "complaint"),
    [
        pytest.param("udp://127.0.0.1:1", "neither tcp", id="udp"),
        pytest.param("127.0.0.1:5555", "neither tcp", id="no scheme"),
        pytest.param("tcp://127.0.0.1", "needs a port", id="no port"),
        pytest.param("tcp://127.0.0.1:http", "needs a port", id="a port by name"),
        pytest.param("tcp://127.0.0.1:65536", "needs a port", id="a port out of range"),
        pytest.param("tcp://[::1]:5555", "only IPv4 is supported", id="IPv6 in brackets"),
        pytest.param("tcp://fe80::1:5555", "only IPv4 is supported", id="IPv6"),
    ],
)
def test_an_endpoint_that_may_not_be_used_is_refused(endpoint: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_endpoint(endpoint)


def test_sending_without_a_server_ends_at_its_timeout_naming_the_endpoint() -> None:
    client: Worker = Client("tcp://127.0.0.1:1", FromBroker, b"one", key())
    with pytest.raises(PeerLost, match=r"no connection to tcp://127.0.0.1:1 within 0.1 s"):
        client.send(GetStatus(), timeout_s=0.1)
    client.close()


def test_more_wakes_than_anyone_reads_do_no_harm() -> None:
    server = bind()
    client = connect(server)
    for _ in range(200_000):
        client.wake()
    wait_until(lambda: client.receive(0.0) is None, "silence")
    client.send(GetStatus())
    assert receive(server)[1] == GetStatus()
    client.close()
    server.close()


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:0", "tcp://10.0.0.7:1", "tcp://node7:1", "tcp://eth0:0", "ipc://x"],
)
def test_every_address_of_a_host_is_an_endpoint(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint
