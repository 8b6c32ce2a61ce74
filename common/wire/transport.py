"""The only importer of zmq: a ROUTER per server, a DEALER per client, one table of options.

`Server` and `Client` carry typed messages plus raw payload frames. Wire form of a message: one MessagePack frame (a
tagged union, validated on decode), then zero or more payload frames. When a side is slow or gone: a server's send to a
peer whose queue is full or that is not connected raises `Undeliverable` and never drops in silence (mandatory routing);
a client's send waits at most its timeout, then raises `PeerLost`; a restarted peer takes over its identity; heartbeats
find a half-open connection within `HEARTBEAT_TIMEOUT_MS`. A malformed message is counted and not answered.

Sockets belong to the thread that made them.
"""

import contextlib
import ctypes
import ipaddress
import socket as _socket
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import msgspec
import zmq

from prefixrl.common.errors import ConfigError, PeerLost

In = TypeVar("In")
Out = TypeVar("Out")

MAX_HEADER_BYTES = 64 * 2**20
"""Largest frame accepted from a peer."""
HWM_MESSAGES = 4096
"""A safety net, since credit bounds the messages under way; never 0, which would mean unbounded memory."""
TAKEN_OVER = b"\0"
"""First byte of the name that a ROUTER gives a connection when a newer one of the same peer takes over its identity. An
unread Hello of the old connection would enrol a worker that nobody can reach."""
HEARTBEAT_IVL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000

_COMMON_OPTIONS = {
    zmq.SNDHWM: HWM_MESSAGES,
    zmq.RCVHWM: HWM_MESSAGES,
    zmq.MAXMSGSIZE: MAX_HEADER_BYTES,
    zmq.HEARTBEAT_IVL: HEARTBEAT_IVL_MS,
    zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
    zmq.HEARTBEAT_TTL: HEARTBEAT_TIMEOUT_MS,
    zmq.HANDSHAKE_IVL: 5_000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.LINGER: 0,
}
_SERVER_OPTIONS = {zmq.ROUTER_MANDATORY: 1, zmq.ROUTER_HANDOVER: 1, zmq.BACKLOG: 1024}
# IMMEDIATE keeps unsent work in the application, where it is counted; the reconnect cap keeps recovery under seconds.
_CLIENT_OPTIONS = {zmq.IMMEDIATE: 1, zmq.CONNECT_TIMEOUT: 3_000, zmq.RECONNECT_IVL: 100, zmq.RECONNECT_IVL_MAX: 2_000}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

Payload = bytes | bytearray | memoryview
Context = zmq.Context[zmq.Socket[bytes]]


class Undeliverable(Exception):
    """The peer is not connected or its queue is full: keep the message, or drop the peer."""


class Malformed(Exception):
    """A peer sent bytes that are not a message of the link; names the peer and the fault."""


def is_local(endpoint: str) -> bool:
    """Return True for ipc and loopback endpoints, where plaintext is allowed."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    host = endpoint.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint, or raise ConfigError unless it is a tcp or ipc address allowed here."""
    port = endpoint.rsplit(":", 1)[-1]
    if not endpoint:
        raise ConfigError("the endpoint is empty; a learner writes RUN/endpoint seconds after its start: try again")
    if not endpoint.startswith(("tcp://", "ipc://")):
        raise ConfigError(f"endpoint {endpoint!r} is neither tcp://HOST:PORT nor ipc://PATH")
    if endpoint.startswith("tcp://") and not (port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"endpoint {endpoint!r} needs a port between 1 and 65535: tcp://127.0.0.1:5555, for example")
    if not is_local(endpoint):
        raise ConfigError(
            f"endpoint {endpoint!r} is not loopback and no keys are in use; listen on 127.0.0.1 (or ipc://) and tunnel"
        )
    return endpoint


def keep_receive_buffers() -> None:
    """Let the allocator keep the memory of received frames."""
    # Fresh pages halve the speed of large frames. glibc adopts these values once it has freed a block of 32 MiB.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)


