"""Uploads: a command of the user's for every complete checkpoint, while training goes on.

One at a time, in a thread, each with a deadline. A failure is an error on the console and a line of `uploads.jsonl`;
that checkpoint is tried again with the next one, as long as it is there. After a kill, whatever has no line of success
is uploaded again: the command must bear to be repeated.

    command ──stdout, stderr──▶ pipe ──▶ the thread ──▶ logs/upload.log: the beginning and the end of a long output
       └── in the group of a guard, a small process that kills the group when the learner dies
"""

import contextlib
import logging
import os
import select
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
from prefixrl.common.errors import ConfigError
from prefixrl.common.journal.crash_points import crash_point
from prefixrl.common.run import json_lines
from prefixrl.common.run.digests import file_digest
from prefixrl.common.run.documents import UPLOADS_FILE, UploadLine
from prefixrl.learner.run.retention import checkpoints

log = logging.getLogger(__name__)

LOG_FILE = "logs/upload.log"
TICK_S = 0.1
END_S = 5.0
"""Time for a command to end after SIGTERM."""
BEGINNING_BYTES = 1 << 20
"""Part of an output that goes to the log as it comes; of the rest only the end does."""
END_BYTES = 1 << 16
MOST_LOG_BYTES = 4 << 20
"""Size of the log from which the next upload begins a new one; one old log is kept."""
LINE_CHARS = 1000
_GUARD = """
import os, signal, sys, time
from prefixrl.common.host.process import die_with_parent, handle_stops
handle_stops(lambda *_: None)  # the command hears them, and may take its time
guard, learner, tick_s = os.getpid(), int(sys.argv[1]), float(sys.argv[2])
if (command := os.fork()) == 0:
    die_with_parent(guard)
    os.execvp(sys.argv[3], sys.argv[3:])
while not (ended := os.waitpid(command, os.WNOHANG))[0]:
    if os.getppid() != learner:
        os.killpg(guard, signal.SIGKILL)
    time.sleep(tick_s)
code = os.waitstatus_to_exitcode(ended[1])
sys.exit(code if code >= 0 else 128 - code)
"""


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
        while self._served < number and self._thread.is_alive():
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
            except Exception:  # the end of a run waits for this thread
                log.exception("uploads failed; they are tried again with the next checkpoint")
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
        began_s = time.monotonic()
        guarded = [sys.executable, "-P", "-c", _GUARD, str(os.getpid()), str(TICK_S), *self._command, str(folder)]
        with _Output(self._directory / LOG_FILE) as output:
            process = subprocess.Popen(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=output.theirs,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            crash_point("upload.begun")
            code = self._wait_for(process, output, began_s)
        crash_point("upload.done")
        if code is None and self._closing.is_set():
            log.warning("the upload of checkpoint %d is cut off; the next start of the run repeats it", iteration)
            return
        took_s, last_line = time.monotonic() - began_s, output.last_line()
        if code == 0:
            self._done.add((iteration, digest))
            log.info("checkpoint %d is uploaded, after %.1f s", iteration, took_s)
        else:
            how = f"failed with exit code {code}" if code is not None else "was ended (checkpoint.upload_s)"
            log.error(
                "the upload of checkpoint %d %s after %.1f s: %s; it is tried again with the next checkpoint; its "
                "output is in %s",
                iteration, how, took_s, last_line or "it printed nothing", output.log_path,
            )  # fmt: skip
        line = UploadLine(time.time(), iteration, digest, code, took_s, last_line)
        json_lines.append(self._directory / UPLOADS_FILE, [line])

    def _wait_for(self, process: "subprocess.Popen[bytes]", output: "_Output", began_s: float) -> int | None:
        """Return the exit code; None for a command that was ended."""
        try:
            while process.poll() is None:
                if self._closing.is_set() or time.monotonic() - began_s > self._limit_s:
                    return None
                output.read(TICK_S)
            return process.returncode
        finally:
            if process.returncode is None:
                _end(process, output)


class _Output:
    """The output of one command: all of it is read, and little of it kept."""

    def __init__(self, log_path: Path) -> None:
        """Open the pipe; a log that has grown long gives way to a new one."""
        self.log_path, self._size_bytes, self._end = log_path, 0, b""
        with contextlib.suppress(OSError):
            if log_path.stat().st_size > MOST_LOG_BYTES:
                log_path.replace(f"{log_path}.1")
        # Both ends stay open: the pipe of a command that closed its output would always be ready, with nothing to read.
        self._ours, self.theirs = os.pipe()
        self._ready = select.poll()
        self._ready.register(self._ours, select.POLLIN)

    def __enter__(self) -> "_Output":
        """Return it with its pipe."""
        return self

    def __exit__(self, *_: object) -> None:
        """Take what the command left in the pipe, and no more: what it started may print for ever."""
        self.read(0.0)
        os.close(self._ours)
        os.close(self.theirs)
        if (rest_bytes := self._size_bytes - BEGINNING_BYTES) > 0:
            kept = self._end[-rest_bytes:]
            left_out = rest_bytes - len(kept)
            self._log((b"\n[%d bytes are left out here]\n" % left_out if left_out else b"") + kept)

    def read(self, limit_s: float) -> None:
        """Take a block, once there is one within the limit."""
        if not self._ready.poll(1000 * limit_s):
            return
        block = os.read(self._ours, END_BYTES)
        if beginning := block[: max(0, BEGINNING_BYTES - self._size_bytes)]:
            self._log(beginning)
        self._size_bytes += len(block)
        self._end = (self._end + block)[-END_BYTES:]

    def _log(self, block: bytes) -> None:
        # A command whose output nobody reads stands still: no fault of the log may end the reading.
        with contextlib.suppress(OSError), self.log_path.open("ab", buffering=0) as log_file:
            log_file.write(block)

    def last_line(self) -> str:
        """Return the end of the last line that is not empty; a bar drawn over itself is many lines."""
        lines = self._end.replace(b"\r", b"\n").decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[-LINE_CHARS:]


def _end(process: "subprocess.Popen[bytes]", output: _Output) -> None:
    """End a command with all that it started; what it prints is read, or it would stand still."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        until_s = time.monotonic() + END_S
        while process.poll() is None and time.monotonic() < until_s:
            output.read(TICK_S)
        if number == signal.SIGTERM:
            time.sleep(TICK_S)
