"""The process that a launch forks its workers from, so that torch is imported once for all.

    launch ── socket: module, arguments, environment, log ──▶ template ── fork ──▶ one between ── fork ──▶ worker
      ▲ ◀── Imported, NotForked ─────────────────────────────────┘                                           │
      └──── Forked; then the word to begin ──────────────────────────────────────────────────────────────────┘

The template imports what an embedded engine needs and does nothing else: it has one thread, and neither CUDA nor ZeroMQ
is begun. Where that is not so, what it forks begins anew as a program of its own.

The process between ends at once, and the launch adopts the worker, which is then a child like any other: nothing ends
with the template. A worker waits until the launch is its parent, says so, and waits for the word to begin: one that the
launch has given up meanwhile ends. The template ends with the launch. The launch's side is `template_process.py`.
"""

import errno
import importlib
import os
import runpy
import signal
import socket
import sys
import time

import msgspec
import setproctitle

from prefixrl.common.host.process import PARENT_VARIABLE, die_with_parent, uncollected

MOST_BYTES = 1 << 20
RETRY_S = 0.1
"""Wait where the system has no memory for a message."""
ADOPTED_TICK_S = 0.001


class Fork(msgspec.Struct, tag=True):
    """The request for a worker, with two descriptors: its output, and the word to begin."""

    number: int
    """Told with the answer: one that comes late is not for the next request."""
    arguments: list[str]
    """The module and what is to follow it."""
    environment: dict[str, str]


class Imported(msgspec.Struct, tag=True):
    """All is imported."""


class Forked(msgspec.Struct, tag=True):
    """A worker is a child of the launch and waits for the word to begin."""

    number: int
    pid: int


class NotForked(msgspec.Struct, tag=True):
    """No worker has begun: the system lacks memory, processes or files."""

    number: int
    why: str


Answer = Imported | Forked | NotForked


def main() -> None:
    """Import, then fork until the launch ends; what is forked runs its module."""
    link = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    setproctitle.setproctitle("prefixrl-template")
    with uncollected():  # a later look would write to pages that the workers share
        for name in sys.argv[2:]:
            importlib.import_module(name)
    _tell(link, Imported())
    if (begun := _serve(link)) is None:
        return
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.argv, is_alone = begun
    if not is_alone or _knows_cuda():
        os.execv(sys.executable, [sys.executable, "-m", *sys.argv])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _serve(link: socket.socket) -> tuple[list[str], bool] | None:
    """Fork what is asked for until the launch has ended; a worker returns with its arguments.

    And with True if the template had no other thread, which would be missing in the worker.
    """
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, MOST_BYTES, 2)
        if not data:
            return None
        request = msgspec.msgpack.decode(data, type=Fork)
        try:
            if len(descriptors) < 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            is_alone = len(os.listdir("/proc/self/task")) == 1
            is_forked = _fork(int(request.environment[PARENT_VARIABLE]))
        except OSError as error:
            _tell(link, NotForked(request.number, str(error)))
        else:
            if is_forked:
                _take_over(request, descriptors[0], descriptors[1], link)
                return request.arguments, is_alone
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(launch_pid: int) -> bool:
    """Fork twice; return True in the worker, once the launch has adopted it."""
    if child := os.fork():
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise OSError(code, os.strerror(code)) if code > 0 else OSError(f"ended by signal {-code}")
        return False
    between = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        os._exit(error.errno or errno.EAGAIN)
    if child:
        os._exit(0)
    while os.getppid() == between:
        time.sleep(ADOPTED_TICK_S)
    if os.getppid() != launch_pid:
        os._exit(1)  # the launch has ended, or waits for it no longer
    return True


def _take_over(request: Fork, output: int, word: int, link: socket.socket) -> None:
    """Become a process as the launch would start it: session, output, environment."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment)
    _tell(link, Forked(request.number, os.getpid()))
    link.close()
    if not os.read(word, 1):
        os._exit(1)  # the launch has ended, or waits for it no longer
    os.close(word)


def _tell(link: socket.socket, answer: Answer) -> None:
    """Send an answer, as soon as there is memory for it."""
    while True:
        try:
            link.send(msgspec.msgpack.encode(answer))
            return
        except ConnectionError:  # the launch has ended, as the next read finds
            return
        except OSError:
            time.sleep(RETRY_S)


def _knows_cuda() -> bool:
    """Return True if the template asked CUDA for anything before this process was forked."""
    torch = sys.modules.get("torch")
    is_in_bad_fork = getattr(torch and torch._C, "_cuda_isInBadFork", None)
    return bool(is_in_bad_fork and is_in_bad_fork())


if __name__ == "__main__":
    main()
