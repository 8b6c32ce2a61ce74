"""Uploads: a command of the user's, run after every complete checkpoint while training goes on.

One command at a time runs in a thread, each with a deadline. A failure is an error on the console and a line of
`uploads.jsonl`; that checkpoint is tried again with the next one. A learner that is killed leaves its command running,
and the next start repeats it.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from prefixrl.common.config.run import CheckpointConfig
from prefixrl.common.errors import ConfigError
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.run import json_lines
from prefixrl.common.run.digests import file_digest
from prefixrl.common.run.directory_format import checkpoints
from prefixrl.common.run.documents import UPLOADS_FILE, UploadLine
from prefixrl.learner.run.stop import StopSignal

log = logging.getLogger(__name__)

LOG_FILE = "logs/upload.log"
TICK_S = 0.1
END_S = 5.0
LINE_CHARS = 1000


def check_command(section: CheckpointConfig) -> None:
    """Raise ConfigError if the command of uploads cannot be started here."""
    if section.upload and shutil.which(section.upload[0]) is None:
        raise ConfigError(
            f"checkpoint.upload = {list(section.upload)}: there is no program {section.upload[0]!r} on this host that "
            f"may be executed; give its path, or install it"
        )


def counts(directory: Path) -> dict[str, int]:
    """Return the uploads of a run by their outcome."""
    lines = json_lines.read(directory / UPLOADS_FILE, UploadLine)
    return dict(Counter("done" if line.exit_code == 0 else "failed" for line in lines))


class Uploads:
    """The uploads of one learner process."""

    def __init__(self, directory: Path, section: CheckpointConfig) -> None:
        """Begin with what a learner before this one left."""
        self._directory = directory
        self._section = section
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._running = set[int]()
        """The iteration that is being uploaded, if any."""
        lines = json_lines.read(directory / UPLOADS_FILE, UploadLine)
        self._done = {(line.iteration, line.digest) for line in lines if line.exit_code == 0}
        self._thread = ThreadPoolExecutor(1, "uploads")
        self.upload_new()

    def upload_new(self) -> "Future[None]":
        """Upload in the thread what is there and was not uploaded, also what failed before."""
        return self._thread.submit(self._upload_all)

    @contextlib.contextmanager
    def paused(self) -> Iterator[set[int]]:
        """Start no upload inside the block; yield the iteration that is being uploaded, if any."""
        with self._lock:
            yield self._running

    def warn_of_removed(self, iterations: Sequence[int]) -> None:
        """Warn of removed checkpoints that were never uploaded."""
        never = set(iterations) - {iteration for iteration, _ in self._done}
        if self._section.upload and never:
            log.warning(
                "checkpoint %s was removed before it was uploaded: uploads fail, or take longer than checkpoints come; "
                "raise checkpoint.keep or checkpoint.every",
                ", ".join(map(str, sorted(never))),
            )

    def wait(self, stop: StopSignal, iteration: int) -> None:
        """Upload every checkpoint of a run that ends at `iteration`, failed ones once more, unless a stop comes."""
        uploading = self.upload_new()
        while not uploading.done():
            stop.end_judging(iteration)
            time.sleep(TICK_S)

    def close(self) -> None:
        """End; an upload that is cut off is repeated at the next start of the run."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _upload_all(self) -> None:
        """Upload the checkpoints that are there now, the oldest first; each later checkpoint has a call of its own."""
        try:
            folders = checkpoints(self._directory / "checkpoints") if self._section.upload else {}
            for iteration, folder in folders.items():
                self._upload_if_due(iteration, folder)
        except OSError as fault:
            log.error(
                "the checkpoints to upload cannot be listed: %s; tried again with the next one",
                fault,
            )
        except Exception:  # the end of a run waits for this thread
            log.exception("uploads failed; they are tried again with the next checkpoint")

    def _upload_if_due(self, iteration: int, folder: Path) -> None:
        manifest = folder / "manifest.json"
        # A checkpoint may have been removed since the folder was listed, and none is removed under the lock.
        with self._lock:
            if self._closing.is_set() or not manifest.exists():
                return
            digest = file_digest(manifest)
            if (iteration, digest) in self._done:
                return
            self._running = {iteration}
        try:
            self._upload(iteration, folder, digest)
        except OSError as fault:
            log.error(
                "the upload of checkpoint %d failed or could not be noted: %s", iteration, fault
            )
        finally:
            self._running = set()

    def _upload(self, iteration: int, folder: Path, digest: str) -> None:
        log_path = self._directory / LOG_FILE
        log_path.parent.mkdir(exist_ok=True)
        began_s = time.monotonic()
        with log_path.open("wb") as output:
            process = subprocess.Popen(
                [*self._section.upload, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code = self._exit_code(process)
        crash_point("upload.done")
        # Without a line in the file this upload counts as not made, and the next start repeats it.
        if code is None and self._closing.is_set():
            log.warning(
                "the upload of checkpoint %d is cut off; the next start of the run repeats it",
                iteration,
            )
            return
        duration_s = time.monotonic() - began_s
        last_line = _last_line(log_path)
        if code == 0:
            self._done.add((iteration, digest))
            log.info("checkpoint %d is uploaded, after %.1f s", iteration, duration_s)
        else:
            log.error(
                "the upload of checkpoint %d %s after %.1f s: %s; it is tried again with the next checkpoint; its "
                "output is in %s",
                iteration,
                "was ended (checkpoint.upload_s)"
                if code is None
                else f"failed with exit code {code}",
                duration_s,
                last_line or "it printed nothing",
                log_path,
            )
        line = UploadLine(time.time(), iteration, digest, code, duration_s, last_line)
        json_lines.append(self._directory / UPLOADS_FILE, [line])

    def _exit_code(self, process: "subprocess.Popen[bytes]") -> int | None:
        """Wait for a command; None where it was ended at its deadline, or because the learner ends."""
        end_s = time.monotonic() + self._section.upload_s
        crash_point("upload.begun")
        while process.poll() is None and time.monotonic() < end_s:
            if self._closing.wait(TICK_S):
                break
        code = process.poll()
        if code is None:
            _end_group(process)
        return code


def _last_line(log_path: Path) -> str:
    """Return the end of the last line that is not empty; a bar drawn over itself is many lines."""
    with log_path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * LINE_CHARS))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return "".join(lines[-1:])[-LINE_CHARS:]


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a command with all processes that it started, which have a moment longer than the command."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        time.sleep(TICK_S)
