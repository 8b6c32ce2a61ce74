"""Background check that gold answers verify against themselves. Never stops the run."""

import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from prefixrl.common.host.process import write_atomically
from prefixrl.learner.data.problems import Problem, first_bad_rows

log = logging.getLogger(__name__)

FILE = "bad_golds.jsonl"


class GoldCheck:
    """A process that verifies every gold answer; rank 0's main thread starts it."""

    def __init__(self, problems: list[Problem], directory: Path, timeout_s: int) -> None:
        """Start it; it logs its findings and writes them to `bad_golds.jsonl` in the run directory."""
        self._path = directory / FILE
        with tempfile.TemporaryFile() as rows:
            rows.write(msgspec.json.encode([(each.prompt_id, each.gold) for each in problems]))
            rows.seek(0)
            called = ["prefixrl.scorer.verifier.offline", "golds", str(os.getpid()), str(timeout_s)]
            command = [sys.executable, "-P", "-m", *called]
            self._process = subprocess.Popen(command, stdin=rows, stdout=subprocess.PIPE)
        self._thread = threading.Thread(target=self._report, name="golds", daemon=True)
        self._thread.start()

    def _report(self) -> None:
        output, _ = self._process.communicate()
        if self._process.returncode != 0:
            return  # closed before it was done, or failed with a message of its own in the log
        try:
            write_atomically(self._path, output.decode())
        except OSError as fault:
            log.error(
                "%s cannot be written: %s; the next start of the run checks the gold answers again",
                self._path,
                fault,
            )
        if rows := output.decode().splitlines():
            text = (
                "%d gold answers do not verify against themselves (all in %s); the run goes on, and only answers that "
                "equal them literally are judged right%s"
            )
            log.warning(text, len(rows), self._path, first_bad_rows(rows))

    def close(self) -> None:
        """End the process, done or not."""
        self._process.kill()
        self._thread.join()
