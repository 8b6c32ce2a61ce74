"""The wait for room on a full disk.

A writer of a file that a run needs waits for room, logs that at once and every minute, and gives up after half an hour.
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from prefixrl.common.errors import TrainingFault, is_crowded, is_full

log = logging.getLogger(__name__)

WAIT_S = 1800.0
RETRY_S = 1.0
TELL_EVERY_S = 60.0


def free_bytes(path: Path) -> int:
    """Return the free room on the disk of a path, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def held_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder, which another process may remove meanwhile."""
    total = 0
    for path, _, files in os.walk(folder):  # a folder that goes away meanwhile is passed over
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def in_mib(size_bytes: int) -> str:
    """Return a size in words."""
    return f"{size_bytes / 2**20:,.1f} MiB"


class FullDisk:
    """The state of a disk that one writer finds full. Pure but for the log: times are given."""

    def __init__(self, path: Path, what: str) -> None:
        """`what`: the words for what is written, "the journal"."""
        self._path = path
        self._what = what
        self._since_s: float | None = None
        self._is_crowded = False
        self._tried_s = self._told_s = -WAIT_S

    @property
    def why(self) -> str:
        """The obstacle in words, "" while there is room."""
        if self._since_s is None:
            return ""
        if self._is_crowded:
            return f"a free descriptor to write {self._what} with; too many files and connections are open"
        return f"room on the disk of {self._path}, which is full ({self._what} cannot be written; make room there)"

    def takes(self, write: Callable[[], object], now_s: float) -> bool:
        """Write; return False while there is no room; TrainingFault after `WAIT_S` without room."""
        if self._since_s is not None and now_s - self._tried_s < RETRY_S:
            return False
        try:
            write()
        except Exception as error:
            if not (is_full(error) or is_crowded(error)):
                raise
            self._note_failure(error, now_s)
            return False
        if self._since_s is not None:
            log.warning(
                "%s is written again after %.0f s without room", self._what, now_s - self._since_s
            )
        self._since_s = None
        self._told_s = -WAIT_S
        return True

    def _note_failure(self, error: Exception, now_s: float) -> None:
        since_s = self._since_s = now_s if self._since_s is None else self._since_s
        self._tried_s = now_s
        self._is_crowded = is_crowded(error)
        if now_s - since_s > WAIT_S:
            raise TrainingFault(f"waited {WAIT_S:g} s for {self.why}") from error
        if now_s - self._told_s >= TELL_EVERY_S:
            self._told_s = now_s
            log.error("waiting for %s: %s", self.why, error)


def when_there_is_room(
    write: Callable[[], object],
    path: Path,
    what: str,
    raise_if_hopeless: Callable[[], None],
) -> None:
    """Write, repeatedly while the disk is full; TrainingFault after `WAIT_S`."""
    full = FullDisk(path, what)
    while not full.takes(write, time.monotonic()):
        raise_if_hopeless()
        time.sleep(RETRY_S)
