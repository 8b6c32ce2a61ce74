"""The process that a launch forks its workers from, so that torch is imported once for all.

    launch ── socket: module, arguments, environment, log ──▶ template ── fork ──▶ worker
      ▲ ◀── Imported, Forked, NotForked, Ended ──────────────────────┘

It imports what an embedded engine needs and does nothing else: it has one thread, and neither CUDA nor ZeroMQ is begun.
Where that is not so, what it forks begins anew as a program of its own. It ends with the launch, and the workers end
with it; the launch then starts them one by one. The launch's side is `template_process.py`.
"""

import errno
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import time
from contextlib import ExitStack

import msgspec
import setproctitle

from prefixrl.common.process import PARENT_VARIABLE, die_with_parent, uncollected

MOST_BYTES = 1 << 20
RETRY_S = 0.1
"""Wait where the system has no memory for a message."""


class Fork(msgspec.Struct, tag=True):
    """The request for a worker; its output goes to the descriptor that comes with it."""

    arguments: list[str]
    """The module and what is to follow it."""
    environment: dict[str, str]


class Imported(msgspec.Struct, tag=True):
    """All is imported."""


class Forked(msgspec.Struct, tag=True):
    """A worker has begun."""

    pid: int


class NotForked(msgspec.Struct, tag=True):
    """No worker has begun: the system lacks memory, processes or files."""

    why: str


class Ended(msgspec.Struct, tag=True):
    """A worker has ended; the code as `subprocess` has it."""

    pid: int
    code: int


Answer = Imported | Forked | NotForked | Ended


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
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not link:
                    _tell_end(link, selector, key)
                    continue
                data, descriptors, _, _ = socket.recv_fds(link, MOST_BYTES, 1)
                if not data:
                    return None
                request, parent_pid = msgspec.msgpack.decode(data, type=Fork), os.getpid()
                try:
                    if not descriptors:
                        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                    threads = len(os.listdir("/proc/self/task"))
                    pid = _begin(selector)
                except OSError as error:
                    _tell(link, NotForked(str(error)))
                else:
                    if pid == 0:
                        _close_all(link, selector)
                        _take_over(request, descriptors[0], parent_pid)
                        return request.arguments, threads == 1
                    _tell(link, Forked(pid))
                for descriptor in descriptors:
                    os.close(descriptor)


def _begin(selector: selectors.BaseSelector) -> int:
    """Fork, and have the worker's end noticed; return its id, 0 in the worker."""
    if (pid := os.fork()) == 0:
        return 0
    with ExitStack() as undo:
        undo.callback(os.waitpid, pid, 0)
        undo.callback(os.kill, pid, signal.SIGKILL)
        handle = os.pidfd_open(pid)
        undo.callback(os.close, handle)
        selector.register(handle, selectors.EVENT_READ, pid)
        undo.pop_all()
    return pid


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


def _tell_end(link: socket.socket, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    selector.unregister(key.fileobj)
    os.close(key.fd)
    code = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
    _tell(link, Ended(key.data, code))


def _close_all(link: socket.socket, selector: selectors.BaseSelector) -> None:
    for key in list(selector.get_map().values()):
        if key.fileobj is not link:
            os.close(key.fd)
    link.close()


def _take_over(request: Fork, output: int, parent_pid: int) -> None:
    """Become a process as the launch would start it: session, output, environment."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment)
    # As the template knew it: one that ended since is no parent any more, and the worker is to end too.
    os.environ[PARENT_VARIABLE] = str(parent_pid)


def _knows_cuda() -> bool:
    """Return True if the template asked CUDA for anything before this process was forked."""
    torch = sys.modules.get("torch")
    is_in_bad_fork = getattr(torch and torch._C, "_cuda_isInBadFork", None)
    return bool(is_in_bad_fork and is_in_bad_fork())


if __name__ == "__main__":
    main()
