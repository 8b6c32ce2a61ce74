"""One pull per host: rollouts of a user share the memory where one staged a version.

    lock (a file, flock) ─▶ pull, verify ─▶ note (a file: the path of the memory) ─▶ unlock
    the others: wait for the note ─▶ map that memory, hold a shared lock on it

A lock dies with its holder, so a puller that is killed is followed by another. One that stands still is not waited for.
The memory has no name of its own: when the last process that maps it is gone, so is it. Its owner writes to it again
only when it holds the exclusive lock on it, which it gets when nobody else maps it.
"""

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from zlib import crc32

from prefixrl.common.host.process import is_private, write_atomically
from prefixrl.common.weights.memory import Memory, map_shared

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02
STILL_S = 5.0
"""Time without a sign of the puller after which another one pulls for itself."""
LOCKS = 64
"""Number of lock files. Versions share them; they are never removed."""
SHARED_MEMORY = Path("/dev/shm")


class HostShare:
    """The staged versions of this user's rollouts on this host."""

    def __init__(self, folder: Path | None = None) -> None:
        """Use `folder`, by default one in memory that only this user can enter."""
        root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self._folder = folder or root / f"prefixrl-{os.geteuid()}"
        self._is_usable = self._prepare()

    def _prepare(self) -> bool:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            is_own = is_private(self._folder)
        except OSError as error:
            log.info("weights are not shared on this host: %s", error)
            return False
        if not is_own:
            log.warning(
                "weights are not shared on this host: %s is not this user's alone", self._folder
            )
        return is_own

    def find_memory(self, digest: str, size_bytes: int) -> Memory | None:
        """Return the memory in which another process staged a version, or None."""
        note = self._note_path(digest)
        try:
            path = note.read_text(encoding="utf-8")
            memory = map_shared(path, size_bytes)
            # The owner takes the note away before it asks for its memory again.
            return (
                memory if memory is not None and note.read_text(encoding="utf-8") == path else None
            )
        except OSError:
            return None

    @contextlib.contextmanager
    def turn(self, digest: str, is_there: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        """Wait for the turn to pull a version, or until `is_there`; yield a call that gives a sign of life."""
        try:
            lock = self._folder / f"lock-{crc32(digest.encode()) % LOCKS}"
            descriptor = (
                os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                if self._is_usable
                else -1
            )
        except OSError as error:
            log.warning("weights are pulled without the others of this host: %s", error)
            descriptor = -1
        if descriptor < 0:
            yield lambda: None
            return
        try:
            has_it = _wait_for(descriptor, is_there)
            yield (lambda: os.utime(descriptor)) if has_it else (lambda: None)
        finally:
            os.close(descriptor)

    def announce(self, digest: str, memory: Memory) -> None:
        """Tell the others where a verified version is, until its memory is used again."""
        if not self._is_usable:
            return
        for note in self._folder.glob("note-*"):
            with contextlib.suppress(OSError):
                if not os.path.exists(note.read_text(encoding="utf-8")):
                    note.unlink()  # its owner is gone
        with contextlib.suppress(OSError):
            write_atomically(self._note_path(digest), memory.path)
            # Only the path: a reference to the memory would keep it for ever.
            memory.on_release.append(partial(self._forget, digest, memory.path))

    def _forget(self, digest: str, path: str) -> None:
        with contextlib.suppress(OSError):
            if self._note_path(digest).read_text(encoding="utf-8") == path:
                self._note_path(digest).unlink()

    def _note_path(self, digest: str) -> Path:
        return self._folder / f"note-{digest}"


def _wait_for(descriptor: int, is_there: Callable[[], bool]) -> bool:
    """Wait for the lock. Returns False if the version arrives first or the holder makes no progress."""
    seen_ns = -1
    since_s = time.monotonic()
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(descriptor)
            return True
        if is_there():
            return False
        now_ns = os.fstat(descriptor).st_mtime_ns
        if now_ns != seen_ns:
            seen_ns = now_ns
            since_s = time.monotonic()
        elif time.monotonic() - since_s > STILL_S:
            return False
        time.sleep(LOOK_EVERY_S)
