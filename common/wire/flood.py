"""Memory and descriptors that peers take before anything is read, over all connections.

libzmq hands a message over whole, so that it keeps the frames of one that never ends. The kernel counts what each
connection sent, this process what it took: the difference is held here. libzmq also lets in connections as fast as they
come, until no descriptor is free: then the kernel is told to ignore who begins to connect. Nothing here needs a free
descriptor. Only Linux counts so; elsewhere nothing is cut.
"""

import contextlib
import ctypes
import errno
import logging
import os
import resource
import socket
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

log = logging.getLogger(__name__)

MOST_UNREAD_BYTES = 96 * 2**20
"""Limit for all connections of strangers together; more than the largest message."""
MEMBER_BYTES = 96 * 2**20
MEMBERS_BYTES = 2**30
MOST_CONNECTIONS = 2**14
FILES_SHARE = 3 / 4
"""Largest share of this process's open files that connections have: it writes to the others."""
MOST_SILENT = 2048
"""Connections without any message, at most half of all: a handshake takes milliseconds."""
SHUT_S = 0.25
"""Time without new connections after there were too many. A client tries again for longer."""
BUSY_BACKLOG = 64
"""Connections that wait in the kernel after there were too many: all come in together afterwards."""
CHECK_EVERY_S = 0.1
GLANCE_S = 0.005
"""Time between two counts of connections: thousands come in a tenth of a second."""
HURRIED_S = 0.01
"""Time between two checks while more than NEAR_BYTES are held: a fast peer sends 100 MiB in a tenth of a second."""
NEAR_BYTES = 8 * 2**20
CHECK_SHARE, QUIET_SHARE = 20, 50
"""Pause after a check, in multiples of the time that the check computed; the second while little
is held. A longer pause lets much through."""
FRAME_BYTES, PINGS_BYTES_S = 64, 64
"""Bytes around a frame on the wire, and of libzmq's heartbeats per second; a little too many."""
_TCP_INFO = (socket.IPPROTO_TCP, socket.TCP_INFO) if sys.platform == "linux" else (0, 0)
_RECEIVED = struct.Struct("128xQ")
_IGNORE = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""A packet filter of one instruction: keep nothing of any packet."""
_SHUT = (26, struct.pack("HP", 1, ctypes.addressof(_IGNORE)))  # SO_ATTACH_FILTER
_OPEN = (27, bytes(4))  # SO_DETACH_FILTER


@dataclass
class _Connection:
    inode: int
    """Tells a connection from an earlier one with the same descriptor."""
    number: int
    """Its place in the order in which they came."""
    received_bytes: int = 0
    taken_bytes: int = 0
    key: str | None = None
    """The key of its newest message; None before the first."""
    is_member: bool = False
    is_cut: bool = False

    @property
    def held_bytes(self) -> int:
        """Bytes that it sent and this process has not taken."""
        return self.received_bytes - self.taken_bytes


class FloodGuard:
    """Cuts the connections of a server that hold too much, or are too many; a member only for what it holds itself."""

    def __init__(self, endpoint: str) -> None:
        is_counted = sys.platform == "linux" and endpoint.startswith("tcp://")
        self._port = int(endpoint.rpartition(":")[2]) if is_counted else None
        self._listeners = (
            [each for each in _descriptors() if self._is_listener(each)] if is_counted else []
        )
        self._known: dict[int, _Connection] = {}
        self._taken: dict[int, tuple[int, str, bool]] = {}
        """By inode, bytes handed over since the last check, and key and membership of the newest message."""
        self._came = 0
        self._checked_s = time.monotonic()
        self._next_s = self._glance_s = self._shut_s = 0.0

    def took(
        self, descriptor: int, size_bytes: int, frames: int, key: str, is_member: bool
    ) -> None:
        """Note that a message was handed over, the key of its peer, and whether that is a member by now."""
        if self._port is None:
            return
        # A descriptor may have another connection at the next check: the inode is asked now.
        with contextlib.suppress(OSError):  # its connection is gone
            inode = os.stat(descriptor).st_ino
            before = self._taken[inode][0] if inode in self._taken else 0
            self._taken[inode] = before + size_bytes + FRAME_BYTES * frames, key, is_member

    def check(self) -> None:
        """Cut the connections that hold too much or are too many, if a check is due."""
        began_s = time.monotonic()
        if self._port is None or (began_s < self._next_s and not self._is_crowded(began_s)):
            return
        computed_before_s = time.thread_time()
        if not self._count_connections(began_s):
            log.warning("this kernel does not count what connections send: nothing is cut")
            self._port = None
            return
        alive = [connection for connection in self._known.values() if not connection.is_cut]
        held_bytes = sum(connection.held_bytes for connection in alive)
        silent = sum(connection.key is None for connection in alive)
        most = _most_connections()
        is_near = held_bytes > NEAR_BYTES
        if held_bytes > min(MOST_UNREAD_BYTES, MEMBER_BYTES, MEMBERS_BYTES):
            self._cut_largest()
        # Near the limit no connection is let in for a while: those that were cut would come again.
        if len(self._known) >= most:
            self._let_in(False, BUSY_BACKLOG)
            self._shut_s = began_s
        elif self._shut_s and began_s - self._shut_s > SHUT_S:
            self._let_in(True)
            self._shut_s = 0.0
        if silent > min(MOST_SILENT, most // 2) or len(alive) >= most:
            self._cut_many(most)
        # Not the time that it took: on a busy machine most of that is spent waiting for a core.
        computed_s = time.thread_time() - computed_before_s
        every_s, share = (HURRIED_S, CHECK_SHARE) if is_near else (CHECK_EVERY_S, QUIET_SHARE)
        self._next_s = began_s + max(every_s, share * computed_s)
        self._glance_s = began_s + max(GLANCE_S, CHECK_SHARE * computed_s)

    def _count_connections(self, now_s: float) -> bool:
        """Count the bytes of every open connection; return False where the kernel does not."""
        pings_bytes = int(PINGS_BYTES_S * (now_s - self._checked_s)) + 1
        self._checked_s = now_s
        handed_over = self._taken
        self._taken = {}
        open_now: dict[int, _Connection] = {}
        for descriptor in _descriptors():
            try:
                connection = self._connection(descriptor, handed_over)
                info = _info(descriptor)
            except OSError:
                continue  # closed meanwhile, or no connection
            if len(info) < _RECEIVED.size:
                return False
            open_now[descriptor] = connection
            (connection.received_bytes,) = _RECEIVED.unpack(info)
            # libzmq answers pings itself: nothing holds their bytes, though nobody takes them.
            connection.taken_bytes = min(
                connection.taken_bytes + pings_bytes, connection.received_bytes
            )
        self._known = open_now
        return True

    @property
    def rest_s(self) -> float:
        """Seconds until the next check."""
        return CHECK_EVERY_S if self._port is None else max(0.0, self._next_s - time.monotonic())

    def shut(self) -> None:
        """Let nobody in until the next check."""
        self._let_in(False)
        self._shut_s = time.monotonic() - SHUT_S

    def _is_crowded(self, now_s: float) -> bool:
        """Return True where there may be too many connections: the kernel gives the lowest free descriptor."""
        if now_s < self._glance_s:
            return False
        self._glance_s = now_s + GLANCE_S
        try:
            return bool(os.stat(_most_connections()))
        except OSError:
            return False

    def _is_listener(self, descriptor: int) -> bool:
        with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
            is_listener = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return bool(is_listener) and borrowed.getsockname()[1:2] == (self._port,)
        return False

    def _let_in(self, is_open: bool, backlog: int = 0) -> None:
        """Have the kernel answer or ignore who begins to connect; connections stay."""
        option, value = _OPEN if is_open else _SHUT
        for descriptor in self._listeners:
            with contextlib.suppress(OSError), _borrowed(descriptor) as listener:
                listener.setsockopt(socket.SOL_SOCKET, option, value)
                if backlog:
                    listener.listen(backlog)

    def _connection(
        self, descriptor: int, handed_over: dict[int, tuple[int, str, bool]]
    ) -> _Connection:
        """Return a connection with the bytes it handed over; OSError for another descriptor."""
        inode = os.stat(descriptor).st_ino
        connection = self._known.get(descriptor)
        is_reused = connection is not None and connection.inode != inode
        if connection is None or is_reused:
            # A known inode is a connection. Any other descriptor is asked, which costs more.
            with _borrowed(descriptor) as borrowed:
                if borrowed.getsockname()[1:2] != (self._port,) or not borrowed.getpeername():
                    raise OSError(errno.ENOTCONN, "not a connection to this server")
            self._came += 1
            connection = _Connection(inode, self._came)
        if inode in handed_over:
            taken_bytes, key, is_member = handed_over[inode]
            connection.taken_bytes += taken_bytes
            if not is_reused:  # else the message may be of the connection before
                connection.key = key
                connection.is_member = is_member
        return connection

    def _cut_largest(self) -> None:
        # Members have a limit of their own: a flood of strangers must not cut a worker off.
        for are_members, most, most_each in (
            (False, MOST_UNREAD_BYTES, MOST_UNREAD_BYTES),
            (True, MEMBERS_BYTES, MEMBER_BYTES),
        ):
            held_bytes = {
                descriptor: connection.held_bytes
                for descriptor, connection in self._known.items()
                if connection.is_member == are_members and not connection.is_cut
            }
            while held_bytes:
                # The largest first: one connection that floods goes before many that do not.
                largest = max(held_bytes, key=held_bytes.__getitem__)
                total = sum(held_bytes.values())
                if total <= most and held_bytes[largest] <= most_each:
                    break
                peer = self._cut(largest)
                size_bytes = held_bytes.pop(largest)
                log.warning(
                    "cut the connection of %s: %.0f MiB of it are not a whole message or not read yet, allowed are %d; "
                    "of all %s %.0f MiB, allowed are %d",
                    peer,
                    size_bytes / 2**20,
                    most_each // 2**20,
                    "members" if are_members else "strangers",
                    total / 2**20,
                    most // 2**20,
                )

    def _cut_many(self, most: int) -> None:
        """Cut silent connections that are too many, then the newest of the keys that have most."""
        alive = {
            descriptor: connection
            for descriptor, connection in self._known.items()
            if not connection.is_cut
        }
        # Silent connections stay longest that sent most, and newer ones: their handshake may be under way.
        silent = [descriptor for descriptor, connection in alive.items() if connection.key is None]
        silent.sort(
            key=lambda descriptor: (-alive[descriptor].received_bytes, -alive[descriptor].number)
        )
        by_key: dict[str, list[int]] = defaultdict(list)
        for descriptor, connection in sorted(
            alive.items(), key=lambda item: (not item[1].is_member, item[1].number)
        ):
            if connection.key is not None:
                by_key[connection.key].append(descriptor)
        remaining = len(alive)
        were_silent = len(silent)
        most_silent = min(MOST_SILENT, most // 2)
        room = most - most // 8 if remaining >= most else most
        while remaining > room or len(silent) > most_silent:
            self._cut((silent or max(by_key.values(), key=len)).pop())
            remaining -= 1
        log.warning(
            "cut %d of %d connections: %d sent no message, allowed are %d; in all %d are allowed, three quarters of "
            "the limit of open files",
            len(alive) - remaining,
            len(alive),
            were_silent,
            most_silent,
            most,
        )

    def _cut(self, descriptor: int) -> str:
        """End a connection, whose descriptor stays with libzmq; return its peer's address."""
        self._known[descriptor].is_cut = True
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            if os.stat(descriptor).st_ino == self._known[descriptor].inode:
                host, port = connection.getpeername()[:2]
                connection.shutdown(socket.SHUT_RDWR)
                return f"{host}:{port}"
        return "a peer that is gone"


def _most_connections() -> int:
    return min(MOST_CONNECTIONS, int(FILES_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _descriptors() -> Iterable[int]:
    try:
        return map(int, os.listdir("/proc/self/fd"))
    except OSError:  # none is free to look with
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _info(descriptor: int) -> bytes:
    # Asked of every connection several times a second: `_borrowed` costs more.
    connection = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        return connection.getsockopt(*_TCP_INFO, _RECEIVED.size)
    finally:
        connection.detach()  # it stays with libzmq


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.SocketType]:
    """Use a descriptor as a socket, without a duplicate, which would need a free descriptor."""
    connection = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        yield connection
    finally:
        connection.detach()
