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
"""For all connections of strangers together; more than the largest message."""
MEMBER_BYTES = 96 * 2**20
MEMBERS_BYTES = 2**30
MOST_CONNECTIONS = 2**14
FILES_SHARE = 3 / 4
"""Connections as a share of the files that this process may have open, at most: the others are for what it writes."""
MOST_SILENT = 2048
"""Connections of which no message came, and at most half of all: a handshake takes milliseconds."""
SHUT_S = 0.25
"""Time for which nobody is let in after there were too many. A client tries again for longer."""
BUSY_BACKLOG = 64
"""Connections that wait in the kernel after there were too many: all of them come in at once when it is over."""
CHECK_EVERY_S = 0.1
GLANCE_S = 0.005
"""Time between two looks whether there are too many connections: thousands come in a tenth of a second."""
HURRIED_S = 0.01
"""Time between two checks while more than NEAR_BYTES are held: a fast peer sends 100 MiB in a tenth of a second."""
NEAR_BYTES = 8 * 2**20
CHECK_SHARE, QUIET_SHARE = 20, 50
"""A check is followed by a pause at least so many times as long as it computed, more while little is held; a longer one
lets much through."""
FRAME_BYTES, PINGS_BYTES_S = 64, 64
"""A little more than what surrounds a frame, and than the heartbeats of libzmq, on the wire."""
_TCP_INFO = (socket.IPPROTO_TCP, socket.TCP_INFO) if sys.platform == "linux" else (0, 0)
_RECEIVED = struct.Struct("128xQ")
_IGNORE = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""A packet filter of one instruction: keep nothing of any packet."""
_SHUT, _OPEN = (
    (26, struct.pack("HP", 1, ctypes.addressof(_IGNORE))),
    (27, bytes(4)),
)  # SO_(AT|DE)TACH_FILTER


@dataclass
class _Connection:
    inode: int
    """Tells a connection from an earlier one with the same descriptor."""
    number: int
    """Its place in the order in which they came."""
    received: int = 0
    taken: int = 0
    key: str | None = None
    """The key of its newest message; None before the first."""
    is_member: bool = False
    is_cut: bool = False


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
        self._checked_s, self._next_s, self._glance_s, self._shut_s = (
            time.monotonic(),
            0.0,
            0.0,
            0.0,
        )

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
        """Cut what is too much, if it is time to look again."""
        began_s = time.monotonic()
        if self._port is None or (began_s < self._next_s and not self._is_crowded(began_s)):
            return
        computed_before_s = time.thread_time()
        pings, self._checked_s = int(PINGS_BYTES_S * (began_s - self._checked_s)) + 1, began_s
        taken, self._taken = self._taken, {}
        open_now: dict[int, _Connection] = {}
        held_bytes = silent = alive = 0
        for descriptor in _descriptors():
            try:
                known, info = self._connection(descriptor, taken), _info(descriptor)
            except OSError:
                continue  # closed meanwhile, or no connection
            if len(info) < _RECEIVED.size:
                log.warning("this kernel does not count what connections send: nothing is cut")
                self._port = None
                return
            open_now[descriptor] = known
            (known.received,) = _RECEIVED.unpack(info)
            known.taken = min(known.taken + pings, known.received)
            if not known.is_cut:
                held_bytes += known.received - known.taken
                silent, alive = silent + (known.key is None), alive + 1
        self._known, most = open_now, _most_connections()
        is_near = held_bytes > NEAR_BYTES
        if held_bytes > min(MOST_UNREAD_BYTES, MEMBER_BYTES, MEMBERS_BYTES):
            self._cut_largest()
        if len(open_now) >= most:
            self._let_in(False, BUSY_BACKLOG)
            self._shut_s = began_s
        elif self._shut_s and began_s - self._shut_s > SHUT_S:
            self._let_in(True)
            self._shut_s = 0.0
        if silent > min(MOST_SILENT, most // 2) or alive >= most:
            self._cut_many(most)
        # Not the time that it took: on a busy machine most of that is spent waiting for a core.
        computed_s = time.thread_time() - computed_before_s
        every_s, share = (HURRIED_S, CHECK_SHARE) if is_near else (CHECK_EVERY_S, QUIET_SHARE)
        self._next_s = began_s + max(every_s, share * computed_s)
        self._glance_s = began_s + max(GLANCE_S, CHECK_SHARE * computed_s)

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
        with contextlib.suppress(OSError), _borrowed(descriptor) as found:
            is_listener = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return bool(is_listener) and found.getsockname()[1:2] == (self._port,)
        return False

    def _let_in(self, is_open: bool, backlog: int = 0) -> None:
        """Have the kernel answer or ignore who begins to connect; connections stay."""
        option, value = _OPEN if is_open else _SHUT
        for descriptor in self._listeners:
            with contextlib.suppress(OSError), _borrowed(descriptor) as listener:
                listener.setsockopt(socket.SOL_SOCKET, option, value)
                if backlog:
                    listener.listen(backlog)

    def _connection(self, descriptor: int, taken: dict[int, tuple[int, str, bool]]) -> _Connection:
        """Return a connection with what it handed over; OSError for another descriptor."""
        inode, known = os.stat(descriptor).st_ino, self._known.get(descriptor)
        is_reused = known is not None and known.inode != inode
        if known is None or is_reused:
            # One that is known by its inode is a connection; others are asked, which costs more.
            with _borrowed(descriptor) as connection:
                if connection.getsockname()[1:2] != (self._port,) or not connection.getpeername():
                    raise OSError(errno.ENOTCONN, "not a connection to this server")
            self._came += 1
            known = _Connection(inode, self._came)
        if inode in taken:
            taken_bytes, key, is_member = taken[inode]
            known.taken += taken_bytes
            if not is_reused:  # else the message may be of the connection that is gone
                known.key, known.is_member = key, is_member
        return known

    def _cut_largest(self) -> None:
        for are_members, most, most_each in (
            (False, MOST_UNREAD_BYTES, MOST_UNREAD_BYTES),
            (True, MEMBERS_BYTES, MEMBER_BYTES),
        ):
            held = {
                each: known.received - known.taken
                for each, known in self._known.items()
                if known.is_member == are_members and not known.is_cut
            }
            while held:
                largest, total = max(held, key=held.__getitem__), sum(held.values())
                if total <= most and held[largest] <= most_each:
                    break
                peer, size_bytes = self._cut(largest), held.pop(largest)
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
        """Cut the silent that are too many; where that makes no room, the newest of the keys that have most."""
        alive = {each: known for each, known in self._known.items() if not known.is_cut}
        # The silent that sent most stay longest, and the newer: their handshake may be under way.
        silent = [each for each, known in alive.items() if known.key is None]
        silent.sort(key=lambda each: (-alive[each].received, -alive[each].number))
        by_key: dict[str, list[int]] = defaultdict(list)
        for each, known in sorted(
            alive.items(), key=lambda each: (not each[1].is_member, each[1].number)
        ):
            if known.key is not None:
                by_key[known.key].append(each)
        left, were_silent, most_silent = len(alive), len(silent), min(MOST_SILENT, most // 2)
        room = most - most // 8 if left >= most else most
        while left > room or len(silent) > most_silent:
            self._cut((silent or max(by_key.values(), key=len)).pop())
            left -= 1
        log.warning(
            "cut %d of %d connections: %d sent no message, allowed are %d; in all %d are allowed, three quarters of "
            "the limit of open files",
            len(alive) - left,
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
