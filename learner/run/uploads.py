"""Uploads: a command of the user's for every complete checkpoint, while training goes on.

One at a time, in a thread, each with a deadline. A failure is an error on the console and a line of `uploads.jsonl`;
that checkpoint is tried again with the next one, as long as it is there. After a kill, whatever has no line of success
is uploaded again: the command must bear to be repeated.
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
from pathlib import Path

from prefixrl.common.config.run import CheckpointConfig
from prefixrl.common.digests import file_digest
from prefixrl.common.errors import ConfigError
from prefixrl.common.run import json_lines
from prefixrl.common.run.crash_points import crash_point
from prefixrl.common.run.documents import UPLOADS_FILE, UploadLine
from prefixrl.learner.run.retention import checkpoints

log = logging.getLogger(__name__)

LOG_FILE = "logs/upload.log"
TICK_S = 0.1
END_S = 5.0
"""Time for a command to end after SIGTERM."""
_DIES_WITH_PARENT = (
    "import os, sys; from prefixrl.common.process import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


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
        self._lock, self._wanted, self._closing = threading.Lock(), threading.Event(), threading.Event()
        self._asked = self._served = 0
        """Looks that were asked for, and the last one that is over."""
        self._running: int | None = None
        lines = json_lines.read(directory / UPLOADS_FILE, UploadLine) if self._command else []
        self._done = {(line.iteration, line.digest) for line in lines if line.exit_code == 0}
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        if self._command:
            (directory / LOG_FILE).parent.mkdir(exist_ok=True)
            self._thread.start()
            self.look()

    def look(self) -> None:
        """Upload what is there and was not uploaded, also what failed before."""
        self._asked += 1
        self._wanted.set()

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
        if not self._command:
            return
        self.look()
        number = self._asked
        while self._served < number:
            raise_if_hopeless()
            time.sleep(TICK_S)

    def close(self) -> None:
        """End; an upload that is cut off is repeated at the next start of the run."""
        self._closing.set()
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join(2 * END_S)

    def _work(self) -> None:
        while not self._closing.is_set():
            self._wanted.wait()
            self._wanted.clear()
            number, tried = self._asked, set[int]()
            try:
                while (found := self._take(tried)) is not None:
                    tried.add(found[0])
                    try:
                        self._upload(*found)
                    except OSError as fault:
                        log.error("the upload of checkpoint %d failed: %s", found[0], fault)
            except OSError as fault:
                log.error("no checkpoint to upload could be looked for: %s; tried again with the next one", fault)
            self._served = number

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
        began_s, output = time.monotonic(), self._directory / LOG_FILE
        with output.open("ab") as sink:
            position = sink.tell()
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _DIES_WITH_PARENT, str(os.getpid()), *self._command, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        crash_point("upload.begun")
        code = self._wait_for(process, began_s)
        crash_point("upload.done")
        if code is None and self._closing.is_set():
            log.warning("the upload of checkpoint %d is cut off; the next start of the run repeats it", iteration)
            return
        took_s, last_line = time.monotonic() - began_s, _last_line(output, position)
        if code == 0:
            self._done.add((iteration, digest))
            log.info("checkpoint %d is uploaded, after %.1f s", iteration, took_s)
        else:
            how = f"failed with exit code {code}" if code is not None else "was ended (checkpoint.upload_s)"
            log.error(
                "the upload of checkpoint %d %s after %.1f s: %s; it is tried again with the next checkpoint; all its "
                "output is in %s",
                iteration, how, took_s, last_line or "it printed nothing", output,
            )  # fmt: skip
        line = UploadLine(time.time(), iteration, digest, code, took_s, last_line)
        json_lines.append(self._directory / UPLOADS_FILE, [line])

    def _wait_for(self, process: "subprocess.Popen[bytes]", began_s: float) -> int | None:
        """Return the exit code; None for a command that was ended."""
        while process.poll() is None:
            if self._closing.is_set() or time.monotonic() - began_s > self._limit_s:
                _end(process)
                return None
            time.sleep(TICK_S)
        return process.returncode


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            if number == signal.SIGTERM:
                time.sleep(TICK_S)


def _last_line(path: Path, position: int) -> str:
    with path.open("rb") as file:
        file.seek(position)
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