class Server(Generic[In, Out]):
    """A ROUTER: receives `In` from many clients, sends `Out` to one of them by identity."""

    def __init__(
        self, endpoint: str, incoming: object, context: Context | None = None, queue_messages: int = HWM_MESSAGES
    ) -> None:
        """Listen; a peer for which `queue_messages` wait does not read; raises ConfigError."""
        self._context = context or zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in {**_COMMON_OPTIONS, **_SERVER_OPTIONS}.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.SNDHWM, queue_messages)
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        try:
            self._socket.bind(check_endpoint(endpoint))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {endpoint}: {error.strerror}; another process holds the port: choose another one"
            ) from None
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout_s: float) -> tuple[bytes, In, list[bytes]] | None:
        """Return the next (sender, message, payload), or None after `timeout_s`; raises Malformed."""
        if not self._socket.poll(max(0, int(timeout_s * 1000)), zmq.POLLIN):
            return None
        peer, *frames = self._socket.recv_multipart()
        if peer.startswith(TAKEN_OVER):
            raise Malformed(f"peer {peer.hex()}: an old connection whose identity was taken over")
        return peer, cast(In, _decode(self._decoder, frames, peer)), frames[1:]

    def send(self, peer: bytes, message: Out, payload: Sequence[Payload] = ()) -> None:
        """Queue a message for one peer; raises Undeliverable when it is gone or does not read."""
        frames: list[Payload] = [peer, _checked(self._encoder.encode(message), message), *payload]
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=sum(len(part) for part in payload) < 65536)
        except zmq.ZMQError as error:
            raise Undeliverable(f"peer {peer.hex()}: {error.strerror}") from None

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; queued messages get `linger_s` to leave."""
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()


def _checked(encoded: bytes, message: object) -> bytes:
    """Refuse a frame too large: its receiver would drop it, its sender would send it for ever."""
    if len(encoded) > MAX_HEADER_BYTES:
        raise ConfigError(
            f"{type(message).__name__} holds {len(encoded) / 2**20:.0f} MiB, a message at most "
            f"{MAX_HEADER_BYTES / 2**20:.0f}: lower rollout.groups_per_task, algorithm.samples_per_prompt or the "
            "lengths, or leave scorer.keep_completions out"
        )
    return encoded


class Client(Generic[In, Out]):
    """A DEALER connected to one server, by an identity that does not begin with a zero byte."""

    def __init__(self, endpoint: str, incoming: object, identity: bytes) -> None:
        self.endpoint = check_endpoint(endpoint)
        self._context: Context = zmq.Context(io_threads=1)
        self._incoming = incoming
        self._identity = identity
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._wake_read, self._wake_write = _socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._connect()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in {**_COMMON_OPTIONS, **_CLIENT_OPTIONS}.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        self._socket.connect(self.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)

    def receive(self, timeout_s: float) -> tuple[In, list[bytes]] | None:
        """Return the next (message, payload), None after `timeout_s` or a wake; raises Malformed."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake_read.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        if self._socket not in ready:
            return None
        frames = self._socket.recv_multipart()
        return cast(In, _decode(self._decoder, frames, b"server")), frames[1:]

    def receive_views(self, timeout_s: float) -> tuple[In, list[memoryview]] | None:
        """Receive payload frames as views of the memory they arrived in, to be copied on."""
        if not self._socket.poll(max(0, int(timeout_s * 1000)), zmq.POLLIN):
            return None
        frames = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
        return cast(In, _decode(self._decoder, frames, b"server")), frames[1:]

    def send(self, message: Out, payload: Sequence[Payload] = (), timeout_s: float = 5.0) -> None:
        """Hand a message to the connection; raises PeerLost when there is none within `timeout_s`."""
        if not self._socket.poll(max(0, int(timeout_s * 1000)), zmq.POLLOUT):
            raise PeerLost(f"no connection to {self.endpoint} within {timeout_s:g} s")
        try:
            self._socket.send_multipart([_checked(self._encoder.encode(message), message), *payload], flags=zmq.NOBLOCK)
        except zmq.Again:
            # The connection was lost between the poll and the send.
            raise PeerLost(f"the connection to {self.endpoint} was lost just now") from None

    def renew(self) -> None:
        """Connect anew as the same peer: zmq may report a dead connection as healthy."""
        self._socket.close(linger=0)
        self._connect()

    def wake(self) -> None:
        """End a `receive` that waits in another thread."""
        # Full: it is awake already. Closed: its thread has ended, and `receive` raises the reason.
        with contextlib.suppress(OSError):
            self._wake_write.send(b"w")

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection; queued messages get `linger_s` to leave."""
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()


def _decode(decoder: msgspec.msgpack.Decoder[object], frames: Sequence[bytes | memoryview], peer: bytes) -> object:
    try:
        if not frames:
            raise ValueError("no frame")
        return decoder.decode(frames[0])
    # msgspec raises UnicodeDecodeError (a ValueError) for invalid UTF-8 and RecursionError for deep nesting:
    # catching only DecodeError would let one hostile message end the process.
    except (ValueError, RecursionError, MemoryError, OverflowError, msgspec.MsgspecError) as error:
        raise Malformed(f"peer {peer.hex()}: {error}") from None
