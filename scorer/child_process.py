"""Verifier children as their parent sees them: started with little of its environment, asked, heard, killed.

    pool ── two descriptors ──▶ template ── fork ──▶ child ◀── Question, Answer ──▶ pool

Importing sympy takes a second of a core, and every hostile answer costs a child: so the template alone imports it, and a child
is there after some milliseconds, however busy the machine is. A user's function is not forked, since what it imports may have
threads: each of its children is a process started anew.

Knows nothing of jobs and deadlines: those are the pool's. Nothing here waits but `wait` and `close`.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys

import msgspec

from prefixrl.scorer.verifier_child import LENGTH_BYTES, FromChild, Question, frame

FUNCTION_PIPE_BYTES = 2**20
"""The buffer where whole texts are sent, to a user's function; a longer question is an error."""
_READ_BYTES = 65_536
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")
"""All that a child sees of the parent's environment, which may hold tokens."""
_PYTHON_INTEGERS = {"SYMPY_GROUND_TYPES": "python", "MPMATH_NOGMPY": "1"}
"""Where gmpy2 is installed sympy takes it by itself: no signal interrupts it, and without memory it aborts the process."""


class ChildProcess:
    """One child and the pipes to it."""

    def __init__(self, inbox: int, outbox: int, process: "subprocess.Popen[bytes] | None") -> None:
        """A child that reads questions from `inbox`; `process` where it is this process's own child."""
        self._inbox, self.outbox = inbox, outbox
        self._process = process
        self._handle: int | None = None
        self._received = bytearray()
        self.pid = process.pid if process else None
        """None while a forked child has not said it."""
        os.set_blocking(outbox, False)

    def learn_pid(self, pid: int) -> None:
        """A forked child has named itself; it is held by a descriptor, since its number may be another's once it is dead."""
        self.pid = pid
        if self._process is None:
            with contextlib.suppress(ProcessLookupError):
                self._handle = os.pidfd_open(pid)

    def ask(self, question: Question) -> None:
        """Send a question to an idle child."""
        # Broken: it died while idle; the end of its output says so to the next `hear`.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._inbox, frame(question))

    def hear(self) -> tuple[list[FromChild], bool]:
        """What it said since the last call; False when it has ended, or says something that is no message."""
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
                body = self._received[LENGTH_BYTES:end]
                messages.append(msgspec.msgpack.decode(body, type=FromChild))
            except (msgspec.DecodeError, UnicodeDecodeError):
                return messages, False
            del self._received[:end]
        return messages, bool(data) and len(self._received) < _READ_BYTES

    def kill(self) -> None:
        """End it. One that has no number yet ends by itself when it finds its pipe closed."""
        if self._process is not None:
            self._process.kill()
        elif self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        os.close(self._inbox)
        os.close(self.outbox)

    def is_gone(self) -> bool:
        """Whether it has ended, after `kill`; nothing is left of it then."""
        return self._has_ended(0)

    def wait(self) -> None:
        """Until it has ended, after `kill`."""
        self._has_ended(None)

    def _has_ended(self, limit_s: float | None) -> bool:
        if self._process is not None:
            if limit_s is None:
                self._process.wait()
            return self._process.poll() is not None
        if self._handle is None:
            return True
        if not select.select([self._handle], [], [], limit_s)[0]:
            return False
        os.close(self._handle)
        self._handle = None
        return True


class Template:
    """The process that children of the verifier are forked from. It ends with its parent, they with it."""

    def __init__(self) -> None:
        """Start it; what is asked of it before it is ready it does then."""
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = _popen((), stdin=theirs.fileno(), stdout=subprocess.DEVNULL)

    @property
    def is_alive(self) -> bool:
        """False when children can no longer be had from it."""
        return self._process.poll() is None

    def fork(self, takes_long_questions: bool) -> ChildProcess:
        """A child: soon ready, or soon at its end where the template is."""
        theirs, ours = _pipes(takes_long_questions)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._link, [b"!"], list(theirs))
        for each in theirs:
            os.close(each)
        return ChildProcess(*ours, None)

    def close(self) -> None:
        """Kill and reap it."""
        self._process.kill()
        self._process.wait()
        self._link.close()


def spawn(place: str, digest: str) -> ChildProcess:
    """A child of its own for a user's function."""
    theirs, ours = _pipes(takes_long_questions=True)
    process = _popen((place, digest), *theirs)
    for each in theirs:
        os.close(each)
    return ChildProcess(*ours, process)


def _popen(function: tuple[str, ...], stdin: int, stdout: int) -> "subprocess.Popen[bytes]":
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    # -P: modules of the working directory must not shadow the installed ones.
    command = [sys.executable, "-P", "-m", "prefixrl.scorer.verifier_child", str(os.getpid())]
    given = environment | _PYTHON_INTEGERS
    return subprocess.Popen([*command, *function], stdin=stdin, stdout=stdout, env=given)


def _pipes(takes_long_questions: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """The child's ends, for questions and answers, and ours."""
    asked, inbox = os.pipe()
    outbox, answered = os.pipe()
    if takes_long_questions:
        # Where the system grants less, a long question waits for the idle child to read it.
        with contextlib.suppress(OSError):
            fcntl.fcntl(inbox, fcntl.F_SETPIPE_SZ, FUNCTION_PIPE_BYTES)
    return (asked, answered), (inbox, outbox)
