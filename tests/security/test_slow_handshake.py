"""A stranger that never ends its handshake: it is hung up on, whatever it sends meanwhile, and nobody waits for it."""

import socket
import time
from pathlib import Path

import pytest

from benchmarks.hostile_peers import BEAT, EVERY_S, GREETING, HonestPeer, broker
from prefixrl.common.wire.address import address_in
from prefixrl.common.wire.messages.worker import Beat

CONNECTIONS, DEADLINE_S = 100, 60.0
HELLO = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + bytes(194)


def _is_open(slow: socket.socket, sent: int) -> bool:
    """Send the next byte, never the last one; return False once the broker has hung up."""
    try:
        slow.send(HELLO[sent : sent + 1] if sent < len(HELLO) - 1 else b"")
        return slow.recv(4096) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.slow
def test_handshakes_of_a_byte_at_a_time_are_ended_and_an_honest_worker_is_answered(
    tmp_path: Path,
) -> None:
    with broker(tmp_path) as (directory, child, _):
        address = address_in(directory, "worker")
        host, port = address.endpoint.removeprefix("tcp://").split(":")
        every = [
            socket.create_connection((host, int(port)), timeout=10.0) for _ in range(CONNECTIONS)
        ]
        for connection in every:
            connection.setblocking(False)
        honest, began_s, sent, slow = HonestPeer(address), time.monotonic(), 0, every
        while slow:
            assert time.monotonic() - began_s < DEADLINE_S, (
                f"{len(slow)} connections are open still"
            )
            slow, sent = [each for each in slow if _is_open(each, sent)], sent + 1
            honest._ask(BEAT, Beat)
            time.sleep(10 * EVERY_S)
        honest.close()
        assert child.poll() is None
        assert sent > len(GREETING), "they were cut for what they had sent, not for their time"
        for connection in every:
            connection.close()
