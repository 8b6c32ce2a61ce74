"""Verifier children as their parent sees them: start, send, read, kill.

    pool ── two descriptors ──▶ template ── fork ──▶ child ◀── ChildQuestion, Judgement ──▶ pool

Importing sympy takes a second of a core, and every hostile answer costs a child: so only the
template imports it, and a child starts in milliseconds, however busy the machine is. A user's
function is not forked, since its imports may start threads: each of its children is a new process,
which leads a group. What the function starts belongs to it and ends with the child, unless it makes
a group of its own. Jobs and deadlines are the pool's. Only `wait` and `close` wait.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time

import msgspec

from prefixrl.scorer.verifier.exchange import LENGTH_BYTES, ChildQuestion, FromChild, frame

TEMPLATE, FUNCTION = "template", "function"
"""The two kinds of a process of `child.py`, by its second argument."""
FUNCTION_PIPE_BYTES = 2**20
"""Pipe buffer for whole texts and programs; a longer question is an error."""
GUARD_S = 1.0
"""Longest time that the guard of a function's group has to end it."""
_READ_BYTES = 65_536
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
"""Variables that a child gets from the parent's environment, which may hold tokens."""
_PYTHON_INTEGERS = {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}
"""Settings against gmpy2, which sympy uses if installed: no signal interrupts it, and without memory it aborts."""


class ChildProcess:
    """One child and the pipes to it."""

    def __init__(self, inbox: int, outbox: int, process: "subprocess.Popen[bytes] | None") -> None:
        """Take over the pipes of a child; `process` if it is this process's own child."""
        self._inbox = inbox
        self.outbox = outbox
        self._process = process
        self._handle: int | None = None
        self._received = bytearray()
        self._killed_s = 0.0
        self.pid = process.pid if process else None
        """None until a forked child has reported it."""
        os.set_blocking(outbox, False)

    def learn_pid(self, pid: int) -> None:
        """Note the id of a forked child and hold it by a descriptor, since ids are reused."""
        self.pid = pid
        if self._process is None:
            with contextlib.suppress(ProcessLookupError):
                self._handle = os.pidfd_open(pid)

    def send_question(self, question: ChildQuestion) -> None:
        """Send a question to an idle child."""
        # Broken: it died while idle; the next `read_messages` finds the end of its output.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._inbox, frame(question))

    def read_messages(self) -> tuple[list[FromChild], bool]:
        """Return its messages since the last call; False if it ended or sent an invalid message."""
        try:
            data = os.read(self.outbox, _READ_BYTES)
        except BlockingIOError:
            return [], True
        self._received += data
        messages: list[FromChild] = []
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "big")
            if len(self._received) < end:
                break
            try:
                messages.append(
                    msgspec.msgpack.decode(self._received[LENGTH_BYTES:end], type=FromChild)
                )
            except (msgspec.DecodeError, UnicodeDecodeError):
                return messages, False
            del self._received[:end]
        return messages, bool(data) and len(self._received) < _READ_BYTES

    def kill(self) -> None:
        """End it, and with a spawned one all its group.

        A forked one whose id is unknown yet ends by itself when it finds its pipe closed.
        """
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        os.close(self._inbox)
        os.close(self.outbox)
        self._killed_s = time.monotonic()

    def has_ended(self, waits: bool = False) -> bool:
        """Return True if it has ended after `kill`; `waits`: wait for its end."""
        if self._process is not None:
            return self._has_group_ended(self._process, waits)
        if self._handle is None:
            return True
        if not select.select([self._handle], [], [], None if waits else 0)[0]:
            return False
        os.close(self._handle)
        self._handle = None
        return True

    def _has_group_ended(self, guard: "subprocess.Popen[bytes]", waits: bool) -> bool:
        """Return True once the guard, which found its pipe closed, has killed its group and itself."""
        if waits:
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(GUARD_S)
        # A function may have stopped its guard. It was not waited for, so that its id cannot be another's.
        if guard.poll() is None and time.monotonic() - self._killed_s > GUARD_S:
            os.killpg(guard.pid, signal.SIGKILL)
            if waits:
                guard.wait()
        return guard.poll() is not None


class Template:
    """The process from which children are forked; it ends with its parent, they end with it."""

    def __init__(self, verifiers: tuple[str, ...]) -> None:
        """Start it; it handles earlier requests once it is ready, with these verifiers of packages imported."""
        self._link, child_end = socket.socketpair()
        with child_end:
            self._process = _start_process(
                (TEMPLATE, *verifiers), stdin=child_end.fileno(), stdout=subprocess.DEVNULL
            )

    @property
    def is_alive(self) -> bool:
        """True while it can fork children."""
        return self._process.poll() is None

    def fork(self) -> ChildProcess:
        """Fork a child, which soon is ready, or soon ends if the template has ended."""
        child_ends, own_ends = _pipes()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._link, [b"!"], list(child_ends))
        for descriptor in child_ends:
            os.close(descriptor)
        return ChildProcess(*own_ends, None)

    def close(self) -> None:
        """Kill and reap it."""
        self._process.kill()
        self._process.wait()
        self._link.close()


def spawn(function: tuple[str, ...], environment: tuple[str, ...]) -> ChildProcess:
    """Start a child of its own for a user's function (reference, digest, limit of a call in seconds, weights)."""
    child_ends, own_ends = _pipes()
    process = _start_process((FUNCTION, *function), *child_ends, environment)
    for descriptor in child_ends:
        os.close(descriptor)
    return ChildProcess(*own_ends, process)


def _start_process(
    words: tuple[str, ...], stdin: int, stdout: int, more_variables: tuple[str, ...] = ()
) -> "subprocess.Popen[bytes]":
    """Start `child.py`; a process for a function leads a group."""
    names = (*_ENVIRONMENT, *more_variables)
    environment = {name: os.environ[name] for name in names if name in os.environ}
    # -P: modules of the working directory must not shadow the installed ones.
    command = [sys.executable, "-P", "-m", "prefixrl.scorer.verifier.child", str(os.getpid())]
    return subprocess.Popen(
        [*command, *words],
        stdin=stdin,
        stdout=stdout,
        env=environment | _PYTHON_INTEGERS,
        start_new_session=words[0] == FUNCTION,
    )


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Make two pipes; return the child's ends (questions, answers) and the pool's."""
    questions, inbox = os.pipe()
    outbox, answers = os.pipe()
    # Where the system grants less, a long question waits for the idle child to read it.
    with contextlib.suppress(OSError):
        fcntl.fcntl(inbox, fcntl.F_SETPIPE_SZ, FUNCTION_PIPE_BYTES)
    return (questions, answers), (inbox, outbox)
