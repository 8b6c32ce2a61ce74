"""Connections of strangers who have no key: they hold as many as they can, and come again wherever they are cut.

    python -m benchmarks.strangers AT_ONCE SECONDS GREETING PORT...     GREETING is what each sends, in hexadecimal

It says "ready", and at its end how many connections it began. Nothing of the program is imported: it starts at once.
"""

import resource
import select
import socket
import sys
import time

AT_ONCE_BEGUN = 256
PAUSE_S = 0.05
"""Longest wait for a cut while as many are held as may be."""


def main(at_once: int, seconds: float, greeting: bytes, ports: list[int]) -> None:
    """Connect, greet, hold, and come again."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    watch, held, begun, until_s = (
        select.epoll(),
        dict[int, socket.socket](),
        0,
        time.monotonic() + seconds,
    )
    at_once = min(at_once, most - 64)
    print("ready", flush=True)
    while time.monotonic() < until_s:
        for _ in range(min(AT_ONCE_BEGUN, at_once - len(held))):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", ports[begun % len(ports)]))
            held[each.fileno()], begun = each, begun + 1
            watch.register(each, select.EPOLLIN | (select.EPOLLOUT if greeting else 0))
        for descriptor, events in watch.poll(
            0.0 if len(held) < at_once else PAUSE_S, 4 * AT_ONCE_BEGUN
        ):
            if _is_cut(held[descriptor], greeting if events & select.EPOLLOUT else b""):
                watch.unregister(descriptor)
                held.pop(descriptor).close()
            elif events & select.EPOLLOUT:
                watch.modify(descriptor, select.EPOLLIN)
    print(begun)


def _is_cut(connection: socket.socket, greeting: bytes) -> bool:
    try:
        return not (connection.send(greeting) if greeting else connection.recv(4096))
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        float(sys.argv[2]),
        bytes.fromhex(sys.argv[3]),
        [int(port) for port in sys.argv[4:]],
    )
