"""Which gold answers no verifier can judge by: told while the run works, which they do not stop."""

import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from prefixrl.learner.problems import SHOWN_BAD_ROWS, Problem

log = logging.getLogger(__name__)

FILE = "bad_golds.jsonl"


class GoldCheck:
    """A process beside the run that verifies every gold answer against itself; for rank 0's main thread."""

    def __init__(self, problems: list[Problem], directory: Path, timeout_s: int) -> None:
        """Start it; what it finds is logged and written to `bad_golds.jsonl` in the run directory."""
        self._path = directory / FILE
        with tempfile.TemporaryFile() as rows:
            rows.write(msgspec.json.encode([(each.prompt_id, each.gold) for each in problems]))
            rows.seek(0)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "prefixrl.scorer.golds",
                    str(os.getpid()),
                    str(timeout_s),
                ],
                stdin=rows,
                stdout=subprocess.PIPE,
            )
        self._thread = threading.Thread(target=self._report, name="golds", daemon=True)
        self._thread.start()

    def _report(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        found = self._process.stdout.read()
        if self._process.wait() != 0:
            return  # closed before it was done, or its own message stands in the log
        self._path.write_bytes(found)
        if rows := found.decode().splitlines():
            rest = (
                f"\n  and {len(rows) - SHOWN_BAD_ROWS} more" if len(rows) > SHOWN_BAD_ROWS else ""
            )
            shown = "\n  ".join(rows[:SHOWN_BAD_ROWS])
            log.warning(
                "%d gold answers do not verify against themselves (all in %s); the run goes on, and of their answers only the "
                "literal ones are judged right\n  %s%s",
                len(rows), self._path, shown, rest,
            )  # fmt: skip

    def close(self) -> None:
        """End it, done or not."""
        self._process.kill()
        self._thread.join()
        assert self._process.stdout is not None, "it is a pipe"
        self._process.stdout.close()
