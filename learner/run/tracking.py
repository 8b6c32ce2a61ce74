"""The process that shows metrics elsewhere (`prefixrl track`), started and ended by rank 0."""

import logging
import subprocess
import sys
from pathlib import Path

log = logging.getLogger(__name__)

FLUSH_S = 60.0
"""Longest time that the end of a run waits for what is not sent yet."""


class Tracking:
    """The tracker of one learner process; its failure is a warning."""

    def __init__(self, directory: Path) -> None:
        """Start it; it ends with its stdin, also where this process is killed."""
        command = [sys.executable, "-P", "-m", "prefixrl.deploy", "track", str(directory), "--until-eof"]
        # A Ctrl-C is the learner's to handle: its last iterations are still to be sent.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Let it send what is left."""
        assert self._process.stdin
        self._process.stdin.close()
        try:
            code = self._process.wait(FLUSH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            log.warning(
                "the tracker ([log]) did not end within %.0f s and was killed; `prefixrl track` sends what is left",
                FLUSH_S,
            )
            return
        if code:
            log.warning("the tracker ([log]) ended with exit code %d; the metrics are in metrics.jsonl", code)
