"""Memory and files that peers take before anything is read, over all connections.

libzmq hands a message over whole, so that it keeps the frames of one that never ends, and it lets in connections as
fast as they come. The kernel counts what each connection sent, this process what it took: the difference is held here.
Only Linux counts so; elsewhere nothing is cut.
"""

import contextlib
import errno
import logging
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass

log = logging.getLogger(__name__)

MOST_UNREAD_BYTES = 96 * 2**20
"""For all connections of strangers together; more than the largest message."""
MEMBER_BYTES = 96 * 2**20
"""For one connection of a member, a peer that may send large messages: more than the largest."""
MEMBERS_BYTES = 2**30
"""For all members together."""
MOST_SILENT = 2048
"""Connections of which no message came: a handshake takes milliseconds."""
CHECK_EVERY_S = 0.1
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
"""tcpi_bytes_received in the kernel's struct tcp_info."""


@dataclass
class _Connection:
    inode: int
    """Tells a connection from an earlier one with the same descriptor."""
    received: int = 0
    taken: int = 0
    is_silent: bool = True
    is_member: bool = False
    is_cut: bool = False


class FloodGuard:
    """Cuts the connections of a server that hold too much.

    Of strangers those that hold most, while all strangers together hold too much. A member only for what it holds
    itself, so that no other peer costs it a large result; or the largest, where members fill the memory together.
    """

    def __init__(self, endpoint: str) -> None:
        is_counted = sys.platform == "linux" and endpoint.startswith("tcp://")
        self._port = int(endpoint.rpartition(":")[2]) if is_counted else None
        self._known: dict[int, _Connection] = {}
        self._taken: dict[int, tuple[int, bool]] = {}
        """By inode, bytes handed over since the last check, and whether the newest message was a member's."""
        self._checked_s, self._next_s = time.monotonic(), 0.0

    def took(self, descriptor: int, size_bytes: int, frames: int, is_member: bool) -> None:
        """Note that a message was handed over, and whether its peer is a member by now."""
        if self._port is None:
            return
        # A descriptor may have another connection at the next check: the inode is asked now.
        with contextlib.suppress(OSError):  # its connection is gone
            inode = os.stat(descriptor).st_ino
            before, _ = self._taken.get(inode, (0, False))
            self._taken[inode] = before + size_bytes + FRAME_BYTES * frames, is_member

    def check(self) -> None:
        """Cut what is too much, if it is time to look again."""
        began_s = time.monotonic()
        if self._port is None or began_s < self._next_s:
            return
        computed_before_s = time.thread_time()
        pings, self._checked_s = int(PINGS_BYTES_S * (began_s - self._checked_s)) + 1, began_s
        taken, self._taken = self._taken, {}
        open_now: dict[int, _Connection] = {}
        held_bytes = silent = 0
        for descriptor in map(int, os.listdir("/proc/self/fd")):
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
                silent += known.is_silent
        self._known = open_now
        is_near = held_bytes > NEAR_BYTES
        if held_bytes > min(MOST_UNREAD_BYTES, MEMBER_BYTES, MEMBERS_BYTES):
            self._cut_largest()
        if silent > MOST_SILENT:
            self._cut_silent()
        # Not the time that it took: on a busy machine most of that is spent waiting for a core.
        computed_s = time.thread_time() - computed_before_s
        every_s, share = (HURRIED_S, CHECK_SHARE) if is_near else (CHECK_EVERY_S, QUIET_SHARE)
        self._next_s = began_s + max(every_s, share * computed_s)

    @property
    def rest_s(self) -> float:
        """Seconds until the next check."""
        return CHECK_EVERY_S if self._port is None else max(0.0, self._next_s - time.monotonic())

    def _connection(self, descriptor: int, taken: dict[int, tuple[int, bool]]) -> _Connection:
        """Return a connection with what it handed over; OSError for another descriptor."""
        inode, known = os.stat(descriptor).st_ino, self._known.get(descriptor)
        is_reused = known is not None and known.inode != inode
        if known is None or is_reused:
            # One that is known by its inode is a connection; others are asked, which costs more.
            with _duplicate(descriptor) as connection:
                if connection.getsockname()[1:2] != (self._port,) or not connection.getpeername():
                    raise OSError(errno.ENOTCONN, "not a connection to this server")
            known = _Connection(inode)
        if inode in taken:
            taken_bytes, is_member = taken[inode]
            known.taken += taken_bytes
            if not is_reused:  # else the message may be of the connection that is gone
                known.is_silent, known.is_member = False, is_member
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
                    "of all %s %.0f MiB, allowed are %d", peer, size_bytes / 2**20, most_each // 2**20,
                    "members" if are_members else "strangers", total / 2**20, most // 2**20,
                )  # fmt: skip

    def _cut_silent(self) -> None:
        silent = [each for each, known in self._known.items() if known.is_silent and not known.is_cut]
        if (many := len(silent)) > MOST_SILENT:
            for each in silent[: many - MOST_SILENT]:
                self._cut(each)
            log.warning("cut %d connections: %d sent no message, allowed are %d", many - MOST_SILENT, many, MOST_SILENT)

    def _cut(self, descriptor: int) -> str:
        """End a connection, whose descriptor stays with libzmq; return its peer's address."""
        self._known[descriptor].is_cut = True
        with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
            if os.stat(connection.fileno()).st_ino == self._known[descriptor].inode:
                host, port = connection.getpeername()[:2]
                connection.shutdown(socket.SHUT_RDWR)
                return f"{host}:{port}"
        return "a peer that is gone"


def _info(descriptor: int) -> bytes:
    # Asked of every connection several times a second: the class beneath `socket.socket` costs less.
    connection = socket.SocketType(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        return connection.getsockopt(*_TCP_INFO, _RECEIVED.size)
    finally:
        connection.detach()  # it stays with libzmq


def _duplicate(descriptor: int) -> socket.socket:
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
