"""Encrypted sockets: a ROUTER per server, a DEALER per client, one table of options.

`Server` and `Client` carry typed messages. Nothing of a peer is decoded, and no frame of more than `MAX_FRAME_BYTES` is
taken from it, before it has proved a key of the run's list (CURVE; `keys.py`). Wire form to a server: the tag of a
request, if it has one, then one MessagePack message in frames of limited size. To a client: the message, the tag, then
raw payload frames. Sockets belong to the thread that made them.
"""

import contextlib
import logging
import math
import socket as _socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar, cast

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from prefixrl.common.errors import ConfigError, PeerLost, Refusal
from prefixrl.common.wire.flood import FloodGuard
from prefixrl.common.wire.keys import ZAP_DOMAIN, Authenticator, ClientKey, Listed, ServerKeys

log = logging.getLogger(__name__)

In = TypeVar("In")
Out = TypeVar("Out")

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message, and largest frame that a client takes from its server."""
MAX_FRAME_BYTES = 256 * 2**10
"""Largest frame that a server takes: one that a stranger begins to send is held in memory before the key is asked."""
MOST_FRAMES = MAX_MESSAGE_BYTES // MAX_FRAME_BYTES + 1
CURVE_BYTES = 256
TAG_BYTES = 9
HWM_MESSAGES = 4096
"""A safety net, since credit bounds the messages under way; never 0, which would mean unbounded memory."""
TAKEN_OVER = b"\0"
"""First byte of the name that a ROUTER gives a connection when a newer one of the same peer takes over its identity. An
unread Hello of the old connection would enrol a worker that cannot be reached."""
HEARTBEAT_IVL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000

_COMMON_OPTIONS = {
    zmq.SNDHWM: HWM_MESSAGES,
    zmq.RCVHWM: HWM_MESSAGES,
    # libzmq's own heartbeats notice a dead connection below the application's silence limit.
    zmq.HEARTBEAT_IVL: HEARTBEAT_IVL_MS,
    zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
    zmq.HEARTBEAT_TTL: HEARTBEAT_TIMEOUT_MS,
    # A stranger that connects and says nothing is dropped after this time.
    zmq.HANDSHAKE_IVL: 5_000,
    # Keeps idle connections open in firewalls: probes after 30 s, lost after 3 without an answer.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    # A closed socket drops unsent messages, unless `close` is given a time.
    zmq.LINGER: 0,
}
_SERVER_OPTIONS = {
    # Sending to an unknown peer raises an error; by default the message is dropped in silence.
    zmq.ROUTER_MANDATORY: 1,
    # A peer that connects again takes over its identity from the old connection.
    zmq.ROUTER_HANDOVER: 1,
    # Thousands of workers may connect in the same second.
    zmq.BACKLOG: 1024,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES + CURVE_BYTES,
}
_CLIENT_OPTIONS = {
    # Unsent work stays in the application, where it is counted, until there is a connection.
    zmq.IMMEDIATE: 1,
    zmq.CONNECT_TIMEOUT: 3_000,
    zmq.RECONNECT_IVL: 100,
    # Caps the pause between two attempts, so that recovery takes seconds at most.
    zmq.RECONNECT_IVL_MAX: 2_000,
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES + CURVE_BYTES,
}
_HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""As plain numbers: to combine flags of an enumeration costs as much as the call they are for."""

Payload = bytes | bytearray | memoryview
Context = zmq.Context[zmq.Socket[bytes]]


class Undeliverable(Exception):
    """The peer is not connected or its queue is full: keep the message, or drop the peer."""


class Malformed(Exception):
    """A peer sent bytes that are not a message of the link; names the peer and the fault."""


class Unlisted(Exception):
    """The key of a connected peer was removed from the list; holds its identity."""

    def __init__(self, peer: bytes) -> None:
        super().__init__(f"peer {peer.hex()}: its key is not in the run's list any more")
        self.peer = peer


class Received(NamedTuple, Generic[In]):
    """A message, and who sent it."""

    peer: bytes
    message: In
    tag: bytes
    """Number of the request, to be sent back with the answer; empty without one."""
    client: Listed | None
    """The owner of the key that the sender proved; None at the local endpoint."""


