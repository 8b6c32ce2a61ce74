"""What every process of a run does the same way: logs, signals, dying with its parent, exit codes."""

import ctypes
import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import setproctitle

from prefixrl.common.errors import ConfigError, PrefixRLError

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "PREFIXRL_PARENT_PID"
"""A process started with this set ends with that parent: nothing is left behind when a supervisor is killed."""


def start_logging(title: str) -> None:
    """Start as a daemon of a run; log lines go to stderr, which the supervisor writes to the run's logs."""
    if PARENT_VARIABLE in os.environ:
        die_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
    setproctitle.setproctitle(title)
    logging.basicConfig(
        level=os.environ.get("PREFIXRL_LOG", "INFO").upper(),
        format=f"%(asctime)s %(levelname)-7s {title} %(message)s",
        stream=sys.stderr,
    )
    logging.captureWarnings(True)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies; ends at once if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def stop_event() -> threading.Event:
    """An event that SIGTERM and SIGINT set; a second SIGINT ends the process the hard way."""
    event = threading.Event()

    def stop(number: int, _frame: object) -> None:
        if event.is_set() and number == signal.SIGINT:
            os._exit(130)
        event.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return event


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the errors raised on purpose into one message and their exit code; others keep their stack trace."""
    try:
        yield
    except PrefixRLError as error:
        sys.stderr.write(f"error: {error}\n" if error.is_fault else f"{error}\n")
        sys.stderr.flush()
        raise SystemExit(error.exit_code) from None


def own(directory: Path) -> TextIO:
    """Lock a run directory for as long as the returned file is open; raises ConfigError when another learner holds it."""
    lock = (directory / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"another learner works in {directory} (`prefixrl status {directory}` shows it); stop it or choose another "
            "directory (--set directory=...)"
        ) from None
    return lock


def write_atomically(path: Path, content: str) -> None:
    """Replace a text file; a reader sees the old or the new content, never a part, and so does one after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(content, encoding="utf-8")
    # A name may reach the disk before what it names.
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def run_main(main: Callable[[], None]) -> None:
    """Run a daemon's main under `exit_codes`."""
    with exit_codes():
        main()
