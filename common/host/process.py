"""The conduct of every process of a run: logs, signals, end with its parent, exit codes."""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import setproctitle

from prefixrl.common.errors import ConfigError, is_full, to_copy
from prefixrl.common.host.exit_codes import exit_codes, printable

_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals that ask for an orderly end. Batch systems send any of them, a closed terminal SIGHUP."""
END_SIGNAL: signal.Signals = getattr(
    signal, "SIGRTMIN", signal.SIGVTALRM
)  # macOS has no real-time signals
"""Signal by which a learner ends its servers. A batch system sends SIGTERM to all processes, not this one."""
PARENT_VARIABLE = "PREFIXRL_PARENT_PID"
"""Variable with a parent's id; a process that has it ends with that parent, even if the parent is killed."""
LEAST_FILES = 96
MOST_FILES = 2**16
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
GLANCE_S = 0.05
WELL_S = 3600.0
"""Running time after which a process has all its restarts again: rare crashes do not add up."""


class _Lines(logging.Formatter):
    """Records whose further lines are indented, so that no text can forge a record."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n    ")


def start_logging(title: str, budget: logging.Filter | None = None) -> None:
    """Start as a daemon of a run; logs go to stderr, which the supervisor writes to files."""
    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    setproctitle.setproctitle(title)
    faulthandler.enable()  # a watchdog's SIGABRT leaves the stack of every thread in the log
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(f"%(asctime)s %(levelname)-7s {title} %(message)s"))
    if budget:
        handler.addFilter(budget)
    logging.basicConfig(level=os.environ.get("PREFIXRL_LOG", "INFO").upper(), handlers=[handler])
    logging.captureWarnings(True)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; end at once if it is dead."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


@contextmanager
def without_gc() -> Iterator[None]:
    """Import large packages without garbage collection, and leave them out of later ones."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Start processes that ignore stop signals from their first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def keep_receive_buffers() -> None:
    """Let the allocator keep the memory of received frames."""
    # Fresh pages halve the speed of large frames. glibc adopts these values once it has freed a block of 32 MiB.
    with suppress(AttributeError):  # other C libraries have none
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)


def return_large_blocks() -> None:
    """Have the allocator give blocks of 1 MiB and more back once they are free; by default it learns to keep them."""
    with suppress(AttributeError):  # other C libraries have none
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def allow_many_files() -> None:
    """Raise the limit of open files, since each connection is one; ConfigError if it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < LEAST_FILES:
        raise ConfigError(
            f"a process may have {hard} files open here (ulimit -Hn); this one needs {LEAST_FILES} and one for each "
            f"connection: raise the limit (4096, for example)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(MOST_FILES, hard)), hard))


def is_gone(host: str, pid: int) -> bool:
    """Return True if a process of this host has ended, False for another host."""
    return host == socket.gethostname() and not Path(f"/proc/{pid}").exists()


def stop_event(numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> threading.Event:
    """Return an event that these signals set; a second SIGINT ends the process at once."""
    event = threading.Event()

    def stop(number: int, _frame: FrameType | None) -> None:
        if event.is_set() and number == signal.SIGINT:
            os._exit(130)
        event.set()

    handle_stops(stop, numbers)
    return event


Handler = Callable[[int, FrameType | None], None]


def handle_stops(
    handler: Handler, numbers: Sequence[signal.Signals] = STOP_SIGNALS
) -> dict[signal.Signals, Any]:
    """Have stop signals handled, unless nohup ignores SIGHUP; return the handlers before."""
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # The terminal is gone: a word to it would fail, and end the process before it has saved.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in terminals:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)
        handler(number, frame)

    return {
        number: signal.signal(number, handle)
        for number in numbers
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }


class AskedToStop(BaseException):
    """A stop signal came while nothing would be lost. No `Exception`: libraries catch those."""


class StopSignals:
    """Counts a worker's stop signals; the third, or a second SIGINT, ends the process at once."""

    def __init__(self) -> None:
        self._requests = self._interrupts = 0
        self._ends_at_once = False
        handle_stops(self._count_signal)

    def _count_signal(self, number: int, _frame: FrameType | None) -> None:
        self._requests += 1
        self._interrupts += number == signal.SIGINT
        if self._requests > 2 or self._interrupts > 1:
            os._exit(128 + number)
        if self._ends_at_once:
            raise AskedToStop

    def requests(self) -> int:
        """Return the number of signals so far: 1 asks to finish what is open, 2 to end now."""
        return self._requests

    def is_set(self) -> bool:
        """Return True once a signal came."""
        return self._requests > 0

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Raise AskedToStop at the first signal while the body runs, however long its calls take."""
        self._ends_at_once = True
        try:
            if self._requests:
                raise AskedToStop
            yield
        finally:
            self._ends_at_once = False


class _Console:
    """A stream whose lines are lost while its disk is full: no run ends because of its output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._stream, name)
        return partial(_unless_full, attribute) if name in ("write", "flush") else attribute