def is_tag(frame: bytes | memoryview) -> bool:
    """Return True if a frame is the number of a request; no encoded message begins like it."""
    return len(frame) == TAG_BYTES and frame[:1] == b"#"


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint, or raise ConfigError unless it is a tcp or ipc address."""
    if not endpoint:
        raise ConfigError(
            "the endpoint is empty; a learner writes RUN/endpoint seconds after its start: try again"
        )
    if not endpoint.startswith(("tcp://", "ipc://")):
        raise ConfigError(f"endpoint {endpoint!r} is neither tcp://HOST:PORT nor ipc://PATH")
    if endpoint.startswith("ipc://"):
        return endpoint
    host, _, port = endpoint.rpartition(":")
    if not (port.isdigit() and int(port) <= 65535):
        raise ConfigError(
            f"endpoint {endpoint!r} needs a port between 1 and 65535: tcp://127.0.0.1:5555, for example"
        )
    if ":" in host.removeprefix("tcp://") or "[" in host:
        raise ConfigError(
            f"endpoint {endpoint!r} is an IPv6 address; only IPv4 is supported: tcp://10.0.0.7:5555"
        )
    return endpoint


class Server(Generic[In, Out]):
    """A ROUTER: receives `In` from many clients, sends `Out` to one of them by identity."""

    def __init__(
        self,
        endpoint: str,
        incoming: object,
        keys: ServerKeys,
        queue_messages: int = HWM_MESSAGES,
        local_endpoint: str | None = None,
    ) -> None:
        """Listen; raises ConfigError. At `local_endpoint`, in a folder of this user, peers need no key.

        A peer for which `queue_messages` wait does not read.
        """
        self._keys = keys
        self._context: Context = zmq.Context(io_threads=1)
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._authenticator = Authenticator(self._context, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        # Also where an exception ends the process: the context would wait for ever for the authenticator's socket.
        self._end = weakref.finalize(self, self._authenticator.end, self._socket, self._context)
        for option, value in {**_COMMON_OPTIONS, **_SERVER_OPTIONS}.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.SNDHWM, queue_messages)
        if local_endpoint:
            self._bind(local_endpoint)
        # A socket keeps, per address, the options that it had when it was bound.
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._flood = FloodGuard(self.endpoint)

    def _bind(self, endpoint: str) -> None:
        try:
            self._socket.bind(check_endpoint(endpoint))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {endpoint}: {error.strerror}; choose a free port, and an address of this host"
            ) from None

    def receive(
        self, timeout_s: float, may_be_large: Callable[[bytes], bool] = lambda peer: True
    ) -> Received[In] | None:
        """Return the next message, or None after `timeout_s`.

        Raises Malformed, also for a message that is too large, and Unlisted.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._flood.check()
            try:
                # To ask first whether something is there would cost more.
                peer = self._socket.recv(_NOBLOCK)
                break
            except zmq.Again:
                pass
            left_s = max(0.0, deadline_s - time.monotonic())
            # A message that never ends wakes nobody: the next check must not wait for one that does.
            if not left_s:
                return None
            self._socket.poll(math.ceil(min(left_s, self._flood.rest_s) * 1000), zmq.POLLIN)
        first = self._socket.recv(copy=False)
        is_member = may_be_large(peer)
        most = MAX_MESSAGE_BYTES if is_member else MAX_FRAME_BYTES
        frames, size_bytes, count = self._kept(first, most)
        if peer.startswith(TAKEN_OVER):
            raise Malformed(f"peer {peer.hex()}: an old connection whose identity was taken over")
        key = _key_of(first)
        self._flood.took(first.get(zmq.SRCFD), size_bytes, count, key, is_member)
        client = self._keys.clients.find_client(key) if key else None
        if key and client is None:
            raise Unlisted(peer)
        if size_bytes > most:
            raise Malformed(f"peer {peer.hex()}: a message of {size_bytes} bytes, at most {most}")
        if count > MOST_FRAMES:
            raise Malformed(f"peer {peer.hex()}: a message of more than {MOST_FRAMES} frames")
        tag = frames.pop(0) if is_tag(frames[0]) else b""
        encoded = b"".join(frames) if len(frames) > 1 else frames[0]
        frames.clear()  # a copy less while a large message is decoded
        message = cast(In, _decode(self._decoder, encoded, peer))
        return Received(peer, message, tag, client)

    def _kept(self, first: zmq.Frame, most_bytes: int) -> tuple[list[bytes], int, int]:
        """Read a message to its end; return its frames, its size in bytes, its number of frames."""
        frames = [first.bytes]
        frame = first
        size_bytes = len(first.bytes)
        count = 1
        while frame.more:
            frame = self._socket.recv(copy=False)
            size_bytes += len(frame)
            count += 1
            if size_bytes <= most_bytes and count <= MOST_FRAMES + 1:
                frames.append(frame.bytes)
        return frames, size_bytes, count

    def send(self, peer: bytes, message: Out, payload: Sequence[Payload] = ()) -> None:
        """Queue a message for one peer; raises Undeliverable when it is gone or does not read."""
        frames: list[Payload] = [_checked(self._encoder.encode(message), message), *payload]
        is_small = not payload or sum(len(part) for part in payload) < 65536
        last = frames.pop()
        try:
            # `send_multipart` does the same, but looks at every part first. Only the first send can fail.
            self._socket.send(peer, _MORE)
            for part in frames:
                self._socket.send(part, _MORE, copy=is_small)
            self._socket.send(last, _NOBLOCK, copy=is_small)
        except zmq.ZMQError as error:
            raise Undeliverable(f"peer {peer.hex()}: {error.strerror}") from None

    def shut(self) -> None:
        """Let nobody in until `receive` is called."""
        self._flood.shut()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; queued messages get `linger_s` to leave."""
        self._socket.close(linger=int(linger_s * 1000))
        self._end()


def _key_of(frame: zmq.Frame) -> str:
    """Return the public key that the sender of a frame proved, "" at the local endpoint."""
    try:
        return str(frame["User-Id"])
    except zmq.ZMQError:
        return ""


def _checked(encoded: bytes, message: object) -> bytes:
    """Refuse a frame too large: its receiver would drop it, its sender would send it for ever."""
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise ConfigError(
            f"{type(message).__name__} holds {len(encoded) / 2**20:.0f} MiB, a message at most "
            f"{MAX_MESSAGE_BYTES / 2**20:.0f}: lower rollout.groups_per_task, algorithm.samples_per_prompt or the "
            "lengths, or leave scorer.keep_completions out"
        )
    return encoded


class Client(Generic[In, Out]):
    """A DEALER connected to one server, by an identity that does not begin with a zero byte."""

    def __init__(
        self, endpoint: str, incoming: object, identity: bytes, key: ClientKey | None
    ) -> None:
        """Begin to connect, with a key, or without one to a server's local endpoint."""
        self.endpoint = check_endpoint(endpoint)
        self._context: Context = zmq.Context(io_threads=1)
        self._identity = identity
        self._key = key
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
        if self._key:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._key.server.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.pair.public.encode())
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.pair.secret.encode())
        self._handshakes = self._socket.get_monitor_socket(_HANDSHAKE_EVENTS)
        self._handshake = 0
        self._socket.connect(self.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read.fileno(), zmq.POLLIN)

    def _disconnect(self, linger_s: float) -> None:
        self.drain()
        self._socket.disable_monitor()
        self._handshakes.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))

    def drain(self) -> None:
        """Read the events of handshakes: a full queue of them would stop the connection."""
        while self._handshakes.poll(0):
            self._handshake = parse_monitor_message(self._handshakes.recv_multipart())["event"]

    def why_not(self) -> str:
        """Return why there is no connection; raises Refusal if the key is not let in."""
        self.drain()
        if self._handshake == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._key:
            raise Refusal(
                f"{self.endpoint} does not let in the key {self._key.name!r} (role {self._key.role}): it was removed "
                "from the run's list, or has another role than this address serves; `prefixrl keygen RUN` lists keys"
            )
        if self._handshake in (0, zmq.EVENT_HANDSHAKE_SUCCEEDED):
            return "nothing listens there, or a network drops what is sent"
        return "what listens there does not hold the run's key: another run, or the key file is of another one"

    def receive(self, timeout_s: float) -> tuple[In, list[bytes]] | None:
        """Return the next (message, payload), None after `timeout_s` or a wake; raises Malformed."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake_read.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
        if self._socket not in ready:
            return None
        first, *payload = self._socket.recv_multipart()
        return cast(In, _decode(self._decoder, first, b"server")), payload

    def receive_views(self, timeout_s: float) -> tuple[In, list[memoryview]] | None:
        """Receive payload frames as views of the memory they arrived in, to be copied on."""
        if not self._socket.poll(max(0, int(timeout_s * 1000)), zmq.POLLIN):
            return None
        first, *payload = (frame.buffer for frame in self._socket.recv_multipart(copy=False))
        return cast(In, _decode(self._decoder, first, b"server")), payload

    def send(self, message: Out, tag: bytes = b"", timeout_s: float = 5.0) -> None:
        """Hand a message to the connection; raises PeerLost after `timeout_s`, Refusal."""
        if not self._socket.poll(max(0, int(timeout_s * 1000)), zmq.POLLOUT):
            raise PeerLost(
                f"no connection to {self.endpoint} within {timeout_s:g} s: {self.why_not()}"
            )
        encoded = memoryview(_checked(self._encoder.encode(message), message))
        frames = [
            encoded[start : start + MAX_FRAME_BYTES]
            for start in range(0, len(encoded), MAX_FRAME_BYTES)
        ]
        try:
            self._socket.send_multipart([tag, *frames] if tag else frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            # The connection was lost between the poll and the send.
            raise PeerLost(f"the connection to {self.endpoint} was lost just now") from None

    def renew(self) -> None:
        """Connect again as the same peer: zmq may report a dead connection as healthy."""
        self._disconnect(0.0)
        self._connect()

    def wake(self) -> None:
        """End a `receive` that waits in another thread."""
        # Full: it is awake already. Closed: its thread has ended, and `receive` raises the reason.
        with contextlib.suppress(OSError):
            self._wake_write.send(b"w")

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection; queued messages get `linger_s` to leave."""
        self._disconnect(linger_s)
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()


def _decode(
    decoder: msgspec.msgpack.Decoder[object], frame: bytes | memoryview, peer: bytes
) -> object:
    try:
        return decoder.decode(frame)
    # msgspec raises UnicodeDecodeError (a ValueError) for invalid UTF-8 and RecursionError for deep nesting:
    # catching only DecodeError would let one hostile message end the process.
    except (ValueError, RecursionError, MemoryError, OverflowError, msgspec.MsgspecError) as error:
        raise Malformed(f"peer {peer.hex()}: {error}") from None
