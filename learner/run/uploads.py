"""Uploads: a command of the user's for every complete checkpoint, while training goes on.

One at a time, in a thread, each with a deadline. A failure is an error on the console and a line of `uploads.jsonl`;
that checkpoint is tried again with the next one. After a kill it may be uploaded again. The command runs in the group
of a guard, a small process that kills the group when the learner dies.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from prefixrl.common.config.run import CheckpointConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.run import json_lines
from prefixrl.common.run.digests import file_digest
from prefixrl.common.run.directory_format import checkpoints
from prefixrl.common.run.documents import UPLOADS_FILE, UploadLine

log = logging.getLogger(__name__)

LOG_FILE = "logs/upload.log"
TICK_S = 0.1
END_S = 5.0
LAST_OUTPUT_S = 1.0
LOGGED_BYTES = 1 << 20
"""Part of an output that goes to the log; of the rest only the last line is kept."""
MOST_LOG_BYTES = 4 << 20
"""Size of the log from which the next upload begins a new one; one old log is kept."""
LINE_CHARS = 1000
_GUARD = Path(__file__).with_name("upload_guard.txt").read_text(encoding="utf-8")


def check_command(kept: CheckpointConfig) -> None:
    """Raise ConfigError if the command of uploads cannot be started here."""
    if kept.upload and shutil.which(kept.upload[0]) is None:
        raise ConfigError(
            f"checkpoint.upload = {list(kept.upload)}: there is no program {kept.upload[0]!r} on this host that may be "
            f"executed; give its path, or install it"
        )


def counts(directory: Path) -> dict[str, int]:
    """Return the uploads of a run by their outcome."""
    lines = json_lines.read(directory / UPLOADS_FILE, UploadLine)
    return dict(Counter("done" if line.exit_code == 0 else "failed" for line in lines))


class Uploads:
    """The uploads of one learner process."""

    def __init__(self, directory: Path, kept: CheckpointConfig) -> None:
        """Begin with what a learner before this one left."""
        self._directory, self._command, self._limit_s = directory, kept.upload, kept.upload_s
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._running: int | None = None
        lines = json_lines.read(directory / UPLOADS_FILE, UploadLine) if self._command else []
        self._done = {(line.iteration, line.digest) for line in lines if line.exit_code == 0}
        self._thread = ThreadPoolExecutor(1, "uploads")
        self.upload_new()

    def upload_new(self) -> "Future[None] | None":
        """Upload in the thread what is there and was not uploaded, also what failed before."""
        return self._thread.submit(self._upload_all) if self._command else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[set[int]]:
        """Begin no upload in the block; give the iteration of the one that goes on."""
        with self._lock:
            yield set() if self._running is None else {self._running}

    def tell_removed(self, iterations: Sequence[int]) -> None:
        """Warn of removed checkpoints that were never uploaded."""
        known = {iteration for iteration, _ in self._done}
        if self._command and (lost := [each for each in iterations if each not in known]):
            log.warning(
                "checkpoint %s was removed before it was uploaded: uploads fail, or take longer than checkpoints come; "
                "raise checkpoint.keep or checkpoint.every",
                ", ".join(map(str, lost)),
            )

    def wait(self, raise_if_hopeless: Callable[[], None]) -> None:
        """Upload all that is there, failed ones once more; the check may raise to end the wait."""
        asked = self.upload_new()
        while asked is not None and not asked.done():
            raise_if_hopeless()
            time.sleep(TICK_S)

    def close(self) -> None:
        """End; an upload that is cut off is repeated at the next start of the run."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _upload_all(self) -> None:
        tried = set[int]()
        try:
            while (found := self._take(tried)) is not None:
                tried.add(found[0])
                try:
                    self._upload(*found)
                except OSError as fault:
                    log.error(
                        "the upload of checkpoint %d failed or could not be noted: %s",
                        found[0],
                        fault,
                    )
        except OSError as fault:
            log.error(
                "the checkpoints to upload cannot be listed: %s; tried again with the next one",
                fault,
            )
        except Exception:  # the end of a run waits for this thread
            log.exception("uploads failed; they are tried again with the next checkpoint")

    def _take(self, tried: set[int]) -> tuple[int, Path, str] | None:
        """Return the oldest checkpoint to upload, from now on kept from removal."""
        with self._lock:
            self._running = None
            for iteration, folder in sorted(checkpoints(self._directory / "checkpoints").items()):
                manifest = folder / "manifest.json"
                if self._closing.is_set() or iteration in tried or not manifest.exists():
                    continue
                if (iteration, digest := file_digest(manifest)) not in self._done:
                    self._running = iteration
                    return iteration, folder, digest
        return None

    def _upload(self, iteration: int, folder: Path, digest: str) -> None:
        began_s = time.monotonic()
        guarded = [
            sys.executable,
            "-P",
            "-c",
            _GUARD,
            str(os.getpid()),
            str(TICK_S),
            *self._command,
            str(folder),
        ]
        process = subprocess.Popen(
            guarded,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        crash_point("upload.begun")
        log_path, end = self._directory / LOG_FILE, bytearray()
        reader = threading.Thread(
            target=_read, args=(process.stdout, log_path, end), name="upload log", daemon=True
        )
        reader.start()
        while (
            process.poll() is None
            and not self._closing.is_set()
            and time.monotonic() - began_s < self._limit_s
        ):
            time.sleep(TICK_S)
        code = process.poll()
        if code is None:
            _end(process)
        reader.join(LAST_OUTPUT_S)
        crash_point("upload.done")
        if code is None and self._closing.is_set():
            log.warning(
                "the upload of checkpoint %d is cut off; the next start of the run repeats it",
                iteration,
            )
            return
        took_s, last_line = time.monotonic() - began_s, _last_line(bytes(end))
        if code == 0:
            self._done.add((iteration, digest))
            log.info("checkpoint %d is uploaded, after %.1f s", iteration, took_s)
        else:
            how = (
                f"failed with exit code {code}"
                if code is not None
                else "was ended (checkpoint.upload_s)"
            )
            log.error(
                "the upload of checkpoint %d %s after %.1f s: %s; it is tried again with the next checkpoint; its "
                "output is in %s",
                iteration,
                how,
                took_s,
                last_line or "it printed nothing",
                log_path,
            )
        line = UploadLine(time.time(), iteration, digest, code, took_s, last_line)
        json_lines.append(self._directory / UPLOADS_FILE, [line])


def _read(output: IO[bytes], log_path: Path, end: bytearray) -> None:
    """Write the first part of an output to the log, read all of it, and keep its end."""
    left_bytes = LOGGED_BYTES
    # No fault of the log may end the reading.
    with contextlib.suppress(OSError):
        log_path.parent.mkdir(exist_ok=True)
        if log_path.exists() and log_path.stat().st_size > MOST_LOG_BYTES:
            log_path.replace(f"{log_path}.1")
    with output:
        while block := output.read(1 << 16):
            with contextlib.suppress(OSError), log_path.open("ab", buffering=0) as log_file:
                log_file.write(block[:left_bytes])
            left_bytes = max(0, left_bytes - len(block))
            end[:] = (end + block)[-4 * LINE_CHARS :]


def _last_line(end: bytes) -> str:
    """Return the end of the last line that is not empty; a bar drawn over itself is many lines."""
    lines = end.replace(b"\r", b"\n").decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[-LINE_CHARS:]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        if number == signal.SIGTERM:
            time.sleep(TICK_S)