def _unless_full(write: Callable[..., Any], *arguments: str) -> Any:
    try:
        return write(*arguments)
    except OSError as error:
        if not is_full(error):
            raise


@contextmanager
def patient_console() -> Iterator[None]:
    """Lose lines of standard output and error while their disk is full, and go on."""
    with (
        redirect_stdout(cast(TextIO, _Console(sys.stdout))),
        redirect_stderr(cast(TextIO, _Console(sys.stderr))),
    ):
        yield


@contextmanager
def no_teardown() -> Iterator[None]:
    """End this process with the block and its exit code; the interpreter is not taken apart.

    Gloo's threads may still hold a tensor of a collective that is over. A thread that lets go of one while the
    interpreter is taken apart aborts the process: a finished rank would look like a killed one.
    """
    code: object = 0
    try:
        with exit_codes():
            yield
    except SystemExit as ended:
        code = ended.code if ended.code is not None else 0
    except BaseException:  # noqa: BLE001 -- printed, and the process ends
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # it is not read again
            stream.flush()
    os._exit(code if isinstance(code, int) else 1)


def end_children(
    children: Sequence["subprocess.Popen[bytes]"],
    patience_s: float,
    with_groups: bool = False,
    number: int = signal.SIGTERM,
) -> None:
    """Signal all children; kill the remaining children, or their groups, after the patience."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.send_signal(number)
    deadline_s = time.monotonic() + patience_s
    for child in running:
        try:
            child.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            if with_groups:
                with suppress(ProcessLookupError):  # its parent has reaped it just now
                    os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()


def is_private(folder: Path) -> bool:
    """Return True for a folder, and no link to one, that only this user may enter; OSError without one."""
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & 0o077


@contextmanager
def locked(path: Path, kind: int) -> Iterator[None]:
    """Hold the lock of a file or folder; OSError without it, a BlockingIOError where another process holds it.

    `kind`: of `fcntl.flock`. The lock is gone with this process.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def own(directory: Path) -> TextIO:
    """Lock a run directory while the returned file is open; raises ConfigError if it is locked or cannot be."""
    lock = (directory / "lock").open("w")
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # `prefixrl list` holds a shared lock for a moment to see if a run is running.
            time.sleep(GLANCE_S)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if not isinstance(error, BlockingIOError):
            raise ConfigError(
                f"{directory}: its file system has no file locks ({error.strerror}), without which two learners could "
                "work there. Mount Lustre with -o flock, NFS with its lock service, or choose another file system"
            ) from None
        raise ConfigError(
            f"another learner works in {directory} ({to_copy('prefixrl status', directory)} shows it); stop it "
            "or choose another directory (--set directory=...)"
        ) from None
    return lock


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file at once: a reader, even after a power cut, sees old or new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        # Without it a name may reach the disk before its content.
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class RestartBudget:
    """Restarts of one child. Pure: times are given."""

    most: int
    used: int = 0
    started_s: float = 0.0
    """Time of the child's last start."""

    def use_restart(self, now_s: float) -> bool:
        """Use one restart for a child that has ended; return False where none is left."""
        if now_s - self.started_s >= WELL_S:
            self.used = 0
        if self.used >= self.most:
            return False
        self.used += 1
        return True
